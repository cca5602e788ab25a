"""The control surface of one `vllm serve` process: what it is, pause and resume, caches, versions.

    info ........ /version, /v1/models, /server_info, /openapi.json      what the server can do
    publish ..... /pause -> a carrier's own calls -> /update_weight_version -> /resume
    watching .... /health, /metrics

Synchronous, because a publish is a sequence. Every call has a deadline and a connection of its own
(a server drops a kept one after an internal error); every failure is an `EngineError`. Routes and
fields differ between releases, so they are looked up and never assumed (0.22, 0.28, 0.32 tested).
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import httpx

# The module and class of the worker extension (`vllm_worker.py`), as a server is started with it.
EXTENSION = "fastturn_vllm_worker.WeightExtension"

_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_EXCERPT = 300  # characters of an error body that a message quotes
_RESET_TRIES, _RESET_WAIT_S = 5, 0.2
_HEALTH_TIMEOUT_S = 5.0

_REMEDIES = {
    401: "the server was started with --api-key; start it without one on a private address",
    403: "the route is switched off; start the server with the command that fastturn serve prints",
    404: "the route is missing; start the server with the command that fastturn serve prints "
    "(control routes need VLLM_SERVER_DEV_MODE=1)",
    503: "the server is paused or its engine has died; look at its log and restart it",
}


class EngineError(RuntimeError):
    """A rollout server did not do what it was asked.

    `phase`: what was being done ("pause", "load weights"); `url`: where; `status`: the HTTP status,
    None when there was no whole answer. The message names all three, what was expected, and what to
    do about it.
    """

    def __init__(self, message: str, *, phase: str, url: str, status: int | None = None) -> None:
        super().__init__(f"{phase} at {url}: {message}")
        self.phase, self.url, self.status = phase, url, status


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server is and can do; None where its release or its flags do not say.

    `generate_route`: /inference/v1/generate answers (it reports weight versions by token).
    `dev_mode`: the control routes are there. `carriers`: names of `CARRIERS` that reach it.
    Example: `ServerInfo("http://127.0.0.1:8000", "0.32.0", "m", 1024, "processed_logprobs",
    "float32", True, True, True, ("file",), 1)`. `devices`: GPUs (or CPUs) it computes on, 1 where
    it does not say.
    """

    url: str
    version: str | None
    model: str | None
    max_model_len: int | None
    logprobs_mode: str | None
    dtype: str | None
    prefix_caching: bool | None
    generate_route: bool
    dev_mode: bool
    carriers: tuple[str, ...]
    devices: int


