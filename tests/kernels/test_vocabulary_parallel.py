"""Two ranks with slices of the head equal one process with all of it.

Run as a script this file is one of the two ranks: `python test_vocabulary_parallel.py RANK FOLDER`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fastturn.kernels as kernels
from fastturn.kernels.adapters import linear_cross_entropy

DOUBLE = torch.float64
RANKS, DEADLINE_S = 2, 120
OPS = ("surrogate", "logprob")
ROWS = sys.modules["fastturn.kernels.rows"]

# name -> (rows of each rank, arguments of the case fixture, chunk heights of 16 rows and 8)
SPLITS: dict[str, tuple[tuple[int, int], dict[str, Any], bool]] = {
    "even": ((150, 150), {}, False),
    "uneven, several chunks": ((7, 293), {}, True),
    "temperature and softcap": ((130, 170), {"softcap": 3.0, "temperature": 0.7}, True),
    "several labels a row": ((101, 199), {"per_row": 4}, True),
    "several labels, softcap": ((256, 44), {"per_row": 3, "softcap": 2.0}, False),
    "one rank without rows": ((0, 300), {}, True),
    "the other without rows": ((300, 0), {"per_row": 4}, False),
    "no bias, peaked": ((37, 263), {"bias": False, "spread": 30.0}, False),
    "on policy": ((140, 160), {"behavior_A": None}, False),
    "without KL": ((140, 160), {"kl_coef": 0.0, "reference_A": None}, True),
    "empty": ((130, 170), {"actions": 0}, False),
    "forbidden slice": ((200, 100), {}, True),
    "zero weights": ((130, 170), {}, True),
    "labels at the seam": ((130, 170), {}, False),
}


def rank_main(rank: int, folder: Path) -> None:
    """Every job of `folder` on this rank's slice; results to `folder`/RANK.pt."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    found = {}
    for name, job in torch.load(folder / "jobs.pt").items():
        found[name] = {op: run_split(op, rank, **job) for op in OPS}
        again = {op: run_split(op, rank, **job) for op in OPS}
        assert all(torch.equal(found[name][op][k], again[op][k]) for op in OPS for k in again[op])
    verl = torch.load(folder / "verl.pt")
    found["verl"] = run_verl(rank, *verl, (150, 150))
    found["verl, uneven"] = run_verl(rank, *verl, (130, 170))
    found["refused"] = run_refused(rank, *verl)
    found["data"] = run_data_parallel(rank, *torch.load(folder / "verl.pt"))
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def run_split(
    op: str,
    rank: int,
    tensors: dict[str, Tensor],
    given: dict[str, Any],
    counts: tuple[int, ...],
    short: bool,
) -> dict[str, Tensor]:
    ROWS.chunk_rows = (lambda *_: 16) if short else HEIGHTS[0]
    ROWS.tile_rows = (lambda *_: 8) if short else HEIGHTS[1]
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    leaves = {"hidden": tensors["hidden"].clone(), "head": tensors["head"][own].clone()}
    if "bias" in tensors:
        leaves["bias"] = tensors["bias"][own].clone()
    inputs = [x.requires_grad_() for x in leaves.values()]
    part = kernels.VocabularySlice.of(counts[rank])
    shared = {"bias_V": leaves.get("bias"), "part": part}
    named: dict[str, Tensor] = {}
    if op == "surrogate":
        out = kernels.vocabulary_parallel_surrogate(
            *inputs[:2], tensors["action"], **shared, **given
        )
        named = {"loss": out.loss, "logprob_A": out.logprob_A, "entropy_A": out.entropy_A}
        named |= {f"sum {name}": x for name, x in out.sums.items()}
        named |= {f"peak {name}": x for name, x in out.peaks.items()}
        total = out.loss
    else:
        options = {k: v for k, v in given.items() if k in ("row_A", "temperature", "softcap")}
        logprob_A, entropy_A = kernels.vocabulary_parallel_logprob(
            *inputs[:2], tensors["action"], **shared, **options
        )
        named = {"logprob_A": logprob_A, "entropy_A": entropy_A}
        wave_A = torch.cos(torch.arange(len(logprob_A), dtype=logprob_A.dtype))
        total = (logprob_A * wave_A).sum() + (entropy_A * wave_A.flip(0)).sum()
    grads = torch.autograd.grad(total, inputs)
    named |= {f"d{name}": g for name, g in zip(leaves, grads, strict=True)}
    return {name: x.detach() for name, x in named.items()}


