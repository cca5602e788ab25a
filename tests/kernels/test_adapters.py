"""The adapters against the libraries they serve: TRL by running it, verl by its definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fastturn.kernels.adapters as adapters
from fastturn.tokenizer import build_tokenizer

DOUBLE = torch.float64
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


@pytest.fixture(autouse=True)
def own_random_state() -> Iterator[None]:
    """Trainers seed the global generators."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["1 + 2 = 3", "what is four plus five"], 280)


@pytest.fixture(scope="module")
def saved_model(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, so that TRL can load the reference model from it."""
    folder = tmp_path_factory.mktemp("model")
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **SHAPE,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def grpo(saved_model: Path, tokenizer: Any, tmp_path: Path) -> Callable[..., Any]:
    """Makes a GRPOTrainer of a tiny model; the reward is the number of different characters."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    def make(**options: Any) -> Any:
        settings = {
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "num_iterations": 2,
            "max_completion_length": 8,
            "max_steps": 2,
            "optim": "sgd",
            "learning_rate": 1.0,
            "beta": 0.05,
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        return GRPOTrainer(
            model=transformers.AutoModelForCausalLM.from_pretrained(saved_model),
            reward_funcs=reward,
            args=GRPOConfig(**(settings | options)),
            train_dataset=Dataset.from_dict({"prompt": ["1 + 2", "what is"] * 4}),
            processing_class=tokenizer,
        )

    return make


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Scored actions of each call of the kernel by an adapter."""
    seen: list[int] = []
    kernel = adapters.linear_logprob

    def counted(hidden_RD: Tensor, head_VD: Tensor, action_A: Tensor, **given: Any) -> Any:
        seen.append(len(action_A))
        return kernel(hidden_RD, head_VD, action_A, **given)

    monkeypatch.setattr(adapters, "linear_logprob", counted)
    return seen


def scored(trainer: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probabilities and entropies of padded rows by the trainer's own method, and gradients of
    a function of both."""
    ids_BT = torch.randint(3, 270, (3, 12), generator=torch.Generator().manual_seed(1))
    seen_BT = torch.ones_like(ids_BT)
    seen_BT[0, :3], seen_BT[1, -2:] = 0, 0
    logprob_BT, entropy_BT, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids_BT, seen_BT, 7, compute_entropy=True
    )
    trainer.model.zero_grad()
    (logprob_BT.cos() + entropy_BT.sin()).sum().backward()
    grads = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    return logprob_BT.detach(), entropy_BT.detach(), grads


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "cast_lm_head_to_fp32": True}])
def test_trl_log_probabilities_and_gradients(
    grpo: Callable[..., Any], calls: list[int], options: dict[str, Any]
) -> None:
    """Values and gradients are those of TRL's own step; padding is not scored."""
    theirs = scored(grpo(**options))
    assert not calls
    trainer = grpo(**options)
    adapters.fuse_trl(trainer)
    ours = scored(trainer)
    assert calls == [3 * 7 - 2]
    assert ours[0][1, -2:].tolist() == [0, 0]
    for got, want in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    for name, want in theirs[2].items():
        torch.testing.assert_close(ours[2][name], want, rtol=0, atol=3e-6 * float(want.abs().max()))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "entropy_coef": 0.05},
    ],
)
def test_trl_trains_to_the_same_weights(
    grpo: Callable[..., Any], calls: list[int], options: dict[str, Any]
) -> None:
    """Two optimiser steps with generation, old and reference log-probabilities, and metrics."""
    trainers = [grpo(**options) for _ in range(2)]
    adapters.fuse_trl(trainers[1])
    for trainer in trainers:
        torch.manual_seed(7)
        trainer.train()
    assert len(calls) >= 2 * 2  # every step, and the reference model
    logs = [
        {k: v for k, v in t.state.log_history[1].items() if "time" not in k and "second" not in k}
        for t in trainers
    ]
    assert logs[1] == pytest.approx(logs[0], rel=1e-3, abs=1e-5)
    start = transformers.AutoModelForCausalLM.from_pretrained(trainers[0].model.name_or_path)
    pairs = zip(*(t.model.named_parameters() for t in trainers), start.parameters(), strict=True)
    for (name, theirs), (_, ours), first in pairs:
        moved = float((theirs - first).detach().abs().max())
        assert moved > 0, name
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3 * moved, msg=name)


def test_generation_is_left_alone(grpo: Callable[..., Any], calls: list[int]) -> None:
    trainer = grpo()
    given = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 4, "do_sample": False}
    before = trainer.model.generate(**given)
    adapters.fuse_trl(trainer)
    assert torch.equal(trainer.model.generate(**given), before)
    assert not calls


def test_a_router_loss_is_refused(grpo: Callable[..., Any]) -> None:
    trainer = grpo()
    trainer.aux_loss_enabled = True
    with pytest.raises(ValueError, match=r"trainer: .*aux_loss_enabled=True; set router_aux"):
        adapters.fuse_trl(trainer)


class Adapted(torch.nn.Module):
    """Stands for an output layer with a low-rank adapter."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.weight, self.bias = inner, inner.weight, inner.bias


def test_an_adapter_on_the_output_layer_is_refused(saved_model: Path) -> None:
    """Its weight alone would be another model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(saved_model)
    adapters.fuse_head(model)
    model.set_output_embeddings(Adapted(model.lm_head))
    ids = torch.tensor([[5, 6, 7]])
    for call in (
        lambda: adapters.fuse_head(model),
        lambda: model(ids, labels=ids, fused_lm_head=True),
    ):
        with pytest.raises(ValueError, match=r"torch\.nn\.Linear, got Adapted; .*lm_head"):
            call()


