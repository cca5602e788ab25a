"""Adapters: their gradients, what leaves the model, and whole runs that train nothing else."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from fastturn import checkpoint, lora, models
from fastturn.carriers import FullWeights
from fastturn.cli import main
from fastturn.config import Config, ConfigError, override
from fastturn.memory import held_gib, step_gib
from fastturn.optim import training_optimizer
from fastturn.policy import Policy, WithoutAdapter
from fastturn.recipes import quickstart
from fastturn.shape import shape_of
from fastturn.sharding import merged_state

peft = pytest.importorskip("peft")
sys.path.insert(0, str(Path(__file__).parent))
from ranks import adapted  # noqa: E402
from test_policy import (  # noqa: E402
    OBJECTIVE,
    Wide,
    batch,
    error,
    gradients,
    packed_loss,
    tiny,
    unpacked_loss,
)
from test_trainer import records, run, small  # noqa: E402

PARITY = Path(__file__).with_name("parity.py")
RUN = (
    *("model.lora_rank=4", "warm.steps=0", "optim.lr=1e-2", "loss.kl_coef=0.01", "tasks=4"),
    *("data.eval_tasks=4", f"data.domain={PARITY}:Graded"),
)


class Sum(nn.Module):
    """W -> W + s B A, written out."""

    def __init__(self, a_RI: torch.Tensor, b_OR: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Parameter(a_RI), nn.Parameter(b_OR), scale

    def forward(self, weight_OI: torch.Tensor) -> torch.Tensor:
        return weight_OI + self.scale * self.b @ self.a


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_gradients_are_those_of_the_sum_written_out(family: str) -> None:
    batch()  # made outside, where its float32 rows stay float32
    model = adapted(family, torch.float64)
    plain = tiny(family).requires_grad_(False)
    sums = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            parts = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
            sums[name] = Sum(*(part.detach().clone() for part in parts), 32 / 4)
            parametrize.register_parametrization(plain.get_submodule(name), "weight", sums[name])
    assert len(sums) == 2 * 7
    with Wide():
        policy = Policy(model)
        got = gradients(model, lambda: packed_loss(policy, OBJECTIVE))
        want_loss = unpacked_loss(plain, OBJECTIVE)
        want_loss.backward()
    want = {"loss": want_loss.detach()}
    for name, one in sums.items():
        want[f"{name}.lora_A.default.weight"] = one.a.grad
        want[f"{name}.lora_B.default.weight"] = one.b.grad
    assert max(error(got, want).values()) <= 1e-9


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3-moe"])
def test_merged_weights_compute_the_same_under_the_old_names(family: str) -> None:
    model = adapted(family)
    plain = tiny(family, torch.float32)
    names = list(dict(plain.named_parameters()))
    weights = FullWeights(model)
    sent = dict(weights)
    assert sorted(sent) == sorted(names)
    assert [(n, w.dtype, tuple(w.shape)) for n, w in sent.items()] == weights.meta()
    plain.load_state_dict(merged_state(model, keep=True), strict=False)
    assert all(torch.equal(plain.get_parameter(name), sent[name]) for name in names)
    score_A, plain_A = (Policy(one).score(batch(), 1.0) for one in (model, plain))
    torch.testing.assert_close(plain_A, score_A, rtol=1e-6, atol=0)  # 8 roundings of the value
    wide, wide_plain = adapted(family, torch.float64), tiny(family)
    wide_plain.load_state_dict(merged_state(wide, keep=True), strict=False)
    with Wide():
        score_A, plain_A = (Policy(one).score(batch(), 1.0) for one in (wide, wide_plain))
    torch.testing.assert_close(plain_A, score_A, rtol=0, atol=1e-12)


def test_switched_off_it_is_the_model_that_it_was() -> None:
    policy, plain = Policy(adapted("qwen3")), Policy(tiny("qwen3", torch.float32))
    before_A, with_A = plain.score(batch(), 1.0), policy.score(batch(), 1.0)
    assert torch.equal(WithoutAdapter(policy).score(batch(), 1.0), before_A)
    assert torch.equal(policy.score(batch(), 1.0), with_A) and not torch.equal(before_A, with_A)


def test_a_fresh_adapter_changes_nothing_and_depends_on_the_seed_alone() -> None:
    def made(seed: int) -> Policy:
        model = tiny("qwen3", torch.bfloat16)
        torch.manual_seed(torch.seed())
        config = override(Config(), ["model.lora_rank=2", f"seed={seed}"])
        lora.adapt(model, models.blocks(model), config)
        return Policy(model)

    plain = Policy(tiny("qwen3", torch.bfloat16))
    one, same, other = (dict(lora.adapter(made(seed).model)) for seed in (0, 0, 1))
    assert torch.equal(made(0).score(batch(), 1.0), plain.score(batch(), 1.0))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)
    assert {tensor.dtype for tensor in one.values()} == {torch.float32}


def test_only_adapters_are_trained_and_planned(tmp_path: Path) -> None:
    config = small("model.lora_rank=4")
    shape = shape_of(config)
    assert shape is not None
    from fastturn.envs import load_domain
    from fastturn.tokenizer import build_tokenizer, episode_texts

    texts = episode_texts(load_domain(config), 20, config)
    policy = Policy.build(config, build_tokenizer(texts, config.model.vocabulary))
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    assert sum(map(torch.Tensor.numel, trained)) == shape.adapters(4)
    assert not policy.model.get_output_embeddings().weight.requires_grad
    groups = training_optimizer(policy.model, config.optim).members[0].param_groups
    assert sum(len(group["params"]) for group in groups) == len(trained)
    gib = held_gib(config, shape) | step_gib(config, shape)
    assert gib["gradients"] == shape.adapters(4) * 4 / 2**30 == gib["AdamW moments"] / 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model that has seen demonstrations."""
    out = tmp_path_factory.mktemp("base") / "run"
    run(out, "iterations=0", "data.eval_tasks=1")
    return str(out / "final")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, base: str) -> Path:
    out = tmp_path_factory.mktemp("lora") / "run"
    run(out, *RUN, f"model.path={base}")
    return out


