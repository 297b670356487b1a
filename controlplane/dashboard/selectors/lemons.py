"""Nodes that fail far more than others, from 28 days of the fleet's own record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, QuerySet
from django.utils import timezone

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import AuditEvent
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Cluster, Node
from controlplane.health.choices import FaultClass
from controlplane.health.models import Failure
from controlplane.incidents.models import Incident, PlaybookRun, RmaCase
from controlplane.jobs.models import Job, NodeExclusion, Placement
from workers.lemons import DAYS, History, Score, score

#: So many are listed, the worst first.
LISTED = 50
LABELS = {
    "exclusions": "excluded by people",
    "xids": "faults of its own",
    "tickets": "repairs and RMA cases",
    "outs": "times out of service",
    "multi_node_failures": "failed jobs of several nodes",
    "single_node_failures": "failed jobs of its own",
    "single_node_failure_rate": "share of its own jobs that failed",
}
#: Whose fault speaks against a node.
_ITS_OWN = (FaultClass.HARDWARE, FaultClass.DRIVER, FaultClass.FABRIC, FaultClass.PLATFORM)


@dataclass(frozen=True)
class Lemon:
    """A node with a score, and what of it spoke: label, value, from where on it speaks."""

    node: Node
    score: Score

    @property
    def spoke(self) -> list[tuple[str, float, float]]:
        return [
            (LABELS[part.signal], part.value, part.threshold)
            for part in self.score.parts
            if part.points
        ]


def lemons_in(clusters: Iterable[Cluster]) -> list[Lemon]:
    """Those of these clusters' nodes that anything speaks against, the worst first. Each cluster is
    its own fleet: other hardware, another distribution."""
    found: list[Score] = []
    for fleet in histories(clusters).values():
        found += [one for one in score(fleet) if one.points]
    worst = sorted(found, key=lambda one: (-one.points, one.node))[:LISTED]
    nodes = Node.objects.select_related("cluster").defer("report")
    there = nodes.in_bulk([one.node for one in worst])
    return [Lemon(there[one.node], one) for one in worst if one.node in there]


def histories(clusters: Iterable[Cluster]) -> dict[str, dict[str, History]]:
    """What is on record, over DAYS, of each node that is not retired: by cluster and node."""
    since = timezone.now() - timedelta(days=DAYS)
    ids = [cluster.pk for cluster in clusters]
    nodes = Node.objects.filter(cluster__in=ids).exclude(state=NodeState.RETIRED)
    repairs = PlaybookRun.objects.filter(
        cluster__in=ids, playbook="repair-node", created_at__gte=since
    )
    cases = RmaCase.objects.filter(cluster__in=ids, opened_at__gte=since)
    failures = Failure.objects.filter(
        node__cluster__in=ids, observed_at__gte=since, fault_class__in=_ITS_OWN
    )
    lost = Incident.objects.filter(
        cluster__in=ids, occurred_at__gte=since, failures__in=failures, job__isnull=False
    )
    on_one = Job.objects.filter(cluster__in=ids, world_replicas=1, nodes_per_replica=1)
    alone = Placement.objects.filter(
        node__cluster__in=ids, created_at__gte=since, replica__job__in=on_one
    )
    excluded = NodeExclusion.objects.filter(node__cluster__in=ids, created_at__gte=since)
    xids, tickets, ran = _by_node(failures), _by_node(repairs) + _by_node(cases), _by_node(alone)
    multi = _by_node(lost.exclude(job__in=on_one), "failures__node")
    single = _by_node(lost.filter(job__in=on_one), "failures__node")
    outs = _audited(ids, since, ["node.transition"], after__state=NodeState.QUARANTINED)
    drained = _audited(ids, since, ["node.drain"], actor_kind=ActorKind.USER)
    # A hold that is lifted, or is given another reason, is told by the same verb.
    held = _audited(ids, since, ["node.hold"], actor_kind=ActorKind.USER, before__hold_reason="")
    shunned = _by_node(excluded) + drained + held
    found: dict[str, dict[str, History]] = {}
    for node, cluster in nodes.values_list("pk", "cluster"):
        found.setdefault(cluster, {})[node] = History(
            exclusions=shunned[node],
            xids=xids[node],
            tickets=tickets[node],
            outs=outs[node],
            multi_node_failures=multi[node],
            single_node_failures=single[node],
            single_node_failure_rate=min(1.0, single[node] / ran[node]) if ran[node] else 0.0,
        )
    return found


def _by_node(rows: QuerySet[Any], node: str = "node") -> Counter[str]:
    counted = rows.order_by().values(node).annotate(times=Count("pk", distinct=True))
    return Counter({row[node]: row["times"] for row in counted if row[node]})


def _audited(ids: list[str], since: datetime, verbs: list[str], **what: object) -> Counter[str]:
    """How often each node's record has one of these, by whom or to what."""
    events = AuditEvent.objects.filter(cluster__in=ids, verb__in=verbs, at__gte=since, **what)
    counted = events.order_by().values("object_id").annotate(times=Count("pk"))
    return Counter({row["object_id"]: row["times"] for row in counted})
