"""Stand-in servers that are stopped after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastturn.bench.fake_server import Fake

from .client import V


@pytest.fixture
def serve() -> Iterator[Callable[..., Fake]]:
    """Starts stand-ins that are stopped after the test."""
    started: list[Fake] = []

    def start(**settings: Any) -> Fake:
        port = settings.pop("port", 0)
        started.append(Fake(vocabulary=V, **settings).start(port))
        return started[-1]

    yield start
    for fake in started:
        fake.stop()
