"""What `fastturn doctor` checks: functions of a `Patient` that return a `Finding`.

    settings -> servers -> opening -> rollouts -> what they show

Each looks at one thing, with the run's own parts. One that raises has failed; one that raises
`Unavailable` is skipped, because another line says what is wrong. Weights are always put back.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from fastturn.algorithms import algorithm_of
from fastturn.config import ConfigError
from fastturn.demos import demonstrate
from fastturn.envs.base import Message, events_by_call
from fastturn.findings import FAIL, PASS, SKIP, WARN, Finding
from fastturn.patient import (
    Patient,
    Unavailable,
    agreed,
    answer,
    dtype,
    errors,
    other_weights,
    some_groups,
    uniform_error,
)
from fastturn.preflight import check_data, preflight
from fastturn.publish import TOLERANCE
from fastturn.render import Renderer
from fastturn.rulebook import DRIVER, SOUND, Episode, review
from fastturn.rules import Judged, Ruled
from fastturn.sampler.server import EngineError, Server, ServerInfo
from fastturn.types import Ending, Stop

if TYPE_CHECKING:
    from fastturn.rules import Move

TESTED = ((0, 22), (0, 33))  # releases of vLLM, the second one excluded
MOST_TRUNCATED, MOST_BAD_CALLS, LEAST_MIXED, LEAST_KEPT = 0.3, 0.2, 0.05, 0.5
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>'
DEMONSTRATIONS = 64  # scripts may err on purpose
NUDGE = 0.02  # of a tensor's own spread: the change that every tensor must carry to the sampler


DIALOGUE: tuple[Message, ...] = (
    {"role": "user", "content": "What is 2*3 + 4?"},
    {"role": "assistant", "content": f"<think>first the product</think>\n\n{CALL}"},
    {"role": "tool", "content": "6"},
    {"role": "assistant", "content": f"<think>now the sum</think>\n\n{CALL}"},
    {"role": "tool", "content": "10"},
)


def settings(patient: Patient) -> Finding:
    """Everything that the dry run refuses."""
    preflight(patient.config)
    check_data(patient.config)
    algorithm_of(patient.config)
    return Finding(PASS, "the dry run accepts them")


def servers(patient: Patient) -> Finding:
    """Each address answers as a vLLM server of a release that was tested."""
    seen, dead, untested = [], [], False
    for url in _urls(patient):
        try:
            with Server(url, timeout_s=10.0) as server:
                info = patient.servers[url] = server.info()
                untested |= not TESTED[0] <= server.release[:2] < TESTED[1]
        except EngineError as error:
            dead.append(str(error))
        else:
            seen.append(f"{url}: vLLM {info.version or 'of unknown release'}")
    measured = "; ".join(dead + seen)
    if dead:
        return Finding(
            FAIL, measured, "start it with `fastturn serve`, or take it off rollout.urls"
        )
    if not untested:
        return Finding(PASS, measured)
    return Finding(
        WARN,
        measured,
        f"releases from {_dotted(TESTED[0])} to before {_dotted(TESTED[1])} were tested; the lines "
        f"below say whether this one works",
    )


def flags(patient: Patient) -> Finding:
    """Carrier, context length, prefix cache and number format are those the recipe needs."""
    config = patient.config
    wrong, doubtful = [], []
    for info in _infos(patient):
        if config.rollout.carrier not in info.carriers:
            offered = ", ".join(info.carriers) or "none"
            wrong.append(f"{info.url} takes weights by {offered}, not {config.rollout.carrier}")
        if (info.max_model_len or config.model.max_context) < config.model.max_context:
            wrong.append(f"{info.url} reads {info.max_model_len} tokens")
        if info.prefix_caching is not True:
            doubtful.append(f"{info.url}: prefix cache {_told(info.prefix_caching)}")
        if info.dtype != config.model.compute_dtype:
            doubtful.append(f"{info.url}: weights in {info.dtype or 'an untold format'}")
    if wrong or doubtful:
        command = "start servers with the command that `fastturn serve` prints for this recipe"
        return Finding(FAIL if wrong else WARN, "; ".join(wrong + doubtful), command)
    return Finding(PASS, f"carrier {config.rollout.carrier}, prefix cache on")


def distribution(patient: Patient) -> Finding:
    """Reported log-probabilities are of the distribution that is sampled."""
    temperature = patient.config.sampling.temperature
    remedy = "start servers with --logprobs-mode processed_logprobs --generation-config vllm"
    modes = {info.url: info.logprobs_mode for info in _infos(patient)}
    told = "; ".join(f"{url}: {mode or 'untold'}" for url, mode in modes.items())
    if any(mode not in (None, "processed_logprobs", "raw_logprobs") for mode in modes.values()):
        return Finding(FAIL, told, remedy)
    if "raw_logprobs" in modes.values():
        at_one = temperature == 1.0
        return Finding(WARN if at_one else FAIL, f"{told}, temperature {temperature:g}", remedy)
    status = WARN if None in modes.values() else PASS
    hint = "the server does not say; the agreement with the trainer below decides"
    return Finding(status, f"{told}, temperature {temperature:g}", hint if status == WARN else "")


def opening(patient: Patient) -> Finding:
    """Model, tokenizer, tasks and sampler open as the run opens them."""
    run = patient.run = patient.open()
    size = sum(p.numel() for p in run.policy.parameters())
    return Finding(PASS, f"{type(run.policy.model).__name__}, {size:,} parameters")


def template(patient: Patient) -> Finding:
    """Whether the chat template keeps earlier turns, and which `context` does as it does."""
    run, config = patient.opened, patient.config

    def difference(context: str) -> str | None:
        limit = max(4096, config.model.max_context)
        return Renderer(run.tokenizer, run.domain.tools, context, limit).template_difference(
            DIALOGUE
        )

    own = difference(config.context)
    if own is None:
        return Finding(PASS, f"context={config.context}: contexts are the template's own")
    for other in ("keep", "strip_think"):
        if difference(other) is None:
            return Finding(
                WARN,
                f"context={config.context}: {own}",
                f"the template does as context={other}; training is exact either way, but a model "
                f"that will be served through its template should see what it will see there: set "
                f"context={other}",
            )
    return Finding(
        WARN,
        f"context={config.context}: {own}",
        "training is exact all the same; serve the model with contexts built turn by turn",
    )


def kept_tokens(patient: Patient) -> Finding:
    """How much of a context survives to the next turn: what prefix caches live on."""
    kept = running = 0
    for episode in patient.episodes:
        contexts = list(episode.contexts())
        for context_T, turn, after in zip(contexts, episode.turns, episode.turns[1:], strict=False):
            running += len(context_T) + len(turn.completion.action_A)
            kept += after.boundary.kept
    if not running:
        return Finding(SKIP, "no episode has a second turn")
    share = kept / running
    if share >= LEAST_KEPT:
        return Finding(PASS, f"{share:.1%} of the running tokens are kept")
    return Finding(
        WARN,
        f"{share:.1%} of the running tokens are kept",
        "each turn is read almost from the start; choose context=keep if the task allows it",
    )


def agreement(patient: Patient) -> Finding:
    """The trainer gives the sampled tokens the log-probabilities that the sampler reported."""
    return agreed(patient, errors(patient, patient.groups))


def round_trip(patient: Patient) -> Finding:
    """Weights that are all zero, and then weights of which every tensor is another, arrive."""
    if patient.config.rollout.carrier == "lora" and patient.config.rollout.engine != "local":
        return Finding(SKIP, "adapters alone travel; every publish proves them with its canary")
    generator = torch.Generator().manual_seed(0)

    def nudge(tensor: torch.Tensor) -> None:
        spread = tensor.float().std() if tensor.numel() > 1 else tensor.float().abs()
        spread = spread if spread > 0 else tensor.float().abs().mean()
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.device)
        tensor.add_((NUDGE * spread * noise).to(tensor.dtype))

    with other_weights(patient, torch.Tensor.zero_):
        uniform = uniform_error(patient)
    with other_weights(patient, nudge):
        moved = errors(patient, some_groups(patient))
    back = errors(patient, some_groups(patient))
    most = TOLERANCE[dtype(patient)]
    if not uniform <= most:
        return Finding(
            FAIL,
            f"with all weights zero a token's log-probability is off the uniform by {uniform:.3g}",
            "the publish does not reach the sampler: start servers with the command that "
            "`fastturn serve` prints, or choose another rollout.carrier",
        )
    for found in map(partial(agreed, patient), (moved, back)):
        if found.status == FAIL:
            return found
    return Finding(
        PASS,
        f"all weights zero: off the uniform by at most {uniform:.1e} nats; every tensor changed: "
        f"{moved[0].max():.1e}; put back: {back[0].max():.1e}",
    )


def truncation(patient: Patient) -> Finding:
    """Episodes that their token budget cuts."""
    cut = np.mean([episode.ending is Ending.TRUNCATED for episode in patient.episodes])
    limits = patient.config.sampling
    if cut <= MOST_TRUNCATED:
        return Finding(PASS, f"{cut:.0%} of {len(patient.episodes)} episodes are cut")
    early = "the warm start comes first and may teach it to stop; if not, " * patient.untrained
    return Finding(
        WARN,
        f"{cut:.0%} of {len(patient.episodes)} episodes are cut",
        f"{early}raise sampling.turn_tokens (now {limits.turn_tokens}) or sampling.episode_tokens "
        f"(now {limits.episode_tokens})",
    )


def calls(patient: Patient) -> Finding:
    """Tool calls that could be read and carried out."""
    events = [turn.events for episode in patient.episodes for turn in episode.turns]
    made = [call for turn in events for call in events_by_call(turn)]
    if not made:
        early = "the warm start comes first and may teach it; if not, " * patient.untrained
        return Finding(
            WARN if patient.opened.domain.tools else SKIP,
            "no episode calls a tool",
            f"{early}use a model that knows its template's tool calls",
        )
    bad = [event for call in made for event in call[1:]]
    share = sum(len(call) > 1 for call in made) / len(made)
    measured = f"{1 - share:.0%} of {len(made)} calls succeed"
    if share <= MOST_BAD_CALLS:
        return Finding(PASS, measured)
    ((common, _),) = Counter(bad).most_common(1)
    return Finding(
        WARN,
        f"{measured}; most often: {common}",
        "look at the tool's schema and the model's call format (samples.jsonl of a run shows them)",
    )


def snapshots(patient: Patient) -> Finding:
    """A state gives one answer to one action, however often it is restored, and stays as it is."""
    run, steps = patient.opened, 0
    for trunk in patient.trunks:
        for point, turn in zip(trunk.snapshots, trunk.trajectory.turns, strict=False):
            before = pickle.dumps(point.env_state)
            action = run.rollout.renderer.parse(turn.completion.action_A)
            answers = [answer(run, point, action) for _ in range(2)]
            where = f"task {point.task.id}, turn {point.turn + 1}"
            if isinstance(answers[0], Exception):
                return Finding(
                    FAIL,
                    f"{where}: the step raised {type(answers[0]).__name__}: {answers[0]}",
                    "environments answer bad actions with an observation; mend the environment",
                )
            if answers[0] != answers[1]:
                return Finding(
                    FAIL,
                    f"{where}: the same action gave {answers[0]!r:.80} and {answers[1]!r:.80}",
                    "restore must bring back all that step reads (random state, files, clocks), "
                    "and no state may be shared between instances",
                )
            seen, now = (turn.reward, turn.events), (answers[0][1], answers[0][3])
            if turn.completion.stop is Stop.STOP and seen != now:
                return Finding(
                    FAIL,
                    f"{where}: restored, the action earns and raises {now!r:.80}; in the episode "
                    f"it was {seen!r:.80}",
                    "snapshot and restore must carry all that step reads",
                )
            if pickle.dumps(point.env_state) != before:
                return Finding(
                    FAIL,
                    f"{where}: playing on from a snapshot changed the snapshot",
                    "snapshot must return a copy, and restore must copy it again",
                )
            steps += 1
    return Finding(PASS, f"{steps} steps, twice each")


def demonstrations(patient: Patient) -> Finding:
    """Whether the scripted policy of the tasks earns their reward."""
    run, config = patient.opened, patient.config
    tasks = run.domain.train_tasks[:DEMONSTRATIONS]
    try:
        shown = demonstrate(run.domain, run.rollout.renderer, tasks, config, ("doctor",))
    except ConfigError:
        return Finding(SKIP, "the tasks have no scripted policy")
    solved = sum(t.success for t in shown)
    if solved:
        return Finding(PASS, f"{solved} of {len(shown)} solve their task")
    return Finding(
        FAIL, f"none of {len(shown)} solves its task", "check the reward and data of the tasks"
    )


def path_rules(patient: Patient) -> Finding:
    """Rules answer for what the policy does, the same twice, and leave states as they are."""
    domain = patient.opened.domain
    if not isinstance(domain, Ruled) or not domain.rules:
        return Finding(SKIP, "the tasks have no path rules")
    parse = patient.opened.rollout.renderer.parse
    episodes: list[Episode] = []
    for trunk in patient.trunks:
        moves: list[Move] = []
        for point, turn in zip(trunk.snapshots, trunk.trajectory.turns, strict=True):
            env = Judged(domain.domain.env, ())
            env.restore(point.env_state)
            moves += env.carry_out(parse(turn.completion.action_A))[1]
        episodes.append(Episode(trunk.trajectory.task, moves, trunk.trajectory.success))
    deadline_s = patient.config.data.env_timeout_s
    tried, lines = review(domain.rules, episodes, deadline_s=deadline_s)
    for line in lines:
        if line.status == FAIL and line.check in SOUND:
            return Finding(FAIL, line.measured, line.remedy)
        if line.status != PASS and line.check == DRIVER:
            return Finding(WARN, line.measured, line.remedy)
    told = "; ".join(f"{rule.name} {tried.rate(rule):.2f}" for rule in tried.rules)
    return Finding(PASS, f"hits an episode: {told}; `fastturn rules` has more")


def outcomes(patient: Patient) -> Finding:
    """Whether the policy ever earns something, and ever fails to."""
    returns = np.array([t.discounted_return(patient.config.gamma) for t in patient.episodes])
    measured = f"returns {returns.min():.3g} to {returns.max():.3g}, mean {returns.mean():.3g}"
    if np.ptp(returns) > 0:
        return Finding(PASS, measured)
    if patient.untrained:
        return Finding(WARN, measured, "untrained yet: the warm start comes first")
    return Finding(
        FAIL,
        f"all returns are {returns[0]:.3g}",
        "nothing can be learnt from equal returns: choose tasks nearer to what the policy can do, "
        "or give it a warm start (warm.steps)",
    )


def mixed_groups(patient: Patient) -> Finding:
    """Groups whose siblings differ in their return: all others teach nothing."""
    gamma = patient.config.gamma
    mixed = [
        np.ptp([t.discounted_return(gamma) for t in group.siblings]) > 0 for group in patient.groups
    ]
    share = float(np.mean(mixed)) if mixed else 0.0
    measured = f"{share:.0%} of {len(mixed)} groups of {patient.config.group_size}"
    if share >= LEAST_MIXED:
        return Finding(PASS, measured)
    if patient.untrained:
        return Finding(WARN, measured, "untrained yet: the warm start comes first")
    return Finding(WARN, measured, "raise group_size, or choose tasks of middling difficulty")


OPEN_FIRST = "mend what the lines above say, then run the doctor again"
ENVIRONMENT = "mend the environment or its data; docs/environments.md has the contract"
# Name, check, and what to do when the check itself cannot be carried out.
CHECKS: tuple[tuple[str, Callable[[Patient], Finding], str], ...] = (
    ("settings", settings, "change the setting that is named"),
    ("servers answer", servers, "check rollout.urls"),
    ("server flags", flags, "start servers with the command that `fastturn serve` prints"),
    ("log-probabilities", distribution, "start servers with --logprobs-mode processed_logprobs"),
    ("opening", opening, OPEN_FIRST),
    ("chat template", template, "use a tokenizer whose chat template carries tool dialogues"),
    ("context kept", kept_tokens, OPEN_FIRST),
    ("agreement", agreement, "start servers with the command that `fastturn serve` prints"),
    (
        "publish round trip",
        round_trip,
        "choose another rollout.carrier, or mend the flags",
    ),
    ("truncation", truncation, OPEN_FIRST),
    ("tool calls", calls, OPEN_FIRST),
    ("snapshots", snapshots, ENVIRONMENT),
    ("path rules", path_rules, "mend the rules; docs/rules.md has the contract"),
    ("demonstrations", demonstrations, ENVIRONMENT),
    ("outcome reached", outcomes, OPEN_FIRST),
    ("mixed groups", mixed_groups, OPEN_FIRST),
)


def _urls(patient: Patient) -> Sequence[str]:
    if patient.config.rollout.engine == "local":
        raise Unavailable("rollout.engine=local: the policy samples in this process")
    return patient.config.rollout.urls


def _infos(patient: Patient) -> list[ServerInfo]:
    _urls(patient)
    if not patient.servers:
        raise Unavailable("no server answers")
    return list(patient.servers.values())


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _told(flag: bool | None) -> str:
    return {True: "on", False: "off", None: "untold (VLLM_SERVER_DEV_MODE=1 would tell)"}[flag]
