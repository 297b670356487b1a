"""What a caller may see of incidents, and the facts that the on-call page is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.models import AnonymousUser
from django.db.models import (
    Case,
    Exists,
    IntegerField,
    OuterRef,
    Prefetch,
    Q,
    QuerySet,
    Value,
    When,
)
from django.http import Http404

from controlplane.accounts.ids import person_id
from controlplane.accounts.models import User
from controlplane.accounts.selectors import username, usernames
from controlplane.fleet.choices import Rung
from controlplane.fleet.models import Cluster, Node
from controlplane.fleet.selectors import clusters_for
from controlplane.health.choices import Action
from controlplane.health.models import Failure, Signal
from controlplane.incidents import pricing
from controlplane.incidents.choices import (
    INCIDENT_UNRESOLVED,
    RUN_ACTIVE,
    RUN_STOPPED,
    RUN_UNFINISHED,
    STEP_FINISHED,
    ApprovalState,
    IncidentState,
    RunState,
    Severity,
    StepState,
)
from controlplane.incidents.models import (
    Approval,
    Breaker,
    Incident,
    PlaybookRun,
    PlaybookStep,
    RmaCase,
    TimelineEntry,
)
from controlplane.incidents.plans import NODE_ORDERS
from controlplane.jobs.choices import JOB_ACTIVE, PlacementState
from controlplane.jobs.models import IN_ITS_PLACE, Job, Placement
from controlplane.jobs.selectors import placeable, placeable_nodes
from controlplane.paging import Top
from workers import triage
from workers.losses import lives

#: The playbook whose runs say which replicas an incident is about.
LOSS = "replica-lost"
_IN_VAIN = {RunState.CANCELLED: "was cancelled", RunState.FAILED: "failed"}
#: How far back a list may reach, by the word in the address, in seconds.
WINDOWS: dict[str, tuple[str, float]] = {
    "1h": ("1 h", 3600.0),
    "1d": ("1 d", 86_400.0),
    "7d": ("7 d", 7 * 86_400.0),
    "30d": ("30 d", 30 * 86_400.0),
}
#: What a failure may call for that only a person on the spot can do.
HANDS = triage.FOR_PEOPLE - {"contact_vendor"}
#: So many of an incident's failures are shown, the first ones, and so many of its lines.
FAILURES_SHOWN = 100
LINES_SHOWN = 500
#: So many of a failure's signals are shown, the first ones: each repeat is one more of them.
SIGNALS_SHOWN = 5

_WAITING = ApprovalState.WAITING
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
    """Those first that wait for a person; among equals the gravest, then the oldest.

    Each says whether it `signs`, wanting a plan of its runs signed, and whether it `waits`, wanting
    something else of a person: with all runs but those to sign, `ask_of` tells the same.
    """
    unresolved = incidents_for(user).filter(state__in=INCIDENT_UNRESOLVED)
    runs = PlaybookRun.objects.filter(incident=OuterRef("pk"))
    stopped = Exists(_unsigned(runs).filter(state__in=RUN_STOPPED))
    at_work = Exists(runs.filter(state__in=RUN_ACTIVE))
    signs = Exists(runs.filter(approvals__state=_WAITING))
    return (
        unresolved.annotate(signs=signs, waits=Q(stopped) | ~(Q(at_work) | Q(signs)))
        .prefetch_related("runs__steps", "runs__approvals")
        .order_by("-waits", _GRAVITY, "occurred_at")
    )


def _unsigned(runs: QuerySet[PlaybookRun]) -> QuerySet[PlaybookRun]:
    """Without those whose plan waits for a signature: that is what they want of a person."""
    waiting = Approval.objects.filter(run=OuterRef("pk"), state=_WAITING)
    return runs.exclude(Exists(waiting))


def resolved_for(user: User | AnonymousUser, *, limit: int) -> QuerySet[Incident]:
    """The incidents of the user's clusters that were resolved last, newest first."""
    done = incidents_for(user).filter(resolved_at__isnull=False)
    return done.order_by("-resolved_at")[:limit]


def runs_needing_operator_for(user: User | AnonymousUser) -> QuerySet[PlaybookRun]:
    """Runs that wait for a person and that no unresolved incident tells, the longest wait first."""
    runs = PlaybookRun.objects.filter(cluster__in=clusters_for(user), state__in=RUN_STOPPED)
    return (
        _unsigned(runs)
        .exclude(incident__state__in=INCIDENT_UNRESOLVED)
        .select_related("cluster", "job", "node", "incident")
        .order_by("created_at")
    )


