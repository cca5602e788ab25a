"""Who held which devices for how long, what for, and what that bought.

    trainer   devices x wall-clock, by span
    servers   devices x wall-clock: busy while requests are in flight, else idle, and then by the
              span that the trainer was in, which is what they waited for

Everything sums exactly: a pool's parts to its devices x wall-clock, pools to the run's
device-seconds. GPU-hours are device-seconds / 3600, of whatever the device is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

LEVELS = (*(n / 10 for n in range(1, 10)), 0.95, 0.99)  # success rates that a cost is told for
# What the trainer's devices wait for in a span, if they wait.
WAITS = {"environment": "tools", "exchange": "the slowest rank"}
WAITS_WITH_SERVERS = WAITS | dict.fromkeys(("trunk_decode", "sibling_decode", "prefill"), "servers")


class Servers(Protocol):
    """The devices that sample for a run, apart from those that train."""

    @property
    def devices(self) -> int: ...

    def busy_ns(self) -> int:
        """Device-nanoseconds with requests in flight, since the start of this process."""
        ...


class Held:
    """Device-nanoseconds by pool. `state`: of `state()`; a resumed run may hold other numbers of
    devices, and what was held before stays counted as it was.

    Example: 4 devices for 2 s of "pack" are 8 device-seconds of "pack".
    """

    def __init__(self, devices: int, state: Mapping[str, Any]) -> None:
        self.devices = devices
        self._servers: Servers | None = None
        self._trainer_ns: Counter[str] = Counter(state.get("trainer", {}))
        self._busy_ns: int = state.get("busy", 0)
        self._idle_ns: Counter[str] = Counter(state.get("idle", {}))
        self._alone_ns: Counter[str] = Counter()  # wall-clock until servers were named
        self._counted_ns = 0  # of what the servers say

    def serve(self, servers: Servers) -> None:
        """These sample for the run. They have been held as long as the trainer."""
        self._servers = servers
        self._counted_ns = servers.busy_ns()
        for name, ns in self._alone_ns.items():
            self._idle_ns[name] += ns * servers.devices
        self._alone_ns.clear()

    def add(self, name: str, ns: int) -> None:
        """`ns` more of wall-clock, in the trainer's span `name`."""
        self._trainer_ns[name] += ns * self.devices
        if self._servers is None:
            self._alone_ns[name] += ns
            return
        # Both clocks are read one after the other: what is too much now belongs to the next time.
        held_ns = ns * self._servers.devices
        busy_ns = min(self._servers.busy_ns() - self._counted_ns, held_ns)
        self._counted_ns += busy_ns
        self._busy_ns += busy_ns
        self._idle_ns[name] += held_ns - busy_ns

    @property
    def total_ns(self) -> int:
        return self._trainer_ns.total() + self._busy_ns + self._idle_ns.total()

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        trainer, idle = dict(self._trainer_ns), dict(self._idle_ns)
        return {"trainer": trainer, "busy": self._busy_ns, "idle": idle}

    def pools(self) -> dict[str, Any]:
        """Devices now, and device-seconds until now, of every pool."""
        trainer = {
            "devices": self.devices,
            "device_seconds": self._trainer_ns.total() / 1e9,
            "spans": _seconds(self._trainer_ns),
        }
        held_ns = self._busy_ns + self._idle_ns.total()
        if not held_ns and self._servers is None:
            return {"trainer": trainer}
        servers = {
            "devices": self._servers.devices if self._servers else 0,
            "device_seconds": held_ns / 1e9,
            "busy": self._busy_ns / 1e9,
            "idle": _seconds(self._idle_ns),
        }
        return {"trainer": trainer, "servers": servers}

    def idle(self) -> dict[str, float]:
        """Device-seconds of waiting, by who waits for what, most first.

        Example: `{"servers wait for forward_backward": 40.0, "trainer waits for tools": 3.0}`.
        """
        found: Counter[str] = Counter()
        waits = WAITS_WITH_SERVERS if self._busy_ns or self._idle_ns else WAITS
        for name, reason in waits.items():
            found[f"trainer waits for {reason}"] += self._trainer_ns[name]
        for name, ns in self._idle_ns.items():
            found[f"servers wait for {name}"] += ns
        return {name: ns / 1e9 for name, ns in found.most_common() if ns}


def _seconds(parts_ns: Mapping[str, int]) -> dict[str, float]:
    return {name: ns / 1e9 for name, ns in parts_ns.items() if ns}


def levels(records: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """What it cost to reach each success rate of `LEVELS`: the first held-out evaluation (sampled)
    that shows it, and the device-seconds and training rollouts until then. Everything is in them:
    setup, warm start, evaluations, waiting. Rates that were never seen are left out.

    Example: evaluations of .31 after 40 and .52 after 90 device-seconds give .1, .2 and .3 at 40,
    and .4 and .5 at 90.
    """
    found: list[dict[str, float]] = []
    rollouts = 0
    for record in records:
        rollouts = record.get("rollouts_total", rollouts)
        seconds, success = record.get("device_seconds"), record.get("success")
        if record.get("kind") != "eval" or success is None or seconds is None:
            continue
        cost = {"device_seconds": seconds, "gpu_hours": seconds / 3600, "rollouts": rollouts}
        found += [{"success": level, **cost} for level in LEVELS[len(found) :] if success >= level]
    return found


def money(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's device-hours cost, in all, for a successful rollout and to each success level;
    empty when `price_per_gpu_hour` is not known.

    Example: 2 hours at 1.5 with 30 successes are `{"money": 3.0, "money_per_success": 0.1, ...}`.
    """
    price = summary.get("price_per_gpu_hour")
    if price is None:
        return {}
    paid = price * summary["gpu_hours"]
    successes = summary.get("successes")
    reached = [x | {"money": price * x["gpu_hours"]} for x in summary.get("levels") or ()]
    each = {"money_per_success": paid / successes} if successes else {}
    return {"money": paid, **each, "levels": reached}


def curves(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A run's ledger as a record for trackers: device-seconds of each pool by span, device-hours
    and, at a price, money, in all and to each success level.

    Example: `{"kind": "ledger", "device_hours to success": {"0.5": 0.02}, ...}`.
    """
    pools = summary.get("pools") or {}
    servers = pools.get("servers") or {}
    busy = {"busy": servers["busy"], **servers["idle"]} if servers else {}
    reached = {f"{x['success']:g}": x for x in summary.get("levels") or ()}
    paid = {key: summary[key] for key in ("money", "money_per_success") if key in summary}
    if paid:
        paid["money to success"] = {name: x["money"] for name, x in reached.items()}
    return {
        "kind": "ledger",
        "device_hours": sum(pool["device_seconds"] for pool in pools.values()) / 3600,
        "trainer": (pools.get("trainer") or {}).get("spans", {}),
        "servers": busy,
        "device_hours to success": {name: x["gpu_hours"] for name, x in reached.items()},
        **paid,
    }
