"""A worker extension of vLLM that loads weights from a file into a running server.

`fastturn serve` copies this file as `fastturn_vllm_worker.py` to a folder of its own, puts that on
the server's PYTHONPATH and names the class with `--worker-extension-cls`: the server's environment
needs nothing of fastturn's and sees nothing of the trainer's. It imports safetensors and vLLM, both
only when called.

Its answers are data and never exceptions: an exception in a worker is a 500 that says nothing.

    {"ok": True, "tensors": n}
    {"ok": False, "changed": False, "error": "…"}    refused, the old weights serve on
    {"ok": False, "changed": True,  "error": "…"}    failed half-way, the server must be restarted

vLLM's `reload_weights` rebuilds the layers that received a tensor. A tied head receives none and
keeps, on CPU, a packed copy of the old table; so it is packed again here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HEAD = "lm_head.weight"
_NAMED = 4  # tensors that a message names

Shapes = dict[str, tuple[int, ...]]


class WeightExtension:
    """Mixed into vLLM's worker, whose `model_runner` and `vllm_config` it uses."""

    model_runner: Any
    vllm_config: Any
    _expected: Shapes | None = None

    def load_file(self, path: str) -> dict[str, Any]:
        """Replace all weights by those of one safetensors file in checkpoint format.

        Names and shapes must be those of the checkpoint that the server started from (a tied head
        may be left out); everything is read before anything is changed.
        """
        from safetensors import SafetensorError

        model = self.model_runner.get_model()
        tied = _is_tied(model)
        try:
            if self._expected is None:
                self._expected = _checkpoint_shapes(self.vllm_config.model_config)
            _check(self._expected, _shapes(Path(path)), tied)
            weights = _read(Path(path))
        except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
            return _refusal(error, changed=False)
        try:
            self._replace(model, weights, tied)
        except Exception as error:  # the caller must know that the model is broken
            return _refusal(error, changed=True)
        return {"ok": True, "tensors": len(weights)}

    def _replace(self, model: Any, weights: Mapping[str, Any], tied: bool) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=iter(weights.items()))
            if tied:
                model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def _refusal(error: Exception, changed: bool) -> dict[str, Any]:
    return {"ok": False, "changed": changed, "error": f"{type(error).__name__}: {error}"}


def _is_tied(model: Any) -> bool:
    """Whether head and embeddings are one tensor."""
    head = getattr(model, "lm_head", None)
    embeddings = getattr(getattr(model, "model", None), "embed_tokens", None)
    return head is not None and getattr(head, "weight", head) is getattr(embeddings, "weight", None)


def _shapes(path: Path) -> Shapes:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _read(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _checkpoint_shapes(config: Any) -> Shapes:
    """Names and shapes of the checkpoint that the server started from: a folder or a hub id."""
    folder = Path(config.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        revision = getattr(config, "revision", None)
        folder = Path(
            snapshot_download(
                config.model,
                revision=revision,
                allow_patterns="*.safetensors",
                local_files_only=True,
            )
        )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder} holds no safetensors files to compare names and shapes with; serve a "
            f"checkpoint in safetensors format"
        )
    return {name: shape for file in files for name, shape in _shapes(file).items()}


def _check(expected: Shapes, given: Shapes, tied: bool) -> None:
    """`ValueError` that names the first differences."""
    if tied:  # the head is the embeddings; files may or may not repeat it
        expected, given = ({k: v for k, v in s.items() if k != _HEAD} for s in (expected, given))
    faults = [f"{name} is missing" for name in expected if name not in given]
    faults += [f"{name} is not in the served checkpoint" for name in given if name not in expected]
    faults += [
        f"{name} has shape {list(given[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    if faults:
        more = f" and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise ValueError("; ".join(faults[:_NAMED]) + more)
