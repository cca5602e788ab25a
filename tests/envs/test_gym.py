"""Domain "gym": generators of reasoning-gym, guarded verifiers, several tries."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

pytest.importorskip("reasoning_gym")

from fastturn.config import Config, ConfigError, Data
from fastturn.conformance import conform
from fastturn.envs import Action, DomainError, load_domain
from fastturn.envs.gym import Generated
from fastturn.findings import FAIL


def opened(options: str, eval_tasks: int = 4, **data: Any) -> Any:
    where = Data(domain=f"gym:{options}", eval_tasks=eval_tasks, tool_timeout_s=20.0, **data)
    try:
        return load_domain(Config(data=where))
    except ConfigError as error:
        if "isolated" in str(error):
            pytest.skip(str(error))
        raise


def say(domain: Any, *texts: str) -> list[tuple[float, bool, tuple[str, ...]]]:
    env = domain.env()
    env.start(domain.train_tasks[0])
    answers = [env.step(Action(text)) for text in texts]
    return [(a.reward, a.done, a.events) for a in answers]


def test_answers_are_taken_out_of_their_box_and_only_full_scores_count() -> None:
    domain = opened("generator=chain_sum")
    right = domain.train_tasks[0].data["entry"]["answer"]
    wrong = f"\\boxed{{{int(right) + 1}}}"
    assert say(domain, f"It is \\boxed{{{right}}}.") == [(1.0, True, ("answer",))]
    assert say(domain, f"\\boxed{{ {right} }}")[0][0] == 1.0
    assert say(domain, wrong) == [(0.0, True, ("answer",))]
    assert say(domain, f"The answer is {right}") == [(0.0, True, ("no_answer",))]


def test_a_verifier_that_raises_is_an_event() -> None:
    domain = opened("generator=prime_factorization")
    assert say(domain, "\\boxed{banana}") == [(0.0, True, ("answer", "verifier_error"))]


def test_a_verifier_does_not_run_answers_here() -> None:
    """Some verifiers evaluate the text of an answer."""
    domain = opened("generator=countdown")
    attack = "\\boxed{__import__('os')._exit(1)}"
    assert say(domain, attack)[0][0] == 0.0
    assert say(domain, "\\boxed{1}")[0][1]


def test_a_generator_without_answers_has_its_verifier() -> None:
    domain = opened("generator=graph_color")
    assert say(domain, "\\boxed{nothing}")[0][0] == 0.0
    with pytest.raises(ConfigError, match=r"warm\.steps=0"):
        domain.demonstrator(domain.train_tasks[0], np.random.default_rng(0))


def test_wrong_answers_may_be_given_again() -> None:
    domain = opened("generator=leg_counting,tries=3")
    right = f"\\boxed{{{domain.train_tasks[0].data['entry']['answer']}}}"
    assert say(domain, "no box", "\\boxed{x}", right) == [
        (0.0, False, ("no_answer",)),
        (0.0, False, ("answer",)),
        (1.0, True, ("answer",)),
    ]
    assert [done for _, done, _ in say(domain, "a", "b", "c")] == [False, False, True]


@pytest.mark.slow
def test_the_contract() -> None:
    where = Data(domain="gym:generator=chain_sum,tries=2", eval_tasks=4)
    config = Config(data=where)
    opened("generator=chain_sum,tries=2")
    assert not [line for line in conform(load_domain(config), config) if line.status == FAIL]


def test_tasks_are_repeatable_and_held_out_ones_are_not_trained_on() -> None:
    one, two = (opened("generator=leg_counting,size=50") for _ in range(2))
    assert len(one.train_tasks) == 50
    assert pickle.dumps(one.train_tasks[3]) == pickle.dumps(two.train_tasks[3])
    held_out = frozenset(task.data["entry"]["question"] for task in one.eval_tasks)
    same = Generated(
        one.train_tasks._entries, "t", frozenset({one.train_tasks[3].data["entry"]["question"]})
    )
    assert same[3].data == one.train_tasks[4].data and same[3].id == "t-3"
    assert not held_out & {task.data["entry"]["question"] for task in one.train_tasks}
    every = frozenset(task.data["entry"]["question"] for task in one.train_tasks)
    with pytest.raises(DomainError, match="all 50 training tasks are held out"):
        Generated(one.train_tasks._entries, "t", every)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("generator=leg_countin", "the nearest is 'leg_counting'"),
        ("generator=composite", "2000 tasks cannot be made|4 tasks cannot be made"),
        ("generator=chain_sum,tries=9", "tries=9: expected 1 to turns=4"),
        ("tries=1", "no such generator"),
    ],
)
def test_options_that_cannot_be_used(options: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(options)


@pytest.mark.slow
def test_every_generator_accepts_its_own_answers() -> None:
    from reasoning_gym.factory import DATASETS

    for name in sorted(DATASETS.keys() - {"composite", "acre"}):
        domain = opened(f"generator={name},size=8", eval_tasks=1)
        entry = domain.train_tasks[0].data["entry"]
        if entry["answer"] is not None:
            assert domain._grade.args[0]({**entry, "question": ""}, entry["answer"]) == 1.0, name
            changed = domain._grade.args[0](entry, f"{entry['answer']} ")
            assert changed is None or 0.0 <= changed <= 1.0, name
