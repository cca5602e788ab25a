"""The control surface against stand-ins of three releases: fields, bodies, failures, deadlines."""

from __future__ import annotations

import time

import pytest

from fastturn.sampler.server import EXTENSION, EngineError, Server, parse_metrics

RELEASES = ["0.22.0", "0.28.0", "0.32.0"]


@pytest.mark.parametrize("release", RELEASES)
def test_info_reads_every_release(release, fake):
    info = Server(fake(release).url).info()
    assert (info.version, info.model, info.max_model_len) == (release, "m", 512)
    assert (info.logprobs_mode, info.dtype) == ("processed_logprobs", "float32")
    assert info.prefix_caching is True and info.generate_route and info.dev_mode
    assert info.carriers == ("file",)


def test_info_without_dev_mode_says_what_it_can(fake):
    info = Server(fake("0.32.0", dev_mode=False, scale_out=False).url).info()
    assert (info.model, info.max_model_len, info.version) == ("m", 512, "0.32.0")
    assert info.logprobs_mode is info.dtype is info.prefix_caching is None
    assert not info.dev_mode and not info.generate_route and info.carriers == ()


def test_unknown_fields_are_none_and_never_a_crash(fake):
    strange = {"model_config": {"max_model_len": "512", "dtype": 7}, "cache_config": None}
    info = Server(fake("0.33.0", config=strange).url).info()
    assert info.max_model_len == 512  # from /v1/models
    assert info.dtype is info.logprobs_mode is info.prefix_caching is None


@pytest.mark.parametrize(
    ("config", "extra", "carriers"),
    [
        ({"parallel_config": {"worker_extension_cls": "other.Class"}}, (), ()),
        ({"parallel_config": {"worker_extension_cls": EXTENSION}}, (), ("file",)),
        ({"weight_transfer_config": {"backend": "nccl"}}, (), ("file", "nccl")),
        (
            {"weight_transfer_config": {"backend": "ipc"}},
            ("/v1/load_lora_adapter",),
            ("file", "ipc", "lora"),
        ),
    ],
)
def test_info_names_the_carriers_that_reach_it(config, extra, carriers, fake):
    assert Server(fake("0.32.0", config=config, extra_routes=extra).url).info().carriers == carriers


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((200, "<html>hello</html>"), "no JSON"),
        ((200, [1, 2]), "expected a JSON object"),
        ((200, {"data": []}), "lists no model"),
        ((401, {"error": "Unauthorized"}), "--api-key"),
    ],
)
def test_what_is_no_vllm_server_is_refused(answer, says, fake):
    other = fake("0.32.0", answers={"/v1/models": lambda f, b: answer})
    with pytest.raises(EngineError, match=says) as caught:
        Server(other.url).info()
    assert caught.value.url == other.url + "/v1/models" and caught.value.phase == "probe"


@pytest.mark.parametrize("release", RELEASES)
def test_pause_waits_and_start_update_has_a_body(release, fake):
    it = fake(release)
    server = Server(it.url + "/")
    server.pause()
    assert it.paused
    server.start_update()
    server.update_weights({"names": []})
    server.finish_update()
    server.set_weight_version("7")
    server.resume()
    assert not it.paused and it.calls[0] == ("/pause", {"mode": "wait"}, None)
    tagged = release != "0.22.0"
    assert ("/update_weight_version" in it.paths) == tagged
    assert server.weight_version() == ("7" if tagged else None)


def test_a_release_without_a_number_counts_as_the_newest(fake):
    versions = {"/version": lambda f, b: (200, {"version": "dev"})}
    assert Server(fake("0.32.0", answers=versions).url).release > (1,)
    assert Server(fake("0.32.0").url).release == (0, 32, 0)


def test_reset_is_tried_again_until_it_says_success(fake, monkeypatch):
    monkeypatch.setattr("fastturn.sampler.server._RESET_WAIT_S", 0.001)
    said = iter([False, False, True])
    it = fake(
        "0.32.0", answers={"/reset_prefix_cache": lambda f, b: (200, {"success": next(said)})}
    )
    Server(it.url).reset_prefix_cache()
    assert len(it.calls) == 3


def test_a_reset_that_never_succeeds_is_an_error(fake, monkeypatch):
    monkeypatch.setattr("fastturn.sampler.server._RESET_WAIT_S", 0.001)
    it = fake("0.32.0", answers={"/reset_prefix_cache": lambda f, b: (200, {"success": False})})
    with pytest.raises(EngineError, match=r"reset prefix cache at .*success was false 5 times"):
        Server(it.url).reset_prefix_cache()


def test_a_release_that_does_not_say_is_believed(fake):
    it = fake("0.22.0")
    Server(it.url).reset_prefix_cache()
    assert it.paths == ["/reset_prefix_cache"]


def test_rpc_gives_one_result_a_worker(fake):
    it = fake("0.32.0", world=2)
    assert Server(it.url).rpc("load_file", ["/x"]) == [{"ok": True, "tensors": 1}] * 2
    path, _, body = it.calls[0]
    assert path == "/collective_rpc" and body["method"] == "load_file" and body["args"] == ["/x"]


def test_rpc_without_results_is_an_error(fake):
    it = fake("0.32.0", answers={"/collective_rpc": lambda f, b: (200, "")})
    with pytest.raises(EngineError, match="the answer has no results"):
        Server(it.url).rpc("load_file")


def test_every_failure_is_named_within_its_deadline(failure, fake):
    behave, status, says = failure
    it = fake("0.32.0", answers={"/pause": behave})
    start = time.monotonic()
    with pytest.raises(EngineError, match=says) as caught:
        Server(it.url, timeout_s=0.4).pause()
    assert time.monotonic() - start < 1.5
    error = caught.value
    assert (error.phase, error.url, error.status) == ("pause", it.url + "/pause", status)
    assert str(error).startswith(f"pause at {it.url}/pause: ")


def test_a_server_that_is_not_there(fake):
    server = Server("http://127.0.0.1:9")
    with pytest.raises(EngineError, match=r"refused; is the server running there\? fastturn serve"):
        server.resume()
    assert not server.healthy()
    assert Server(fake("0.32.0").url).healthy()


def test_a_failure_does_not_spoil_the_next_call(fake):
    """The server drops the connection of a request that failed inside."""
    it = fake("0.32.0", answers={"/pause": lambda f, b: (500, {"detail": "x"})})
    server = Server(it.url)
    for _ in range(3):
        with pytest.raises(EngineError):
            server.pause()
        server.resume()


def test_proxies_of_the_environment_are_not_used(fake, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert Server(fake("0.32.0").url).healthy()


def test_metrics_are_summed_over_labels(fake):
    found = Server(fake("0.32.0").url).metrics()
    assert found["prefix_cache_hits"] == 48 and found["prefix_cache_queries"] == 96
    assert found["num_requests_running"] == 2
    assert not [name for name in found if name.endswith(("_bucket", "_created"))]
    assert parse_metrics("# a comment\n\nvllm:x 1 1700000000000\nnot a sample\n") == {"x": 1.0}
