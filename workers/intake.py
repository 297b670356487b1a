"""From signal to playbook: each new signal becomes a failure, merged into an incident, with a run.

Signals are taken with SKIP LOCKED and marked in the transaction that writes what they led to, so
each is handled once, whoever dies.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import structlog
from django.conf import settings
from django.db import OperationalError
from django.db.models import Q, QuerySet
from django.utils import timezone

from controlplane import doorbell
from controlplane.accounts.models import SYSTEM
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.changes import change
from controlplane.fleet.choices import IN_SERVICE
from controlplane.fleet.models import Gpu, Node
from controlplane.health.actions import (
    card_at,
    join_failures,
    record_failure,
    repeat_failure,
    restate_failure,
)
from controlplane.health.choices import Action, FaultClass, SignalKind, Urgency
from controlplane.health.models import Failure, Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents import limits
from controlplane.incidents.choices import (
    INCIDENT_UNRESOLVED,
    RUN_UNFINISHED,
    EntryKind,
    Severity,
)
from controlplane.incidents.models import Incident, PlaybookRun
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JOB_ACTIVE, JobState, PlacementState
from controlplane.jobs.models import IN_ITS_PLACE, Job, Placement
from workers import triage
from workers.verdicts import HARDWARE_SPEAKS, deciding_signals, verdict_of

log = structlog.get_logger(__name__)

#: A fault that shows again within this time of its last line is the same one.
BURST_GAP = timedelta(minutes=3)

#: A fault that is still there this long after its incident was closed is opened again.
REOPENED_AFTER = timedelta(hours=1)
#: What a repair of the node can be asked for; the last two only where a card is to blame.
REPAIRS = triage.NODE_REPAIRS | {"field_diagnostic", "contact_vendor"}
#: So many lines, so long before a loss, are told with it.
NOTES, NOTED_BEFORE = 10, timedelta(seconds=60)

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
        .select_related("node__lease", "node__cluster", "node__rack", "gpu")
        .order_by("recorded_at", "observed_at")[:BATCH]
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
    except OperationalError:
        raise  # a deadlock or a lost connection says nothing of the signal: all are taken again
    except Exception:
        log.exception("intake.signal_not_handled", signal=signal.pk)
    return True


def _handle(signal: Signal) -> None:
    if signal.kind == SignalKind.LEASE_LOST:
        _node_went_silent(signal)
    elif signal.kind in HARDWARE_SPEAKS:
        _hardware_spoke(signal)
    elif (spare := _ended_warm_spare(signal)) is not None:
        jobs.end_warm_spare(SYSTEM, spare.pk, "its process has ended")
    elif (leaving := _ended_while_stopping(signal)) is not None:
        jobs.end_placement(SYSTEM, leaving.pk, "its process has ended", free_node=True)
    elif signal.kind == SignalKind.PEER_LOST or _is_unasked_end_of_rank(signal):
        _replica_was_lost(signal)
    elif (slow := _straggler(signal)) is not None:
        _job_found_a_straggler(signal, slow)
    elif signal.node is not None and _is_coordinator_gone(signal):
        led = Job.objects.filter(coordinator_placement=signal.placement_id)
        _coordinators_went_with(signal.node, signal, led)
    elif signal.node is not None:
        _tell_node_incident(signal)


def _hardware_spoke(signal: Signal) -> None:
    """A line of a node's kernel log, or a card's readings: nothing, a note, or a failure that
    somebody must act on."""
    node: Node | None = signal.node
    verdict = verdict_of(signal)
    if node is None or verdict is None or triage.is_note(verdict):
        _tell_node_incident(signal)
        return
    if signal.repeated_at is not None and _only_repeats(signal, node):
        return
    card = signal.gpu or card_at(node.pk, verdict.pci)
    if card is not None and signal.gpu_id is None:
        Signal.objects.filter(pk=signal.pk).update(gpu=card)
    _take_up(signal, node, card, verdict)


def _job_found_a_straggler(signal: Signal, index: int) -> None:
    """Its peers say that a replica is slow: something holds its node back that nothing else shows.
    The failure is its node's, whoever told it."""
    placement = (
        Placement.objects.select_related("node__lease", "node__cluster", "node__rack")
        .filter(replica__job=signal.job_id, replica__index=index, standby=False)
        .exclude(state=PlacementState.ENDED)
        .first()
    )
    if placement is not None:
        verdict = triage.judge_straggler(str(signal.data.get("text", "")))
        _take_up(signal, placement.node, None, verdict)


