"""From signal to playbook: each new signal becomes a failure, merged into an incident, with a run.

Signals are taken with SKIP LOCKED and marked in the transaction that writes what they led to, so
each is handled once, whoever dies.
"""

from __future__ import annotations

import structlog
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.errors import Conflict
from controlplane.fleet.changes import change
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Node
from controlplane.health.actions import record_failure
from controlplane.health.choices import FaultClass, SignalKind
from controlplane.health.models import Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, EntryKind, Severity
from controlplane.incidents.models import Incident
from controlplane.jobs.choices import JOB_ACTIVE, JobState, PlacementState
from controlplane.jobs.models import Job, Placement

log = structlog.get_logger(__name__)

#: Few, because what they touch stays locked until all are done.
BATCH = 20


def untriaged() -> QuerySet[Signal]:
    return Signal.objects.filter(triaged_at=None)


@change()
def triage_signals() -> int:
    """Handle the oldest signals that nobody has handled. Returns how many."""
    # Placements in a fixed order of locks with ingest: signals first, then what they speak of.
    batch = list(
        untriaged()
        .select_for_update(skip_locked=True, no_key=True, of=("self",))
        .select_related("node__lease")
        .order_by("recorded_at")[:BATCH]
    )
    handled = [signal.pk for signal in batch if _handle_alone(signal)]
    Signal.objects.filter(pk__in=handled).update(triaged_at=timezone.now())
    return len(batch)


def _handle_alone(signal: Signal) -> bool:
    """Handle one signal in a savepoint, so that one that cannot be handled stops no other.

    False: what it belongs to ended in this very moment; it is to be handled again.
    """
    try:
        with change():
            _handle(signal)
    except Conflict as conflict:
        log.info("intake.again", signal=signal.pk, reason=conflict.detail)
        return False
    except Exception:
        log.exception("intake.signal_not_handled", signal=signal.pk)
    return True


def _handle(signal: Signal) -> None:
    if signal.kind == SignalKind.LEASE_LOST:
        _node_went_silent(signal)
    elif signal.kind == SignalKind.PEER_LOST or _is_unasked_end_of_rank(signal):
        _replica_was_lost(signal)
    elif signal.node is not None and _is_coordinator_gone(signal):
        jobs = Job.objects.filter(coordinator_placement=signal.placement_id)
        _coordinators_went_with(signal.node, signal, jobs)
    elif signal.node is not None:
        _tell_node_incident(signal)


def _is_unasked_end_of_rank(signal: Signal) -> bool:
    return (
        signal.kind == SignalKind.PROCESS_EXITED
        and signal.data.get("kind") == "rank"
        and not signal.data.get("requested")
    )


def _is_coordinator_gone(signal: Signal) -> bool:
    """Its agent starts a coordinator again by itself, unless the node booted in between."""
    return (
        signal.kind == SignalKind.PROCESS_EXITED
        and signal.data.get("kind") == "coordinator"
        and signal.data.get("reason") == "reboot"
    )


def _replica_was_lost(signal: Signal) -> None:
    """A peer or the agent says that a replica's process is gone."""
    placement = (
        Placement.objects.select_related("replica__job", "node")
        .filter(pk=signal.placement_id)
        .first()
    ) or _present_placement(signal)
    if placement is None:
        log.info("intake.no_such_placement", signal=signal.pk)
        return
    job = placement.replica.job
    subject = f"job/{job.pk}/{placement.replica.index}"
    if placement.state == PlacementState.ENDED:
        # Known already: an incident that is still open takes it as evidence, else it is old news.
        open_one = Incident.objects.filter(subject=subject, state__in=INCIDENT_UNRESOLVED).first()
        if open_one is not None:
            _tell_signal(open_one, signal)
        return
    if job.state not in (JobState.RUNNING, JobState.STARTING):
        return
    _open_for_replica(signal, placement)


def _present_placement(signal: Signal) -> Placement | None:
    if signal.placement_id or not signal.job_id or signal.replica is None:
        return None
    return (
        Placement.objects.select_related("replica__job", "node")
        .filter(replica__job_id=signal.job_id, replica__index=signal.replica)
        .exclude(state=PlacementState.ENDED)
        .first()
    )


def _open_for_replica(signal: Signal, placement: Placement) -> None:
    job = placement.replica.job
    index = placement.replica.index
    incident = incidents.open_or_merge(
        f"job/{job.pk}/{index}",
        cluster_id=job.cluster_id,
        title=f"{job.name} lost replica {index} on {placement.node.name}",
        severity=Severity.MAJOR,
        occurred_at=signal.observed_at,
        job_id=job.pk,
        replica=index,
        node_id=placement.node_id,
    )
    _tell_signal(incident, signal)
    incidents.request_run(
        SYSTEM,
        "replica-lost",
        f"{job.pk}/{index}",
        cluster_id=job.cluster_id,
        title=f"Bring back replica {index} of {job.name}",
        incident=incident,
        job_id=job.pk,
        node_id=placement.node_id,
        context={"replica": index, "lost_placement": placement.pk},
    )


