"""Which failure a judged signal speaks of: a new one, or the one whose story it is a part of.

Told by when things were observed, so that a late delivery changes nothing; then acted on.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q

from controlplane import doorbell
from controlplane.fleet.choices import IN_SERVICE
from controlplane.fleet.models import Gpu, Node
from controlplane.health.actions import (
    join_failures,
    record_failure,
    repeat_failure,
    restate_failure,
)
from controlplane.health.choices import Action, FaultClass, SignalKind, Urgency
from controlplane.health.models import Failure, Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents.actions.runs import BEING_DRAINED
from controlplane.incidents.choices import INCIDENT_UNRESOLVED
from controlplane.incidents.models import Incident
from controlplane.jobs.models import Placement
from workers import triage
from workers.intake.lost_replicas import live_placement
from workers.intake.remedies import act_on_failure, name_incidents
from workers.intake.timeline import add_to_node_incident
from workers.signal_triage import deciding_signals, verdict_of

#: A fault that shows again within this time of its last line is the same one.
BURST_GAP = timedelta(minutes=3)

#: A fault that is still there this long after its incident was closed is opened again.
REOPENED_AFTER = timedelta(hours=1)


def take_up(signal: Signal, node: Node, card: Gpu | None, verdict: triage.LineVerdict) -> None:
    """Make a failure of what was judged, or join the one that it is a part of, and act on it."""
    placement = live_placement(node)
    failure, before = _failure_with(signal, node, card, placement, verdict)
    deciding = verdict
    if (verdict.code, verdict.action, verdict.urgency) != (failure.code, *_wanted(failure)):
        deciding = _deciding(failure) or verdict
        if node.state not in BEING_DRAINED:  # else it is not acted on, unless that is called off
            _say(failure, deciding)
    acted_on = before == (deciding.action, deciding.urgency) and _in_hand(failure, signal)
    if acted_on or node.state not in IN_SERVICE:  # else it is in somebody's hands already
        name_incidents(failure, node, deciding)
        add_to_node_incident(signal)
        return
    minor = list(Incident.objects.filter(failures=failure, state__in=INCIDENT_UNRESOLVED))
    incident = act_on_failure(signal, node, placement, failure, deciding)
    if incident is not None:
        incidents.merge_into(incident, [one for one in minor if one.subject == f"node/{node.pk}"])


def judge_again(node: Node) -> None:
    """Have triage take up, as the node is in service again, what it told while it was out and that
    can wait: nobody has it in hand, and it was not answered by the repair or a boot since. A card
    may be silent while it is reset; one that is silent still is told of again."""
    left = Failure.objects.filter(
        node=node, urgency=Urgency.IDLE, incidents=None, last_seen_at__gte=_back_since(node)
    )
    told = Signal.objects.filter(failures__in=left, boot_id=node.boot_id)
    once = told.exclude(kind=SignalKind.GPU_UNREADABLE)
    once.filter(triaged_at__isnull=False).update(triaged_at=None)
    doorbell.ring_after_commit()


def only_repeats(signal: Signal, node: Node, verdict: triage.LineVerdict) -> bool:
    """Whether it is counted with a failure of before; not if it came again after a repair, calls
    for more by now, or goes on while nobody has it in hand."""
    failure = signal.failures.order_by("-observed_at").first()
    back = _back_since(node)
    again = signal.repeated_at is not None and signal.repeated_at >= back
    if failure is None or (again and failure.observed_at < back):
        return False
    if again and not any(_covers(one, verdict) for one in signal.failures.all()):
        return False
    if again and node.state in IN_SERVICE and not _in_hand(failure, signal):
        return False
    repeat_failure(failure, signal)
    return True


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
    silent = (other.code, other.urgency) == (triage.SILENT, Urgency.IDLE)
    if silent and triage.explains_silence(needed, str(known.urgency)):
        return True
    by_machine = not {needed, wanted} & triage.FOR_PEOPLE
    return by_machine and triage.stronger(needed, wanted) == needed


def _needed(of: Failure | triage.LineVerdict) -> str:
    return str(of.needed) if isinstance(of, Failure) else of.action


def _back_since(node: Node) -> datetime:
    """When the node was last repaired; its enrolment if it never was."""
    repair = node.repairs.order_by("-at").first()
    return repair.at if repair else node.enrolled_at


def _deciding(failure: Failure) -> triage.LineVerdict | None:
    """Of all that was said of one fault the gravest word, and of equally grave ones the first:
    whatever came first, and in whatever order it was delivered."""
    verdicts = [verdict_of(one) for one in deciding_signals(failure)]
    counting = [one for one in verdicts if one is not None and not triage.is_note(one)]
    return next(iter(triage.gravest(counting)), None)


def _in_hand(failure: Failure, signal: Signal) -> bool:
    """Whether somebody has been told of it, or nobody needs to be. Not where its node was out of
    service then, nor where it lasts until it is repaired, every incident of it was closed a while
    ago, and here it is again. Not at once: whoever closes one may be at work on it."""
    if failure.incidents.filter(state__in=INCIDENT_UNRESOLVED).exists():
        return True
    closed = failure.incidents.order_by("-resolved_at").first()
    if closed is None:  # what a program does wrong where none of ours runs is nobody's
        return failure.needed == Action.RESTART_APP
    resolved_at = closed.resolved_at
    seen_at = signal.repeated_at or signal.observed_at  # it may be told much later
    lately = resolved_at is None or seen_at - resolved_at <= REOPENED_AFTER
    return lately or failure.needed not in triage.LASTING


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
