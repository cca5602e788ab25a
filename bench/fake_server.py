"""A stand-in for `vllm serve`: its routes and answers, a function for a model, faults on demand.

    python bench/fake_server.py --vocabulary 64 --token-s 0.01        prints its URL and serves

Used where a real server would be slow or could not be made to fail: client overhead (a fixed time
a token) and tests. It imports nothing of the project, so it starts at once in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# (prompt, n, max_tokens, temperature, stop ids, cache salt) -> ids and log-probabilities of each
Draw = Callable[[list[int], dict[str, Any], str], list[tuple[list[int], list[float]]]]
LOAD_ADAPTER = "/v1/load_lora_adapter"


@dataclass
class Fake:
    """What the server is and does. `faults` are taken off one a sampling request: "http_500",
    "http_503", "http_400", "truncate", "drop", "hang", "no_logprobs", "stray_id", "abort",
    "missing", "short", "" for none. `seen`: bodies of sampling requests, whole. `calls`: (path,
    query) of every other request. `releases`: held requests of "hang" end when it is set.
    """

    vocabulary: int = 64
    model: str = "fake"
    max_model_len: int = 1024
    logprobs_mode: str = "processed_logprobs"
    prefix_caching: bool = True
    generate_route: bool = True
    version: str = "0.32.0"
    token_s: float = 0.0
    draw: Draw | None = None
    rpc: Callable[[str, list[Any]], Any] = lambda method, args: {"ok": True}
    clear: Callable[[], None] = lambda: None  # of the prefix cache
    adapt: Callable[[str], None] = lambda folder: None  # of an adapter that is loaded in place
    adapters: set[str] = field(default_factory=set)  # by name, served beside the model
    weight_version: str = "default"
    paused: bool = False
    faults: deque[str] = field(default_factory=deque)
    always: str = ""  # a fault of every request
    seen: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    healthy: bool = True
    reset_success: bool = True
    url: str = ""

    def start(self, port: int = 0) -> Fake:
        """Serve on loopback, in threads of this process; `url` is then its address."""
        fake = self

        class Handler(_Handler):
            state = fake

        self._server = _Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        """No answer from here on, as when the process were killed."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._server.cut()

    def sample(self, prompt: list[int], sampling: dict[str, Any], salt: str) -> Any:
        if self.draw is not None:
            return self.draw(prompt, sampling, salt)
        return [self._uniform(sampling) for _ in range(sampling["n"])]

    def _uniform(self, sampling: dict[str, Any]) -> tuple[list[int], list[float]]:
        """Every id is equally likely: what a model of zeros gives at any temperature."""
        ids: list[int] = []
        stops = set(sampling["stop_token_ids"])
        while len(ids) < sampling["max_tokens"] and not (ids and ids[-1] in stops):
            ids.append(random.randrange(self.vocabulary))
        return ids, [-math.log(self.vocabulary)] * len(ids)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, *args: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no news."""

    def cut(self) -> None:
        """Drop every connection in the middle of whatever it does."""
        for connection in list(self._open):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:  # closed already
                continue


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    state: Fake

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        fake, path = self.state, self.path.partition("?")[0]
        fake.calls.append(self.path)
        if path == "/health":
            self._send(200 if fake.healthy else 503, None)
            return
        config = {
            "model_config": {
                "max_model_len": fake.max_model_len,
                "logprobs_mode": fake.logprobs_mode,
                "dtype": "torch.float32",
            },
            "cache_config": {"enable_prefix_caching": fake.prefix_caching},
            "parallel_config": {"worker_extension_cls": "fastturn_vllm_worker.WeightExtension"},
            "weight_transfer_config": None,
        }
        routes = ["/collective_rpc", "/update_weight_version", "/v1/completions", LOAD_ADAPTER]
        answers: dict[str, Any] = {
            "/v1/models": {"data": [{"id": fake.model, "max_model_len": fake.max_model_len}]},
            "/version": {"version": fake.version},
            "/server_info": {"vllm_config": config},
            "/openapi.json": {"paths": {route: {} for route in routes}},
            "/weight_info": {"weight_version": fake.weight_version},
        }
        if path in answers:
            self._send(200, answers[path])
        else:
            self._send(404, _error(f"no route {path}"))

    def do_POST(self) -> None:
        fake, path = self.state, self.path.partition("?")[0]
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(data) if data else {}
        if path in ("/v1/completions", "/inference/v1/generate"):
            self._sampling(path, body)
            return
        fake.calls.append(self.path)
        if path in ("/pause", "/resume"):
            fake.paused = path == "/pause"
            if fake.paused:
                fake.clear()
            self._send(200, {"status": "paused" if fake.paused else "resumed"})
        elif path == "/collective_rpc":
            self._send(200, {"results": [fake.rpc(body["method"], body["args"])]})
        elif path == LOAD_ADAPTER:
            fake.adapt(body["lora_path"])
            fake.adapters.add(body["lora_name"])
            self._send(200, None)
        elif path == "/update_weight_version":
            fake.weight_version = body["new_version"]
            self._send(200, {})
        elif path == "/reset_prefix_cache":
            self._send(200, {"success": fake.reset_success})
        else:
            self._send(404, _error(f"no route {path}"))

    def _sampling(self, path: str, body: dict[str, Any]) -> None:
        fake = self.state
        generate = path.startswith("/inference")
        if generate and not fake.generate_route:
            self._send(404, _error("Not Found"))
            return
        sampling = body.get("sampling_params", {}) if generate else body
        prompt = body.get("token_ids" if generate else "prompt")
        if not prompt:
            self._send(422, _error("the prompt is missing"))
            return
        while fake.paused and not fake.released.is_set():  # no answer before it is resumed
            time.sleep(0.005)
        fault = fake.faults.popleft() if fake.faults else fake.always
        if fault == "hang":
            fake.released.wait()
        if fault == "drop" or fake.released.is_set():
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if fault.startswith("http_"):
            status = int(fault.removeprefix("http_"))
            self._send(status, _error(f"a fault of kind {status}"))
            return
        problem = self._refusal(body, prompt, sampling)
        if problem is not None:
            self._send(*problem)
            return
        drawn = fake.sample(prompt, sampling, body.get("cache_salt", ""))
        if fake.token_s:
            time.sleep(fake.token_s * max(len(ids) for ids, _ in drawn))
        if fake.released.is_set():
            return
        fake.seen.append(body)
        choices = [self._choice(i, *one, sampling, generate) for i, one in enumerate(drawn)]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sum(len(i) for i, _ in drawn)}
        answer = {"choices": _spoilt(choices, fault, fake), "usage": usage}
        self._send(200, answer, cut=fault == "truncate")

    def _refusal(
        self, body: dict[str, Any], prompt: Sequence[int], sampling: dict[str, Any]
    ) -> tuple[int, Any] | None:
        """What the real server refuses, in its words."""
        fake = self.state
        if body.get("model") not in {fake.model, *fake.adapters}:
            return 404, _error(f"The model `{body.get('model')}` does not exist.")
        if max(prompt) >= fake.vocabulary:
            return 400, _error(f"Token id {max(prompt)} is out of vocabulary")
        if len(prompt) >= fake.max_model_len:
            return 400, _error(f"maximum context length is {fake.max_model_len} tokens")
        if sampling["temperature"] == 0 and sampling["n"] > 1:
            return 400, _error("n must be 1 when using greedy sampling")
        if "seed" in sampling:
            return 500, _error("EngineCore encountered an issue")
        return None

    def _choice(
        self,
        index: int,
        ids: list[int],
        logprobs: list[float],
        sampling: dict[str, Any],
        generate: bool,
    ) -> dict[str, Any]:
        stopped = bool(ids) and ids[-1] in sampling["stop_token_ids"]
        found: dict[str, Any] = {
            "index": index,
            "token_ids": ids,
            "finish_reason": "stop" if stopped else "length",
            "stop_reason": ids[-1] if stopped else None,
        }
        if generate:
            pairs = zip(ids, logprobs, strict=True)
            content = [{"token_id": i, "logprob": x, "top_logprobs": []} for i, x in pairs]
            span = {"version": self.state.weight_version, "start": 0, "end": len(ids)}
            return found | {"logprobs": {"content": content}, "weight_versions": [span]}
        tokens = [f"token_id:{i}" for i in ids]
        return found | {"text": "", "logprobs": {"tokens": tokens, "token_logprobs": logprobs}}

    def _send(self, status: int, answer: Any, cut: bool = False) -> None:
        data = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.wfile.flush()
        if cut or status >= 500:  # the real one drops the connection after an internal error
            self.close_connection = True


def _spoilt(choices: list[dict[str, Any]], fault: str, fake: Fake) -> list[dict[str, Any]]:
    """The choices with a fault in the first one."""
    first = choices[0]
    if fault == "no_logprobs":
        first["logprobs"] = None
    elif fault == "stray_id":
        first["token_ids"][0] = fake.vocabulary
    elif fault == "missing":
        return choices[1:]
    elif fault in ("abort", "short"):
        keep = max(1, len(first["token_ids"]) // 2)
        first["token_ids"] = first["token_ids"][:keep]
        for name in ("content", "tokens", "token_logprobs"):
            if name in first["logprobs"]:
                first["logprobs"][name] = first["logprobs"][name][:keep]
        first["finish_reason"] = "abort" if fault == "abort" else "length"
    return choices


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "code": 400}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    fake = Fake(vocabulary=args.vocabulary, token_s=args.token_s).start(args.port)
    print(fake.url, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
