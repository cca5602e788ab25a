"""Attention for unmodified transformers models, and which implementation of it runs.

    transformers layer ─> "fastturn" in AttentionInterface ─> attend(layer, q, k, v, scores)

The registered function knows nothing of trees or caches: it calls the object that came as
`model(..., attend=object)`. The policy passes a `TreeAttention`, the sampler a recorder or a decode
cache. A `Backend` says which implementation a tree runs through, checks the first use of every kind
of input against one plain forward and backward for each branch, and falls back when they disagree.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface

from fastturn import models
from fastturn.config import ConfigError
from fastturn.kernels import TreePlan, attention_implementations, tree_attention
from fastturn.kernels import reference as plain

logger = logging.getLogger(__name__)

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "gpu.jsonl"
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q_THE, k_TKE, v_TKE
LEAVES = 4  # branches of a layout that are checked
SAMPLE = 512  # and at most this many of their tokens
CANCELLED = 0.02  # a gradient smaller than this share of its terms is measured by its terms


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer makes attention scores: cap(scale · q·k), of keys at most `window` - 1 positions
    back. None: scale E ** -0.5, no cap, the whole history.

    Example: `Scores(scaling=0.125)`; Gemma 2 has `softcap=50.0` and a window in every other layer.
    """

    scaling: float | None = None
    window: int | None = None
    softcap: float | None = None

    def scale(self, width: int) -> float:
        """The factor for heads of this width."""
        return width**-0.5 if self.scaling is None else self.scaling


