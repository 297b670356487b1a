"""A spare is told as ready where it could take work at this moment, and alike on every page."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.fleet.models import Lease, Node
from controlplane.incidents.candidates import free_nodes
from tests.controlplane.dashboard.world import Fleet
from tests.factories import (
    GpuFactory,
    MaintenanceWindowFactory,
    PlaybookRunFactory,
    SpareReservationFactory,
)

Befall = Callable[[Node], object]


def _is(**values: object) -> Befall:
    return lambda node: Node.objects.filter(pk=node.pk).update(**values)


#: What may befall a spare so that it takes no work, by its words.
BEFALLS: dict[str, Befall] = {
    "on hold": _is(hold_reason="look at it"),
    "drained": _is(drained_by="7"),
    "key revoked": _is(key_revoked_at=timezone.now()),
    "unreachable": lambda node: Lease.objects.filter(node=node).update(reachable=False),
    "not heard lately": lambda node: Lease.objects.filter(node=node).update(
        last_beat_at=timezone.now() - timedelta(hours=1)
    ),
    "maintenance of its cluster": lambda node: MaintenanceWindowFactory(cluster=node.cluster),
    "maintenance of its rack": lambda node: MaintenanceWindowFactory(
        cluster=node.cluster, rack=node.rack
    ),
    "maintenance of it": lambda node: MaintenanceWindowFactory(cluster=node.cluster, node=node),
    "reserved": lambda node: SpareReservationFactory(cluster=node.cluster, node=node),
    "about to be repaired": lambda node: PlaybookRunFactory(
        cluster=node.cluster, node=node, incident=None, playbook="repair-node"
    ),
}


def _ready(client: Client, fleet: Fleet) -> dict[str, int]:
    """How many spares are ready, by where it is told."""
    GpuFactory(node=fleet.other, index=0)
    address = reverse("cluster", args=[fleet.cluster.id])
    pages = {"overview": reverse("overview"), "cluster": address}
    rows = json.loads(client.get(reverse("clusters"), {"export": "json"}).getvalue())
    listed = client.get(address, {"spare": "ready"}).content.decode()
    pools = client.get(reverse("repairs")).content.decode().split('data-testid="pools"')[1]
    return {
        "the scheduler": sum(node.spare for node in free_nodes(fleet.cluster.id)),
        **{
            name: _number_before("</strong> spare ready", client.get(page).content.decode())
            for name, page in pages.items()
        },
        "export": rows[0]["spares_ready"],
        "filter": listed.count('data-testid="node-row"'),
        "repairs": _number_before("</strong></a>", pools),
    }


def _number_before(words: str, page: str) -> int:
    return int(page.split(words)[0].rsplit("<strong>", 1)[1])


def test_a_spare_that_may_take_work_is_ready_everywhere(viewer: Client, fleet: Fleet) -> None:
    assert set(_ready(viewer, fleet).values()) == {1}


@pytest.mark.parametrize("befall", BEFALLS.values(), ids=BEFALLS)
def test_one_that_may_not_is_ready_nowhere(befall: Befall, viewer: Client, fleet: Fleet) -> None:
    befall(fleet.other)

    assert set(_ready(viewer, fleet).values()) == {0}


def test_what_befalls_another_cluster_changes_nothing(viewer: Client, fleet: Fleet) -> None:
    MaintenanceWindowFactory()

    assert set(_ready(viewer, fleet).values()) == {1}