def test_a_batch_without_labels_has_gradient_zero(saved_model: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(saved_model)
    adapters.fuse_head(model)
    ids = torch.tensor([[5, 6, 7]])
    out = model(ids, labels=torch.full_like(ids, -100), fused_lm_head=True)
    assert out.log_probs.tolist() == [[0, 0]]
    out.log_probs.sum().backward()
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    with pytest.raises(ValueError, match="labels: expected labels or shift_labels"):
        model(ids, fused_lm_head=True)


MODELS = {
    "softcap": ("Gemma2", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}),
    "divided": ("Granite", {"logits_scaling": 4.0}),
    "multiplied": ("Cohere", {"logit_scale": 0.25}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_as_the_model_makes_them(name: str, calls: list[int]) -> None:
    """Factors and caps of the model's own logits, with a temperature; float64, both kinds of
    labels."""
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(vocab_size=60, **SHAPE, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double().eval()
    model.get_output_embeddings().weight.data *= 20
    ids_BT = torch.randint(3, 60, (2, 9))
    labels_BT = ids_BT.clone()
    labels_BT[0, :4] = -100
    all_BTV = (model(ids_BT).logits.double() / 0.7).log_softmax(-1)[:, :-1]
    mask_BT = labels_BT[:, 1:] != -100
    want_BT = all_BTV.gather(-1, ids_BT[:, 1:, None]).squeeze(-1) * mask_BT
    adapters.fuse_head(model, temperature=0.7)
    out = model(ids_BT, labels=labels_BT, fused_lm_head=True)
    torch.testing.assert_close(out.log_probs, want_BT, rtol=0, atol=1e-6)
    entropy_BT = -(all_BTV.exp() * all_BTV).sum(-1) * mask_BT
    torch.testing.assert_close(out.entropy, entropy_BT, rtol=0, atol=1e-6)
    ahead = model(ids_BT[:, :-1], shift_labels=labels_BT[:, 1:], fused_lm_head=True)
    torch.testing.assert_close(ahead.log_probs, out.log_probs, rtol=0, atol=1e-6)
    assert calls == [13, 13]


def test_autocast_projects_in_half_precision(saved_model: Path, calls: list[int]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(saved_model)
    ids_BT = torch.randint(3, 270, (2, 9))
    adapters.fuse_head(model)
    single = model(ids_BT, labels=ids_BT, fused_lm_head=True)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(ids_BT, labels=ids_BT, fused_lm_head=True)
    assert half.log_probs.dtype == torch.float32
    assert not torch.equal(half.log_probs, single.log_probs)
    torch.testing.assert_close(half.log_probs, single.log_probs, rtol=0, atol=0.05)
    half.log_probs.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_model_without_a_positive_factor_is_refused() -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(logit_scale=0.0))
    layer = torch.nn.Linear(4, 8)
    model = SimpleNamespace(forward=None, config=config, get_output_embeddings=lambda: layer)
    with pytest.raises(ValueError, match=r"positive factor of its logits, got 0\.0"):
        adapters.fuse_head(model)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", None])
def test_verl_signature(reduction: str | None) -> None:
    """[B, T] inputs flattened, positional arguments, gradients of log-probabilities and entropy."""
    hidden_BTD = torch.randn(2, 5, 8, dtype=DOUBLE).requires_grad_()
    head_VD = torch.randn(30, 8, dtype=DOUBLE).requires_grad_()
    label_BT = torch.randint(30, (2, 5), dtype=torch.int32)
    logprob, entropy_A = adapters.linear_cross_entropy(
        hidden_BTD, head_VD, label_BT, 0.8, reduction
    )
    all_AV = (hidden_BTD.flatten(0, 1) @ head_VD.T / 0.8).log_softmax(-1)
    want = all_AV.gather(1, label_BT.flatten()[:, None].long()).squeeze(1)
    if reduction in ("sum", "mean"):
        want = getattr(want, reduction)()
    want_entropy_A = -(all_AV.exp() * all_AV).sum(-1)
    torch.testing.assert_close(logprob, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(entropy_A, want_entropy_A, rtol=1e-12, atol=0)
    grads = [
        torch.autograd.grad((x * x).sum() + y.sin().sum(), (hidden_BTD, head_VD))
        for x, y in ((logprob, entropy_A), (want, want_entropy_A))
    ]
    for got, right in zip(*grads, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-13)


def test_verl_defaults_and_errors() -> None:
    hidden_AD, head_VD = torch.ones(1, 2), torch.zeros(2, 2)
    logprob_A, entropy_A = adapters.linear_cross_entropy(
        hidden=hidden_AD, weight=head_VD, labels=torch.tensor([1]), temperature=None
    )
    assert logprob_A.tolist() == pytest.approx([-0.6931472])
    assert entropy_A.tolist() == pytest.approx([0.6931472])
    with pytest.raises(ValueError, match=r"reduction='median': expected one of none, sum, mean"):
        adapters.linear_cross_entropy(hidden_AD, head_VD, torch.tensor([1]), 1.0, "median")
    with pytest.raises(ValueError, match=r"labels: expected entries in \[0, 2\), got 2"):
        adapters.linear_cross_entropy(hidden_AD, head_VD, torch.tensor([2]))
