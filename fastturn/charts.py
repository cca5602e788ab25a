"""Small line charts as inline SVG that follow the page: its fonts, its light and dark
colours (CSS variables --c0 … --c7, --ink, --grid), its width.

Legends are not drawn; the page writes them as text, so that they never cover data.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

COLORS = 8
_POINTS = 240  # a longer line is averaged in as many bins
# Stand-in colours: unlikely ones, replaced by CSS variables in the finished SVG.
_STAND_INS = {f"#f00d{i:02d}": f"var(--c{i})" for i in range(COLORS)} | {
    "#f00d90": "var(--ink)",
    "#f00d91": "var(--grid)",
}
_INK, _GRID = "#f00d90", "#f00d91"
_WIDE, _CARD = (7.6, 2.7), (4.3, 2.2)  # inches


def color(index: int) -> str:
    """The CSS colour of a line; they repeat after eight."""
    return f"var(--c{index % COLORS})"


@dataclass(frozen=True, slots=True)
class Line:
    """One line: x and y of equal length (None in y: no point there). `merge`: how the points of a
    bin become one when there are too many. `style`: "line", "dashed" or "points"."""

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    color: int = 0
    style: Literal["line", "dashed", "points"] = "line"
    merge: Literal["mean", "max"] = "mean"

    @property
    def css(self) -> str:
        """Its colour for the page's legend."""
        return color(self.color)

    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """The known points, at most 240 of them."""
        pairs = [(x, y) for x, y in zip(self.x, self.y, strict=True) if y is not None]
        x_N, y_N = np.asarray(pairs, dtype=float).reshape(-1, 2).T
        if len(x_N) <= _POINTS:
            return x_N, y_N
        merge = np.mean if self.merge == "mean" else np.max
        bins = zip(np.array_split(x_N, _POINTS), np.array_split(y_N, _POINTS), strict=True)
        merged = np.array([(np.mean(x), merge(y)) for x, y in bins])
        return merged[:, 0], merged[:, 1]


@dataclass(frozen=True, slots=True)
class Axis:
    """The vertical axis. `least`: a range that is always inside the visible one. `floor`: smallest
    value a log axis shows; what is below is drawn there."""

    scale: Literal["linear", "percent", "log"] = "linear"
    least: tuple[float, float] | None = None
    floor: float = 1e-9


def line_chart(
    lines: Sequence[Line],
    axis: Axis | None = None,
    *,
    x_label: str = "iteration",
    wide: bool = False,
) -> str:
    """SVG text; "" when no line has a point."""
    axis = axis or Axis()
    drawn = [(line, *line.points()) for line in lines]
    if axis.scale == "log":
        drawn = [(line, x_N, np.maximum(y_N, axis.floor)) for line, x_N, y_N in drawn]
    drawn = [item for item in drawn if len(item[1])]
    if not drawn:
        return ""
    figure, axes = _figure(_WIDE if wide else _CARD)
    for line, x_N, y_N in drawn:
        points = line.style == "points"
        axes.plot(
            x_N,
            y_N,
            color=_stand_in(line.color),
            linestyle={"line": "-", "dashed": (0, (4, 2)), "points": ""}[line.style],
            linewidth=1.4,
            marker="o" if points or len(x_N) <= 24 else "",
            markersize=_marker_size(points, len(x_N)),
            zorder=4 if points else 3,
            clip_on=False,
        )
    _scale(axes, axis, [y for _, _, y_N in drawn for y in y_N])
    return _svg(figure, axes, x_label)


def _marker_size(points: bool, n: int) -> float:
    """Bigger the fewer there are: a run of one iteration is only markers."""
    if points:
        return 5.5 if n <= 24 else 3.0
    return 4.5 if n <= 3 else 2.6


def _stand_in(index: int) -> str:
    return f"#f00d{index % COLORS:02d}"


def _figure(size: tuple[float, float]) -> tuple[Any, Any]:
    # Here, because the import takes a second that a training run need not pay at its start.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    axes = figure.add_subplot()
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.grid(axis="y", color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=8, length=0, pad=4)
    return figure, axes


def _scale(axes: Any, axis: Axis, values: Sequence[float]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

    low, high = min(values), max(values)
    if axis.least:
        low, high = min(low, axis.least[0]), max(high, axis.least[1])
    if axis.scale == "log":
        first = int(np.floor(np.log10(low) + 1e-9))
        last = max(first + 1, int(np.ceil(np.log10(high) - 1e-9)))
        low, high = 10.0**first, 10.0**last
        axes.set_yscale("log")
        decades = range(first, last + 1, math.ceil((last - first) / 5))
        axes.yaxis.set_major_locator(FixedLocator([10.0**k for k in decades]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(_power))
    else:
        spread = high - low if high - low > 1e-9 * abs(high) else 0.0
        room = 0.04 * spread or 0.1 * abs(high) or 1.0
        bottom = low if axis.least and low == axis.least[0] else low - room
        low = 0.0 if bottom < 0 <= low else bottom  # what is never negative has no room below 0
        high = high if axis.least and low < high == axis.least[1] else high + room
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        percent = axis.scale == "percent"
        axes.yaxis.set_major_formatter(FuncFormatter(_percent if percent else _number))
    axes.set_ylim(low, high)


def _power(value: float, _: int) -> str:
    return f"{value:g}" if 1e-3 <= value < 1e5 else f"{value:.0e}".replace("e-0", "e-")


def _percent(value: float, _: int) -> str:
    return f"{100 * value:.3g} %"


def _number(value: float, _: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.6g}"


def _place(figure: Any, axes: Any) -> None:
    """Room for the labels, in points (8 pt digits are about 5.2 wide). Matplotlib's own layout
    would draw everything twice for it."""
    labels = axes.yaxis.get_major_formatter().format_ticks(axes.yaxis.get_majorticklocs())
    width, height = 72 * figure.get_size_inches()
    left, right, bottom, top = 7 + 5.2 * max(map(len, labels), default=0), 8, 26, 6
    axes.set_position(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    )


def _svg(figure: Any, axes: Any, x_label: str) -> str:
    from matplotlib import rc_context
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.set_xlabel(x_label, color=_INK, fontsize=8, loc="right", labelpad=2)
    _place(figure, axes)
    out = io.StringIO()
    # Text stays text (page fonts, small files); a fixed salt makes equal data equal bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fastturn", "text.parse_math": False}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<style.*?</style>\s*", "", text, flags=re.DOTALL)  # would rule the whole page
    text = re.sub(r" font-family: [^;\"]*;", "", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    for stand_in, variable in _STAND_INS.items():
        text = text.replace(stand_in, variable)
    return text.replace("<svg ", '<svg role="img" ', 1)
