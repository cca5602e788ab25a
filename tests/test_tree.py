"""Trunks, stages and forks: exact contexts, exact states, reverse order, and named endings."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from fastturn.config import Config, Data, Sampling
from fastturn.envs import load_domain
from fastturn.envs.base import Observation
from fastturn.envs.calculator import calculator_call
from fastturn.envs.workshop import workshop_call
from fastturn.episode import stream_seed
from fastturn.render import Renderer
from fastturn.sampler.base import SamplerStats
from fastturn.tokenizer import build_tokenizer, episode_texts
from fastturn.tree import Rollout, stages
from fastturn.types import Completion, Ending, Stop

CONFIG = Config(turns=4, sampling=Sampling(turn_tokens=40, episode_tokens=400))


class Counts(Counter):
    def span(self, name):
        return nullcontext()

    aside = span

    def count(self, name, n=1):
        self[name] += n


@dataclass
class Script:
    """A sampler that draws one of a few actions by the seed alone."""

    texts: tuple[str, ...]
    renderer: Renderer
    version: int = 7
    stats: SamplerStats = field(default_factory=SamplerStats)
    calls: list = field(default_factory=list)

    def sample(self, requests, params):
        self.calls.append(requests)
        return [[self._draw(r, seed) for seed in r.seeds] for r in requests]

    def _draw(self, request, seed):
        text = self.texts[seed % len(self.texts)]
        action_A, stop = self.renderer.encode_action(text), Stop.STOP
        if len(action_A) > request.max_tokens:
            action_A, stop = action_A[: request.max_tokens], Stop.LENGTH
        return Completion(action_A, np.full(len(action_A), -0.5, np.float32), self.version, stop)

    def publish(self, version):
        self.version = version


def content(value):
    """Records as nested tuples, so that two of them can be compared."""
    if dataclasses.is_dataclass(value):
        return tuple(content(getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, np.ndarray):
        return tuple(value.tolist())
    return tuple(map(content, value)) if isinstance(value, (list, tuple)) else value


@pytest.fixture(scope="module")
def parts():
    domain = load_domain(CONFIG)
    tokenizer = build_tokenizer(episode_texts(domain, 100, Config(turns=4)), 334)
    return domain, tokenizer


TEXTS = (calculator_call("2*3"), calculator_call("40+2"), calculator_call("1/0"), "\\boxed{1}")


def rollout(parts, texts=TEXTS, config=CONFIG, domain=None) -> Rollout:
    own, tokenizer = parts
    domain = domain or own
    renderer = Renderer(tokenizer, domain.tools, config.context, config.model.max_context)
    return Rollout(domain, renderer, Script(texts, renderer), config, Counts())


def grown(run: Rollout, n: int = 6, key=("trunk", 0)):
    return run.grow(run.roots([run.domain.train_tasks[i] for i in range(n)]), key)


@pytest.mark.parametrize("context", ["keep", "truncate:60", "summarise"])
def test_trunks_record_the_exact_context_of_every_boundary(parts, context):
    run = rollout(parts, config=replace(CONFIG, context=context))
    sampled = []
    for trunk in grown(run):
        contexts = list(trunk.trajectory.contexts())
        assert len(contexts) == len(trunk.snapshots)
        for context_T, point in zip(contexts, trunk.snapshots, strict=True):
            assert np.array_equal(context_T, point.conversation.context_T)
            sampled.append(context_T.tobytes())
    asked = Counter(r.context_T.tobytes() for call in run.sampler.calls for r in call)
    assert asked == Counter(sampled)


def test_stages_go_backwards_and_short_trunks_join_late(parts):
    trunks = grown(rollout(parts), 12)
    lengths = [len(trunk.trajectory.turns) for trunk in trunks]
    assert len(set(lengths)) > 1
    order = list(stages(trunks))
    assert [k for k, _ in order] == list(reversed(range(max(lengths))))
    for k, points in order:
        assert len(points) == sum(length > k for length in lengths)
        assert all(point.turn == k for point in points)
    assert list(stages([])) == []


def test_siblings_start_from_the_boundary_state_and_nothing_else(parts):
    run = rollout(parts)
    for k, points in stages(grown(run)):
        for point, group in zip(points, run.fork(points, 4, ("fork", 0, k)), strict=True):
            assert np.array_equal(group.context_T, point.conversation.context_T)
            assert (group.task, group.turn) == (point.task.id, k) and len(group.siblings) == 4
            for sibling in group.siblings:
                assert sibling.first_turn == k
                assert np.array_equal(next(iter(sibling.contexts())), group.context_T)
                env = run.domain.env()
                env.restore(point.env_state)
                action = run.renderer.parse(sibling.turns[0].completion.action_A)
                answer = env.step(action)
                assert answer.events == sibling.turns[0].events
                if len(sibling.turns) > 1:
                    following = run.renderer.advance(
                        point.conversation,
                        sibling.turns[0].completion.action_A,
                        answer.messages,
                    )
                    second = list(sibling.contexts())[1]
                    assert np.array_equal(second, following.context_T)


def test_forking_leaves_the_points_as_they_were(parts):
    run = rollout(parts)
    points = [point for trunk in grown(run) for point in trunk.snapshots]
    before = pickle.dumps(points)
    first = run.fork(points, 3, ("fork", 0))
    assert pickle.dumps(points) == before
    again = run.fork(pickle.loads(before), 3, ("fork", 0))
    assert content(first) == content(again)


def test_siblings_of_a_point_are_one_request_with_different_seeds(parts):
    run = rollout(parts)
    points = run.roots([run.domain.train_tasks[0], run.domain.train_tasks[1]])
    run.fork(points, 4, ("fork", 0))
    first = run.sampler.calls[0]
    assert [len(request.seeds) for request in first] == [4, 4]
    assert len({seed for request in first for seed in request.seeds}) == 8


def test_draws_depend_on_the_key_and_not_on_the_company(parts):
    run = rollout(parts)
    points = run.roots([run.domain.train_tasks[i] for i in range(4)])
    together = run.fork(points, 3, ("fork", 5))
    alone = [run.fork([point], 3, ("fork", 5))[0] for point in reversed(points)]
    assert content(together) == content(alone[::-1])
    other = run.fork(points, 3, ("fork", 6))
    assert content(together) != content(other)
    assert 0 <= stream_seed("a") < 2**63 and stream_seed("a") != stream_seed("b")


def test_several_trunks_of_one_task_are_different_anchors(parts):
    run = rollout(parts)
    trunks = run.grow(run.roots([run.domain.train_tasks[0]], trunks=8), ("trunk", 0))
    assert [trunk.snapshots[0].trunk for trunk in trunks] == list(range(8))
    assert len({content(trunk.trajectory) for trunk in trunks}) > 1
    groups = run.fork([trunk.snapshots[0] for trunk in trunks], 3, ("fork", 0, 0))
    assert [group.trunk for group in groups] == list(range(8))
    assert len({content(group.siblings) for group in groups}) > 1


def test_a_task_that_comes_twice_is_played_twice(parts):
    """As where a stage wants more tasks than there are, or an epoch ends within it."""
    run = rollout(parts)
    one, other = run.domain.train_tasks[0], run.domain.train_tasks[1]
    points = run.roots([one, other, one], trunks=2)
    assert [point.trunk for point in points] == [0, 1, 0, 1, 2, 3]
    groups = run.fork([points[0], points[4]], 6, ("fork", 0))
    assert content(groups[0].siblings) != content(groups[1].siblings)


def test_an_action_cut_by_its_budget_ends_the_episode_unanswered(parts):
    config = replace(CONFIG, sampling=Sampling(turn_tokens=3, episode_tokens=100))
    run = rollout(parts, texts=(calculator_call("2*3"),), config=config)
    (trunk,) = grown(run, 1)
    (turn,) = trunk.trajectory.turns
    assert trunk.trajectory.ending is Ending.TRUNCATED
    assert turn.events == ("truncated",) and turn.completion.stop is Stop.LENGTH
    assert run.clock["ending_truncated"] == 1 and "tool_call" not in run.clock


def test_the_episode_budget_counts_all_turns(parts):
    run = rollout(
        parts,
        texts=(calculator_call("2*3"),),
        config=replace(CONFIG, sampling=Sampling(turn_tokens=40, episode_tokens=14)),
    )
    (trunk,) = grown(run, 1)
    assert trunk.trajectory.ending is Ending.TRUNCATED and trunk.trajectory.tokens_sampled == 14


def test_turn_limit_and_context_limit_have_their_own_names(parts):
    calls = (calculator_call("2*3"),)
    (trunk,) = grown(rollout(parts, texts=calls), 1)
    assert trunk.trajectory.ending is Ending.TURNS and len(trunk.trajectory.turns) == 4
    small = replace(CONFIG, model=replace(CONFIG.model, max_context=40))
    (trunk,) = grown(rollout(parts, texts=calls, config=small), 1)
    assert trunk.trajectory.ending in (Ending.CONTEXT, Ending.TRUNCATED)
    assert all(len(context_T) < 40 for context_T in trunk.trajectory.contexts())


def test_malformed_calls_are_answered_counted_and_survived(parts):
    run = rollout(parts, texts=('<tool_call>{"name": "calculator"</tool_call>', "\\boxed{1}"))
    grown(run, 8)
    assert run.clock["ending_failed"] == 0 and run.clock["tool_call"] > 0
    assert run.clock["bad_json"] + run.clock["missing_brace"] == run.clock["tool_call"]


class Hanging:
    """A domain whose environments never return for one action, and raise for another."""

    def __init__(self, domain, release):
        self._domain, self._release = domain, release
        self.tools, self.eval_tasks = domain.tools, domain.eval_tasks
        self.train_tasks = domain.train_tasks

    def env(self):
        inner, release = self._domain.env(), self._release
        step = inner.step

        def stuck(action) -> Observation:
            if "40+2" in action.text:
                release.wait()
            if "2*3" in action.text:
                raise RuntimeError("the environment broke")
            return step(action)

        inner.step = stuck
        return inner

    def demonstrator(self, task, rng):
        return self._domain.demonstrator(task, rng)


def test_hanging_and_raising_environments_are_left_out_and_counted(parts, caplog):
    release = threading.Event()
    config = replace(CONFIG, data=replace(CONFIG.data, env_timeout_s=0.2))
    run = rollout(parts, config=config, domain=Hanging(parts[0], release))
    points = run.roots([run.domain.train_tasks[i] for i in range(4)])
    groups = run.fork(points, 6, ("fork", 0))
    release.set()
    assert run.clock["env_timeout"] > 0 and run.clock["env_error"] > 0
    siblings = [t for group in groups for t in group.siblings]
    assert siblings and all(t.ending is not Ending.FAILED for t in siblings)
    assert len(siblings) + run.clock["ending_failed"] + run.clock["group_lost"] >= 24
    assert "the environment broke" in caplog.text


class Unrestored(Hanging):
    """A domain in which the restore of one task never returns and that of another raises."""

    def env(self):
        inner, release = self._domain.env(), self._release
        restore = inner.restore

        def stuck(state) -> None:
            restore(state)
            place = self.train_tasks.index(state)
            if place == 1:
                release.wait()
            if place == 2:
                raise RuntimeError("the environment is not what it was")

        inner.restore = stuck
        return inner


def test_a_restore_that_hangs_or_raises_fails_its_episodes_and_no_others(parts, caplog):
    release = threading.Event()
    config = replace(CONFIG, data=replace(CONFIG.data, env_timeout_s=0.5))
    run = rollout(parts, texts=("\\boxed{1}",), config=config, domain=Unrestored(parts[0], release))
    tasks = [run.domain.train_tasks[i] for i in range(3)]
    groups = run.fork(run.roots(tasks), 3, ("fork", 0))
    release.set()
    assert [group.task for group in groups] == [tasks[0].id] and len(groups[0].siblings) == 3
    assert run.clock["env_timeout"] == run.clock["env_error"] == run.clock["group_lost"] + 1 == 3
    assert "the environment is not what it was" in caplog.text


class Unkept(Hanging):
    """A domain whose environments have no state to show once they have been played."""

    def env(self):
        inner = self._domain.env()
        step, snapshot = inner.step, inner.snapshot

        def broken() -> None:
            raise RuntimeError("nothing to keep")

        def played(action) -> Observation:
            inner.snapshot = broken
            return step(action)

        inner.step, inner.snapshot = played, snapshot
        return inner


def test_a_snapshot_that_raises_fails_the_trunk_only(parts, caplog):
    texts = (calculator_call("2*3"),)
    run = rollout(parts, texts=texts, domain=Unkept(parts[0], None))
    points = run.roots([run.domain.train_tasks[0]])
    (trunk,) = run.grow(points, ("trunk", 0))
    assert trunk.trajectory.ending is Ending.FAILED and len(trunk.snapshots) == 1
    assert "nothing to keep" in caplog.text
    (group,) = run.fork(points, 2, ("fork", 0))
    assert len(group.siblings) == 2


def test_chance_of_the_environment_is_drawn_for_each_episode_and_kept_by_snapshots():
    """Workshop: prices of a group of episodes differ, those of siblings of a later turn do not, and
    the same rollout draws the same ones again."""
    config = replace(CONFIG, data=Data(domain="workshop:steps=1,prices=1000", eval_tasks=8))
    domain = load_domain(config)
    task = domain.train_tasks[0]
    texts = tuple(workshop_call("set", n=n) for n in task.data["order"])
    tokenizer = build_tokenizer(episode_texts(domain, 100, config), 334)

    def prices():
        run = rollout((domain, tokenizer), texts, config)
        trunks = run.grow(run.roots([task], trunks=6), ("trunk", 0))
        begun = trunks[0].snapshots[1]
        later = run.grow([replace(begun, trunk=number) for number in range(4)], ("fork", 0))
        return [[t.snapshots[1].env_state.price for t in played] for played in (trunks, later)]

    episodes, siblings = prices()
    assert len(set(episodes)) == 6 and min(episodes) > 1
    assert siblings == [episodes[0]] * 4
    assert prices() == [episodes, siblings]
