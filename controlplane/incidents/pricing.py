"""What incidents cost: GPU-seconds by part, and money by cause. Reads only.

The parts of one incident do not overlap, so they add up to its loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, F, FloatField, Sum
from django.db.models.functions import Cast

from controlplane.accounts.models import AuditEvent
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Cluster, Gpu
from controlplane.incidents.models import Incident
from controlplane.jobs import accounting

REPLICA_AWAY = "the lost replica's GPUs until it trained again"
STOOD_STILL = "the survivors' GPUs while they stood still"
NODE_OUT = "the node's GPUs while it was out for repair"


@dataclass(frozen=True)
class CodeImpact:
    """What one cause has cost one cluster over a time."""

    code: str
    cluster: str
    incidents: int
    gpu_seconds: float
    money: float
    currency: str


def parts(incident: Incident, until: datetime) -> list[dict[str, Any]]:
    """What the incident has cost by `until`: [{"part": words, "gpu_seconds": float}].

    A replica's absence is counted until it trained again, wherever that was. From then on its old
    node is missing from the fleet, not from the job, and is counted as such until it returned.
    """
    found = []
    back_at = incident.restored_at or until
    if incident.job is not None and incident.replica is not None:
        lost_at = accounting.lost_at(incident.job, incident.replica, incident.occurred_at)
        loss = accounting.loss_of(incident.job, incident.replica, lost_at, back_at)
        found += [
            {"part": REPLICA_AWAY, "gpu_seconds": loss.away},
            {"part": STOOD_STILL, "gpu_seconds": loss.stood_still},
        ]
    out = _node_out_s(incident, until)
    if out > 0:
        cards = Gpu.objects.filter(node=incident.node_id).count()
        found.append({"part": NODE_OUT, "gpu_seconds": round(out * cards, 1)})
    return found


def money(cluster: Cluster, gpu_seconds: float) -> float:
    """Money in the cluster's currency at its price per GPU-hour."""
    return gpu_seconds / 3600 * float(cluster.gpu_hour_price)


def impact_by_code(clusters: Iterable[Cluster], since: datetime) -> list[CodeImpact]:
    """What each cause has cost since a moment, the dearest first."""
    rows = (
        Incident.objects.filter(cluster__in=list(clusters), occurred_at__gte=since)
        .values(
            "code",
            name=F("cluster__name"),
            price=Cast("cluster__gpu_hour_price", FloatField()),
            currency=F("cluster__currency"),
        )
        .annotate(incidents=Count("pk"), gpu_seconds=Sum("gpu_seconds_lost"))
    )
    impacts = [
        CodeImpact(
            code=row["code"] or "not yet known",
            cluster=row["name"],
            incidents=row["incidents"],
            gpu_seconds=row["gpu_seconds"] or 0.0,
            money=(row["gpu_seconds"] or 0.0) / 3600 * row["price"],
            currency=row["currency"],
        )
        for row in rows
    ]
    return sorted(impacts, key=lambda impact: -impact.money)


def _node_out_s(incident: Incident, until: datetime) -> float:
    """Seconds for which the incident's node was out, beyond the absence of its replica."""
    if incident.node_id is None:
        return 0.0
    changes = AuditEvent.objects.filter(
        object_type="node",
        object_id=incident.node_id,
        verb="node.transition",
        at__gte=incident.occurred_at,
        at__lte=until,
    ).order_by("id")
    out_at = back_at = None
    for at, state in changes.values_list("at", "after__state"):
        if state == NodeState.QUARANTINED and out_at is None:
            out_at = at
        if state in (NodeState.AVAILABLE, NodeState.ALLOCATED) and out_at is not None:
            back_at = at
            break
    if out_at is None:
        return 0.0
    begin = max(out_at, incident.restored_at) if incident.restored_at else out_at
    return max((back_at or until) - begin, timedelta(0)).total_seconds()
