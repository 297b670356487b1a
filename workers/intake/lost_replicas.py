"""A replica's process is gone, by its peers' word or its agent's: a loss, or an end that was meant.

The incident in which a lost replica is brought back is opened here, whatever took the replica.
"""

from __future__ import annotations

import structlog

from controlplane import doorbell
from controlplane.accounts.models import SYSTEM
from controlplane.fleet.models import Node
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import RunState, Severity
from controlplane.incidents.models import Incident, PlaybookRun
from controlplane.incidents.move_plans import PLAYBOOK as MOVE
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JOB_ACTIVE, JobState, PlacementState
from controlplane.jobs.models import IN_ITS_PLACE, Job, Placement
from workers.intake.timeline import add_preceding_lines, add_signal_entry, add_to_node_incident

log = structlog.get_logger(__name__)


def replica_was_lost(signal: Signal) -> None:
    """A peer or the agent says that a replica's process is gone."""
    named = Placement.objects.select_related("replica__job", "node").filter(pk=signal.placement_id)
    if signal.kind == SignalKind.PEER_LOST:  # a job's word is of its own processes only
        named = named.filter(replica__job=signal.job_id)
    placement = named.first() or _present_placement(signal)
    if placement is None:
        log.info("intake.no_such_placement", signal=signal.pk)
        return
    job = placement.replica.job
    if placement.standby:
        doorbell.ring_after_commit(f"job/{job.pk}")  # its move is given up; the replica trains on
        return
    if placement.state == PlacementState.ENDED and not _is_news_of_a_takeover(placement):
        _ended_one_is_gone(signal, placement)
        return
    if _has_made_way(signal, placement):
        jobs.end_placement(SYSTEM, placement.pk, "left for another node", free_node=True)
        return
    if job.state not in (JobState.RUNNING, JobState.STARTING):
        return
    incident = open_for_replica(signal, placement)
    if is_unasked_end_of_rank(signal):
        incidents.raise_severity(incident.pk, Severity.MAJOR)


def is_unasked_end_of_rank(signal: Signal) -> bool:
    """Whether a rank's process ended without anybody having asked it to."""
    return (
        signal.kind == SignalKind.PROCESS_EXITED
        and signal.data.get("kind") == "rank"
        and not signal.data.get("requested")
    )


def ended_warm_spare(signal: Signal) -> Placement | None:
    """The warm spare that stood by still when its process ended: no loss to anybody."""
    spares = Placement.objects.filter(pk=signal.placement_id, standby=True, warm=True)
    return spares.first() if signal.kind == SignalKind.PROCESS_EXITED else None


def ended_while_stopping(signal: Signal) -> Placement | None:
    """The process, of a job that was told to end, that has ended without a word of its own."""
    if signal.kind != SignalKind.PROCESS_EXITED:
        return None
    # Those of one job take turns: the last one to leave ends it.
    stopping = Job.objects.select_for_update(no_key=True).filter(
        state=JobState.STOPPING, pk=signal.job_id
    )
    left = Placement.objects.filter(pk=signal.placement_id, replica__job__in=list(stopping))
    return left.exclude(state=PlacementState.ENDED).first()


def stopped_by_order(signal: Signal) -> Placement | None:
    """What trained, or was about to, and ended as somebody had ordered."""
    if signal.kind != SignalKind.PROCESS_EXITED or not signal.data.get("requested"):
        return None
    there = Placement.objects.filter(
        pk=signal.placement_id, standby=False, replica__job__state__in=JOB_ACTIVE
    )
    alive = there.exclude(state=PlacementState.ENDED)
    return alive.select_related("replica__job", "node").first()


def replica_was_stopped(signal: Signal, placement: Placement) -> None:
    """Who ordered it sees to its replica, unless that run was called off."""
    incident = incidents.bring_back_stopped(placement, signal.observed_at)
    if incident is None:
        add_to_node_incident(signal)
    else:
        add_signal_entry(incident, signal)


def free_what_it_left(signal: Signal) -> None:
    """A process that was known to be gone is seen to have ended: its node waited for that, and a
    move of its replica that asked for a person because nobody saw it end."""
    ended = Placement.objects.filter(pk=signal.placement_id, state=PlacementState.ENDED)
    for left in ended.select_related("replica"):
        jobs.vacate(SYSTEM, left)
        subject = f"{MOVE}/{left.replica.job_id}/{left.replica.index}"
        moves = PlaybookRun.objects.filter(subject=subject, state=RunState.NEEDS_OPERATOR)
        for run in moves.filter(context__from=left.pk):
            incidents.look_again(run.pk, "its old process has ended", afresh=False)


def live_placement(node: Node) -> Placement | None:
    """What the node holds of a replica. A process that only stands by is no loss to anybody."""
    return (
        Placement.objects.select_related("replica__job", "node")
        .filter(node=node, standby=False)
        .exclude(state=PlacementState.ENDED)
        .first()
    )


def open_for_replica(signal: Signal, placement: Placement) -> Incident:
    """The incident in which the replica is brought back, with the signal in its timeline."""
    incident = incidents.bring_back(placement, signal.observed_at)
    add_signal_entry(incident, signal)
    add_preceding_lines(incident, signal)
    return incident


def _is_news_of_a_takeover(placement: Placement) -> bool:
    """Whether a warm spare was quicker to say that it has the place than anybody was to say that
    this process is gone: why it went is still to be found out."""
    looked_into = PlaybookRun.objects.filter(
        playbook="replica-lost", context__lost_placement=placement.pk
    )
    taken = placement.joined_at is not None and placement.successors.filter(warm=True).exists()
    return taken and not looked_into.exists()


def _ended_one_is_gone(signal: Signal, placement: Placement) -> None:
    """An incident that is still open takes it as evidence, else it is old news.

    But for one: what took its replica's place, and was lost, while its move was being given up.
    """
    replica = placement.replica
    open_one = incidents.incident_of_replica(replica.job_id, replica.index)
    if open_one is not None:
        add_signal_entry(open_one, signal)
        return
    own = replica.placements.filter(IN_ITS_PLACE)
    alive = own.exclude(state=PlacementState.ENDED)
    lost_in_its_place = (
        signal.kind == SignalKind.PEER_LOST
        and placement.moved_from_id is not None
        and replica.job.state == JobState.RUNNING
    )
    if lost_in_its_place and not alive.exists():
        open_for_replica(signal, placement)


def _has_made_way(signal: Signal, placement: Placement) -> bool:
    """Whether a process that another was to replace has left by itself."""
    successors = placement.successors.filter(standby=True).exclude(state=PlacementState.ENDED)
    return signal.data.get("exit_code") == 0 and successors.exists()


def _present_placement(signal: Signal) -> Placement | None:
    if signal.placement_id or not signal.job_id or signal.replica is None:
        return None
    return (
        Placement.objects.select_related("replica__job", "node")
        .filter(replica__job_id=signal.job_id, replica__index=signal.replica, standby=False)
        .exclude(state=PlacementState.ENDED)
        .first()
    )
