"""Callers of the API: operator and admin of the world's cluster, a viewer of it, and a stranger.

Imports of ours stand inside the fixtures: pytest reads this file before Django has its settings.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from pytest_django import DjangoDbBlocker

if TYPE_CHECKING:
    from .world import Caller, World


@pytest.fixture(scope="module")
def made_once(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[World]:
    """For all of the file's tests, which undo what they do to it."""
    from tests.once import around_tests

    from .world import one_of_each

    with around_tests(django_db_blocker):
        with django_db_blocker.unblock():
            world = one_of_each()
        yield world


@pytest.fixture
def world(made_once: World, db: None) -> World:
    from django.utils import timezone

    from controlplane.fleet.models import Lease

    # Whoever was heard when it was made is heard now.
    Lease.objects.filter(reachable=True).update(last_beat_at=timezone.now())
    return copy.deepcopy(made_once)


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
