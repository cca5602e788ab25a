"""One thread, seeded generators and a cache folder of its own for every test."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

# Subprocesses of tests inherit these; two threads on two busy cores are slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A test that needs the network is wrong; the hub's client then says so instead of waiting for it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a real server come last: it may still be on its way."""
    items.sort(key=lambda item: "real" in item.path.parts)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a test caches reaches the user's cache, and nothing there reaches a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(_cache(tmp_path_factory)))


def _cache(factory: pytest.TempPathFactory) -> Path:
    folder = factory.getbasetemp() / "cache"
    folder.mkdir(exist_ok=True)
    return folder