class Attend(Protocol):
    """Attention of one layer: q [1, H, T, E], k and v [1, K, T, E] -> [1, T, H, E].

    Called once a layer, in order, with the layer's index.
    """

    def __call__(
        self,
        layer: int,
        q_1HTE: torch.Tensor,
        k_1KTE: torch.Tensor,
        v_1KTE: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor: ...


# Arguments by which models change their attention in ways that are not computed here.
_FOREIGN = ("s_aux", "position_bias", "head_mask")


@torch.compiler.disable  # plans are made by numpy and kernels are compiled already
def _registered_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attend: Attend | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer; no mask is built for a name without mask function."""
    if attend is None:
        raise ValueError(
            f"{type(module).__name__}: the attention 'fastturn' needs model(..., attend=object); "
            f"call the model through Policy or LocalSampler, or switch it back with "
            f"model.set_attn_implementation('sdpa')"
        )
    changed = [name for name in _FOREIGN if kwargs.get(name) is not None]
    if changed:
        raise ConfigError(
            f"{type(module).__name__} changes attention scores by {', '.join(changed)}, which tree "
            f"attention does not compute; choose a model without it"
        )
    layer: Any = module.layer_idx
    return attend(layer, query, key, value, Scores(scaling, sliding_window, softcap)), None


AttentionInterface.register(models.ATTENTION, _registered_attention)


@dataclass(frozen=True, slots=True)
class Choice:
    """An implementation of tree attention and why it is the one."""

    impl: str
    why: str


def choose(attention: str, device: torch.device, results: Path = RESULTS) -> Choice:
    """What `attention=` in a configuration means on `device`.

    A name is taken as it is. "auto" is the implementation that the recorded results show to be the
    fastest on this device, among those that run here; without results for it, Triton's on CUDA and
    torch's on a CPU. Raises `ConfigError` for a name that cannot run here, with the reason.

    Example: `choose("auto", torch.device("cpu"))` is `Choice("torch", "the one for a CPU")`.
    """
    usable = attention_implementations(device)
    if attention != "auto":
        reason = usable.get(attention, f"expected one of auto, {', '.join(usable)}")
        if reason:
            raise ConfigError(f"attention={attention!r}: {reason}")
        return Choice(attention, "as configured")
    if device.type != "cuda":
        return Choice("torch", "the one for a CPU")
    name = torch.cuda.get_device_name(device)
    seen = recorded(results, name)
    timed = {impl: time for impl, time in seen.items() if usable.get(impl) is None}
    if timed:
        best = min(timed, key=timed.__getitem__)
        others = ", ".join(f"{impl} {time / timed[best]:.2f}x" for impl, time in timed.items())
        return Choice(best, f"the fastest recorded on {name}: {others}")
    impl = "torch" if usable["triton"] else "triton"
    return Choice(impl, f"nothing is recorded for {name}; scripts/gpu_check measures")


def recorded(results: Path, device: str) -> dict[str, float]:
    """Implementation -> relative time on `device`: the geometric mean over the cases that all of
    them have, from the newest row of each. Empty without rows.

    Example: rows of 2 ms and 3 ms for Triton and FlexAttention in the one case that both have give
    {"triton": 0.002, "flex": 0.003}.
    """
    if not results.exists():
        return {}
    time: dict[str, dict[str, float]] = defaultdict(dict)
    for line in results.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["device"] == device and row["metric"] == "time":
            case, impl = row["case"], row["provider"].removeprefix("fastturn ")
            if case.startswith("attention/") and impl != row["provider"]:
                time[impl][case] = row["p50"]
    shared = set.intersection(*(set(cases) for cases in time.values())) if time else set()
    if not shared:
        return {}
    return {
        impl: math.exp(sum(math.log(cases[case]) for case in shared) / len(shared))
        for impl, cases in time.items()
    }


FALLBACK = {"triton": "torch", "flex": "torch", "flash": "torch", "torch": "reference"}


@dataclass(slots=True, eq=False)
class Backend:
    """What `attention` means on each device, and what has been found out about it there.

    `choices` are made and `checked` grows as inputs come: kind of input (device, dtype, heads,
    scores) -> the implementation that is right for it.
    """

    attention: str = "auto"
    choices: dict[torch.device, Choice] = field(default_factory=dict)
    checked: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def choice(self, device: torch.device) -> Choice:
        """What is meant to run on `device`; raises `ConfigError` when it cannot."""
        if device not in self.choices:
            self.choices[device] = choose(self.attention, device)
        return self.choices[device]

    def __call__(self, inputs: Inputs, plan: TreePlan, scores: Scores) -> str:
        """The implementation for these q_THE, k_TKE, v_TKE."""
        q_THE, k_TKE, _ = inputs
        kind = (q_THE.device, q_THE.dtype, *q_THE.shape[1:], k_TKE.shape[1], scores)
        if kind not in self.checked:
            impl = self.choice(q_THE.device).impl
            if plan.tokens < 2:
                return impl
            self.checked[kind] = self._check(impl, inputs, plan, scores)
        return self.checked[kind]

    def _check(self, impl: str, inputs: Inputs, plan: TreePlan, scores: Scores) -> str:
        sample = Sample.of(inputs, plan, scores)
        while impl in FALLBACK:
            found = sample.disagreement(impl)
            if found is None:
                return impl
            logger.warning(
                "attention %r is wrong on this device for heads of shape %s in %s: %s; "
                "falling back to %r",
                impl,
                list(inputs[0].shape[1:]),
                inputs[0].dtype,
                found,
                FALLBACK[impl],
            )
            impl = FALLBACK[impl]
        return impl


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Some branches of a layout with their real q, k, v, and a random upstream gradient.

    A subset of a tree's tokens is a tree. `paths` are the branches, root to leaf, as indices into
    the sample.
    """

    inputs: Inputs
    upstream_THE: torch.Tensor
    plan: TreePlan
    scores: Scores
    paths: Sequence[torch.Tensor]

    @classmethod
    def of(cls, inputs: Inputs, plan: TreePlan, scores: Scores) -> Sample:
        end_T, place_T = plan.end_T.long(), plan.place_T.long()
        index_T = torch.arange(plan.tokens, device=plan.device)
        leaf_N = (end_T == index_T + 1).nonzero().flatten()
        leaf_N = leaf_N[_spread(len(leaf_N), LEAVES, plan.device)]
        seen_NT = (index_T <= leaf_N.unsqueeze(1)) & (leaf_N.unsqueeze(1) < end_T)
        node_S = seen_NT.any(0).nonzero().flatten()
        inner_S = node_S[~torch.isin(node_S, leaf_N)]
        inner_S = inner_S[_spread(len(inner_S), SAMPLE - len(leaf_N), plan.device)]
        node_S = torch.cat([inner_S, leaf_N]).sort().values
        end_S = torch.searchsorted(node_S, end_T[node_S])
        q_SHE, k_SKE, v_SKE = (x.detach()[node_S] for x in inputs)
        draw = torch.Generator(plan.device).manual_seed(0)
        upstream_SHE = torch.randn(
            q_SHE.shape, generator=draw, device=plan.device, dtype=q_SHE.dtype
        )
        part = TreePlan(end_S, plan.window, place_T[node_S])
        paths = [row_T[node_S].nonzero().flatten() for row_T in seen_NT]
        return cls((q_SHE, k_SKE, v_SKE), upstream_SHE, part, scores, paths)

    def disagreement(self, impl: str) -> str | None:
        """What is wrong with `impl` here, None if nothing.

        Each output and gradient may have twice the error of the plain computation in the same
        dtype, both measured against float64, plus eight units of the accumulator, and one for each
        unit of the largest score: a probability that is computed again from its score has the
        score's rounding as its own relative error.
        """

        def attend(q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor) -> torch.Tensor:
            return _tree(q_THE, k_TKE, v_TKE, self.plan, self.scores, impl)

        try:
            got = list(self._results(attend, self.inputs))
        except Exception as error:  # whatever a compiler or driver raises is a reason not to use it
            logger.warning("attention %r failed", impl, exc_info=True)
            return f"{type(error).__name__}: {error}"
        truth = list(self._results(self._branches, [x.double() for x in self.inputs]))
        same = list(self._results(self._branches, self.inputs))
        accumulator = torch.promote_types(self.inputs[0].dtype, torch.float32)
        largest, terms = self._magnitudes()
        floor = (8 + largest) * torch.finfo(accumulator).eps
        for name, mine, its, true in zip(("out", "dq", "dk", "dv"), got, same, truth, strict=True):
            # Gradients of queries and keys may cancel, to nothing where a token sees only itself.
            size = max(float(true.abs().max()), CANCELLED * terms[name], 1e-30)
            off, plain_off = (float((x.double() - true).abs().max() / size) for x in (mine, its))
            allowed = 2 * plain_off + floor
            if not off <= allowed:
                return f"{name} differs by {off:.2g}, at most {allowed:.2g} was expected"
        return None

    def _magnitudes(self) -> tuple[float, dict[str, float]]:
        """Bounds of the scores, and of the terms that each result is a sum of."""
        q, k, v, g = (
            float(x.double().norm(dim=-1).max()) for x in (*self.inputs, self.upstream_THE)
        )
        scale = self.scores.scale(self.inputs[0].shape[2])
        largest = scale * q * k
        return largest, {"out": v, "dq": g * v * scale * k, "dk": g * v * scale * q, "dv": g}

    def _results(self, attend: Any, inputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        # Identity hooks and no modes: those of gradient checkpointing, in whose middle this may be,
        # stay out.
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.enable_grad(), hooks, _disable_current_modes():
            leaves = [x.detach().clone().requires_grad_() for x in inputs]
            out_SHE = attend(*leaves)
            yield out_SHE.detach()
            yield from torch.autograd.grad(out_SHE, leaves, self.upstream_THE.to(out_SHE.dtype))

    def _branches(
        self, q_THE: torch.Tensor, k_TKE: torch.Tensor, v_TKE: torch.Tensor
    ) -> torch.Tensor:
        """Every branch as a sequence of its own; a shared token is read from the first."""
        out_THE = torch.zeros_like(q_THE)
        done_T = torch.zeros(len(q_THE), dtype=torch.bool, device=q_THE.device)
        for path in self.paths:
            alone = plain.tree_attention(
                q_THE[path],
                k_TKE[path],
                v_TKE[path],
                torch.full_like(path, len(path)),
                self.scores.scale(q_THE.shape[2]),
                self.scores.window,
                self.plan.place_T[path],
                self.scores.softcap,
            )
            new = ~done_T[path]
            out_THE = out_THE.index_put((path[new],), alone[new])
            done_T[path] = True
        return out_THE


def _spread(count: int, most: int, device: torch.device) -> torch.Tensor:
    """At most `most` indices below `count`, evenly spread, both ends among them."""
    if count <= most:
        return torch.arange(count, device=device)
    return torch.linspace(0, count - 1, most, device=device).long()


def _tree(
    q_THE: torch.Tensor,
    k_TKE: torch.Tensor,
    v_TKE: torch.Tensor,
    plan: TreePlan,
    scores: Scores,
    impl: str,
) -> torch.Tensor:
    return tree_attention(
        q_THE,
        k_TKE,
        v_TKE,
        plan.end_T,
        scale=scores.scaling,
        window=scores.window,
        softcap=scores.softcap,
        plan=plan,
        impl=impl,
    )


class TreeAttention:
    """Attention over one packed tree: `visible(q, k) = k <= q < end_T[k]`, and in layers with a
    sliding window `position_T[q] - position_T[k] < window`. A call changes nothing but the plans,
    one for each window (`plans` may have them from an earlier pass), so gradient checkpointing may
    call it again."""

    def __init__(
        self,
        end_T: torch.Tensor,
        position_T: torch.Tensor,
        backend: Backend,
        plans: dict[int | None, TreePlan] | None = None,
    ) -> None:
        self.end_T, self.position_T, self.backend = end_T, position_T, backend
        self.plans = {} if plans is None else plans

    def __call__(
        self,
        layer: int,
        q_1HTE: torch.Tensor,
        k_1KTE: torch.Tensor,
        v_1KTE: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        if scores.window not in self.plans:
            self.plans[scores.window] = TreePlan(self.end_T, scores.window, self.position_T)
        plan = self.plans[scores.window]
        q_THE, k_TKE, v_TKE = (x.squeeze(0).transpose(0, 1) for x in (q_1HTE, k_1KTE, v_1KTE))
        inputs = q_THE, k_TKE, v_TKE
        return _tree(*inputs, plan, scores, self.backend(inputs, plan, scores)).unsqueeze(0)