HEIGHTS = ROWS.chunk_rows, ROWS.tile_rows


def run_verl(
    rank: int, hidden_RD: Tensor, head_VD: Tensor, action_A: Tensor, counts: tuple[int, int]
) -> dict[str, Tensor]:
    own = head_VD.split(counts)[rank].clone().requires_grad_()
    hidden_RD = hidden_RD.clone().requires_grad_()
    logprob_A, entropy_A = linear_cross_entropy(
        hidden_RD, own, action_A, 0.8, "none", dist.group.WORLD
    )
    grads = torch.autograd.grad((logprob_A * logprob_A + entropy_A).sum(), (hidden_RD, own))
    named = {"logprob_A": logprob_A.detach(), "entropy_A": entropy_A.detach()}
    return named | {"dhidden": grads[0], "dhead": grads[1]}


def run_refused(rank: int, hidden_RD: Tensor, head_VD: Tensor, action_A: Tensor) -> list[str]:
    """Messages of calls whose arguments are wrong on rank 1 only: no rank may wait for ever."""
    own = head_VD.chunk(RANKS)[rank]
    beyond_A = action_A.clone()
    beyond_A[3] += 300 * rank
    messages = []
    for weight, labels in ((own if rank == 0 else own.float(), action_A), (own, beyond_A)):
        try:
            linear_cross_entropy(hidden_RD, weight, labels, 1.0, "none", dist.group.WORLD)
        except ValueError as error:
            messages.append(str(error))
    return messages


def loss_of(hidden_RD: Tensor, head_VD: Tensor, action_A: Tensor, part: slice) -> Tensor:
    advantage_A = torch.linspace(-1, 1, len(action_A), dtype=DOUBLE)
    return kernels.turn_surrogate(
        hidden_RD[part],
        head_VD,
        action_A[part],
        advantage_A=advantage_A[part],
        weight_A=torch.full_like(advantage_A, 0.1)[part],
        clip_low=0.2,
        clip_high=0.2,
    ).loss


def run_data_parallel(
    rank: int, hidden_RD: Tensor, head_VD: Tensor, action_A: Tensor
) -> dict[str, Tensor]:
    """Rank 0 has 3 actions and rank 1 has 7; gradients are summed."""
    head_VD = head_VD.clone().requires_grad_()
    loss = loss_of(hidden_RD, head_VD, action_A, (slice(0, 3), slice(3, 10))[rank])
    (grad_VD,) = torch.autograd.grad(loss, head_VD)
    dist.all_reduce(grad_VD)
    return {"dhead": grad_VD}


def make_job(make: Callable[..., Any], name: str) -> tuple[Any, dict[str, Any]]:
    """The case, and what a rank needs of it."""
    counts, options, short = SPLITS[name]
    options = dict(options)
    case = make(options.pop("actions", 60), 16, 300, **options)
    if name in HOSTILE:
        case = HOSTILE[name](case)
    tensors = {"hidden": case.hidden_RD, "head": case.head_VD, "action": case.action_A}
    if case.bias_V is not None:
        tensors["bias"] = case.bias_V
    return case, {"tensors": tensors, "given": case.given, "counts": counts, "short": short}


def forbidden(case: Any) -> Any:
    """All columns of rank 0 and some of rank 1 are forbidden."""
    bias_V = case.bias_V.clone()
    bias_V[:260] = -torch.inf
    return replace(case, bias_V=bias_V, action_A=260 + case.action_A % 40)


