"""What a caller may see of incidents, and the facts that the on-call page is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.contrib.auth.models import AnonymousUser
from django.db.models import Case, IntegerField, QuerySet, Value, When
from django.http import Http404

from controlplane.accounts.models import User
from controlplane.fleet.selectors import clusters_for
from controlplane.incidents.choices import (
    INCIDENT_UNRESOLVED,
    RUN_ACTIVE,
    STEP_FINISHED,
    RunState,
    Severity,
    StepState,
)
from controlplane.incidents.models import Incident, PlaybookRun, PlaybookStep, TimelineEntry

_GRAVITY = Case(
    *(When(severity=severity, then=Value(rank)) for rank, severity in enumerate(Severity)),
    output_field=IntegerField(),
)


def incidents_for(user: User | AnonymousUser) -> QuerySet[Incident]:
    """Incidents the caller may see, newest first."""
    return (
        Incident.objects.filter(cluster__in=clusters_for(user))
        .select_related("cluster", "job", "node", "owner")
        .order_by("-id")
    )


def incident_for(user: User | AnonymousUser, incident_id: str) -> Incident:
    """Raises Http404 if there is none, or none the caller may see."""
    incident = incidents_for(user).filter(pk=incident_id).first()
    if incident is None:
        raise Http404("no such incident")
    return incident


def unresolved_for(user: User | AnonymousUser) -> QuerySet[Incident]:
    """The gravest first, then the oldest."""
    unresolved = incidents_for(user).filter(state__in=INCIDENT_UNRESOLVED)
    return unresolved.prefetch_related("runs__steps").order_by(_GRAVITY, "occurred_at")


def resolved_for(user: User | AnonymousUser, *, limit: int) -> QuerySet[Incident]:
    done = incidents_for(user).filter(resolved_at__isnull=False)
    return done.order_by("-resolved_at")[:limit]


def runs_needing_operator_for(user: User | AnonymousUser) -> QuerySet[PlaybookRun]:
    """Runs that wait for a person, the longest wait first."""
    return (
        PlaybookRun.objects.filter(cluster__in=clusters_for(user), state=RunState.NEEDS_OPERATOR)
        .select_related("cluster", "job", "node", "incident")
        .order_by("created_at")
    )


def decisions_for(user: User | AnonymousUser, *, limit: int) -> QuerySet[PlaybookStep]:
    """What automation last did or decided, newest first."""
    return (
        PlaybookStep.objects.filter(
            run__cluster__in=clusters_for(user),
            state__in=[*STEP_FINISHED, StepState.FAILED, StepState.NEEDS_OPERATOR],
            finished_at__isnull=False,
        )
        .exclude(outcome="")
        .select_related("run__incident", "run__job", "run__node")
        .order_by("-finished_at")[:limit]
    )


# --- The on-call page -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """A key time of an incident: how long after the fault, or None if it has not come yet."""

    key: str
    label: str
    at: datetime | None
    after_s: float | None


@dataclass(frozen=True)
class Ask:
    """What the incident wants from a person: nothing, or the run that waits for one."""

    kind: str  # "nothing", "watch", "decide" or "look"
    text: str
    run: PlaybookRun | None = None


@dataclass(frozen=True)
class Impact:
    """What the fault cost the job."""

    longest_gap_s: float | None
    interruptions: int


def runs_of(incident: Incident) -> list[PlaybookRun]:
    return list(incident.runs.select_related("job", "node").prefetch_related("steps"))


def moments_of(incident: Incident) -> list[Moment]:
    """The incident's key times in order, each as seconds since the fault."""
    times = [
        ("seen", "Fault seen", incident.occurred_at),
        ("opened", "Incident opened", incident.opened_at),
        ("resolved", "Resolved", incident.resolved_at),
    ]
    if incident.job_id:
        times[2:2] = [
            ("mitigated", "Survivors commit", incident.mitigated_at),
            ("restored", "Replica back", incident.restored_at),
        ]
    return [Moment(key, label, at, _seconds(incident, at)) for key, label, at in times]


def _seconds(incident: Incident, at: datetime | None) -> float | None:
    return None if at is None else (at - incident.occurred_at).total_seconds()


def ask_of(incident: Incident, runs: Sequence[PlaybookRun]) -> Ask:
    """What the on-call engineer should do now, in one sentence."""
    for run in runs:
        if run.state == RunState.NEEDS_OPERATOR:
            reason = run.state_reason or "The playbook stopped and waits for a person."
            return Ask("decide", reason, run)
    if not incident.unresolved:
        return Ask("nothing", "Nothing. The post-mortem below is yours to complete.")
    for run in runs:
        if run.state in RUN_ACTIVE:
            return Ask("watch", f"Nothing now. {_doing(run)}", run)
    return Ask("look", "No playbook is at work on this. Look at the evidence and act by hand.")


def _doing(run: PlaybookRun) -> str:
    for number, step in enumerate(run.steps.all(), start=1):
        if step.state not in STEP_FINISHED:
            return f"The playbook is at step {number}: {step.title}."
    return "The playbook is about to finish."


def deeds_of(runs: Sequence[PlaybookRun]) -> list[PlaybookStep]:
    """The finished steps that have something to tell, in the order in which they finished."""
    told = [
        step
        for run in runs
        for step in run.steps.all()
        if step.outcome and step.finished_at and step.state == StepState.DONE
    ]
    return sorted(told, key=lambda step: (step.finished_at, step.position))


def impact_of(incident: Incident) -> Impact:
    """The gaps in the job's commits between the fault and the replica's return."""
    if incident.job is None:
        return Impact(None, 0)
    interruptions = incident.job.interruptions.filter(
        committed_at__gte=incident.occurred_at - timedelta(seconds=5)
    )
    if end := incident.restored_at or incident.resolved_at:
        interruptions = interruptions.filter(started_at__lte=end + timedelta(seconds=5))
    rows = list(interruptions.values_list("gap_s", flat=True)[:1000])
    return Impact(max(rows, default=None), len(rows))


@dataclass(frozen=True)
class Told:
    """A line of the timeline, with the name of the person whose words it holds, if any."""

    entry: TimelineEntry
    author: str


def timeline_of(incident: Incident, *, limit: int = 500) -> list[Told]:
    """The newest entries, oldest of them first."""
    entries = list(incident.timeline.order_by("-at", "-id")[:limit])[::-1]
    names = _usernames({str(entry.data.get("by", "")) for entry in entries})
    return [Told(entry, names.get(str(entry.data.get("by", "")), "")) for entry in entries]


def _usernames(ids: set[str]) -> dict[str, str]:
    """Names by id. An id that is no number belongs to no person."""
    people = User.objects.filter(pk__in=[int(one) for one in ids if one.isdigit()])
    return {str(pk): name for pk, name in people.values_list("pk", "username")}