def _node_went_silent(signal: Signal) -> None:
    """A lease ran out: the incident of the replica that the node holds, or one about the node."""
    node = signal.node
    if node is None:
        raise ValueError("a lease belongs to a node")
    if node.lease.reachable:
        _tell_node_incident(signal)  # it has been heard again since
        return
    placement = (
        Placement.objects.select_related("replica__job", "node")
        .filter(node=node)
        .exclude(state=PlacementState.ENDED)
        .first()
    )
    _coordinators_went_with(node, signal, Job.objects.filter(coordinator_node=node))
    if placement is not None:
        _open_for_replica(signal, placement)
        return
    in_service = node.state in (NodeState.AVAILABLE, NodeState.ALLOCATED, NodeState.SUSPECT)
    if not in_service or node.hold_reason:
        _tell_node_incident(signal)  # it is in somebody's hands already
        return
    incident = incidents.open_or_merge(
        f"node/{node.pk}",
        cluster_id=node.cluster_id,
        title=f"{node.name} went silent",
        severity=Severity.MINOR,
        occurred_at=signal.observed_at,
        node_id=node.pk,
    )
    _tell_signal(incident, signal)
    failure = record_failure(
        fault_class=FaultClass.PLATFORM,
        code="node-lost",
        summary=f"{node.name} has not been heard within its lease",
        needed="power cycle",
        rule="lease-lost",
        signals=[signal],
        observed_at=signal.observed_at,
        node_id=node.pk,
    )
    incidents.set_cause(
        incident.pk, incident.title, "The node stopped beating; it held no replica.", failure
    )
    incidents.repair_node(SYSTEM, node.pk, incident, "it went silent", only_if_silent=True)


def _coordinators_went_with(node: Node, signal: Signal, jobs: QuerySet[Job]) -> None:
    """A coordinator that ran on this node is gone: its job trains on, but can lose no replica."""
    for job in jobs.filter(state__in=JOB_ACTIVE):
        incident = incidents.open_or_merge(
            f"coordinator/{job.pk}",
            cluster_id=job.cluster_id,
            title=f"{job.name} lost its coordinator on {node.name}",
            severity=Severity.CRITICAL,
            occurred_at=signal.observed_at,
            job_id=job.pk,
            node_id=node.pk,
        )
        _tell_signal(incident, signal)
        incidents.restore_coordinator(SYSTEM, job, incident)


def _tell_node_incident(signal: Signal) -> None:
    """What a node says while an incident about it is open belongs to that incident's story."""
    node: Node | None = signal.node
    if node is None or signal.kind == SignalKind.COORDINATOR_RESTARTED:
        return
    for incident in Incident.objects.filter(node=node, state__in=INCIDENT_UNRESOLVED):
        _tell_signal(incident, signal)


def _tell_signal(incident: Incident, signal: Signal) -> None:
    incidents.tell(
        incident,
        f"signal/{signal.pk}",
        EntryKind.SIGNAL,
        _words(signal),
        at=signal.observed_at,
        data={"signal": signal.pk, "source": signal.source, "raw": signal.raw, **signal.data},
    )


def _words(signal: Signal) -> str:
    node = signal.node.name if signal.node else ""
    if signal.kind == SignalKind.PEER_LOST:
        how = {
            "reset": "its connection was reset",
            "agent": "its agent said so",
            "heartbeat": "it stopped answering",
        }.get(str(signal.data.get("how")), str(signal.data.get("how")))
        step = signal.data.get("step")
        return f"{signal.source} saw replica {signal.replica} go at step {step}: {how}"
    if signal.kind == SignalKind.PROCESS_EXITED:
        if signal.data.get("reason") == "reboot":
            return f"{node}: process {signal.data.get('pid')} ended with the reboot"
        number = signal.data.get("signal")
        end = (
            f"killed by signal {number}"
            if number
            else f"exit status {signal.data.get('exit_code')}"
        )
        return f"{node}: process {signal.data.get('pid')} ended, {end}"
    if signal.kind == SignalKind.LEASE_LOST:
        return f"{node} has not been heard within its lease"
    if signal.kind == SignalKind.BOOT:
        return f"{node} booted ({signal.boot_id})"
    return signal.raw or f"{node}: {signal.get_kind_display()}"
