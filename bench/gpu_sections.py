"""The sections of `gpu`: each fills a `Check` with measurements, failures and omissions.

A provider that is absent or fails is named and left out; a failure of ours is a failure of the
check. Times alternate between providers; results are compared before anything is timed; peak memory
is a separate pass.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastturn.devices import device_of

from . import gpu_laws as laws
from . import gpu_ops as ops
from . import layouts, roofline
from .cases import QWEN3_1_7B, TOY, StepCase
from .measure import Provider, WrongResult, check_equal, peak_bytes, ratios, table
from .record import Measured

REPEATS = 15
PLAIN = ("plain torch", "sdpa, replicated rows", "rows")  # what the others are compared with
# Relative to the largest number, against plain torch in the same dtype: ours, and other libraries,
# some of which round log-probabilities to half precision. What is exact is judged by `gpu_laws`.
TOLERANCE = {"bfloat16": (5e-2, 0.3), "float32": (2e-4, 2e-4)}


@dataclass(slots=True)
class Check:
    """One run: device, sizes, what was found and what failed."""

    device: str
    dry: bool
    measured: list[Measured] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    ceiling_flops_s: float | None = None
    ends: float = 0.0  # of the current section, by the monotonic clock

    def say(self, text: str) -> None:
        print(text, flush=True)

    def add(self, one: Measured) -> None:
        self.measured.append(one)
        self.say(table([one]))

    def judge(self, label: str, what: Callable[[], Iterable[laws.Check]]) -> None:
        """One line for a group of checks; each wrong one is a failure."""
        checks = self.attempt(label, lambda: list(what()), ours=True)
        if checks is None:
            return
        wrong = [c for c in checks if not c.right]
        worst = max((c.error / c.allowed for c in checks), default=0.0)
        self.say(f"{label}: {len(checks) - len(wrong)} of {len(checks)} right, worst {worst:.2f}")
        for c in wrong:
            self.fail(f"{c.name}: error {c.error:.3g}, allowed {c.allowed:.3g}")

    def fail(self, text: str) -> None:
        self.failures.append(text)
        self.say(f"FAILED {text}")

    def leave_out(self, text: str) -> None:
        self.left_out.append(text)
        self.say(f"left out: {text}")

    def attempt(self, name: str, what: Callable[[], Any], *, ours: bool) -> Any:
        """The result, or None with the error reported: one provider never ends the run."""
        try:
            return what()
        except ops.Absent as error:
            self.leave_out(f"{name}: {error}")
        except torch.OutOfMemoryError:
            self._report(f"{name}: more memory than the device has", ours)
        except Exception as error:
            where = traceback.format_exc(limit=-1).splitlines()[1].strip()
            first = (str(error).splitlines() or [""])[0][:200]
            self._report(f"{name}: {type(error).__name__}: {first} ({where})", ours)
        return None

    def _report(self, text: str, ours: bool) -> None:
        if ours:
            self.fail(text)
        else:
            self.leave_out(text)

    @property
    def remaining_s(self) -> float:
        return self.ends - time.monotonic()


def dtypes(check: Check, impl: str) -> list[torch.dtype]:
    """Those that `impl` can be checked in: the interpreter multiplies bfloat16 as bit patterns."""
    if check.dry and impl == "triton":
        return [torch.float32, torch.float16]
    if impl == "flash":
        return [torch.float16, torch.bfloat16]
    return [torch.float32, torch.float16, torch.bfloat16]


def correctness(check: Check) -> None:
    cases = dict(laws.variants(check.device, toy=check.dry))
    for impl in ops.implementations("turn_surrogate"):
        for dtype in dtypes(check, impl):
            for label, case in cases.items():
                full = f"{impl} {dtype} {label}"
                what = partial(laws.head_checks, impl, case, dtype, full)
                check.judge(f"output layer, {full}", what)
        _bits(check, impl, cases["plain"])
    attention = ops.TOY_ATTENTION[0] if check.dry else replace(ops.ATTENTION[1], trees=3)
    for impl in ops.attention_names(check.device):
        for dtype in dtypes(check, impl):
            full = f"tree_attention {impl} {dtype}"
            check.judge(full, partial(laws.attention_checks, impl, attention, dtype, check.device))


def _bits(check: Check, impl: str, case: laws.LawCase) -> None:
    """Same bits again and alone, as rows of 0 and 1: matrix products are the vendor's."""
    dtype = dtypes(check, impl)[-1]
    for metric, law in (("repeats itself", laws.repeats_itself), ("row alone", laws.row_alone)):
        name = f"{metric}, turn_surrogate {impl}"
        same = check.attempt(name, partial(law, impl, case, dtype), ours=True)
        if same is not None:
            config = {"dtype": str(dtype), "rows": len(case.row_A)}
            case_name = "correctness/same bits"
            check.add(Measured(case_name, f"fastturn {impl}", metric, "1", (float(same),), config))