def _straggler(signal: Signal) -> int | None:
    """Which replica a job says to be slow, as its runtime puts it; None if it does not."""
    found = re.fullmatch(r"replica (\d{1,6})", str(signal.data.get("subject", "")))
    told = signal.kind == SignalKind.JOB_TROUBLE and signal.data.get("kind") == "straggler"
    return int(found[1]) if told and found else None


def _take_up(signal: Signal, node: Node, card: Gpu | None, verdict: triage.LineVerdict) -> None:
    """Make a failure of what was judged, or join the one that it is a part of, and act on it."""
    placement = _live_placement(node)
    failure, before = _failure_with(signal, node, card, placement, verdict)
    deciding = verdict
    if (verdict.code, verdict.action, verdict.urgency) != (failure.code, *_wanted(failure)):
        deciding = _deciding(failure) or verdict
        _say(failure, deciding)
    acted_on = before == (deciding.action, deciding.urgency) and not _still_there(failure)
    if acted_on or node.state not in IN_SERVICE:  # else it is in somebody's hands already
        _name_incidents(failure, node, deciding)
        _tell_node_incident(signal)
        return
    minor = list(Incident.objects.filter(failures=failure, state__in=INCIDENT_UNRESOLVED))
    incident = _act_on_failure(signal, node, placement, failure, deciding)
    if incident is not None:
        incidents.merge_into(incident, [one for one in minor if one.subject == f"node/{node.pk}"])


def _failure_with(
    signal: Signal,
    node: Node,
    card: Gpu | None,
    placement: Placement | None,
    verdict: triage.LineVerdict,
) -> tuple[Failure, tuple[str, str] | None]:
    """The failure that this signal speaks of, with it; and what that called for before, and how
    soon. None if it is new."""
    burst = _burst(node, card, signal, verdict)
    alike = [one for one in burst if _covers(one, verdict)][:1] or [
        one for one in burst if _covers(verdict, one)
    ]
    if alike:
        failure, *others = alike
        before = _wanted(failure)
        join_failures(failure, others)
        repeat_failure(failure, signal)
        failure.refresh_from_db()
        return failure, before
    failure = record_failure(
        **_said(verdict),
        signals=[signal],
        observed_at=signal.repeated_at or signal.observed_at,
        node_id=node.pk,
        gpu_id=card.pk if card else None,
        job_id=placement.replica.job_id if placement else "",
        replica=placement.replica.index if placement else None,
    )
    return failure, None


def _deciding(failure: Failure) -> triage.LineVerdict | None:
    """Of all that was said of one fault the gravest word, and of equally grave ones the first:
    whatever came first, and in whatever order it was delivered."""
    verdicts = [verdict_of(one) for one in deciding_signals(failure)]
    counting = [one for one in verdicts if one is not None and not triage.is_note(one)]
    return next(iter(triage.gravest(counting)), None)


def _still_there(failure: Failure) -> bool:
    """Whether every incident of a fault that lasts until it is repaired was closed, a while ago,
    and here it is again. Not at once: whoever closes one may be at work on it."""
    if failure.needed not in triage.LASTING:
        return False
    if failure.incidents.filter(state__in=INCIDENT_UNRESOLVED).exists():
        return False
    closed = failure.incidents.order_by("-resolved_at").first()
    resolved_at = closed.resolved_at if closed else None
    return resolved_at is not None and timezone.now() - resolved_at > REOPENED_AFTER


def _wanted(failure: Failure) -> tuple[str, str]:
    return failure.needed, failure.urgency


def _said(verdict: triage.LineVerdict) -> dict[str, Any]:
    return {
        "fault_class": FaultClass(verdict.fault),
        "code": verdict.code,
        "summary": verdict.summary,
        "needed": Action(verdict.action),
        "urgency": Urgency(verdict.urgency),
        "rule": verdict.rule,
    }


def _say(failure: Failure, verdict: triage.LineVerdict) -> None:
    """Let the failure be what decides on it, unless it is."""
    said = _said(verdict)
    if any(getattr(failure, name) != value for name, value in said.items()):
        restate_failure(failure, **said)


