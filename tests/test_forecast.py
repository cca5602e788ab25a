"""Simulated iterations: counted by hand where that is possible, and the paper's ratio of costs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastturn import cli
from fastturn.bench.savings import PAPER_RATIO, QWEN, STATED, ratios
from fastturn.config import ConfigError, override
from fastturn.devices import DEVICES, device_called
from fastturn.forecast import (
    SERVING_GIB,
    USABLE,
    Case,
    best,
    by_group_size,
    grpo,
    layouts,
    packing_budget,
    placed,
    sequence_gib,
    shape_known,
    silent_share,
    success_of,
    work_of,
)
from fastturn.lengths import lengths_of, run_lengths
from fastturn.plan import memory_gib
from fastturn.recipes import quickstart
from fastturn.runfiles import RunFiles
from fastturn.simulate import (
    SAVINGS,
    Episodes,
    Layout,
    Lengths,
    Speed,
    Work,
    dealt,
    decode,
    decode_together,
    iteration,
    reach,
    stage,
    stepwise,
)

SPEED = Speed(0.01, 0.001, 0.0, 0.002, 0.0001, 0.5, 0.25)


def ends(
    actions: list[list[int]], slots: int, lengths: Lengths, speed: Speed = SPEED
) -> list[float]:
    return decode(episodes(actions, lengths.answer), lengths.tool_s, speed, slots).tolist()


def episodes(actions: list[list[int]], answer: float) -> Episodes:
    action_NU = np.array(actions, float)
    count = len(action_NU)
    answer_NU = np.full(action_NU.shape, answer)
    return Episodes(action_NU, answer_NU, np.zeros(count), np.zeros(count))


def test_decoding_is_what_one_counts_by_hand() -> None:
    still = Lengths(answer=10.0, tool_s=0.5)
    # Two together: 4 steps of .012; then one alone: 6 steps of .011.
    assert ends([[4], [10]], 2, still) == pytest.approx([0.048, 0.048 + 0.066])
    # One after the other.
    assert ends([[4], [10]], 1, still) == pytest.approx([0.044, 0.044 + 0.11])
    # A tool of half a second and ten tokens to read between two turns.
    assert ends([[4, 2]], 1, still) == pytest.approx([0.044 + 0.5 + 0.02 + 0.022])
    # Contexts in the cache slow every step.
    slow = replace(SPEED, cached_s=0.001)
    assert ends([[1, 1]], 1, replace(still, tool_s=0.0), slow) == pytest.approx(
        [0.011 + 0.02 + 0.011 + 0.011]
    )


def test_turns_together_end_with_the_longest_action() -> None:
    found = decode_together(episodes([[4, 2], [10, 0]], 5.0), SPEED)
    # Ten steps that hold 14 sequences in all, 5 tokens to read, two steps of one.
    assert found.tolist() == pytest.approx([0.1 + 0.014 + 0.01 + 0.022, 0.1 + 0.014])


def test_episodes_end_early_as_often_as_they_are_said_to() -> None:
    assert reach(3, 0.5).tolist() == [1.0, 0.75, 0.25] and reach(4, 1.0).tolist() == [1.0] * 4
    work, still = Work(4000, 3, 3), Layout(1, together=True)
    found = iteration(work, Lengths(played=0.5, answer=0.0, action=10, spread=0.0), SPEED, still)
    trunks, forks = 4000 * 2.0, 3 * 4000 * (2.0 + 0.75 * (1 + 1 / 3) + 0.25)
    assert found.tokens == pytest.approx(10 * (trunks + forks), rel=0.02)
    assert found.spans["host"] == 0.0
    busy = replace(SPEED, turn_s=0.001)
    spent = iteration(work, Lengths(played=0.5, action=10, spread=0.0), busy, still).spans["host"]
    assert spent == pytest.approx(0.001 * found.tokens / 10, rel=0.02)
    slow = replace(SPEED, stage_s=1.0)  # the trunks and three stages
    assert iteration(work, Lengths(), slow, still).spans["host"] == 4.0
    most = iteration(replace(work, turn_tokens=7), Lengths(spread=0.0), SPEED, still)
    assert most.tokens == 7 * 4000 * (3 + 3 * 6)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5), st.integers(0, 9)
)
def test_no_saving_ever_costs(
    tasks: int, turns: int, siblings: int, servers: int, seed: int
) -> None:
    work = Work(tasks, turns, 1 + siblings)
    lengths = Lengths(prompt=40, action=20, answer=10, tool_s=0.1)
    found = dict(stepwise(work, lengths, SPEED, Layout(2, servers, slots=4), seed))
    walls = [one.wall_s for one in found.values()]
    assert list(found) == ["naive", *SAVINGS]
    assert all(b <= a * (1 + 1e-9) for a, b in pairwise(walls))
    assert len({one.tokens for one in found.values()}) == 1
    again = iteration(work, lengths, SPEED, Layout(2, servers, slots=4), seed)
    assert again.spans == found["prefetch"].spans


def test_stages_that_are_silent_as_a_whole_take_no_step_and_no_publish() -> None:
    """One task: every stage has one group, of which every fourth has a signal."""
    work, lengths = Work(1, 3, 3), Lengths(silent=0.75, played=1.0)

    def spans(savings: tuple[str, ...], every: int = 1) -> dict[str, float]:
        layout = Layout(1, savings=frozenset(savings), publish_every=every, together=True)
        return iteration(work, lengths, replace(SPEED, train_s=0.0, pass_s=1.0), layout).spans

    assert spans(())["optimizer"] == 3 * SPEED.update_s and spans(())["publish"] == 3 * 0.25
    assert spans(("silent",))["optimizer"] == pytest.approx(0.25 * 3 * SPEED.update_s)
    assert spans(("silent",))["publish"] == pytest.approx(0.25 * 3 * 0.25)
    assert spans(("silent",))["forward_backward"] == pytest.approx(0.25 * 3)
    # The first two stages share a publish, which is left out when both are silent.
    twice = spans(("silent",), every=2)["publish"]
    assert twice == pytest.approx(0.25 * (1 - 0.75**2) + 0.25 * 0.25)
    assert spans((), every=2)["publish"] == 2 * 0.25


def test_ten_thousand_gpus_are_no_slower_than_a_thousand() -> None:
    speed, work = Speed.of(device_called("h100"), QWEN), Work(20_000, 2, 2)
    walls = [iteration(work, Lengths(), speed, Layout(n, n)).wall_s for n in (500, 5000)]
    assert walls[1] < walls[0]


def test_the_papers_ratio_of_costs_from_stated_assumptions() -> None:
    """`bench/savings.py` states them: 1.413 times GRPO's GPU-hours for 1.40 times its tokens."""
    found = ratios(STATED)
    assert found["naive"] == pytest.approx(PAPER_RATIO, rel=0.05)
    assert found["share"] < found["silent"] < found["naive"]