def offsets(check: Check) -> None:
    for impl in ops.implementations("turn_surrogate"):
        for what in (laws.many_logits, laws.far_rows):
            name = f"offsets, {impl}, {what.__name__}"
            check.judge(name, partial(what, impl, check.device, toy=check.dry))
            free()


def ceiling(check: Check) -> None:
    """The fastest plain matrix product of this run: what no kernel built of them can beat."""
    sizes = [(64, 64, 64)] if check.dry else [(8192, 8192, 8192), (8192, 4096, 65536)]
    dtype = torch.float32 if check.dry else torch.bfloat16
    for m, k, n in sizes:
        a, b = (torch.randn(*s, device=check.device).to(dtype) for s in ((m, k), (k, n)))
        out = torch.empty(m, n, device=check.device, dtype=dtype)
        times = timed(check, {"matmul": partial(_product, a, b, out)})["matmul"]
        if times:
            rates = tuple(2.0 * m * k * n / t for t in times)
            name, config = f"matmul/{m}x{k}x{n}", {"m": m, "k": k, "n": n, "dtype": str(dtype)}
            check.add(Measured(name, "plain torch", "rate", "FLOP/s", rates, config))
            best = check.measured[-1].percentile(0.5)
            check.ceiling_flops_s = max(check.ceiling_flops_s or 0.0, best)


def _product(a: Tensor, b: Tensor, out: Tensor) -> list[Tensor]:
    return [torch.mm(a, b, out=out)]


def timed(check: Check, run: Mapping[str, Provider], repeats: int = REPEATS) -> dict[str, Any]:
    """Wall-clock of each provider, alternating, as many rounds as the section's time allows."""
    times: dict[str, list[float]] = {name: [] for name in run}
    for number in range(3 if check.dry else repeats + 1):
        if number > 1 and check.remaining_s < 2:
            break
        for name, provider in run.items():
            _wait()
            start = time.perf_counter()
            provider()
            _wait()
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def usable(
    check: Check, case: str, wanted: Mapping[str, Callable[[], Provider]], dtype: str
) -> dict[str, Provider]:
    """Providers that exist, run, and agree with the plain one; the others are named."""
    ready: dict[str, Provider] = {}
    plain = next(wanted[name] for name in PLAIN if name in wanted)
    truth = check.attempt(f"{case}, truth", lambda: [x.clone() for x in plain()()], ours=False)
    for name, make in wanted.items():
        if check.remaining_s < 4:
            check.leave_out(f"{case}, {name}: out of time")
            continue
        mine = name.startswith("fastturn")
        agree = partial(_agrees, name, make, truth, TOLERANCE[dtype][not mine])
        found = check.attempt(f"{case}, {name}", agree, ours=mine)
        free()
        if found is not None:
            ready[name] = found
    return ready


def _agrees(
    name: str, make: Callable[[], Provider], truth: Sequence[Tensor] | None, tolerance: float
) -> Provider:
    """The provider, after a run whose results are those of `truth`, or finite without one."""
    provider = make()
    if name in ops.CROSS_ENTROPY or truth is None:
        _finite(name, provider)
    else:
        check_equal({"plain": lambda: truth, name: provider}, "plain", tolerance)
    return provider


def _finite(name: str, provider: Provider) -> None:
    if not all(bool(x.isfinite().all()) for x in provider()):
        raise WrongResult(f"{name}: expected finite results")


def rows_of_times(
    check: Check, case: str, times: Mapping[str, Sequence[float]], work: roofline.Work, config: Any
) -> None:
    """Time, share of the measured ceiling and share of the roofline of each provider."""
    device = device_of(torch.cuda.get_device_name()) if not check.dry else None
    for name, values in times.items():
        if not values:
            continue
        check.add(Measured(case, name, "time", "s", tuple(values), config))
        if check.ceiling_flops_s:
            share = tuple(work.flops / t / check.ceiling_flops_s for t in values)
            check.add(Measured(case, name, "fraction of ceiling", "1", share, config))
        if device is not None:
            share = tuple(work.floor_s(device) / t for t in values)
            check.add(Measured(case, name, "fraction_of_floor", "1", share, config))


def memory(check: Check, case: str, run: Mapping[str, Provider], config: Any) -> None:
    for name, provider in run.items():
        if check.remaining_s < 1:
            check.leave_out(f"{case}, {name}: peak memory, out of time")
            continue
        peak = check.attempt(f"{case}, {name}", partial(peak_bytes, provider), ours=False)
        if peak is not None:
            value = (peak / 2**20,)
            check.add(Measured(case, name, "peak extra memory", "MiB", value, config))


def heads(check: Check) -> None:
    """All providers of the output layer at every shape, ours also with half of the rows idle."""
    cases = ops.TOY_HEADS if check.dry else ops.HEADS
    ends, share = check.ends, check.remaining_s / len(cases)
    for number, case in enumerate(cases):
        check.ends = ends - share * (len(cases) - number - 1)
        _head(check, case)
        torch.compiler.reset()
        free()
    check.ends = ends


