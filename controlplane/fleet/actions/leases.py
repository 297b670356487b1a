"""Writes of leases: a node's right to be believed alive."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.db import connection
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

# For each beat Lease.filter(node=node, last_beat_at__lt=at).update(last_beat_at=at, ...): who has
# just begun to lead knows no beat, and must not take what Redis still holds of the dead for news.
# A beat of the future was told while a clock was wrong: any counts after it.
_RENEW_SQL = """
UPDATE fleet_lease
SET last_beat_at = beat.at, deadline = beat.at + make_interval(secs => %s),
    reachable = true, unreachable_since = NULL
FROM unnest(%s::text[], %s::timestamptz[]) AS beat(node_id, at)
WHERE fleet_lease.node_id = beat.node_id
    AND (fleet_lease.last_beat_at < beat.at
         OR fleet_lease.last_beat_at > now() + interval '1 minute')
RETURNING fleet_lease.node_id
"""


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

    `beats` holds, by node id, when ingest received the newest beat; one that is known changes
    nothing.
    """
    lost = dict(
        Node.objects.filter(pk__in=beats, lease__reachable=False).values_list("pk", "cluster_id")
    )
    with connection.cursor() as cursor:
        cursor.execute(_RENEW_SQL, [lease_s, [*beats], [*beats.values()]])
        back = [node_id for (node_id,) in cursor.fetchall() if node_id in lost]
    for node_id in back:
        touch(lost[node_id], ("node", node_id))
        doorbell.ring_after_commit(f"node/{node_id}")
    return back


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