def _only_repeats(signal: Signal, node: Node) -> bool:
    """Whether it is counted with a failure of before; not if it came again after a repair."""
    failure = signal.failures.order_by("-observed_at").first()
    back = _back_since(node)
    again = signal.repeated_at is not None and signal.repeated_at >= back
    if failure is None or (again and failure.observed_at < back):
        return False
    repeat_failure(failure, signal)
    return True


def _act_on_failure(
    signal: Signal,
    node: Node,
    placement: Placement | None,
    failure: Failure,
    verdict: triage.LineVerdict,
) -> Incident | None:
    """Open the incident, and ask for the runs that mend it. Returns it, if there is one."""
    can_examine = failure.gpu_id is not None and node.can_examine
    for_people = not verdict.replace_card and triage.is_for_people(
        verdict.action, verdict.fault, can_examine=can_examine
    )
    incident = _incident_of_failure(signal, node, placement, verdict, for_people)
    if incident is None:
        return None
    title, sentence = _words_of_cause(failure, node, verdict)
    incidents.set_cause(incident.pk, title, sentence, failure)
    incidents.open_breaker_on_burst(node.cluster_id, verdict.code)
    shared = incidents.share_cause(node, failure)
    if shared is not None and incident.subject == f"node/{node.pk}":
        incident = shared
    repair = partial(
        incidents.repair_node,
        SYSTEM,
        node.pk,
        incident,
        sentence,
        gpu_uuid=failure.gpu_id or "",
        code=verdict.code,
        lost_placement=placement.pk if placement else "",
    )
    if verdict.reset_when_idle:
        fleet.set_reset_pending(SYSTEM, node.pk, sentence)
        repair(action=Action.RESET_GPU, urgency=Urgency.IDLE)
    elif verdict.action in REPAIRS and not for_people:
        repair(action=Action(verdict.action), urgency=Urgency(verdict.urgency))
    return incident


def _name_incidents(failure: Failure, node: Node, verdict: triage.LineVerdict) -> None:
    """A later line may name better what an incident is called by."""
    named_otherwise = failure.incidents.filter(state__in=INCIDENT_UNRESOLVED).exclude(
        Q(code=verdict.code) | Q(subject__startswith="rack/") | Q(subject__startswith="switch/")
    )
    for incident in named_otherwise:
        title, sentence = _words_of_cause(failure, node, verdict)
        incidents.set_cause(incident.pk, title, sentence, failure)


def _words_of_cause(failure: Failure, node: Node, verdict: triage.LineVerdict) -> tuple[str, str]:
    """The incident's title, and its cause in a sentence."""
    where = f"card {failure.gpu.index} of {node.name}" if failure.gpu else node.name
    sentence = f"{where}: {verdict.summary[0].upper()}{verdict.summary[1:]}."
    return f"{verdict.code} on {where}", sentence


def _incident_of_failure(
    signal: Signal,
    node: Node,
    placement: Placement | None,
    verdict: triage.LineVerdict,
    for_people: bool,
) -> Incident | None:
    """The incident of the replica that the node holds, or one about the node; None: no incident.

    A fault of a program on a node that holds none of ours is nobody's incident here.
    """
    harmless = verdict.urgency == "idle"  # the replica that the node holds trains on
    in_use = placement is not None and placement.replica.job.state in JOB_ACTIVE
    if placement is not None and in_use and not for_people and not harmless:
        if verdict.urgency == "next_checkpoint":
            # Nothing is lost yet: its replica is brought back once its node is emptied.
            incident = incidents.open_for_replica(placement, signal.observed_at, Severity.MINOR)
            _tell_signal(incident, signal)
            return incident
        incident = _open_for_replica(signal, placement)
        incidents.raise_severity(incident.pk, Severity.MAJOR)
        return incident
    if verdict.action == "restart_app":
        return None
    incident = incidents.open_or_merge(
        f"node/{node.pk}",
        cluster_id=node.cluster_id,
        title=f"{verdict.code} on {node.name}",
        severity=Severity.MINOR,
        occurred_at=signal.observed_at,
        node_id=node.pk,
    )
    _tell_signal(incident, signal)
    return incident