def silent(case: Any) -> Any:
    """Every third weight is 0 and garbage stands beside it."""
    given = {k: v.clone() if isinstance(v, Tensor) else v for k, v in case.given.items()}
    for number, name in enumerate(("behavior_A", "advantage_A", "reference_A")):
        given[name][::3] = (torch.nan, torch.inf, -1e4)[number]
    given["weight_A"][::3] = 0
    return replace(case, given=given)


def edges(case: Any) -> Any:
    """Labels beside the seam at 130, at the ends, and where a slice would be padded (256, 260)."""
    edge_E = torch.tensor([0, 129, 130, 131, 255, 256, 259, 260, 298, 299])
    return replace(case, action_A=edge_E.repeat(6))


HOSTILE = {"forbidden slice": forbidden, "zero weights": silent, "labels at the seam": edges}


@pytest.fixture(scope="module")
def cache() -> dict[str, Any]:
    return {}


@pytest.fixture
def ranks(
    case: Callable[..., Any], cache: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Results of both ranks, [rank][job][op][name], and the cases; computed once."""
    if not cache:
        folder = tmp_path_factory.mktemp("ranks")
        made = {name: make_job(case, name) for name in SPLITS}
        torch.save({name: job for name, (_, job) in made.items()}, folder / "jobs.pt")
        verl = case(10, 16, 300)
        verl = (verl.hidden_RD, verl.head_VD, verl.action_A)
        torch.save(verl, folder / "verl.pt")
        run_ranks(folder)
        cache["found"] = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
        cache["cases"] = {name: one for name, (one, _) in made.items()}
        cache["verl"] = verl
    return cache


def run_ranks(folder: Path) -> None:
    """Both ranks as processes; a rank that fails or hangs takes the other down with it."""
    command = [sys.executable, __file__]
    running = [
        subprocess.Popen([*command, str(rank), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    try:
        for rank, process in enumerate(running):
            _, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, f"rank {rank}: {errors[-3000:]}"
    finally:
        for process in running:
            process.kill()


def expect_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        scale = float(value.abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(
            got[name], value, rtol=0, atol=1e-12 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", SPLITS)
def test_equals_one_process(ranks: dict[str, Any], name: str, op: str) -> None:
    """Every output and gradient by name; dhead and dbias are the slices side by side."""
    first, second = (found[name][op] for found in ranks["found"])
    case = ranks["cases"][name]
    want = case.run("torch") if op == "surrogate" else case.score("torch")
    joined = {}
    for key, value in first.items():
        if key in ("dhead", "dbias"):
            joined[key] = torch.cat([value, second[key]])
        else:
            assert torch.equal(value, second[key]), f"{key} differs between ranks"
            joined[key] = value
    expect_equal(joined, want)
    if name == "zero weights" and op == "surrogate":
        assert not joined["dhidden"][::3].any()


@pytest.mark.parametrize("name", ["verl", "verl, uneven"])
def test_verl_s_process_group(ranks: dict[str, Any], name: str) -> None:
    hidden_RD, head_VD, action_A = ranks["verl"]
    leaves = [x.clone().requires_grad_() for x in (hidden_RD, head_VD)]
    logprob_A, entropy_A = kernels.linear_logprob(
        *leaves, action_A, temperature=0.8, impl="reference"
    )
    grads = torch.autograd.grad((logprob_A * logprob_A + entropy_A).sum(), leaves)
    first, second = (found[name] for found in ranks["found"])
    got = first | {"dhead": torch.cat([first["dhead"], second["dhead"]])}
    want = {"logprob_A": logprob_A.detach(), "entropy_A": entropy_A.detach()}
    expect_equal(got, want | {"dhidden": grads[0], "dhead": grads[1]})


def test_wrong_arguments_of_one_rank_are_refused_by_all(ranks: dict[str, Any]) -> None:
    first, second = (found["refused"] for found in ranks["found"])
    assert first[0] == (
        "hidden, weight, labels: expected correct arguments on all ranks, rank 1 refused its own"
    )
    assert second[0] == "weight: expected torch.float64 like hidden, got torch.float32"
    assert first[1] == second[1]
    assert first[1].startswith("labels: expected entries in [0, 300), got ")


def test_ranks_with_3_and_7_actions_sum_to_one_process(ranks: dict[str, Any]) -> None:
    """Weights are final, so data-parallel ranks add their gradients whatever their shares are."""
    hidden_RD, head_VD, action_A = ranks["verl"]
    head_VD = head_VD.clone().requires_grad_()
    (want_VD,) = torch.autograd.grad(loss_of(hidden_RD, head_VD, action_A, slice(0, 10)), head_VD)
    for found in ranks["found"]:
        expect_equal(found["data"], {"dhead": want_VD})


ALONE = kernels.VocabularySlice((300,), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_is_as_accurate_as_the_op(case: Any, oracle: Any, dtype: torch.dtype) -> None:
    """A slice that is everything, without any process group; half precision rounds once."""
    truth = case(70, 32, 300, dtype, per_row=2)
    named = {}
    for impl, one in (("reference", truth), ("truth", truth.to(DOUBLE))):
        named[impl] = one.run("reference")
        assert named[impl]["loss"].isfinite()
    leaves = [x.clone().requires_grad_() for x in (truth.hidden_RD, truth.head_VD, truth.bias_V)]
    out = kernels.vocabulary_parallel_surrogate(
        *leaves[:2], truth.action_A, bias_V=leaves[2], part=ALONE, **truth.given
    )
    grads = torch.autograd.grad(out.loss, leaves)
    got = dict(zip(("dhidden", "dhead", "dbias"), grads, strict=True))
    got |= {"loss": out.loss.detach(), "logprob_A": out.logprob_A, "entropy_A": out.entropy_A}
    oracle(got, named["reference"], {name: named["truth"][name] for name in got}, dtype)


def test_gradcheck(case: Any) -> None:
    given = case(8, 3, 11, per_row=2, softcap=4.0)
    part = kernels.VocabularySlice((11,), 0)

    def both(hidden: Tensor, head: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.vocabulary_parallel_logprob(
            hidden,
            head,
            given.action_A,
            part=part,
            bias_V=bias,
            softcap=4.0,
            row_A=given.given["row_A"],
        )

    leaves = (given.hidden_RD, given.head_VD, given.bias_V)
    assert torch.autograd.gradcheck(both, [x.clone().requires_grad_() for x in leaves])


def test_slices() -> None:
    part = kernels.VocabularySlice((130, 130, 300), 2)
    assert (part.start, part.rows, part.total, part.largest) == (130, 170, 300, 170)
    assert (kernels.VocabularySlice((130, 130, 300), 1).rows, part.rank) == (0, 2)


def test_bad_input_is_named_before_any_collective() -> None:
    """No process group exists here: reaching a collective would raise something else."""
    part = kernels.VocabularySlice((3, 8), 1)
    hidden_RD, head_VD, action_A = torch.zeros(2, 4), torch.zeros(5, 4), torch.tensor([0, 7])

    def score(**changes: Any) -> None:
        given = {"hidden_RD": hidden_RD, "head_VD": head_VD, "action_A": action_A} | changes
        kernels.vocabulary_parallel_logprob(**given, part=part)

    for match, changes in {
        r"head_VD: expected the 5 rows of rank 1, got 4": {"head_VD": torch.zeros(4, 4)},
        r"action_A: expected entries in \[0, 8\), got 8": {"action_A": torch.tensor([0, 8])},
        r"action_A: expected entries in \[0, 8\), got -1": {"action_A": torch.tensor([0, -1])},
        r"action_A: expected one action for each of the 2": {"action_A": torch.tensor([0])},
        r"row_A: expected entries in \[0, 2\), got 2": {"row_A": torch.tensor([0, 2])},
        r"head_VD: expected shape \[any, 4\]": {"head_VD": torch.zeros(5, 3)},
        r"bias_V: expected shape \[5\]": {"bias_V": torch.zeros(8)},
        r"temperature": {"temperature": 0.0},
    }.items():
        with pytest.raises(ValueError, match=match):
            score(**changes)
    with pytest.raises(ValueError, match="init_process_group"):
        kernels.VocabularySlice.of(5)


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), Path(sys.argv[2]))
