"""What the keeper tells Prometheus: of itself, and, while it leads, of the fleet.

The fleet's figures are read from the rows when they are asked for; a keeper that stands by gives
none, so that no node is counted twice.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import structlog
from django.db import DatabaseError, InterfaceError
from django.db.models import Count, Min, QuerySet
from django.db.models.functions import Greatest
from django.utils import timezone
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from controlplane.accounts.models import AuditEvent
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Cluster, Lease, Node
from controlplane.health.models import Signal
from controlplane.incidents.choices import (
    INCIDENT_UNRESOLVED,
    RUN_ACTIVE,
    RUN_UNFINISHED,
    ApprovalState,
    Severity,
    StepState,
)
from controlplane.incidents.models import (
    Approval,
    Breaker,
    Incident,
    PlaybookRun,
    PlaybookStep,
    Reservation,
)
from controlplane.jobs.choices import JOB_UNFINISHED
from controlplane.jobs.durability import failing_tiers_of
from controlplane.jobs.models import Job

log = structlog.get_logger(__name__)

LEADS = Gauge("drydock_keeper_leads", "1 where this keeper leads, 0 where it stands by.")
PASSES = Histogram(
    "drydock_keeper_pass_duration_seconds",
    "Time that one pass over everything with a time took.",
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
LAST_TURN = Gauge(
    "drydock_keeper_last_turn_timestamp_seconds",
    "When the keeper last came round with a database that answered.",
)
LEASES_LOST = Counter("drydock_keeper_leases_lost", "Nodes that this keeper found silent.")
READS_FAILED = Counter(
    "drydock_keeper_reads_failed", "Times that the fleet's figures could not be read."
)


class FleetFigures(Collector):
    """The fleet as PostgreSQL has it now, while `leading()`."""

    def __init__(self, leading: Callable[[], bool]) -> None:
        self._leading = leading

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing, or the registry would read the database when this is registered."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if not self._leading():
            return
        try:
            figures = [*_by_cluster(), *_backlog(timezone.now())]
        except (DatabaseError, InterfaceError) as error:
            log.warning("keeper.figures_unread", error=str(error))
            READS_FAILED.inc()
            return
        yield from figures


def publish_fleet_figures(leading: Callable[[], bool]) -> None:
    """Add them to this process's metrics, once in its life."""
    REGISTRY.register(FleetFigures(leading))


def _by_cluster() -> Iterator[GaugeMetricFamily]:
    clusters = list(Cluster.objects.values_list("name", flat=True))
    unresolved = Incident.objects.filter(state__in=INCIDENT_UNRESOLVED)
    unfinished = PlaybookRun.objects.filter(state__in=RUN_UNFINISHED)
    yield _counted(
        "drydock_nodes",
        "Nodes, by state.",
        ("state", list(NodeState)),
        clusters,
        Node.objects.values_list("cluster__name", "state"),
    )
    yield _counted(
        "drydock_incidents_unresolved",
        "Incidents that are not resolved.",
        ("severity", list(Severity)),
        clusters,
        unresolved.values_list("cluster__name", "severity"),
    )
    yield _counted(
        "drydock_runs_unfinished",
        "Playbook runs that are not finished; needs_operator waits for a person.",
        ("state", sorted(RUN_UNFINISHED)),
        clusters,
        unfinished.values_list("cluster__name", "state"),
    )
    for name, text, rows in (
        (
            "drydock_nodes_reachable",
            "Nodes whose lease holds, without the retired: their leases are left as they were.",
            Lease.objects.filter(reachable=True)
            .exclude(node__state=NodeState.RETIRED)
            .values_list("node__cluster__name"),
        ),
        (
            "drydock_nodes_reserved",
            "Nodes that automation has out: what is used of the budget.",
            Reservation.objects.filter(released_at=None).values_list("cluster__name"),
        ),
        (
            "drydock_approvals_waiting",
            "Plans that wait for a person's signature.",
            Approval.objects.filter(state=ApprovalState.WAITING).values_list("cluster__name"),
        ),
        (
            "drydock_breakers_open",
            "Breakers that hold disruptive automation back until a person closes them.",
            Breaker.objects.filter(closed_at=None).values_list("cluster__name"),
        ),
    ):
        yield _counted(name, text, None, clusters, rows)
    yield _failing_tiers(clusters)


def _counted(
    name: str,
    text: str,
    label: tuple[str, list[str]] | None,
    clusters: list[str],
    rows: QuerySet[Any, Any],
) -> GaugeMetricFamily:
    """How many rows of each cluster, or of each cluster and label; what has none is told as 0."""
    family = GaugeMetricFamily(name, text, labels=["cluster", *([label[0]] if label else [])])
    keys = [(c, v) for c in clusters for v in label[1]] if label else [(c,) for c in clusters]
    counts = {tuple(row[:-1]): row[-1] for row in rows.order_by().annotate(count=Count("pk"))}
    for key in keys:
        family.add_metric([str(part) for part in key], counts.get(key, 0))
    return family


def _failing_tiers(clusters: list[str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "drydock_checkpoint_tiers_failing",
        "Tiers of jobs to which saves of some replica fail or hang, as the jobs' ranks say.",
        labels=["cluster"],
    )
    jobs = list(Job.objects.filter(state__in=JOB_UNFINISHED).select_related("cluster"))
    failing = failing_tiers_of(jobs)
    counts = Counts(job.cluster.name for job in jobs for _tier in failing.get(job.pk, []))
    for cluster in clusters:
        family.add_metric([cluster], counts[cluster])
    return family


def _backlog(now: datetime) -> Iterator[GaugeMetricFamily]:
    due = PlaybookStep.objects.filter(
        run__state__in=RUN_ACTIVE,
        state__in=[StepState.READY, StepState.WAITING],
        wake_at__lte=now,
    )
    untriaged = Signal.objects.filter(triaged_at=None)
    # One that was observed again is to be triaged again, and waits since then.
    since = Greatest("recorded_at", "repeated_at")
    signals = untriaged.aggregate(count=Count("pk"), oldest=Min(since))
    for name, text, value in (
        (
            "drydock_steps_oldest_due_age_seconds",
            "How long the longest due playbook step has waited for a worker.",
            _age(due.aggregate(oldest=Min("wake_at"))["oldest"], now),
        ),
        ("drydock_signals_untriaged", "Signals that no worker has looked at.", signals["count"]),
        (
            "drydock_signals_oldest_untriaged_age_seconds",
            "Age of the oldest signal that no worker has looked at.",
            _age(signals["oldest"], now),
        ),
        (
            "drydock_audit_rows_unchained",
            "Audit rows that the keeper has not yet chained.",
            AuditEvent.objects.filter(position=None).count(),
        ),
    ):
        yield GaugeMetricFamily(name, text, value=value)


def _age(moment: datetime | None, now: datetime) -> float:
    return max(0.0, (now - moment).total_seconds()) if moment else 0.0