class Server:
    """One server. Calls may come from several threads.

    `timeout_s`: deadline of a call that names no other. Example: `Server("http://127.0.0.1:8000")`.
    """

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self._client = httpx.Client(
            limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
        )  # fmt: skip
        self._routes: frozenset[str] | None = None
        self._release: tuple[int, ...] | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    # What it is -----------------------------------------------------------------------------------

    def info(self) -> ServerInfo:
        """Probe the server. `EngineError` when it does not answer as a vLLM server does."""
        models = self._ask("probe", "/v1/models").get("data")
        first = models[0] if isinstance(models, list) and models else {}
        if not isinstance(first, Mapping) or not isinstance(first.get("id"), str):
            self._fail(
                "probe",
                "/v1/models",
                "the answer lists no model; expected a server started by vllm serve; check the "
                "address and the port",
                200,
            )
        version = (self._optional("/version") or {}).get("version")
        described = self._optional("/server_info", {"config_format": "json"})
        config = (described or {}).get("vllm_config")
        config = config if isinstance(config, Mapping) else {}
        dtype = _at(config, "model_config", "dtype", kind=str)
        return ServerInfo(
            url=self.url,
            version=version if isinstance(version, str) else None,
            model=first["id"],
            max_model_len=_at(config, "model_config", "max_model_len", kind=int)
            or _at(first, "max_model_len", kind=int),
            logprobs_mode=_at(config, "model_config", "logprobs_mode", kind=str),
            dtype=None if dtype is None else dtype.removeprefix("torch."),
            prefix_caching=_at(config, "cache_config", "enable_prefix_caching", kind=bool),
            generate_route=self._answers("/inference/v1/generate"),
            dev_mode=described is not None,
            carriers=self._carriers(config),
            devices=_devices(config),
        )

    def _carriers(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        extension = _at(config, "parallel_config", "worker_extension_cls", kind=str)
        backend = _at(config, "weight_transfer_config", "backend", kind=str)
        found = []
        if extension == EXTENSION and self.has("/collective_rpc"):
            found.append("file")
        if backend in ("nccl", "ipc") and self.has("/init_weight_transfer_engine"):
            found.append(backend)
        if self.has("/v1/load_lora_adapter"):
            found.append("lora")
        return tuple(found)

    def has(self, route: str) -> bool:
        """Whether the server lists a route. A server started without /openapi.json lists none; then
        True, and a route that is missing after all is an `EngineError` when it is called."""
        if self._routes is None:
            paths = (self._optional("/openapi.json") or {}).get("paths")
            self._routes = frozenset(paths) if isinstance(paths, Mapping) else frozenset()
        return not self._routes or route in self._routes

    @property
    def release(self) -> tuple[int, ...]:
        """The numbers of the vLLM release: (0, 32, 0). A build without one counts as the newest."""
        if self._release is None:
            text = str((self._optional("/version") or {}).get("version", ""))
            numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
            found = tuple(int(n or 0) for n in numbers.groups()) if numbers else ()
            self._release = found if found[:2] > (0, 0) else (999,)
        return self._release

    def world_size(self) -> int:
        """Worker processes, data-parallel replicas included."""
        size = self._ask("world size", "/get_world_size").get("world_size")
        if not isinstance(size, int) or size < 1:
            self._fail("world size", "/get_world_size", f"world_size is {size!r}", 200)
        return size

    def healthy(self) -> bool:
        """Whether the server answers and its engine lives. Never raises."""
        try:
            self._call("health", "GET", "/health", min(self.timeout_s, _HEALTH_TIMEOUT_S))
        except EngineError:
            return False
        return True

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of /metrics, summed over their labels, without `vllm:` and `_total`.

        Example: `server.metrics()["prefix_cache_hits"]` are tokens read from the cache since start.
        """
        return parse_metrics(self._call("metrics", "GET", "/metrics").decode(errors="replace"))

    # Pausing and caches ---------------------------------------------------------------------------

    def pause(self, timeout_s: float | None = None) -> None:
        """Let requests in flight finish, start no others, and drop the prefix cache."""
        self._post("pause", "/pause", {"mode": "wait"}, timeout_s=timeout_s)

    def resume(self) -> None:
        self._post("resume", "/resume")

    def reset_prefix_cache(self) -> None:
        """Drop every cached prefix. Tried again while requests hold blocks; `EngineError` when the
        server still says that it did not. Releases that do not say are believed."""
        for attempt in range(_RESET_TRIES):
            if attempt:
                time.sleep(_RESET_WAIT_S * 2 ** (attempt - 1))
            if self._post("reset prefix cache", "/reset_prefix_cache").get("success") is not False:
                return
        self._fail(
            "reset prefix cache",
            "/reset_prefix_cache",
            f"success was false {_RESET_TRIES} times, expected true; requests still hold cached "
            f"blocks: let them finish or pause first",
            200,
        )

    # Weights --------------------------------------------------------------------------------------

    def rpc(
        self, method: str, args: Sequence[Any] = (), timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of every worker with JSON arguments; one result a worker."""
        phase = f"rpc {method}"
        body = {"method": method, "args": list(args), "timeout": timeout_s or self.timeout_s}
        answer = self._post(phase, "/collective_rpc", json_body=body, timeout_s=timeout_s)
        results = answer.get("results")
        if not isinstance(results, list) or not results:
            self._fail(phase, "/collective_rpc", f"the answer has no results: {answer!r:.200}", 200)
        return results

    def set_weight_version(self, version: str) -> None:
        """Stamp the weights; completions of /inference/v1/generate carry the stamp. A release
        without stamps (before 0.28) has nothing to set."""
        if self.has("/update_weight_version"):
            body = {"new_version": version}
            self._post("version tag", "/update_weight_version", json_body=body)

    def weight_version(self) -> str | None:
        """The stamp, None where the release has none."""
        found = self._optional("/weight_info")
        value = (found or {}).get("weight_version")
        return value if isinstance(value, str) else None

    def init_transfer(self, info: Mapping[str, Any], timeout_s: float | None = None) -> None:
        """Open the weight-transfer engine; blocks until its peers have met."""
        body = {"init_info": dict(info)}
        path = "/init_weight_transfer_engine"
        self._post("init transfer", path, json_body=body, timeout_s=timeout_s)

    def start_update(self) -> None:
        """From here until `finish_update` the server holds no whole model: it must be paused."""
        # Read by 0.22, which refuses an empty body; later releases know no other format.
        body = {"is_checkpoint_format": True}
        self._post("start update", "/start_weight_update", json_body=body)

    def update_weights(self, info: Mapping[str, Any], timeout_s: float | None = None) -> None:
        body = {"update_info": dict(info)}
        self._post("update weights", "/update_weights", json_body=body, timeout_s=timeout_s)

    def finish_update(self, timeout_s: float | None = None) -> None:
        path = "/finish_weight_update"
        self._post("finish update", path, json_body={}, timeout_s=timeout_s)

    def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a folder that the server can read, in place of one so named."""
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        self._post("load adapter", "/v1/load_lora_adapter", json_body=body)

    def sleep(self, level: int) -> None:
        """1: weights to host memory; 2: weights dropped. Both drop the key-value cache."""
        self._post("sleep", "/sleep", {"level": str(level), "mode": "wait"})

    def wake(self, tag: str) -> None:
        """Bring back what `tag` names, "weights" or "kv_cache"."""
        self._post(f"wake {tag}", "/wake_up", {"tags": tag})

    # Calls ----------------------------------------------------------------------------------------

    def _post(
        self,
        phase: str,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        json_body: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """POST and read the JSON object; an empty or plain-text answer is {}."""
        data = self._call(phase, "POST", path, timeout_s, params=params, json_body=json_body)
        try:
            answer = json.loads(data) if data else {}
        except ValueError:
            answer = {}
        return answer if isinstance(answer, dict) else {}

    def _ask(
        self, phase: str, path: str, params: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """GET a JSON object; anything else is an `EngineError`."""
        data = self._call(phase, "GET", path, params=params)
        try:
            answer = json.loads(data)
        except ValueError as error:
            message = f"the answer is no JSON ({error}): {data[:80]!r}; is this a vLLM server?"
            self._fail(phase, path, message, 200, error)
        if not isinstance(answer, dict):
            self._fail(phase, path, f"expected a JSON object, got {answer!r:.80}", 200)
        return answer

    def _optional(
        self, path: str, params: Mapping[str, str] | None = None
    ) -> dict[str, Any] | None:
        """The JSON object of a route that not every server has; None when it answers with 4xx."""
        try:
            return self._ask("probe", path, params)
        except EngineError as error:
            if error.status is not None and 400 <= error.status < 500:
                return None
            raise

    def _answers(self, path: str) -> bool:
        """Whether a POST route is there and switched on: an empty body is refused as bad input, a
        missing route with 404 or 405 and one that is switched off with 403."""
        try:
            self._call("probe", "POST", path, json_body={})
        except EngineError as error:
            if error.status is None or error.status >= 500:
                raise
            return error.status in (400, 422)
        return True

    def _call(
        self,
        phase: str,
        method: str,
        path: str,
        timeout_s: float | None = None,
        *,
        params: Mapping[str, str] | None = None,
        json_body: Mapping[str, Any] | None = None,
    ) -> bytes:
        """One request on a connection of its own; the body of a 2xx answer."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        until = time.monotonic() + limit_s
        late = f"no whole answer within {limit_s:g} s; the server hangs or is overloaded: look at "
        late += "its log, then restart it or allow more time"
        parts: list[bytes] = []
        try:
            with self._client.stream(
                method, self.url + path, params=params, json=json_body, timeout=limit_s
            ) as response:
                for part in response.iter_bytes():
                    parts.append(part)
                    if time.monotonic() > until:  # a body that trickles in
                        self._fail(phase, path, late)
                status = response.status_code
        except httpx.TimeoutException as error:
            self._fail(phase, path, late, None, error)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            message = f"{reason}; is the server running there? fastturn serve starts one"
            self._fail(phase, path, message, None, error)
        body = b"".join(parts)
        if not 200 <= status < 300:
            remedy = _REMEDIES.get(status, "look at the server's log")
            message = f"HTTP {status}, expected 200: {_reason(body)}; {remedy}"
            self._fail(phase, path, message, status)
        return body

    def _fail(
        self,
        phase: str,
        path: str,
        message: str,
        status: int | None = None,
        cause: Exception | None = None,
    ) -> NoReturn:
        raise EngineError(message, phase=phase, url=self.url + path, status=status) from cause


def _reason(body: bytes) -> str:
    """What an error body says, in one line."""
    text = body.decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        found = text
    if isinstance(found, Mapping):
        found = found.get("error", found.get("detail", found))
    if isinstance(found, Mapping):
        found = found.get("message", found)
    line = " ".join(str(found).split())
    return line[:_EXCERPT] or "no reason given"


def _devices(config: Mapping[str, Any]) -> int:
    parallel = (_at(config, "parallel_config", name, kind=int) for name in _PARALLEL)
    return math.prod(size or 1 for size in parallel)


def _at(node: Any, *path: str, kind: type) -> Any:
    """The value at a path of keys when it is of `kind`, else None."""
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    if isinstance(node, bool) and kind is not bool:
        return None
    return node if isinstance(node, kind) else None


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text -> name without `vllm:` and `_total` -> value summed over labels.

    Example: `parse_metrics('vllm:prefix_cache_hits_total{engine="0"} 48.0')` is
    `{"prefix_cache_hits": 48.0}`. Histogram buckets and creation times are left out.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = re.match(r"([A-Za-z_:][\w:]*)(?:\{.*\})?\s+([^\s]+)", line)
        if not match or match[1].endswith(("_bucket", "_created")):
            continue
        name = match[1].removeprefix("vllm:").removesuffix("_total")
        try:
            found[name] = found.get(name, 0.0) + float(match[2])
        except ValueError:  # no number: not a sample line
            continue
    return found
