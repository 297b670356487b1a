"""Worlds to play in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from pytest_django import Settings

if TYPE_CHECKING:
    from tests.workers.world import World


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """An agent has long enough to answer that no slow test has its node's power cut."""
    from workers.playbooks import node_steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_steps, "KILL_S", 30.0)
        yield


@pytest.fixture(autouse=True)
def unhurried(settings: Settings) -> None:
    """Nothing beats here but by a test: no node falls silent because the machine is slow."""
    settings.BEAT_INTERVAL_S = 10
    settings.LEASE_S = 30


@pytest.fixture
def world() -> Iterator[World]:
    yield from _world(spares=2)


@pytest.fixture
def poor_world() -> Iterator[World]:
    yield from _world(spares=0)


def _world(spares: int) -> Iterator[World]:
    # Models can be imported only once Django's settings are known, which is after this module.
    from tests.workers.world import World

    with ExitStack() as stack:
        yield World(stack, spares=spares)
