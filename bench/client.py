"""What the client of vLLM servers costs: its tokens a second against a bare load generator's.

    .venv/bin/python scripts/bench client --no-record
    .venv/bin/python scripts/bench client --url http://127.0.0.1:8000 --vocabulary 151936

The same requests (64 contexts, 2 siblings, 64 tokens each) go to the same server, once through the
client, which routes, checks and retries, and once through a generator that opens its connections
beforehand, sends the bytes of all requests at once and counts the bytes that come back. The server
is a stand-in with a fixed time a token unless one is named: then its own speed is in both numbers.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from fastturn.sampler import wire
from fastturn.sampler.base import SamplingParams
from fastturn.sampler.fleet import Fleet
from fastturn.sampler.members import Traffic
from fastturn.sampler.server import Server, ServerInfo
from fastturn.types import Ids

from . import command, fake_server
from .measure import WrongResult, ratios
from .record import Measured

PARAMS = SamplingParams(1.0, ())


@dataclass(frozen=True, slots=True)
class ClientCase:
    contexts: int = 64
    context: int = 128
    siblings: int = 2
    tokens: int = 64
    token_s: float = 0.01  # of the stand-in

    @property
    def name(self) -> str:
        return f"client/contexts={self.contexts} n={self.siblings} tokens={self.tokens}"

    def inputs(self, vocabulary: int) -> list[Ids]:
        rng = np.random.default_rng(0)
        shape = (self.contexts, self.context)
        return list(rng.integers(0, vocabulary, shape).astype(np.int32))


@contextmanager
def stand_in(case: ClientCase, vocabulary: int) -> Iterator[str]:
    """The address of a stand-in in a process of its own."""
    options = ["--vocabulary", str(vocabulary), "--token-s", str(case.token_s)]
    argv = [sys.executable, str(Path(fake_server.__file__)), *options]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child.stdout.readline().strip()
        finally:
            child.kill()


def bodies(case: ClientCase, contexts: Sequence[Ids], info: ServerInfo, salt: str) -> list[bytes]:
    """The bytes of every request, as the client sends them."""
    asks = [wire.Ask(c, case.siblings, case.tokens, PARAMS, salt) for c in contexts]
    return [wire.body(ask, info.model or "", info.generate_route) for ask in asks]


async def bare(url: str, info: ServerInfo, requests: Sequence[bytes]) -> tuple[float, int]:
    """Seconds from the first byte sent to the last one received, and how many were received.

    Connections are open before the clock starts. `WrongResult` for any other status than 200.
    """
    address = urlsplit(url)
    path = wire.GENERATE if info.generate_route else wire.COMPLETIONS
    head = f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"

    async def one(data: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if " 200 " not in answer.partition("\r\n")[0]:
            raise WrongResult(f"bare: the server answered {answer.partition(chr(13))[0]}")
        length = int(answer.partition("content-length:")[2].partition("\r\n")[0])
        return len(await reader.readexactly(length))

    host, port = address.hostname or "", address.port or 80
    streams = [await asyncio.open_connection(host, port, limit=2**26) for _ in requests]
    start = time.perf_counter()
    received = await asyncio.gather(*(one(d, *s) for d, s in zip(requests, streams, strict=True)))
    took_s = time.perf_counter() - start
    for _, writer in streams:
        writer.close()
    return took_s, sum(received)


def through_client(fleet: Fleet, case: ClientCase, contexts: Sequence[Ids], salt: str) -> float:
    """Seconds of one call; `WrongResult` when a completion is not there or not whole."""
    n = case.siblings
    asks = [(context_T, case.tokens, n) for context_T in contexts]
    start = time.perf_counter()
    found = fleet.run(asks, PARAMS, salt, 2**31 - 1)
    took_s = time.perf_counter() - start
    if sum(len(choice.action_A) for choice, _ in found) != case.contexts * n * case.tokens:
        raise WrongResult("fastturn: completions are missing or cut")
    return took_s


def measure(case: ClientCase, url: str, vocabulary: int, repeats: int) -> Iterator[Measured]:
    server, contexts = Server(url), case.inputs(vocabulary)
    info, config = server.info(), asdict(case)
    fleet = Fleet([server], [info], case.contexts * case.siblings, 600.0, 0.0)
    rates: dict[str, list[float]] = {"fastturn": [], "bare": []}
    overhead_ms: list[float] = []
    tokens = case.contexts * case.siblings * case.tokens
    for repeat in range(repeats + 1):  # the first one warms both
        fleet.traffic.client_s = 0.0
        took_s = through_client(fleet, case, contexts, secrets.token_urlsafe(16))
        sent = bodies(case, contexts, info, secrets.token_urlsafe(16))
        bare_s, _ = asyncio.run(bare(url, info, sent))
        if repeat:
            rates["fastturn"].append(tokens / took_s)
            rates["bare"].append(tokens / bare_s)
            overhead_ms.append(1e3 * fleet.traffic.client_s / (case.contexts * case.siblings))
    traffic = fleet.traffic
    fleet.close()
    for name, values in rates.items():
        yield Measured(case.name, name, "rate", "tokens/s", tuple(values), config)
    gain = ratios(rates["fastturn"], rates["bare"])
    yield Measured(case.name, "fastturn", "rate over bare", "1", gain, config)
    yield Measured(case.name, "fastturn", "client CPU", "ms/completion", tuple(overhead_ms), config)
    yield Measured(case.name, "fastturn", "received", "B/completion", _bytes(traffic), config)


def _bytes(traffic: Traffic) -> tuple[float, ...]:
    return (traffic.bytes_received / max(1, traffic.completions),)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("client", __doc__, repeats=5)
    usual = ClientCase()
    parser.add_argument("--url", default="", help="a running server (default: a stand-in)")
    parser.add_argument("--vocabulary", type=int, default=334, help="ids that contexts are made of")
    parser.add_argument("--contexts", type=int, default=usual.contexts)
    parser.add_argument("--context", type=int, default=usual.context)
    parser.add_argument("--siblings", type=int, default=usual.siblings)
    parser.add_argument("--tokens", type=int, default=usual.tokens)
    parser.add_argument("--token-s", type=float, default=usual.token_s)
    args = command.options(parser, argv)
    case = ClientCase(args.contexts, args.context, args.siblings, args.tokens, args.token_s)
    if args.url:
        return command.report(
            "client", measure(case, args.url, args.vocabulary, args.repeats), args
        )
    with stand_in(case, args.vocabulary) as url:
        return command.report("client", measure(case, url, args.vocabulary, args.repeats), args)