@pytest.mark.parametrize(
    ("groups", "servers", "shares"),
    [
        (8, 3, [2, 3, 3]),
        (8, 4, [2] * 4),
        (2, 5, [1, 1]),
        (33, 32, [1] * 7 + [2]),  # one of 32 has two: it is what the others wait for
        (1000, 100, [10] * 8),
    ],
)
def test_groups_are_dealt_out_and_the_longest_share_is_seen(groups, servers, shares):
    assert dealt(groups, servers) == shares


def test_a_stage_of_more_servers_than_are_simulated_has_all_groups():
    lengths = Lengths(prompt=64, action=32, answer=16, spread=0.0)
    speed, layout = Speed.of(device_called("H100"), QWEN), Layout(1, 100, slots=64)
    work = Work(1000, 2, 4)
    cost = speed, layout
    found = stage(1000, 4, 0, work, lengths, cost, rng=np.random.default_rng(0))
    assert len(found.whole_G) == 1000 and (np.diff(found.whole_G) >= 0).all()
    alone = replace(layout, servers=1)
    few = stage(10, 4, 0, work, lengths, (speed, alone), rng=np.random.default_rng(0))
    assert found.tokens == pytest.approx(100 * few.tokens, rel=0.2)
    assert found.whole_G[-1] == pytest.approx(few.whole_G[-1], rel=0.2)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A model of 35 million weights by its config.json alone, on 4 H100s."""
    sizes = {"model_type": "llama", "num_hidden_layers": 8, "hidden_size": 512}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 1536}
    sizes |= {"vocab_size": 8192, "tie_word_embeddings": True, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    config = override(quickstart(), [f"model.path={tmp_path}", "device=cuda", "model.dtype=mixed"])
    return Case(config, device_called("H100"), 4, Lengths(prompt=64, action=32, answer=16))


def test_the_best_layout_is_the_fastest_that_fits(case: Case) -> None:
    work = work_of(case.config)
    assert work == Work(32, 4, 4, 1, True, 24) and grpo(work).siblings == 17
    found = best(case, work)
    for layout in layouts(4):
        assert found.wall_s <= iteration(work, case.lengths, case.speed, layout).wall_s
    small = replace(case.device, memory_gib=0.05)
    with pytest.raises(ConfigError, match=r"4 x H100: a trainer's rank takes .* take more GPUs"):
        best(replace(case, device=small), work)
    assert 2**12 <= packing_budget(case, 1) <= packing_budget(case, 4) <= 2**20


def test_a_server_holds_as_many_sequences_as_its_memory(case: Case) -> None:
    """8 layers with keys and values of 256 numbers, 2 bytes each, 64 + 4 x (24 + 16) tokens:
    actions are cut at 24. (Spreads of 0: the mean is the median.)"""
    spreads = {name: 0.0 for name in ("spread", "answer_spread", "prompt_spread")}
    case = replace(case, lengths=replace(case.lengths, **spreads))
    sequence = 2 * 8 * 2 * 256 * (64 + 4 * (24 + 16)) / 2**30
    assert sequence_gib(case) == pytest.approx(sequence)
    shape = shape_known(case.config)
    held, step, _ = (sum(part.values()) for part in memory_gib(case.config, 2))
    weights = 2 * shape.parameters / 2**30

    def slots(layout: Layout, gib: float) -> int:
        device = replace(case.device, memory_gib=gib / USABLE)
        found, why = placed(replace(case, device=device), layout)
        assert not why, why
        return found.slots

    room = SERVING_GIB + weights + 10.5 * sequence
    assert room > held + step
    assert slots(Layout(2, 2), room) == 10
    assert slots(Layout(2), room + held) == 10  # both in turn: the trainer's beside the server's
    assert slots(Layout(2, 2), 80.0) == Layout(2, 2).slots
    none = replace(case.device, memory_gib=(room - 10 * sequence) / USABLE)
    told = placed(replace(case, device=none), Layout(2))[1]
    assert re.search(r"a server's weights take .* beside .* of the trainer and one sequence", told)


def test_silent_shares_follow_from_one_rate_of_success(case: Case) -> None:
    assert silent_share(0.5, 2) == 0.5
    assert silent_share(success_of(0.63, 4), 4) == pytest.approx(0.63)
    sizes = dict(by_group_size(case, work_of(case.config), Layout(2, 2)))
    live = [found.live for found in sizes.values()]
    assert list(sizes) == list(range(3, 10)) and live == sorted(live)


def test_lengths_of_a_run_and_of_the_command_line() -> None:
    record = {"kind": "iteration", "turns_mean": 2.0, "action_tokens_mean": 60.0, "rollouts": 10}
    record |= {"zero_advantage_share": 0.7, "spans": {"environment": 5.0}}
    run = RunFiles("r", [record], [], {}, {"algorithm": "rtpo"}, {})
    found = lengths_of(["prompt=99"], run_lengths(run))
    assert (found.tool_s, found.silent, found.prompt) == (0.25, 0.7, 99.0)
    assert found.turn_mean == pytest.approx(30.0)  # of a turn, however long its tail
    assert found.silent_whole == Lengths().silent_whole
    with pytest.raises(ConfigError, match="r: expected a run with whole iterations"):
        run_lengths(replace(run, records=[]))
    with pytest.raises(ConfigError, match=r"--lengths silent=1\.5: expected a number from 0 to 1"):
        lengths_of(["silent=1.5"])


def test_plan_prints_what_was_assumed_and_found(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "quickstart", f"model.path={case.config.model.path}", "device=cuda"]
    words += [
        "tasks=4",
        "turns=2",
        "model.dtype=mixed",
        "--gpus",
        "4",
        "--lengths",
        "prompt=64,action=32,answer=16",
    ]
    assert cli.main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "4 x A100 80GB",
        "GPU-hours / GRPO's",
        "+ prefetch",
        "twice the GPUs",
        "group_size=",
    ):
        assert part in shown
    assert cli.main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(told["spans"].values()) == pytest.approx(told["wall_s"])
    assert told["gpu_hours"] == pytest.approx(4 * told["wall_s"] / 3600)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "V100"], f"expected one of {', '.join(d.name for d in DEVICES)}"),
        (["--device", "H"], "--device 'H' is more than one device; expected one of H100, H200"),
        (["--lengths", "acton=3"], "the nearest is 'action'"),
        (["--lengths", "tool_s=inf"], "tool_s=inf: expected a number from 0 to 1e+07"),
        (["--lengths", "spread=9"], "spread=9: expected a number from 0 to 4"),
        (["--lengths", "action=0"], "action=0: expected a number from 1 to 1e+07"),
        (["--run", "nowhere"], "--run nowhere: expected the folder of a run, but there is no such"),
        (["--calibrate", "docs"], "--calibrate docs: expected the folder of a run, but it holds"),
        (["algorithm=dapo"], "only algorithms that sample like rtpo or grpo"),
        (["model.path=some/hub-id"], "its shape is unknown until it has been downloaded"),
    ],
)
def test_bad_input_is_named(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert cli.main(["plan", "quickstart", *words]) == 2
    assert message in capsys.readouterr().err
