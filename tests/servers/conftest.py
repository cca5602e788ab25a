"""A stand-in for a vLLM server that speaks as three releases do.

The stand-in's routes, fields and answers are those of the releases' own routers and of a recorded
0.32.0; `answers` replaces single answers by failures.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from fastturn.sampler.server import EXTENSION

ALWAYS = ["/health", "/version", "/v1/models", "/metrics", "/openapi.json", "/v1/completions"]
DEV = [
    "/server_info",
    "/pause",
    "/resume",
    "/is_paused",
    "/reset_prefix_cache",
    "/collective_rpc",
    "/get_world_size",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
]
TAGGED = ["/update_weight_version", "/weight_info"]  # from 0.28 on
METRICS = """# HELP vllm:prefix_cache_hits_total Prefix cache hits.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m, {x}"} 32.0
vllm:prefix_cache_hits_total{engine="1",model_name="m, {x}"} 16.0
vllm:prefix_cache_hits_created{engine="0",model_name="m, {x}"} 1.79e+09
vllm:prefix_cache_queries_total{engine="0",model_name="m, {x}"} 96.0
vllm:time_to_first_token_seconds_bucket{le="0.1",engine="0"} 3.0
vllm:num_requests_running{engine="0",model_name="m, {x}"} 2.0
process_open_fds NaN
"""


@dataclass
class FakeVllm:
    """One release's HTTP surface. `calls`: (path, query, body) of every POST, in order."""

    release: str
    dev_mode: bool = True
    scale_out: bool = True
    extra_routes: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, Callable[[FakeVllm, dict[str, Any]], Any]] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    world: int = 1
    version: str = "default"
    paused: bool = False
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def paths(self) -> list[str]:
        """Of the POSTs, without probes."""
        return [path for path, _, _ in self.calls if path != "/inference/v1/generate"]

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(map(int, self.release.split(".")))

    def routes(self) -> list[str]:
        dev = (DEV + TAGGED if self.numbers >= (0, 28) else DEV) if self.dev_mode else []
        return [*ALWAYS, "/inference/v1/generate", *dev, *self.extra_routes]

    def answer(self, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if path not in self.routes():
            return 404, {"detail": "Not Found"}
        if path in self.answers:
            return self.answers[path](self, body)
        name = path.strip("/").replace("/", "_").replace(".", "_")
        return getattr(self, f"on_{name}", self.done)(query, body)

    def done(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"message": "ok"}

    def on_health(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, ""

    def on_version(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"version": self.release}

    def on_v1_models(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"object": "list", "data": [{"id": "m", "max_model_len": 512}]}

    def on_metrics(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, METRICS

    def on_openapi_json(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"openapi": "3.1.0", "paths": {route: {} for route in self.routes()}}

    def on_server_info(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if query.get("config_format") != "json":
            return 200, {"vllm_config": "model='m', …"}
        config = {
            "model_config": {
                "model": "m",
                "dtype": "torch.float32",
                "max_model_len": 512,
                "logprobs_mode": "processed_logprobs",
            },
            "cache_config": {"enable_prefix_caching": True},
            "parallel_config": {"worker_extension_cls": EXTENSION},
            "weight_transfer_config": None,
        }
        return 200, {"vllm_config": config | self.config}

    def on_inference_v1_generate(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if self.numbers >= (0, 30) and not self.scale_out:
            message = "This endpoint needs --enable-scale-out"
            return 403, {"error": {"message": message, "type": "PermissionDeniedError"}}
        return (200, {"choices": []}) if body else (400, {"error": {"message": "token_ids"}})

    def on_pause(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        self.paused = True
        return 200, {"status": "paused"}

    def on_resume(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        self.paused = False
        return 200, {"status": "resumed"}

    def on_reset_prefix_cache(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"success": True} if self.numbers >= (0, 28) else ""

    def on_collective_rpc(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"results": [{"ok": True, "tensors": 1}] * self.world}

    def on_get_world_size(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"world_size": self.world}

    def on_start_weight_update(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if self.numbers < (0, 28) and body is None:
            return 400, {"detail": "Invalid JSON format"}
        return 200, {"message": "Weight update started"}

    def on_update_weight_version(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        self.version = body["new_version"]
        return 200, {"success": True, "new_version": self.version}

    def on_weight_info(self, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return 200, {"weight_version": self.version}


class _Handler(BaseHTTPRequestHandler):
    fake: FakeVllm

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._reply(json.loads(data) if data else None)

    def _reply(self, body: Any) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        if self.command == "POST":
            self.fake.calls.append((parts.path, query, body))
        answer = self.fake.answer(parts.path, query, body)
        if callable(answer):  # writes to the socket itself
            answer(self)
            return
        status, content = answer
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing on the test's output."""


@pytest.fixture
def fake() -> Iterator[Callable[..., FakeVllm]]:
    """`fake("0.32.0", …)` starts a stand-in; all of them stop with the test."""
    running: list[ThreadingHTTPServer] = []

    def start(release: str, **settings: Any) -> FakeVllm:
        it = FakeVllm(release, **settings)
        handler = type("Handler", (_Handler,), {"fake": it})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        running.append(server)
        it.port = server.server_address[1]
        return it

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def hang(fake: FakeVllm, body: Any) -> Callable[[BaseHTTPRequestHandler], None]:
    """Never answers."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(5)

    return reply


def truncate(fake: FakeVllm, body: Any) -> Callable[[BaseHTTPRequestHandler], None]:
    """Half a body, then the connection is gone."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"results": [')

    return reply


def trickle(fake: FakeVllm, body: Any) -> Callable[[BaseHTTPRequestHandler], None]:
    """A body that never ends, a byte at a time."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(60):
            try:
                handler.wfile.write(b" ")
            except OSError:
                return
            time.sleep(0.05)

    return reply


FAILURES = {
    "hang": (hang, None, "no whole answer within 0.4 s"),
    "trickle": (trickle, None, "no whole answer within 0.4 s"),
    "truncated": (truncate, None, "peer closed connection"),
    "500": (lambda f, b: (500, {"detail": "engine broke"}), 500, "HTTP 500, expected 200: engine"),
    "503": (lambda f, b: (503, {"error": {"message": "paused"}}), 503, "paused; the server is"),
    "404": (lambda f, b: (404, {"detail": "Not Found"}), 404, "VLLM_SERVER_DEV_MODE=1"),
}


@pytest.fixture(params=FAILURES)
def failure(request: pytest.FixtureRequest) -> tuple[Any, int | None, str]:
    """(what the server does, the status of the error, what its message says)."""
    return FAILURES[request.param]
