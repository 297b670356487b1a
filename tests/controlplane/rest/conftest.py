"""Callers of the API: operator and admin of the world's cluster, a viewer of it, and a stranger.

Imports of ours stand inside the fixtures: pytest reads this file before Django has its settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .world import Caller, World


@pytest.fixture
def world(db: None) -> World:
    from .world import one_of_each

    return one_of_each()


@pytest.fixture
def admin(world: World) -> Caller:
    return world.caller("admin")


@pytest.fixture
def operator(world: World) -> Caller:
    return world.caller("operator")


@pytest.fixture
def viewer(world: World) -> Caller:
    return world.caller("viewer")


@pytest.fixture
def stranger(world: World) -> Caller:
    from .world import a_stranger

    return a_stranger()