def runs_for(user: User | AnonymousUser) -> QuerySet[PlaybookRun]:
    """Runs the caller may see, newest first."""
    return (
        PlaybookRun.objects.filter(cluster__in=clusters_for(user))
        .select_related("cluster", "job", "node", "incident")
        .prefetch_related("steps", "approvals")
        .order_by("-id")
    )


def run_for(user: User | AnonymousUser, run_id: str) -> PlaybookRun:
    """Raises Http404 if there is none, or none the caller may see."""
    run = runs_for(user).filter(pk=run_id).first()
    if run is None:
        raise Http404("no such run")
    return run


def approval_for(user: User | AnonymousUser, approval_id: str) -> Approval:
    """Raises Http404 if there is none, or none the caller may see."""
    found = Approval.objects.filter(pk=approval_id, cluster__in=clusters_for(user))
    approval = found.select_related("run").first()
    if approval is None:
        raise Http404("no such approval")
    return approval


def requester_of(run: PlaybookRun) -> str:
    """The name of the person who asked for a run; empty: automation did."""
    return username(run.requested_by)


def decisions_for(user: User | AnonymousUser, *, limit: int) -> QuerySet[PlaybookStep]:
    """What automation last did or decided, newest first."""
    return (
        PlaybookStep.objects.filter(
            run__cluster__in=clusters_for(user),
            state__in=[*STEP_FINISHED, StepState.FAILED],
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
class RequiredAction:
    """What the incident wants from a person: nothing, or the run that waits for one."""

    kind: str  # "nothing", "watch", "sign", "decide", "resume", "bring-back", "look" or "close"
    text: str
    run: PlaybookRun | None = None

    @property
    def waits(self) -> bool:
        """Whether it waits for a person."""
        return self.kind in ("sign", "decide", "resume", "bring-back", "look")


@dataclass(frozen=True)
class Part:
    """A share of what an incident cost."""

    label: str
    gpu_seconds: float
    money: float


@dataclass(frozen=True)
class Impact:
    """What the fault cost: the job its time, the fleet its GPU-seconds."""

    longest_gap_s: float | None
    interruptions: int
    parts: list[Part]
    money: float | None


def waits_for_hands(incident: Incident) -> bool:
    """Whether what is left of an incident no run mends: a person closes it. Of an incident of a job
    only a card that is to be examined: the rest is its nodes'."""
    of_nodes = incident.subject.startswith(("node/", "rack/", "switch/"))
    left = incident.failures.filter(needed__in=sorted(HANDS))
    if not of_nodes:
        left = left.filter(needed=Action.FIELD_DIAGNOSTIC).exclude(gpu=None)
    return any(not _was_examined(failure) for failure in left)


def latest_loss_runs(runs: Iterable[PlaybookRun]) -> list[PlaybookRun]:
    """Of each replica that an incident with these `runs` is about the one that was to bring it
    back: of a replica that was lost twice the last one counts."""
    losses = sorted((run for run in runs if run.playbook == LOSS), key=lambda run: run.created_at)
    return list({loss.subject: loss for loss in losses}.values())


def unrestored_losses(runs: Iterable[PlaybookRun]) -> list[PlaybookRun]:
    """Of these what came to nothing though the job goes on and the replica does not train, by
    whoever's doing."""
    return [loss for loss in latest_loss_runs(runs) if loss.state in _IN_VAIN and not _trains(loss)]


def restartable_losses(runs: Iterable[PlaybookRun]) -> list[PlaybookRun]:
    """Of these what nobody sees to: nothing of the replica is there or is being started."""
    return [loss for loss in unrestored_losses(runs) if not _is_being_restored(loss)]


def _trains(loss: PlaybookRun) -> bool:
    """Whether the replica does, or its job needs it no more."""
    job = loss.job
    if job is None or job.state not in JOB_ACTIVE:
        return True
    trained = _alive(loss).filter(joined_at__isnull=False)
    return sum(map(lives, trained)) >= job.nodes_per_replica


def _is_being_restored(loss: PlaybookRun) -> bool:
    nodes = loss.job.nodes_per_replica if loss.job else 1
    starts = PlaybookRun.objects.filter(job=loss.job_id, playbook="start-job")
    at_work = starts.filter(state__in=RUN_UNFINISHED).exists()
    return at_work or sum(map(lives, _alive(loss))) >= nodes


def _alive(loss: PlaybookRun) -> QuerySet[Placement]:
    own = Placement.objects.filter(
        IN_ITS_PLACE, replica__job=loss.job_id, replica__index=loss.context.get("replica")
    )
    alive = own.exclude(state=PlacementState.ENDED)
    return alive.select_related("replica", "node__lease")


def _was_examined(failure: Failure) -> bool:
    """Whether the field diagnostic that a card called for came to a verdict since, or it is on its
    way back."""
    if failure.needed != Action.FIELD_DIAGNOSTIC or failure.gpu is None:
        return False
    since = failure.gpu.repairs.filter(at__gte=failure.observed_at)
    return since.filter(rung__in=(Rung.FIELD_DIAGNOSTIC, Rung.RMA)).exists()


def runs_of(incident: Incident) -> list[PlaybookRun]:
    """The incident's runs with all that its page shows of them."""
    return list(incident.runs.select_related("job", "node").prefetch_related("steps", "approvals"))


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


def ask_of(incident: Incident, runs: Sequence[PlaybookRun]) -> RequiredAction:
    """What the on-call engineer should do now, in one sentence."""
    for run in runs:
        if waiting_approval(run) is not None:
            return RequiredAction("sign", f"Approve or reject the plan of “{run.title}”.", run)
        if run.state == RunState.NEEDS_OPERATOR:
            reason = run.state_reason or "it stopped, and does not say why."
            return RequiredAction("decide", f"“{run.title}” waits for a person: {reason}", run)
    for run in runs:
        if run.state == RunState.PAUSED:
            why = f" ({run.state_reason})" if run.state_reason else ""
            text = f"“{run.title}” was paused by a person{why}. Resume or cancel it."
            return RequiredAction("resume", text, run)
    if incident.state == IncidentState.CLOSED:
        return RequiredAction("nothing", "Nothing. It is closed.")
    if not incident.unresolved:
        return RequiredAction(
            "close", "Nothing urgent. Complete the post-mortem below, then close it."
        )
    for run in runs:
        if run.state in RUN_ACTIVE:
            return RequiredAction("watch", f"Nothing now. {_doing(run)}", run)
    if missed := unrestored_losses(runs):
        why = "; ".join(
            f"“{run.title}” {_IN_VAIN[RunState(run.state)]} ({run.state_reason})" for run in missed
        )
        return RequiredAction(
            "bring-back", f"The lost replica has not been restored: {why}.", missed[0]
        )
    return RequiredAction(
        "look", "No playbook is at work on this. Look at the evidence and act by hand."
    )


def waiting_approval(run: PlaybookRun) -> Approval | None:
    """The plan that a run wants signed, if it waits for that."""
    waiting = [one for one in run.approvals.all() if one.state == ApprovalState.WAITING]
    return waiting[-1] if waiting else None


def _doing(run: PlaybookRun) -> str:
    for number, step in enumerate(run.steps.all(), start=1):
        if step.state not in STEP_FINISHED:
            return f"The playbook is at step {number}: {step.title}."
    return "The playbook is about to finish."


def finished_steps_of(runs: Sequence[PlaybookRun]) -> list[PlaybookStep]:
    """The finished steps that have something to tell, in the order in which they finished."""
    told = [
        step
        for run in runs
        for step in run.steps.all()
        if step.outcome and step.finished_at and step.state == StepState.DONE
    ]
    return sorted(told, key=lambda step: (step.finished_at, step.position))


def impact_of(incident: Incident) -> Impact:
    """The gaps in the job's commits, and what the incident cost by its parts."""
    cluster = incident.cluster
    parts = [
        Part(one["part"], one["gpu_seconds"], pricing.money(cluster, one["gpu_seconds"]))
        for one in incident.impact
    ]
    lost = incident.gpu_seconds_lost
    money = None if lost is None else pricing.money(cluster, lost)
    gaps = _gaps_of(incident)
    return Impact(max(gaps, default=None), len(gaps), parts, money)


def _gaps_of(incident: Incident) -> list[float]:
    """Seconds of each gap between the fault and the replica's return."""
    if incident.job is None:
        return []
    interruptions = incident.job.interruptions.filter(
        committed_at__gte=incident.occurred_at - timedelta(seconds=5)
    )
    if end := incident.restored_at or incident.resolved_at:
        interruptions = interruptions.filter(started_at__lte=end + timedelta(seconds=5))
    return list(interruptions.values_list("gap_s", flat=True)[:1000])


def failures_of(incident: Incident) -> Top[Failure]:
    """What triage found behind the incident, the oldest, each with its `first_signals`."""
    failures = incident.failures.select_related("node", "gpu").defer("node__report")
    told = failures.prefetch_related(first_signals()).order_by("observed_at")
    return Top.of(told, FAILURES_SHOWN)


def first_signals() -> Prefetch[Any, Any, Any]:
    """Of failures, the signals that are shown of each, as `first_signals`."""
    shown = Signal.objects.order_by("observed_at", "pk")[:SIGNALS_SHOWN]
    return Prefetch("signals", shown, to_attr="first_signals")


@dataclass(frozen=True)
class TimelineLine:
    """A line of the timeline, with the name of the person whose words it holds, if any."""

    entry: TimelineEntry
    author: str

    @property
    def raw(self) -> str:
        """What was observed, verbatim."""
        return str(self.entry.data.get("raw") or "")

    @property
    def text(self) -> str:
        """The entry's words; empty where they only repeat what was observed."""
        return "" if self.raw.split() == self.entry.text.split() else self.entry.text


def timeline_of(incident: Incident) -> tuple[list[TimelineLine], int]:
    """The newest entries, oldest of them first; and how many there are."""
    top = Top.of(incident.timeline.order_by("-at", "-id"), LINES_SHOWN)
    entries = top.rows[::-1]
    said_by = [str(entry.data.get("by", "")) for entry in entries]
    names = usernames(said_by)
    people = [names[by] if person_id(by) and names[by] != by else "" for by in said_by]
    return [TimelineLine(entry, by) for entry, by in zip(entries, people, strict=True)], top.total


# --- Lists of the API -----------------------------------------------------------------------------


def failures_for(user: User | AnonymousUser) -> QuerySet[Failure]:
    """The failures in the caller's clusters."""
    return failures_in(clusters_for(user))


def failures_in(clusters: Iterable[Cluster]) -> QuerySet[Failure]:
    """The failures in these clusters."""
    return Failure.objects.filter(failed_in(clusters)).select_related("node")


def failed_in(clusters: Iterable[Cluster]) -> Q:
    """Of a failure: that it is of a node, or of a job or site where no node is blamed, in these
    clusters."""
    jobs = Job.objects.filter(cluster__in=clusters).values("pk")
    shared = Incident.objects.filter(cluster__in=clusters).values("failures")
    return (
        Q(node__cluster__in=clusters) | Q(node=None, job_id__in=jobs) | Q(node=None, pk__in=shared)
    )


def steps_for(user: User | AnonymousUser) -> QuerySet[PlaybookStep]:
    """The steps of all runs in the user's clusters."""
    return PlaybookStep.objects.filter(run__cluster__in=clusters_for(user)).select_related("run")


def approvals_for(user: User | AnonymousUser) -> QuerySet[Approval]:
    """All requests for approval in the user's clusters."""
    return Approval.objects.filter(cluster__in=clusters_for(user)).select_related("run")


def breakers_for(user: User | AnonymousUser) -> QuerySet[Breaker]:
    """All breakers of the user's clusters, open and closed."""
    return Breaker.objects.filter(cluster__in=clusters_for(user))


def rma_cases_for(user: User | AnonymousUser) -> QuerySet[RmaCase]:
    """All RMA cases of the user's clusters."""
    return RmaCase.objects.filter(cluster__in=clusters_for(user)).select_related("gpu", "node")


def waits_for_a_worker(*, since: datetime) -> bool:
    """Whether a signal, a run or a step waits for a worker since before this moment."""
    steps = PlaybookStep.objects.filter(
        run__state__in=sorted(RUN_ACTIVE),
        state__in=[StepState.READY, StepState.WAITING],
        wake_at__lt=since,
    )
    runs = PlaybookRun.objects.filter(state=RunState.PENDING, created_at__lt=since)
    # One that was observed again is to be triaged again.
    signals = Signal.objects.filter(triaged_at=None, recorded_at__lt=since).exclude(
        repeated_at__gte=since
    )
    return steps.exists() or runs.exists() or signals.exists()


#: Playbooks that take their node out of service, or are about to: a diagnosis leaves it at work.
TAKING_OUT = {"repair-node", *NODE_ORDERS.values()} - {NODE_ORDERS["diagnose"]}


def usable_nodes(cluster_id: str, job_id: str | None = None) -> QuerySet[Node]:
    """The nodes that may take work at this moment, spares among them; see `placeable_nodes`.

    One that a run is about to take out is none of them.
    """
    return placeable_nodes(cluster_id, job_id).filter(_not_being_taken_out())


def usable() -> Q:
    """Of a node: that it is one of the `usable_nodes` of its cluster."""
    return placeable() & _not_being_taken_out()


def _not_being_taken_out() -> Q:
    """Of a node: that no run is about to take it out."""
    leaving = PlaybookRun.objects.filter(
        node__isnull=False, playbook__in=sorted(TAKING_OUT), state__in=sorted(RUN_UNFINISHED)
    )
    return ~Q(pk__in=leaving.values("node"))