def test_a_run_moves_adapters_and_no_bit_of_the_weights(whole: Path, base: str) -> None:
    stages = [record for record in records(whole, "stage") if record["ratio_geomean"] is not None]
    assert stages and all(record["abs_log_ratio_max"] <= 1e-4 for record in stages)
    assert stages[0]["kl_reference"] == pytest.approx(0, abs=1e-9)
    assert stages[-1]["kl_reference"] > 1e-6
    assert not (whole / "reference").exists()
    untouched = dict(AutoModelForCausalLM.from_pretrained(base).named_parameters())
    policy, _ = Policy.load(small(*RUN, f"model.path={base}"))
    optimizers = training_optimizer(policy.model, small().optim)
    newest = checkpoint.latest(whole / "checkpoints")
    assert newest is not None
    checkpoint.load_weights(newest, policy.model, optimizers)
    saved = {n.replace(".base_layer.", "."): p for n, p in policy.model.named_parameters()}
    assert all(torch.equal(saved[name], tensor) for name, tensor in untouched.items())


def test_the_final_model_is_merged_and_the_adapter_lies_beside_it(whole: Path, base: str) -> None:
    final = AutoModelForCausalLM.from_pretrained(whole / "final")
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert final.state_dict().keys() == plain.state_dict().keys()
    loaded = peft.PeftModel.from_pretrained(plain, whole / "final" / "adapter")
    tokens_BT = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        merged, adapted = (m(tokens_BT).logits.log_softmax(-1) for m in (final, loaded))
        with loaded.disable_adapter():
            before = loaded(tokens_BT).logits.log_softmax(-1)
    torch.testing.assert_close(merged, adapted, atol=1e-5, rtol=0)
    assert float((adapted - before).abs().max()) > 1e-3
    settings = json.loads((whole / "final" / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == base and settings["r"] == 4


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
    whole: Path, base: str, tmp_path: Path
) -> None:
    pairs = (*RUN, f"model.path={base}")
    run(tmp_path / "run", *pairs, "iterations=1")
    run(tmp_path / "run", *pairs, resume=True)
    stages = [records(out, "stage") for out in (tmp_path / "run", whole)]
    assert stages[0] == stages[1]


def test_after_a_warm_start_the_reference_is_a_copy(tmp_path: Path) -> None:
    pairs = ("model.lora_rank=4", "warm.steps=2", "loss.kl_coef=0.01", "tasks=2", "iterations=1")
    run(tmp_path / "run", *pairs, "data.eval_tasks=2")
    assert (tmp_path / "run" / "reference" / "config.json").exists()
    first = records(tmp_path / "run", "stage")[0]
    assert first["kl_reference"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["model.lora_rank=-1"], r"model\.lora_rank=-1: expected zero or more"),
        (["model.lora_alpha=0"], r"model\.lora_alpha=0: expected a positive number"),
        (["rollout.carrier=lora"], r"rollout\.carrier=lora: this run trains whole weights"),
    ],
)
def test_settings_that_cannot_work(pairs: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(quickstart(), pairs)


def test_the_dry_run_misses_peft(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "peft" else find(name)
    )
    status = main(["train", "quickstart", "--dry-run", "model.lora_rank=8"])
    said = capsys.readouterr()
    assert status != 0 and 'pip install "fastturn[lora]"' in said.out + said.err


def test_blocks_without_linear_layers_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 4))
    with pytest.raises(ConfigError, match="no linear layers to adapt"):
        lora.adapt(model, [model], override(Config(), ["model.lora_rank=2"]))
