"""Fleets whose processes end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.adapters.fleets import ScriptFleet


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Callable[..., ScriptFleet]]:
    fleets: list[ScriptFleet] = []

    def make(script: str, world: int, **options: Any) -> ScriptFleet:
        folder = tmp_path / f"fleet{len(fleets)}"
        folder.mkdir()
        fleets.append(ScriptFleet(folder, world, options=options, script=script))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()