def _head(check: Check, case: ops.HeadCase) -> None:
    name, config = f"surrogate/{case.shape}", asdict(case)
    mine = ops.implementations("turn_surrogate")
    inputs = ops.head_inputs(case, check.device)
    wanted = {f"fastturn {impl}": partial(ops.ours, inputs, impl) for impl in mine}
    wanted |= {peer: partial(make, inputs) for peer, make in ops.PEERS.items()}
    run = usable(check, name, wanted, case.dtype)
    times = timed(check, run)
    rows_of_times(
        check, name, times, roofline.surrogate(case.actions, case.width, case.vocab), config
    )
    memory(check, name, run, config)
    run.clear()
    for half, idle in (("zero", {"scored": 0.5, "moving": 0.5}), ("clipped", {"moving": 0.5})):
        if check.remaining_s < 3:
            check.leave_out(f"{name}, half of the rows {half}: out of time")
            continue
        part = replace(case, half=half)
        some = ops.head_inputs(part, check.device)
        for impl in mine:
            both = {"live": ops.ours(inputs, impl), half: ops.ours(some, impl)}
            seen = check.attempt(f"{name}, {half}", partial(timed, check, both), ours=True)
            if not seen or not seen[half]:
                continue
            work = roofline.surrogate(case.actions, case.width, case.vocab, **idle)
            label, settings = f"{name}, half {half}", asdict(part)
            rows_of_times(check, label, {f"fastturn {impl}": seen[half]}, work, settings)
            share = ratios(seen[half], seen["live"])
            check.add(Measured(label, f"fastturn {impl}", "time / live", "1", share, settings))


def logprobs(check: Check) -> None:
    """`linear_logprob` forward alone, and with an arbitrary upstream gradient."""
    case = ops.TOY_HEADS[0] if check.dry else ops.HEADS[2]
    inputs = ops.head_inputs(case, check.device)
    shape = (case.actions, case.width, case.vocab)
    for backward in (False, True):
        name = f"logprob/{case.shape}, {'forward and backward' if backward else 'forward'}"
        config = asdict(case) | {"backward": backward}
        wanted = dict(ops.scorers(inputs, backward=backward))
        run = usable(check, name, wanted, case.dtype)
        work = roofline.logprob(*shape) if backward else roofline.logprob_forward(*shape)
        rows_of_times(check, name, timed(check, run), work, config)
        memory(check, name, run, config)
        run.clear()
        free()


def attention(check: Check) -> None:
    cases = ops.TOY_ATTENTION if check.dry else ops.ATTENTION
    dtype = torch.float32 if check.dry else torch.bfloat16
    for case in cases:
        config = asdict(case) | {"dtype": str(dtype)}
        made = ops.attenders(case, check.device, dtype)
        wanted = {name: partial(_itself, provider) for name, provider in made.items()}
        run = usable(check, case.name, wanted, str(dtype).removeprefix("torch."))
        work = roofline.attention(
            case.end_T("cpu"), case.heads, case.keys, case.width, backward=True
        )
        rows_of_times(check, case.name, timed(check, run), work, config)
        memory(check, case.name, run, config)
        run.clear()
        free()


def update(check: Check) -> None:
    """A whole update of one group: packed, and with the context read once for each sibling."""
    dtype = torch.float32 if check.dry else torch.bfloat16
    case = StepCase(24, 2, 8, 1, TOY) if check.dry else StepCase(4096, 8, 512, 4, QWEN3_1_7B)
    made = layouts.Update(case, check.device, dtype).providers()
    packed = "fastturn packed"
    named = {"rows": made["rows"], "padded": made["padded"], packed: made["packed"]}
    wanted = {name: partial(_itself, provider) for name, provider in named.items()}
    run = usable(check, case.name, wanted, str(dtype).removeprefix("torch."))
    times, config = timed(check, run), asdict(case) | {"dtype": str(dtype)}
    work = roofline.Work(case.packed.flops(case.shape, case.layers), 0.0)
    rows_of_times(check, case.name, times, work, config)
    if times.get("rows") and times.get(packed):
        gain = ratios(times["rows"], times[packed])
        share = tuple(x / case.flop_ratio for x in gain)
        check.add(Measured(case.name, packed, "speed-up over rows", "1", gain, config))
        check.add(Measured(case.name, packed, "speed-up / ideal", "1", share, config))
    memory(check, case.name, run, config)


def _itself(provider: Provider) -> Provider:
    return provider


# Share of the time, and the section.
SECTIONS: dict[str, tuple[float, Callable[[Check], None]]] = {
    "correctness": (0.18, correctness),
    "ceiling": (0.03, ceiling),
    "heads": (0.42, heads),
    "logprobs": (0.08, logprobs),
    "attention": (0.15, attention),
    "update": (0.06, update),
    "offsets": (0.08, offsets),  # last: an illegal access would end every later one
}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
