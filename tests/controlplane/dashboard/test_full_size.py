"""Pages at the size that they are made for: 12,500 nodes of 8 GPUs in one cluster."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.choices import Role
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Cluster, Gpu, Lease, Node, Rack
from tests.controlplane.dashboard.world import client_of
from tests.factories import (
    ClusterFactory,
    FailureFactory,
    IncidentFactory,
    JobFactory,
    PlacementFactory,
    ReplicaFactory,
)

pytestmark = pytest.mark.django_db

NODES, RACK, CARDS = 12_500, 16, 8
MAX_BYTES = 300_000
#: Every state in turn, one node in ten out of service.
STATES = [NodeState.ALLOCATED] * 9 + [NodeState.QUARANTINED]


@pytest.fixture
def cluster() -> Cluster:
    cluster = ClusterFactory(name="full")
    now = timezone.now()
    racks = Rack.objects.bulk_create(
        Rack(cluster=cluster, name=f"full-r{number:04d}") for number in range(-(-NODES // RACK))
    )
    nodes = Node.objects.bulk_create(
        (
            Node(
                cluster=cluster,
                rack=racks[number // RACK],
                name=f"full-{number:05d}",
                address=f"10.{number >> 8}.{number & 255}.1",
                state=STATES[number % len(STATES)],
                state_since=now,
                spare=number % 50 == 0,
                public_key=f"{number:044d}",
                boot_id="boot",
                booted_at=now,
                report={"inventory": {"kernel": "6.1.0" * 20}},
            )
            for number in range(NODES)
        ),
        batch_size=2000,
    )
    Lease.objects.bulk_create(
        (
            Lease(
                node=node,
                last_beat_at=now,
                deadline=now + timedelta(minutes=5),
                reachable=number % 500 > 0,
            )
            for number, node in enumerate(nodes)
        ),
        batch_size=2000,
    )
    Gpu.objects.bulk_create(
        (
            Gpu(
                uuid=f"GPU-{number:05d}-{index}",
                serial=f"{number:05d}{index}",
                model="NVIDIA H200",
                memory_bytes=1,
                node=node,
                index=index,
            )
            for number, node in enumerate(nodes)
            for index in range(CARDS)
        ),
        batch_size=5000,
    )
    with connection.cursor() as cursor:
        # What autovacuum does for rows that are committed: without it, plans are made for a few.
        cursor.execute("ANALYZE fleet_node, fleet_gpu, fleet_lease")
    return cluster


@pytest.fixture
def faults(cluster: Cluster) -> None:
    job = JobFactory(cluster=cluster, name="pretrain-of-everything")
    for number, node in enumerate(cluster.nodes.filter(state="allocated")[:120]):
        PlacementFactory(replica=ReplicaFactory(job=job, index=number), node=node)
    incident = IncidentFactory(cluster=cluster)
    for node in cluster.nodes.filter(state="quarantined")[:60]:
        card = node.gpus.get(index=3)
        incident.failures.add(FailureFactory(node=node, gpu=card))


def test_pages_stay_small_and_cost_a_constant_number_of_queries(
    cluster: Cluster, faults: None, django_assert_max_num_queries: Callable[..., Any]
) -> None:
    client = client_of(Role.VIEWER, cluster)
    pages = {
        "overview": reverse("overview"),
        "cluster": reverse("cluster", args=[cluster.id]),
        "filtered": reverse("cluster", args=[cluster.id]) + "?code=xid-79&sort=-since",
        "repairs": reverse("repairs"),
        "failures": reverse("failures"),
        "automation": reverse("automation-page"),
    }

    sizes = {}
    for page, address in pages.items():
        with django_assert_max_num_queries(24):
            answer = client.get(address)
        sizes[page] = len(answer.content)
        assert answer.status_code == 200

    assert max(sizes.values()) < MAX_BYTES, sizes


def test_the_map_of_every_card_fits_as_well(cluster: Cluster, faults: None) -> None:
    client: Client = client_of(Role.VIEWER, cluster)
    address = reverse("cluster-map", args=[cluster.id])

    plain = client.get(address).content
    packed = client.get(address, headers={"Accept-Encoding": "gzip"}).content

    told = json.loads(plain)
    assert sum(len(rack["states"]) for rack in told["racks"]) == NODES
    assert sum(int(cards) for rack in told["racks"] for cards in rack["cards"]) == NODES * CARDS
    assert len(plain) < MAX_BYTES
    assert gzip.decompress(packed) == plain
