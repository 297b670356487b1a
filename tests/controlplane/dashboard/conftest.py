"""People who may do more or less in a cluster with a faulty card.

Imports of ours stand inside the fixtures: pytest reads this file before Django has its settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from django.test import Client

    from controlplane.health.models import NodeSample

    from .world import Fleet


@pytest.fixture
def fleet(db: None) -> Fleet:
    from .world import one_fleet

    return one_fleet()


@pytest.fixture
def samples(fleet: Fleet) -> list[NodeSample]:
    from .world import ten_samples

    return ten_samples(fleet)


@pytest.fixture
def viewer(fleet: Fleet) -> Client:
    from controlplane.accounts.choices import Role

    from .world import client_of

    return client_of(Role.VIEWER, fleet.cluster)


@pytest.fixture
def operator(fleet: Fleet) -> Client:
    from controlplane.accounts.choices import Role

    from .world import client_of

    return client_of(Role.OPERATOR, fleet.cluster)


@pytest.fixture
def admin(fleet: Fleet) -> Client:
    from controlplane.accounts.choices import Role

    from .world import client_of

    return client_of(Role.ADMIN, fleet.cluster)


@pytest.fixture
def stranger(fleet: Fleet) -> Client:
    from controlplane.accounts.choices import Role
    from tests.factories import ClusterFactory

    from .world import client_of

    return client_of(Role.ADMIN, ClusterFactory(name="elsewhere"))
