"""Which server reads which context: where its beginning is warm, unless that one is busy.

A context is known by chained hashes of its blocks: key i stands for the first i + 1 blocks, so the
longest known beginning is a binary search. Keys are remembered with the servers that read them.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastturn.types import Ids

BLOCK = 32  # tokens
BUSY = 2.0  # a warm server is passed over when its load is beyond this multiple of the least one
WARM = 0.5  # share of a context's blocks that a server must know to count as warm
MOST_KEYS = 2**18  # remembered; the oldest are dropped

Keys = tuple[int, ...]


class Router:
    """Remembers which servers read which beginnings. Servers are numbers below `servers`.

    Example, two idle servers: a first context goes to 0; its siblings and its own later contexts
    go to 0 as well, until 0 has more than twice the load of 1 beyond the new request itself.
    """

    def __init__(self) -> None:
        self._servers_of: dict[int, int] = {}  # key -> bit set of servers

    def keys(self, context_T: Ids) -> Keys:
        """One key a whole block, and one for a shorter context as a whole."""
        data, size = context_T.tobytes(), BLOCK * context_T.itemsize
        found, key = [], 0
        for end in range(size, max(len(data), size) + 1, size):
            key = hash((key, data[end - size : end]))
            found.append(key)
        return tuple(found)

    def learn(self, keys: Keys, server: int) -> None:
        """`server` has read, or is about to read, this context."""
        servers_of = self._servers_of
        for key in keys:
            servers_of[key] = servers_of.pop(key, 0) | 1 << server
        while len(servers_of) > MOST_KEYS:
            del servers_of[next(iter(servers_of))]

    def forget(self, server: int | None = None) -> None:
        """Caches are empty: those of one server, or all."""
        if server is None:
            self._servers_of.clear()
            return
        keep = ~(1 << server)
        left = {key: servers & keep for key, servers in self._servers_of.items()}
        self._servers_of = {key: servers for key, servers in left.items() if servers}

    def warm(self, keys: Keys, cost: float, load: Mapping[int, float]) -> int | None:
        """The server of `load` that knows most of the context, when it knows enough and is not too
        busy. `load`: tokens in flight, by server; `cost`: those of the request."""
        known = {server: self._known(keys, server) for server in load}
        best = max(load, key=lambda server: (known[server], -load[server]))
        enough = known[best] >= WARM * len(keys) and known[best] > 0
        return best if enough and load[best] <= BUSY * min(load.values()) + cost else None

    def choose(self, keys: Keys, cost: float, load: Mapping[int, float]) -> int:
        """The warm server, else the least loaded."""
        warm = self.warm(keys, cost, load)
        return min(load, key=lambda server: (load[server], server)) if warm is None else warm

    def _known(self, keys: Keys, server: int) -> int:
        """How many leading blocks the server knows."""
        bit, low, high = 1 << server, 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if self._servers_of.get(keys[middle], 0) & bit:
                low = middle + 1
            else:
                high = middle
        return low
