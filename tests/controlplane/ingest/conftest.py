"""A real ingest server on a real socket, and the clients that speak to it.

Imports of ours stand inside the fixtures: pytest reads this file before Django has its settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import redis as redis_client
from django.conf import settings

if TYPE_CHECKING:
    from controlplane.fleet.models import Cluster

    from .door import Door, NodeClient, Server


@pytest.fixture(scope="session")
def server(django_db_setup: None) -> Iterator[Server]:
    from .door import Server

    running = Server()
    running.start()
    yield running
    running.stop()


@pytest.fixture
def door(server: Server, transactional_db: None) -> Door:
    return server.door()


@pytest.fixture
def redis(door: Door) -> Iterator[redis_client.Redis]:
    client = redis_client.Redis.from_url(settings.REDIS_URL, decode_responses=True)
    yield client
    client.close()


@pytest.fixture
def cluster(transactional_db: None) -> Cluster:
    from controlplane.accounts.models import SYSTEM
    from controlplane.fleet import actions

    return actions.create_cluster(SYSTEM, "alpha")


@pytest.fixture
def join_token(cluster: Cluster) -> str:
    from controlplane.accounts.models import SYSTEM
    from controlplane.fleet import actions

    return actions.create_join_token(SYSTEM, cluster.pk, max_uses=10)


@pytest.fixture
def node(door: Door, join_token: str) -> NodeClient:
    from .door import enrolment

    return enrolment(door, join_token, "node-1").enrolled()


@pytest.fixture
def other_node(door: Door, join_token: str) -> NodeClient:
    from .door import enrolment

    return enrolment(door, join_token, "node-2").enrolled()


@pytest.fixture
def stopping(node: NodeClient) -> Iterator[Server]:
    """A patient server for a test that ends it, or must not be too slow for it."""
    from .door import speaking_to

    with speaking_to("tests.controlplane.ingest.patient:app", node) as server:
        yield server
