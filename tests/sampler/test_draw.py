"""Streams of uniform numbers and the draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastturn.sampler.draw import draw, uniforms


def test_a_stream_depends_on_its_seed_alone() -> None:
    np.testing.assert_array_equal(uniforms([7], 2)[0], uniforms([9, 7], 5)[1, :2])
    assert not np.array_equal(uniforms([7], 4), uniforms([8], 4))
    np.testing.assert_array_equal(uniforms([-1], 3), uniforms([2**64 - 1], 3))


def test_streams_are_uniform_and_uncorrelated() -> None:
    u = uniforms(range(2000), 50)
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, 100, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 99 + 5 * np.sqrt(2 * 99)
    centred = u - 0.5
    along = (centred[:, :-1] * centred[:, 1:]).mean() * 12
    across = (centred[:-1] * centred[1:]).mean() * 12
    assert abs(along) < 0.02 and abs(across) < 0.02


def test_example() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    token, logprob = draw(logits, torch.tensor([0.6], dtype=torch.float64), 1.0)
    assert token.tolist() == [1]
    assert logprob.item() == pytest.approx(np.log(0.5), abs=1e-6)


def test_edges_of_the_distribution() -> None:
    minus = -torch.inf
    logits = torch.tensor([[minus, 0.0, minus], [minus, 0.0, minus], [500.0, -500.0, 500.0]])
    uniform = torch.tensor([0.0, 1 - 2.0**-52, 1 - 2.0**-52], dtype=torch.float64)
    token, logprob = draw(logits, uniform, 1.0)
    assert token.tolist() == [1, 1, 2]
    assert logprob.tolist() == pytest.approx([0.0, 0.0, np.log(0.5)])


def test_temperature_scales_and_zero_is_greedy() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0]])
    uniform = torch.tensor([0.0], dtype=torch.float64)
    token, logprob = draw(logits, uniform, 0.5)
    assert token.tolist() == [0]
    want = torch.log_softmax(logits.double() / 0.5, -1)[0, 0].item()
    assert logprob.item() == pytest.approx(want, abs=1e-6)
    token, logprob = draw(logits, uniform, 0.0)
    assert token.tolist() == [1]
    want = torch.log_softmax(logits.double(), -1)[0, 1].item()
    assert logprob.item() == pytest.approx(want, abs=1e-6)


def test_float64_logits_keep_their_precision() -> None:
    logits = torch.randn(4, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    token, logprob = draw(logits, torch.from_numpy(uniforms(range(4), 1)[:, 0]), 0.7)
    want = torch.log_softmax(logits / 0.7, -1).gather(1, token.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(logprob, want, atol=1e-13, rtol=0)
