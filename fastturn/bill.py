"""What a run's devices were held for, what that cost, and what would make the largest part smaller.

Made from the files of a run, whether it has ended or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from fastturn.config import ConfigError
from fastturn.ledger import WAITS, WAITS_WITH_SERVERS, levels
from fastturn.meter import SPANS
from fastturn.numerals import percent, plural
from fastturn.runfiles import RunFiles

SERVING = "servers decode"
_SAMPLE_APART = (
    "sample by vLLM servers on devices of their own (rollout.engine=vllm, docs/rollouts.md), or "
    "lower sampling.turn_tokens if many actions are cut"
)
# What would make a part smaller, by its name in `parts`.
REMEDIES = {
    SERVING: "more or faster servers decode more sequences at once (docs/scale.md has the split); "
    "fewer or shorter rollouts cost less: group_size, trunks, turns, sampling.turn_tokens",
    "trunk_decode": _SAMPLE_APART,
    "sibling_decode": _SAMPLE_APART,
    "prefill": _SAMPLE_APART,
    "trainer waits for servers": "more servers, or fewer trainer ranks; rollout.overlap="
    "stream,prefetch lets the trainer work meanwhile; more tasks fill the servers better",
    "trainer waits for tools": "faster tools, or a shorter data.tool_timeout_s; with servers "
    "(rollout.engine=vllm) a slow tool holds up its own episode only",
    "trainer waits for the slowest rank": "more tasks an iteration even out what ranks sample; a "
    "slow machine shows in the timeline (trackers=trace)",
    "publish": "rollout.carrier=nccl or ipc instead of file, adapters alone (model.lora_rank with "
    "rollout.carrier=lora), or fewer publishes (algorithm_options, docs/algorithms.md)",
    "score": "loss.kl_coef=0 needs no reference; with an adapter and no warm start the reference "
    "is the model itself",
    "forward_backward": "model.dtype=mixed, attention=triton on GPUs, a larger pack_tokens as far "
    "as memory goes, more ranks; trackers=profile shows the kernels",
    "optimizer": "fewer, larger steps: loss.epochs=1, loss.minibatches=1, more tasks an iteration",
    "pack": "more ranks share it; a larger pack_tokens makes fewer micro-batches",
    "checkpoint": "a larger save.every",
    "evaluation": "a larger eval_every, or a smaller data.eval_tasks",
    "warm_start": "fewer warm.steps, or start from a model that needs none (model.path)",
    "setup": "longer runs; a local copy of model and data",
    "lost": "a smaller save.every: less is done again after a kill",
}
_MORE_TRAINERS = (
    "servers are idle then: more trainer ranks, fewer servers, or rollout.overlap=stream,prefetch"
)
_NO_REMEDY = "nothing in the configuration makes it shorter"


# What is in a part, where its name does not say all.
MEANINGS = SPANS | {f"trainer waits for {who}": SPANS[span] for span, who in WAITS.items()}


def device_seconds(run: RunFiles) -> float:
    """Of all pools; of an unfinished run what its last record says."""
    known = [r["device_seconds"] for r in run.records if "device_seconds" in r]
    wall_s = run.of_run("wall_s") * run.summary.get("devices", 1)
    return float(run.summary.get("device_seconds", known[-1] if known else wall_s))


def parts(run: RunFiles) -> dict[str, float]:
    """Device-seconds by what devices did or waited for, largest first; they sum to the run's.

    Example: `{"forward_backward": 40.0, "trainer waits for servers": 9.0, "servers decode": 44.0}`.
    """
    pools = run.summary.get("pools") or {"trainer": {"spans": run.spans}}
    servers = pools.get("servers") or {}
    waits = WAITS_WITH_SERVERS if servers else WAITS
    found: dict[str, float] = {}
    for span, seconds in pools["trainer"]["spans"].items():
        name = f"trainer waits for {waits[span]}" if span in waits else span
        found[name] = found.get(name, 0.0) + seconds
    if servers:
        found[SERVING] = servers["busy"]
        found |= {f"servers wait for {name}": s for name, s in servers["idle"].items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def waiting(run: RunFiles) -> dict[str, float]:
    """The parts that are idle."""
    return {name: seconds for name, seconds in parts(run).items() if " wait" in name}


def shares(seconds: Mapping[str, float], of_s: float) -> list[dict[str, Any]]:
    """Rows of name, seconds and share."""
    return [{"name": n, "seconds": s, "share": s / of_s if of_s else 0} for n, s in seconds.items()]


def remedy(part: str) -> str:
    """What would reduce it."""
    if part.startswith("servers wait for"):
        return _MORE_TRAINERS
    return REMEDIES.get(part, _NO_REMEDY)


def bill(run: RunFiles, price: float | None = None) -> dict[str, Any]:
    """Rows of what was bought: device-seconds, device-hours, and money when a device-hour has a
    `price` (that of the summary unless another is given); the energy in words."""
    price = run.summary.get("price_per_gpu_hour") if price is None else price
    seconds, successes = device_seconds(run), run.summary.get("successes", 0)
    bought = {"the whole run": seconds} if seconds else {}
    if successes:
        bought["one successful training rollout"] = seconds / successes
    for level in run.summary.get("levels") or levels(run.records):
        bought[f"held-out success {percent(level['success'], 0)}"] = level["device_seconds"]
    rows = [
        {"what": what, "seconds": s, "hours": s / 3600, "money": s / 3600 * (price or 0.0)}
        for what, s in bought.items()
    ]
    energy = run.summary.get("energy_kwh")
    told = f"{energy:.4g} kWh" if energy is not None else run.summary.get("energy_note", "")
    return {"rows": rows, "priced": price is not None, "energy": told}


def show_slowest(run: RunFiles, console: Console) -> None:
    """Print all parts, and what would reduce the largest one; `ConfigError` before the first."""
    found, whole = parts(run), sum(parts(run).values())
    if not whole:
        raise ConfigError(f"--slowest {run.name}: expected a run with a finished step, it has none")
    devices = plural(run.summary.get("devices", 1), "device")
    table = Table("part", "device-seconds", "share", "what it is", title=f"{run.name}, {devices}")
    for row in shares(found, whole):
        meaning = MEANINGS.get(row["name"], "")
        table.add_row(row["name"], f"{row['seconds']:,.2f}", percent(row["share"]), meaning)
    console.print(table)
    name = next(iter(found))
    console.print(f"largest: {name}, {percent(found[name] / whole)}; to reduce it: {remedy(name)}")


def show_bill(run: RunFiles, price: float, console: Console) -> None:
    """Print what was bought."""
    told = bill(run, price)
    table = Table(
        "for", "device-seconds", "device-hours", "money", title=f"{run.name} at {price:g}"
    )
    for row in told["rows"]:
        table.add_row(row["what"], *(f"{row[key]:.4g}" for key in ("seconds", "hours", "money")))
    console.print(table)
    if told["energy"]:
        console.print(f"energy: {told['energy']}")
