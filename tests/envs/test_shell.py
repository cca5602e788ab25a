"""Domain "shell": its commands, what counts as solved, and its house rules one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fastturn.config import Config, Model
from fastturn.envs import DOMAINS, Task
from fastturn.envs.calls import parse_action, write_call
from fastturn.envs.machine import Machine
from fastturn.envs.machine_rules import RULES
from fastturn.rules import Judged
from fastturn.types import Channel

DOMAIN = DOMAINS["shell"](Config())
DESCRIBED = DOMAINS["shell"](Config(model=Model(path="some/model")))
TASK = Task(
    "t",
    {
        "question": "set web port 907 and restart then remove tmp/4821",
        "duties": (
            ("set", "web.conf", "port", 907),
            ("restarted", "web"),
            ("removed", "tmp/4821"),
        ),
        "files": {
            "web.conf": {"port": 80, "limit": 30},
            "mail.conf": {"level": 0, "port": 25},
            "tmp/4821": {},
            "tmp/1066": {},
            "tmpfs/1": {},
        },
        "strict": False,
    },
)
CAT, EDIT = (
    write_call("cat", file="web.conf"),
    write_call("edit", file="web.conf", setting="port", value=907),
)
CHECK, RESTART = (write_call(name, service="web") for name in ("check", "restart"))
RM, RM_ALL = write_call("rm", path="tmp/4821"), write_call("rm", path="tmp")


def answers(texts: Sequence[str], **data: object) -> list[str]:
    """What the commands answer, of the task with other data."""
    env = DOMAIN.env()
    env.start(replace(TASK, data={**TASK.data, **data}))
    return [env.step(parse_action(text)).messages[0]["content"] for text in texts]


def test_an_episode_of_every_command() -> None:
    env = DOMAIN.env()
    assert env.start(TASK)[0]["content"] == TASK.data["question"]
    top, tmp = write_call("ls", folder="."), write_call("ls", folder="tmp")
    texts = (top, tmp, CAT, EDIT, CAT, CHECK, RESTART, RM, tmp)
    heard = [env.step(parse_action(text)).messages[0]["content"] for text in texts]
    assert heard == [
        *("web.conf mail.conf", "tmp/4821 tmp/1066", "port 80 limit 30", "saved"),
        *("port 907 limit 30", "valid", "restarted", "removed 1", "tmp/1066"),
    ]
    end = env.step(parse_action("All is done."))
    assert end.reward == 1.0 and end.done and end.events == ("answer",)


def test_folders_are_removed_whole_and_nothing_beside_them() -> None:
    assert answers([RM_ALL, write_call("ls", folder="tmp"), write_call("ls", folder="tmpfs")]) == [
        *("removed 2", "empty", "tmpfs/1")
    ]


def test_a_check_finds_what_is_wrong() -> None:
    assert answers([write_call("check", service="mail")]) == ["wrong level"]


@pytest.mark.parametrize(
    ("text", "event"),
    [
        (write_call("cat", file="tmp"), "tool_error"),
        (write_call("edit", file="web.conf", setting="level", value=1), "tool_error"),
        (write_call("edit", file="web.conf", setting="port", value="907"), "bad_arguments"),
        (write_call("rm", path=""), "tool_error"),
        (write_call("rm", path="."), "tool_error"),
        (write_call("rm"), "bad_arguments"),
        (write_call("restart", service="data"), "tool_error"),  # without a configuration
        (write_call("check", service="tmp"), "tool_error"),
        (write_call("sh", command="rm"), "unknown_tool"),
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


def test_what_counts_as_solved() -> None:
    start = Machine(
        duties=(("set", "web.conf", "port", 9), ("restarted", "web")),
        files={"web.conf": {"port": 9, "limit": 1}},
    )
    edited = start.after("set", "web.conf", "port", 9)
    assert not edited.solved
    assert edited.after("restarted", "web").solved
    assert not edited.after("restarted", "web").after("set", "web.conf", "port", 9).solved
    assert not edited.after("restarted", "mail").solved
    assert not edited.after("set", "web.conf", "limit", 2).after("restarted", "web").solved
    assert not replace(edited, files={}).after("restarted", "web").solved


def test_a_strict_machine_refuses_what_is_improper() -> None:
    texts = [EDIT, CAT, EDIT, RESTART, CHECK, RESTART, EDIT, RESTART]
    assert answers(texts, strict=True) == [
        *("refused", "port 80 limit 30", "saved", "refused", "valid", "restarted", "saved"),
        "refused",
    ]


@pytest.mark.parametrize(
    ("rule", "texts", "turns"),
    [
        ("removes_unasked", (RM, RM_ALL), (1,)),
        ("removes_unasked", (RM_ALL, RM_ALL), (0,)),
        ("removes_asked", (RM, RM), (0,)),
        ("removes_asked", (RM_ALL,), ()),
        ("edits_unread", (EDIT, CAT, EDIT), (0,)),
        ("edits_read", (CAT, EDIT, EDIT), (1,)),
        ("restarts_unchecked", (RESTART, CHECK, EDIT, RESTART), (0, 3)),
        ("restarts_checked", (CHECK, RESTART, RESTART), (1,)),
        ("duties_met", (EDIT, CHECK, RESTART, EDIT, RM), (0, 2, 3, 4)),
    ],
)
def test_every_rule_is_met_where_it_says(
    rule: str, texts: Sequence[str], turns: tuple[int, ...]
) -> None:
    env = Judged(DOMAIN.env, RULES)
    env.start(TASK)
    met = [[hit.rule for hit in env.step(parse_action(text)).path] for text in texts]
    assert tuple(turn for turn, rules in enumerate(met) if rule in rules) == turns
