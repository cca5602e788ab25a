"""Domain "frontdesk": its tools, what counts as solved, and its house rules one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fastturn.config import Config, Model
from fastturn.envs import DOMAINS, Task
from fastturn.envs.calls import parse_action, write_call
from fastturn.envs.desk import Contact, Desk
from fastturn.envs.desk_rules import RULES
from fastturn.rules import Judged
from fastturn.types import Channel

DOMAIN = DOMAINS["frontdesk"](Config())
DESCRIBED = DOMAINS["frontdesk"](Config(model=Model(path="some/model")))
TASK = Task(
    "t",
    {
        "question": "call 4821 then refund 482 60 pin 35 then change 517 phone 907 pin 44",
        "duties": (("told", 4821), ("refunded", 482, 60), ("changed", 517, "phone", 907)),
        "hour": 7,
        "contacts": (Contact(4821, opens=9, closes=17, zone=3, busy=3),),
        "pins": {482: 35, 517: 44},
        "strict": False,
    },
)
HOURS, DIAL, WRITE = (write_call(name, contact=4821) for name in ("hours", "dial", "write"))
VERIFY = write_call("verify", account=482, pin=35)
CONFIRM, REFUND = (write_call(name, account=482, amount=60) for name in ("confirm", "refund"))
CHANGE = write_call("change", account=517, field="phone", value=907)


def answers(texts: Sequence[str], **data: object) -> list[str]:
    """What the tools answer, of the task with other data."""
    env = DOMAIN.env()
    env.start(replace(TASK, data={**TASK.data, **data}))
    return [env.step(parse_action(text)).messages[0]["content"] for text in texts]


@pytest.mark.parametrize(
    ("hour", "zone", "closed"), [(9, 0, 0), (16, 0, 0), (17, 0, 16), (8, 0, 1), (20, 3, 10)]
)
def test_offices_keep_their_own_hours(hour: int, zone: int, closed: int) -> None:
    assert Contact(1, opens=9, closes=17, zone=zone).closed_for(hour) == closed


def test_an_episode_of_every_tool() -> None:
    texts = (
        *(HOURS, DIAL, DIAL, WRITE, VERIFY, CONFIRM, REFUND),
        *(write_call("verify", account=517, pin=44), CHANGE),
    )
    env = DOMAIN.env()
    assert env.start(TASK)[0]["content"] == TASK.data["question"]
    heard = [env.step(parse_action(text)).messages[0]["content"] for text in texts]
    assert heard == [
        *("open", "no answer", "no answer", "told", "verified", "yes", "refunded"),
        *("verified", "changed"),
    ]
    end = env.step(parse_action("All is done."))
    assert end.reward == 1.0 and end.done and end.events == ("answer",)


def test_time_passes_while_one_waits() -> None:
    wait = write_call("wait", contact=4821)
    assert answers([HOURS, wait, HOURS, wait], hour=20) == [
        *("closed", "10 h later", "open", "0 h later")
    ]


def test_who_is_busy_answers_later_whatever_the_hour() -> None:
    expected = ["no answer", "no answer", "no answer", "told"]
    assert answers([DIAL] * 4, hour=7) == answers([DIAL] * 4, hour=20) == expected


@pytest.mark.parametrize(
    ("text", "event"),
    [
        (write_call("dial", contact=4822), "tool_error"),
        (write_call("dial", contact="4821"), "bad_arguments"),
        (write_call("dial"), "bad_arguments"),
        (WRITE, "tool_error"),
        (write_call("wait", contact=1), "tool_error"),
        (write_call("verify", account=1, pin=1), "tool_error"),
        (write_call("change", account=517, field="name", value=1), "bad_arguments"),
        (write_call("refund", account=517), "bad_arguments"),
        (write_call("pay", account=517), "unknown_tool"),
        ("<tool_call>{", "unclosed_call"),
        ("<tool_call>[]</tool_call>", "not_an_object"),
    ],
)
def test_malformed_calls_are_answered_and_change_nothing(text: str, event: str) -> None:
    for domain in (DOMAIN, DESCRIBED):
        env = Judged(domain.env, RULES)
        env.start(TASK)
        before = env.snapshot()
        seen = env.step(parse_action(text))
        assert seen.events == ("tool_call", event) and not seen.done
        assert seen.messages[0]["content"].startswith("error")
        assert env.snapshot() == before
        assert all(hit.channel is Channel.PENALTY for hit in seen.path)


CHANGED = Desk(duties=(("changed", 5, "phone", 9),))
REFUNDED = Desk(duties=(("refunded", 5, 60),))


def test_what_counts_as_solved() -> None:
    assert not CHANGED.solved
    assert CHANGED.after("changed", 5, "phone", 9).solved
    assert CHANGED.after("changed", 5, "phone", 8).after("changed", 5, "phone", 9).solved
    assert not CHANGED.after("changed", 5, "phone", 9).after("changed", 5, "phone", 8).solved
    assert not CHANGED.after("changed", 5, "phone", 9).after("changed", 5, "email", 8).solved
    assert not CHANGED.after("changed", 5, "phone", 9).after("refunded", 5, 1).solved
    assert REFUNDED.after("refunded", 5, 60).solved
    assert not REFUNDED.after("refunded", 5, 60).after("refunded", 5, 60).solved
    assert not REFUNDED.after("refunded", 5, 6).after("refunded", 5, 60).solved


def test_a_strict_desk_refuses_what_is_improper() -> None:
    wrong_pin, pin = (write_call("verify", account=517, pin=pin) for pin in (40, 44))
    assert answers([CHANGE, wrong_pin, CHANGE, pin, CHANGE], strict=True) == [
        *("refused", "wrong pin", "refused", "verified", "changed")
    ]
    another = write_call("confirm", account=482, amount=61)
    assert answers([VERIFY, REFUND, another, REFUND, CONFIRM, REFUND], strict=True) == [
        *("verified", "refused", "yes", "refused", "yes", "refunded")
    ]


@pytest.mark.parametrize(
    ("rule", "hour", "texts", "turns"),
    [
        ("dials_outside_hours", 20, (DIAL, DIAL), (0, 1)),
        ("dials_in_hours", 7, (DIAL, DIAL), (0,)),
        ("dials_too_often", 7, (DIAL, DIAL, DIAL, DIAL), (2, 3)),
        ("writes_instead", 7, (WRITE, DIAL, DIAL, WRITE, WRITE), (3,)),
        ("alters_unverified", 7, (CHANGE, REFUND, VERIFY, REFUND, CHANGE), (0, 1, 4)),
        ("alters_verified", 7, (VERIFY, REFUND, REFUND), (1,)),
        ("refunds_unconfirmed", 7, (REFUND, CONFIRM, REFUND), (0,)),
        ("refunds_confirmed", 7, (CONFIRM, REFUND, REFUND), (1,)),
        ("duties_met", 7, (CHANGE, CONFIRM, REFUND, REFUND), (0, 2, 3)),
    ],
)
def test_every_rule_is_met_where_it_says(
    rule: str, hour: int, texts: Sequence[str], turns: tuple[int, ...]
) -> None:
    env = Judged(DOMAIN.env, RULES)
    env.start(replace(TASK, data={**TASK.data, "hour": hour}))
    met = [[hit.rule for hit in env.step(parse_action(text)).path] for text in texts]
    assert tuple(turn for turn, rules in enumerate(met) if rule in rules) == turns


def test_calls_of_one_action_are_judged_one_by_one() -> None:
    env = Judged(DOMAIN.env, RULES)
    env.start(TASK)
    path = env.step(parse_action(VERIFY + CONFIRM + REFUND)).path
    assert {(hit.rule, hit.call) for hit in path} == {
        *{("alters_verified", 2), ("refunds_confirmed", 2), ("duties_met", 2)}
    }