def _burst(
    node: Node, card: Gpu | None, signal: Signal, verdict: triage.LineVerdict
) -> list[Failure]:
    """The failures of this card that are one story with the signal: seen within BURST_GAP of it, or
    of the same code, in an incident that is not resolved, and lasting until it is repaired.

    By the moments at which things were observed, so that a late delivery changes nothing. What came
    before the node was taken out and returned is another story.
    """
    seen = signal.repeated_at or signal.observed_at
    near = Q(last_seen_at__gte=seen - BURST_GAP, observed_at__lte=seen + BURST_GAP)
    lasting = Q(
        incidents__state__in=INCIDENT_UNRESOLVED,
        needed__in=sorted(triage.LASTING),
        code=verdict.code,
    )
    found = Failure.objects.filter(
        near | lasting, node=node, gpu=card, last_seen_at__gte=_back_since(node)
    )
    if card is None:  # else all ports, switches and losses of a node would be one fault
        found = found.filter(code=verdict.code)
    return list(found.distinct().order_by("observed_at", "pk"))


def _covers(known: Failure | triage.LineVerdict, other: Failure | triage.LineVerdict) -> bool:
    """Whether what the first calls for does what the other needs, and as soon.

    A driver repeats itself, and one fault speaks through several codes. What only a person can do
    covers nothing that automation has to do.
    """
    needed, wanted = _needed(known), _needed(other)
    if Urgency(other.urgency).before(known.urgency):
        return False
    if needed == wanted:
        return True
    by_machine = not {needed, wanted} & triage.FOR_PEOPLE
    return by_machine and triage.stronger(needed, wanted) == needed


def _needed(of: Failure | triage.LineVerdict) -> str:
    return str(of.needed) if isinstance(of, Failure) else of.action


def _back_since(node: Node) -> datetime:
    """When the node was last repaired; its enrolment if it never was."""
    repair = node.repairs.order_by("-at").first()
    return repair.at if repair else node.enrolled_at


def _live_placement(node: Node) -> Placement | None:
    """What the node holds of a replica. A process that only stands by is no loss to anybody."""
    return (
        Placement.objects.select_related("replica__job", "node")
        .filter(node=node, standby=False)
        .exclude(state=PlacementState.ENDED)
        .first()
    )


def _incident_of_the_replaced(node: Node) -> Incident | None:
    """The incident of the replica that this node held until a warm spare took its place, while its
    cause is being looked for."""
    replaced = Placement.objects.filter(node=node, successors__warm=True)
    last = replaced.select_related("replica").order_by("-ended_at").first()
    if last is None:
        return None
    looking = PlaybookRun.objects.filter(
        playbook="replica-lost", context__lost_placement=last.pk, state__in=sorted(RUN_UNFINISHED)
    ).first()
    found = looking is not None and "node_fit" in looking.context
    return looking.incident if looking is not None and not found else None


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
    incident = _open_for_replica(signal, placement)
    if _is_unasked_end_of_rank(signal):
        incidents.raise_severity(incident.pk, Severity.MAJOR)


def _ended_warm_spare(signal: Signal) -> Placement | None:
    """The warm spare that stood by still when its process ended: no loss to anybody."""
    spares = Placement.objects.filter(pk=signal.placement_id, standby=True, warm=True)
    return spares.first() if signal.kind == SignalKind.PROCESS_EXITED else None


def _ended_while_stopping(signal: Signal) -> Placement | None:
    """The process, of a job that was told to end, that has ended without a word of its own."""
    if signal.kind != SignalKind.PROCESS_EXITED:
        return None
    # Those of one job take turns: the last one to leave ends it.
    stopping = Job.objects.select_for_update(no_key=True).filter(
        state=JobState.STOPPING, pk=signal.job_id
    )
    left = Placement.objects.filter(pk=signal.placement_id, replica__job__in=list(stopping))
    return left.exclude(state=PlacementState.ENDED).first()


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
    if signal.kind == SignalKind.PROCESS_EXITED:
        jobs.vacate(SYSTEM, placement)
    replica = placement.replica
    open_one = incidents.incident_of_replica(replica.job_id, replica.index)
    if open_one is not None:
        _tell_signal(open_one, signal)
        return
    own = replica.placements.filter(IN_ITS_PLACE)
    alive = own.exclude(state=PlacementState.ENDED)
    lost_in_its_place = (
        signal.kind == SignalKind.PEER_LOST
        and placement.moved_from_id is not None
        and replica.job.state == JobState.RUNNING
    )
    if lost_in_its_place and not alive.exists():
        _open_for_replica(signal, placement)


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


