"""What incidents cost: GPU-seconds by part, and money by cause. Reads only.

The parts of one incident do not overlap, so they add up to its loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from controlplane.jobs.accounting import Absence

REPLICA_AWAY = "the lost replica's GPUs until it trained again"
STOOD_STILL = "the survivors' GPUs while they stood still"
NODE_OUT = "the node's GPUs while it was out for repair"


@dataclass(frozen=True)
class CodeImpact:
    """What one cause has cost one cluster over a time."""

    code: str
    cluster_id: str
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
    absences = _absences(incident, until)
    if incident.job is not None and absences:
        loss = accounting.loss_of(incident.job, absences)
        found += [
            {"part": REPLICA_AWAY, "gpu_seconds": loss.away},
            {"part": STOOD_STILL, "gpu_seconds": loss.stood_still},
        ]
    nodes = {incident.node_id, *incident.runs.values_list("node", flat=True)} - {None}
    out = 0.0
    for node_id in nodes:
        cards = Gpu.objects.filter(node=node_id).count()
        out += _node_out_s(incident, str(node_id), absences, until) * cards
    if out > 0:
        found.append({"part": NODE_OUT, "gpu_seconds": round(out, 1)})
    return found


def replicas_of(incident: Incident) -> list[int]:
    """The replicas whose loss it is about: one, or those that its job lost together."""
    if incident.replica is not None:
        return [incident.replica]
    runs = incident.runs.filter(playbook="replica-lost", context__has_key="replica")
    return sorted({int(index) for index in runs.values_list("context__replica", flat=True)})


def _absences(incident: Incident, until: datetime) -> list[Absence]:
    """When its replicas were away."""
    job, since = incident.job, incident.occurred_at
    if job is None:
        return []
    pauses = accounting.pauses_of(job, since, until)
    return [
        absence
        for index in replicas_of(incident)
        for absence in accounting.absences_of(job, index, since, until, pauses)
    ]


def money(cluster: Cluster, gpu_seconds: float) -> float:
    """Money in the cluster's currency at its price per GPU-hour."""
    return gpu_seconds / 3600 * float(cluster.gpu_hour_price)


def impact_by_code(clusters: Iterable[Cluster], since: datetime) -> list[CodeImpact]:
    """What each cause has cost since a moment, the dearest first."""
    rows = (
        Incident.objects.filter(cluster__in=list(clusters), occurred_at__gte=since)
        .values(
            "code",
            "cluster_id",
            name=F("cluster__name"),
            price=Cast("cluster__gpu_hour_price", FloatField()),
            currency=F("cluster__currency"),
        )
        .annotate(incidents=Count("pk"), gpu_seconds=Sum("gpu_seconds_lost"))
    )
    impacts = [
        CodeImpact(
            code=row["code"] or "not yet known",
            cluster_id=row["cluster_id"],
            cluster=row["name"],
            incidents=row["incidents"],
            gpu_seconds=row["gpu_seconds"] or 0.0,
            money=(row["gpu_seconds"] or 0.0) / 3600 * row["price"],
            currency=row["currency"],
        )
        for row in rows
    ]
    return sorted(impacts, key=lambda impact: -impact.money)


def _node_out_s(
    incident: Incident, node_id: str, absences: Sequence[Absence], until: datetime
) -> float:
    """Seconds for which a node of the incident was out, beyond the absence of what it had held."""
    changes = AuditEvent.objects.filter(
        object_type="node",
        object_id=node_id,
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
    end = back_at or until
    missed = [one.back_at for one in absences if node_id in one.nodes and one.left_at < end]
    return max(end - max([out_at, *missed]), timedelta(0)).total_seconds()
