"""A job's coordinator that is gone with its node, or with its node's reboot, is to be restored."""

from __future__ import annotations

from django.db.models import QuerySet

from controlplane.accounts.models import SYSTEM
from controlplane.fleet.models import Node
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import Severity
from controlplane.jobs.choices import JOB_ACTIVE
from controlplane.jobs.models import Job
from workers.intake.timeline import add_signal_entry


def is_coordinator_gone(signal: Signal) -> bool:
    """Its agent starts a coordinator again by itself, unless the node booted in between."""
    return (
        signal.kind == SignalKind.PROCESS_EXITED
        and signal.data.get("kind") == "coordinator"
        and signal.data.get("reason") == "reboot"
    )


def coordinators_went_with(node: Node, signal: Signal, led: QuerySet[Job]) -> None:
    """A coordinator that ran on this node is gone: its job trains on, but can lose no replica."""
    for job in led.filter(state__in=JOB_ACTIVE):
        incident = incidents.open_or_merge(
            f"coordinator/{job.pk}",
            cluster_id=job.cluster_id,
            title=f"{job.name} lost its coordinator on {node.name}",
            severity=Severity.CRITICAL,
            occurred_at=signal.observed_at,
            job_id=job.pk,
            node_id=node.pk,
        )
        add_signal_entry(incident, signal)
        incidents.restore_coordinator(SYSTEM, job, incident)
