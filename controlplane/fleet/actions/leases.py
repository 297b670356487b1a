"""Writes of leases: a node's right to be believed alive."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.utils import timezone

from controlplane import doorbell
from controlplane.fleet.changes import change, touch
from controlplane.fleet.choices import (
    NodeState,
)
from controlplane.fleet.models import (
    Lease,
    Node,
)


@change()
def extend_leases(seconds: float) -> None:
    """Believe every node alive for some time: we, not they, were away (a start of the product)."""
    now = timezone.now()
    Lease.objects.update(
        deadline=now + timedelta(seconds=seconds), reachable=True, unreachable_since=None
    )


@change()
def renew_leases(beats: dict[str, datetime], lease_s: float) -> list[str]:
    """Extend the leases of the nodes that were heard, and return those that had been lost.

    `beats` holds, by node id, when ingest received the newest beat.
    """
    back = list(
        Node.objects.filter(pk__in=beats, lease__reachable=False).values_list("pk", "cluster_id")
    )
    rows = [
        Lease(node_id=node_id, last_beat_at=at, deadline=at + timedelta(seconds=lease_s))
        for node_id, at in beats.items()
    ]
    for row in rows:
        row.reachable = True
    Lease.objects.bulk_update(
        rows, ["last_beat_at", "deadline", "reachable", "unreachable_since"], batch_size=1000
    )
    for node_id, cluster_id in back:
        touch(cluster_id, ("node", node_id))
        doorbell.ring_after_commit(f"node/{node_id}")
    return [node_id for node_id, _ in back]


@change()
def lose_leases(now: datetime) -> list[Node]:
    """Mark as unreachable each node whose lease ran out, and return them."""
    overdue = list(
        Node.objects.filter(lease__reachable=True, lease__deadline__lt=now)
        .exclude(state=NodeState.RETIRED)
        .select_related("lease")
    )
    lost = [
        node
        for node in overdue
        if Lease.objects.filter(pk=node.pk, reachable=True, deadline__lt=now).update(
            reachable=False, unreachable_since=now
        )
    ]
    for node in lost:
        touch(node.cluster_id, ("node", node.pk))
        doorbell.ring_after_commit(f"node/{node.pk}")
    return lost
