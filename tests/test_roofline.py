"""The roofline against hand-computed times, and properties of the work counted."""

from __future__ import annotations

import pytest
import torch

from fastturn.bench.roofline import attention, logprob_forward, surrogate
from fastturn.devices import DEVICES, device_of

BY_NAME = {device.name: device for device in DEVICES}


@pytest.mark.parametrize(
    ("shape", "a100", "h100", "forward_bytes_ms"),
    [
        ((8192, 2048, 151936), (16.3, 49.0), (5.15, 15.5), 0.20),
        ((8192, 4096, 151936), (32.7, 98.0), (10.3, 30.9), 0.39),
        ((16384, 4096, 151936), (65.4, 196.0), (20.6, 61.8), 0.41),
        ((8192, 4096, 131072), (28.2, 84.6), (8.9, 26.7), 0.34),
    ],
)
def test_times_at_peak(shape, a100, h100, forward_bytes_ms):
    """Forward and whole of the output layer, in milliseconds, rounded as in the published table."""
    forward, whole = logprob_forward(*shape), surrogate(*shape)
    for name, (first, both) in {"A100 80GB": a100, "H100": h100, "H200": h100}.items():
        device = BY_NAME[name]
        assert forward.floor_s(device) * 1e3 == pytest.approx(first, rel=6e-3)
        assert whole.floor_s(device) * 1e3 == pytest.approx(both, rel=4e-3)
    assert forward.bytes / BY_NAME["H100"].bytes_s * 1e3 == pytest.approx(
        forward_bytes_ms, abs=5e-3
    )


@pytest.mark.parametrize(("name", "balance"), [("A100 80GB", 153), ("H100", 295), ("H200", 206)])
def test_machine_balance(name, balance):
    assert BY_NAME[name].balance == pytest.approx(balance, abs=0.5)


def test_few_actions_are_bound_by_traffic():
    """Below the balance the floor is the time to read the head."""
    for device in DEVICES:
        few, many = (logprob_forward(int(device.balance * x), 4096, 151936) for x in (0.5, 2))
        assert few.floor_s(device) == few.bytes / device.bytes_s > few.flops / device.flops_s
        assert many.floor_s(device) == many.flops / device.flops_s


def test_rows_that_leave_cost_nothing():
    full = surrogate(8192, 4096, 151936)
    zero = surrogate(8192, 4096, 151936, scored=0.5, moving=0.5)
    clipped = surrogate(8192, 4096, 151936, moving=0.5)
    assert zero.flops == full.flops / 2 and zero.bytes < full.bytes
    assert clipped.flops == full.flops * 2 / 3


def test_attention_counts_visible_pairs():
    """Context of 2, siblings of 2 and 1, against the rule counted pair by pair."""
    end_T = torch.tensor([5, 5, 4, 4, 5])
    visible = sum(k <= q < int(end_T[k]) for q in range(5) for k in range(5))
    forward, both = (attention(end_T, 4, 2, 8, backward=b) for b in (False, True))
    assert forward.flops == 4 * visible * 4 * 8
    assert both.flops == 3.5 * forward.flops
    assert forward.bytes == 2 * 5 * 8 * (4 + 4 + 2 + 2)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-40GB", None),
    ],
)
def test_devices_are_known_by_what_the_driver_calls_them(name, want):
    found = device_of(name)
    assert (found.name if found else None) == want