def _open_for_replica(signal: Signal, placement: Placement) -> Incident:
    incident = incidents.bring_back(placement, signal.observed_at)
    _tell_signal(incident, signal)
    _tell_what_went_before(incident, signal)
    return incident


def _tell_what_went_before(incident: Incident, signal: Signal) -> None:
    """Lines that called for nothing by themselves, such as a driver that tidies up, belong to the
    story of the loss that they were told with."""
    since = signal.observed_at - NOTED_BEFORE
    lines = Signal.objects.filter(
        node=signal.node_id, kind=SignalKind.KERNEL_LINE, failures=None, raw__contains="Xid"
    )
    for line in lines.filter(observed_at__range=(since, signal.observed_at))[:NOTES]:
        _tell_signal(incident, line)


def _node_went_silent(signal: Signal) -> None:
    """A lease ran out: the incident of the replica that the node holds, or one about the node."""
    node = signal.node
    if node is None:
        raise ValueError("a lease belongs to a node")
    if node.lease.reachable:
        _tell_node_incident(signal)  # it has been heard again since
        return
    silence = limits.silence_around(node)
    if silence is not None:
        _site_went_silent(signal, node, silence)
        return
    placement = _live_placement(node)
    _coordinators_went_with(node, signal, Job.objects.filter(coordinator_node=node))
    if placement is not None and placement.replica.job.state in JOB_ACTIVE:
        _open_for_replica(signal, placement)
        return
    if node.state not in IN_SERVICE or node.hold_reason:
        _tell_node_incident(signal)  # it is in somebody's hands already
        return
    replaced = _incident_of_the_replaced(node)
    if replaced is not None:
        _tell_signal(replaced, signal)  # it is looked into already, for the replica that it held
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
        needed=Action.POWER_CYCLE,
        rule="lease-lost",
        signals=[signal],
        observed_at=signal.observed_at,
        node_id=node.pk,
    )
    incidents.set_cause(
        incident.pk, incident.title, "The node stopped beating; it held no replica.", failure
    )
    incidents.open_breaker_on_burst(node.cluster_id, failure.code)
    incidents.repair_node(SYSTEM, node.pk, incident, "it went silent", only_if_silent=True)


def _site_went_silent(signal: Signal, node: Node, silence: limits.Silence) -> None:
    """Many nodes went quiet together: one incident of what they share, and nothing done to them."""
    incident = incidents.open_or_merge(
        f"silence/{node.cluster_id}",
        cluster_id=node.cluster_id,
        title=f"{silence}",
        severity=Severity.CRITICAL,
        occurred_at=node.lease.last_beat_at,
    )
    _tell_signal(incident, signal)
    failure = incident.failures.first() or record_failure(
        fault_class=FaultClass.FABRIC,
        code="site-silent",
        summary=f"{silence}",
        needed=Action.UNDECODABLE,
        rule="correlated-silence",
        signals=[signal],
        observed_at=signal.observed_at,
    )
    repeat_failure(failure, signal)
    incidents.set_cause(
        incident.pk,
        f"{silence}",
        f"{silence}, within {settings.SILENCE_WINDOW_S:g} s. Something that they share failed: "
        "their own state is unknown, and nothing disruptive is done to them.",
        failure,
    )
    incidents.request_run(
        SYSTEM,
        "site-silent",
        node.cluster_id,
        cluster_id=node.cluster_id,
        title=f"Watch {node.cluster.name} until it is heard again",
        incident=incident,
    )


def _coordinators_went_with(node: Node, signal: Signal, led: QuerySet[Job]) -> None:
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
        _tell_signal(incident, signal)
        incidents.restore_coordinator(SYSTEM, job, incident)


def _tell_node_incident(signal: Signal) -> None:
    """What a node says while an incident about it is open belongs to that incident's story."""
    node: Node | None = signal.node
    if node is None or signal.kind == SignalKind.COORDINATOR_RESTARTED:
        return
    about = Q(node=node) | Q(runs__node=node) | Q(failures__node=node)
    for incident in Incident.objects.filter(about, state__in=INCIDENT_UNRESOLVED).distinct():
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
