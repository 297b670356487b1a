"""A fleet of real processes for each test that asks for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.replicas import Fleet


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Fleets whose processes end with the test."""
    fleets: list[Fleet] = []

    def make(world: int, **settings: Any) -> Fleet:
        folder = tmp_path / f"fleet{len(fleets)}"
        folder.mkdir()
        fleets.append(Fleet(folder, world, **settings))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()
