"""Writes of maintenance windows: announced work, during which automation keeps its hands off."""

from __future__ import annotations

from datetime import datetime

from django.utils import timezone

from controlplane import doorbell
from controlplane.accounts.actions import audit
from controlplane.accounts.models import Actor
from controlplane.errors import Conflict
from controlplane.fleet.changes import change, touch
from controlplane.fleet.models import MaintenanceWindow, Node, Rack


@change()
def open_maintenance(
    actor: Actor,
    cluster_id: str,
    *,
    starts_at: datetime,
    ends_at: datetime,
    reason: str,
    rack_id: str | None = None,
    node_id: str | None = None,
) -> MaintenanceWindow:
    """Announce work on a cluster, or on one rack or node of it.

    Raises Conflict if the window is empty or over, or if rack or node belong to another cluster.
    """
    if ends_at <= starts_at:
        raise Conflict("a maintenance window must end after it starts; correct ends_at")
    if ends_at <= timezone.now():
        raise Conflict("this maintenance window is over already; correct ends_at")
    if rack_id and node_id:
        raise Conflict("name a rack or a node, not both")
    if rack_id and not Rack.objects.filter(pk=rack_id, cluster_id=cluster_id).exists():
        raise Conflict("this cluster has no such rack")
    if node_id and not Node.objects.filter(pk=node_id, cluster_id=cluster_id).exists():
        raise Conflict("this cluster has no such node")
    window = MaintenanceWindow.objects.create(
        cluster_id=cluster_id,
        rack_id=rack_id,
        node_id=node_id,
        starts_at=starts_at,
        ends_at=ends_at,
        owner=actor.id,
        reason=reason,
    )
    audit(
        actor,
        "maintenance.open",
        "maintenance",
        window.pk,
        cluster_id=cluster_id,
        after={
            "starts_at": starts_at.isoformat(),
            "ends_at": ends_at.isoformat(),
            "rack": rack_id,
            "node": node_id,
        },
        reason=reason,
    )
    touch(cluster_id)
    return window


@change()
def close_maintenance(actor: Actor, window_id: str, reason: str) -> None:
    """End a window before its time. Raises Conflict if it is over."""
    window = MaintenanceWindow.objects.select_for_update(no_key=True, of=("self",)).get(
        pk=window_id
    )
    now = timezone.now()
    if window.closed_at is not None or window.ends_at <= now:
        raise Conflict("this maintenance window is over already")
    MaintenanceWindow.objects.filter(pk=window_id).update(closed_at=now)
    audit(
        actor,
        "maintenance.close",
        "maintenance",
        window_id,
        cluster_id=window.cluster_id,
        before={"ends_at": window.ends_at.isoformat()},
        after={"closed_at": now.isoformat()},
        reason=reason,
    )
    touch(window.cluster_id)
    doorbell.ring_after_commit()
