"""The only writers of incidents, their timeline, and the requests and verdicts around runs.

The engine alone moves a run's steps; what people do to a run goes through here.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q
from django.utils import timezone

from controlplane import doorbell
from controlplane.accounts.actions import audit
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.changes import change, touch
from controlplane.fleet.models import Node
from controlplane.health.models import Failure
from controlplane.incidents import postmortem
from controlplane.incidents.choices import (
    INCIDENT_UNRESOLVED,
    RUN_UNFINISHED,
    EntryKind,
    IncidentState,
    RunState,
    Severity,
    StepState,
)
from controlplane.incidents.models import (
    Incident,
    PlaybookRun,
    PlaybookStep,
    Reservation,
    TimelineEntry,
)
from controlplane.jobs import accounting
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Job, Placement

# --- incidents ------------------------------------------------------------------------------------


@change()
def open_or_merge(
    subject: str,
    *,
    cluster_id: str,
    title: str,
    severity: Severity,
    occurred_at: datetime,
    job_id: str | None = None,
    replica: int | None = None,
    node_id: str | None = None,
) -> Incident:
    """The unresolved incident about this subject, locked; a new one if there is none.

    Raises Conflict if it was resolved in this very moment: ask again.
    """
    fresh = Incident(
        cluster_id=cluster_id,
        subject=subject,
        title=title,
        severity=severity,
        occurred_at=occurred_at,
        job_id=job_id,
        replica=replica,
        node_id=node_id,
    )
    # The unique constraint is the turnstile: whoever comes second waits, then finds the first's.
    Incident.objects.bulk_create([fresh], ignore_conflicts=True)
    # Locked, so that it cannot be resolved while something is attached to it.
    incident = (
        Incident.objects.select_for_update(no_key=True, of=("self",))
        .filter(subject=subject, state__in=INCIDENT_UNRESOLVED)
        .first()
    )
    if incident is None:
        raise Conflict("the incident was resolved in this very moment")
    if incident.pk != fresh.pk:
        if occurred_at < incident.occurred_at:
            Incident.objects.filter(pk=incident.pk).update(occurred_at=occurred_at)
        return incident
    tell(incident, "opened", EntryKind.STATE, f"Incident opened: {title}")
    audit(
        SYSTEM,
        "incident.open",
        "incident",
        incident.pk,
        cluster_id=cluster_id,
        after={"title": title, "subject": subject},
    )
    touch(cluster_id)
    return incident


@change()
def tell(
    incident: Incident,
    key: str,
    kind: EntryKind,
    text: str,
    *,
    at: datetime | None = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Add a line to the timeline, once per key."""
    TimelineEntry.objects.get_or_create(
        incident=incident,
        key=key,
        defaults={"at": at or timezone.now(), "kind": kind, "text": text, "data": dict(data or {})},
    )
    touch(incident.cluster_id)


@change()
def set_cause(incident_id: str, title: str, cause: str, failure: Failure) -> None:
    """Write what was found to be the cause, in a sentence, with the failure behind it."""
    incident = Incident.objects.get(pk=incident_id)
    incident.failures.add(failure)
    Incident.objects.filter(pk=incident_id).update(
        title=title, cause=cause, node_id=incident.node_id or failure.node_id
    )
    _move(SYSTEM, incident, IncidentState.MITIGATING, frm={IncidentState.OPEN}, reason=cause)


@change()
def set_mitigated(incident_id: str, at: datetime, text: str) -> None:
    """Note when the job committed steps again."""
    incident = Incident.objects.get(pk=incident_id)
    if Incident.objects.filter(pk=incident_id, mitigated_at=None).update(mitigated_at=at):
        tell(incident, f"mitigated/{at.timestamp()}", EntryKind.JOB, text, at=at)


@change()
def set_restored(incident_id: str, at: datetime, text: str) -> None:
    """Note when the job had all its replicas again, and what the time between cost."""
    incident = Incident.objects.select_related("job").get(pk=incident_id)
    cost = None
    if incident.job is not None and incident.replica is not None:
        cost = accounting.gpu_seconds_lost(incident.job, incident.replica, incident.occurred_at, at)
    Incident.objects.filter(pk=incident_id).update(restored_at=at, gpu_seconds_lost=cost)
    tell(incident, f"restored/{at.timestamp()}", EntryKind.JOB, text, at=at)


@change()
def resolve(actor: Actor, incident_id: str, reason: str) -> bool:
    """Resolve an incident unless a run of it is still at work; drafts the post-mortem.

    Returns whether it is resolved now.
    """
    incident = Incident.objects.select_for_update(no_key=True).get(pk=incident_id)
    if incident.runs.filter(state__in=RUN_UNFINISHED).exists() or not incident.unresolved:
        return not incident.unresolved
    now = timezone.now()
    Incident.objects.filter(pk=incident_id).update(resolved_at=now)
    _move(actor, incident, IncidentState.RESOLVED, frm=INCIDENT_UNRESOLVED, reason=reason)
    tell(incident, f"resolved/{now.timestamp()}", EntryKind.STATE, f"Resolved: {reason}", at=now)
    incident.refresh_from_db()
    if not incident.postmortem:
        Incident.objects.filter(pk=incident_id).update(postmortem=postmortem.draft(incident))
    return True


@change()
def acknowledge(actor: Actor, incident_id: str) -> None:
    """Say that a person has seen it. Raises Conflict if it is resolved or acknowledged already."""
    incident = Incident.objects.select_for_update(no_key=True).get(pk=incident_id)
    if not incident.unresolved:
        raise Conflict("this incident is resolved; there is nothing to acknowledge")
    if incident.owner_id is not None:
        raise Conflict("somebody has acknowledged this incident already")
    if incident.state == IncidentState.OPEN:
        _move(actor, incident, IncidentState.ACKNOWLEDGED, frm={IncidentState.OPEN})
    Incident.objects.filter(pk=incident_id).update(owner_id=actor.id)
    tell(incident, f"acknowledged/{actor.id}", EntryKind.STATE, "Acknowledged")
    audit(
        actor,
        "incident.acknowledge",
        "incident",
        incident_id,
        cluster_id=incident.cluster_id,
        after={"owner": actor.id},
    )


@change()
def add_note(actor: Actor, incident_id: str, text: str) -> None:
    """Add a person's words to the timeline. Raises Conflict if there are none."""
    if not text.strip():
        raise Conflict("a note needs some words")
    incident = Incident.objects.get(pk=incident_id)
    now = timezone.now()
    tell(incident, f"note/{now.timestamp()}", EntryKind.NOTE, text.strip(), data={"by": actor.id})
    audit(
        actor,
        "incident.note",
        "incident",
        incident_id,
        cluster_id=incident.cluster_id,
        after={"text": text.strip()},
    )


@change()
def save_postmortem(actor: Actor, incident_id: str, text: str) -> None:
    """Replace the post-mortem's text."""
    incident = Incident.objects.get(pk=incident_id)
    Incident.objects.filter(pk=incident_id).update(postmortem=text)
    audit(
        actor,
        "incident.save_postmortem",
        "incident",
        incident_id,
        cluster_id=incident.cluster_id,
        before={"text": incident.postmortem},
        after={"text": text},
    )
    touch(incident.cluster_id)


# --- runs -----------------------------------------------------------------------------------------


@change()
def request_run(
    actor: Actor,
    playbook: str,
    subject: str,
    *,
    cluster_id: str,
    title: str,
    incident: Incident | None = None,
    job_id: str | None = None,
    node_id: str | None = None,
    context: dict[str, Any] | None = None,
) -> PlaybookRun:
    """Ask for a playbook to be run; the unfinished run about this subject, if there is one.

    The engine unfolds the run into steps from the playbook's present version. Raises Conflict if
    such a run finished in this very moment: ask again.
    """
    subject = f"{playbook}/{subject}"
    run = PlaybookRun(
        playbook=playbook,
        version=0,
        title=title,
        subject=subject,
        cluster_id=cluster_id,
        incident=incident,
        job_id=job_id,
        node_id=node_id,
        context=context or {},
        # Replaced by the playbook's own when the engine unfolds it; until then an hour is generous.
        deadline=timezone.now() + timedelta(hours=1),
    )
    PlaybookRun.objects.bulk_create([run], ignore_conflicts=True)
    there = (
        PlaybookRun.objects.select_for_update(no_key=True, of=("self",))
        .filter(subject=subject, state__in=RUN_UNFINISHED)
        .first()
    )
    if there is None:
        raise Conflict("the run about this finished in this very moment")
    if there.pk != run.pk:
        # It may be at its last look: let it look again.
        PlaybookStep.objects.filter(
            run=there, state__in=[StepState.WAITING, StepState.RUNNING]
        ).update(wake_at=timezone.now())
        return there
    audit(
        actor,
        "run.request",
        "run",
        run.pk,
        cluster_id=cluster_id,
        after={"playbook": playbook, "subject": subject},
    )
    touch(cluster_id)
    doorbell.ring_after_commit()
    return run


@change()
def retry_run(actor: Actor, run_id: str, reason: str) -> None:
    """Let a run that asked for a person try its step again. Raises Conflict if it did not ask."""
    run = PlaybookRun.objects.select_for_update(no_key=True).get(pk=run_id)
    if run.state not in (RunState.NEEDS_OPERATOR, RunState.PAUSED):
        raise Conflict(f"this run is {run.get_state_display().lower()}; it waits for nobody")
    now = timezone.now()
    PlaybookStep.objects.filter(run=run, state=StepState.NEEDS_OPERATOR).update(
        state=StepState.READY, wake_at=now, started_at=now, attempts=0
    )
    to = RunState.RUNNING if run.steps.exists() else RunState.PENDING
    _set_run(actor, run, to, reason or "tried again", "run.retry")
    # Another turn: what was refused before is asked for anew, and the rounds count from here.
    turn = {**run.context, "retry": int(run.context.get("retry", 0)) + 1, "round": 0}
    PlaybookRun.objects.filter(pk=run_id).update(deadline=now + timedelta(hours=1), context=turn)
    doorbell.ring_after_commit()


@change()
def cancel_run(actor: Actor, run_id: str, reason: str) -> None:
    """Stop a run where it stands; what is done stays done. Raises Conflict if it is finished.

    Orders that no node has finished are called back, and a placement that never came to life ends.
    """
    incident_id = PlaybookRun.objects.values_list("incident_id", flat=True).get(pk=run_id)
    if incident_id is not None:
        Incident.objects.select_for_update(no_key=True, of=("self",)).get(pk=incident_id)
    run = PlaybookRun.objects.select_for_update(no_key=True, of=("self",)).get(pk=run_id)
    if run.state not in RUN_UNFINISHED:
        raise Conflict(f"this run is {run.get_state_display().lower()} already")
    for step_id in run.steps.values_list("pk", flat=True):
        fleet.call_back_commands(step_id)
    stillborn = Placement.objects.filter(
        pk=run.context.get("placement", ""), state=PlacementState.STARTING
    )
    for placement in stillborn:
        jobs.end_placement(actor, placement.pk, f"cancelled: {reason}", free_node=True)
    PlaybookStep.objects.filter(run=run).exclude(
        state__in=[StepState.DONE, StepState.SKIPPED, StepState.FAILED]
    ).update(state=StepState.SKIPPED, lock_token="", lock_expires_at=None, wake_at=None)
    Reservation.objects.filter(run=run, released_at=None).update(released_at=timezone.now())
    _set_run(actor, run, RunState.CANCELLED, reason or "cancelled", "run.cancel")


@change()
def pause_overdue_runs(now: datetime) -> int:
    """Ask for a person wherever a run outlived its deadline. Returns how many."""
    overdue = PlaybookRun.objects.filter(state__in=RUN_UNFINISHED, deadline__lt=now).exclude(
        state__in=[RunState.NEEDS_OPERATOR, RunState.PAUSED]
    )
    runs = list(overdue.select_for_update(no_key=True, skip_locked=True, of=("self",)))
    for run in runs:
        PlaybookStep.objects.filter(
            Q(state__in=[StepState.READY, StepState.WAITING, StepState.RUNNING]), run=run
        ).update(state=StepState.NEEDS_OPERATOR, lock_token="", lock_expires_at=None, wake_at=None)
        _set_run(
            SYSTEM, run, RunState.NEEDS_OPERATOR, "not finished before its deadline", "run.overdue"
        )
    return len(runs)


# --- what asks for runs ---------------------------------------------------------------------------


def admit_node(actor: Actor, node_id: str) -> PlaybookRun:
    """Have a newly enrolled node validated and, if it passes, made available."""
    node = Node.objects.get(pk=node_id)
    return request_run(
        actor,
        "admit-node",
        node_id,
        cluster_id=node.cluster_id,
        title=f"Admit {node.name}",
        node_id=node_id,
    )


def repair_node(
    actor: Actor,
    node_id: str,
    incident: Incident,
    reason: str,
    *,
    only_if_silent: bool = False,
    lost_placement: str = "",
) -> PlaybookRun:
    """Have a node taken out, repaired, validated and returned as a spare.

    `only_if_silent`: silence is all that speaks against it, so a word from it ends the repair.
    `lost_placement` is the one that may be ended with it; another on it is a reason to stop.
    """
    node = Node.objects.get(pk=node_id)
    return request_run(
        actor,
        "repair-node",
        node_id,
        cluster_id=node.cluster_id,
        title=f"Repair {node.name}",
        incident=incident,
        node_id=node_id,
        context={
            "reason": reason,
            "only_if_silent": only_if_silent,
            "lost_placement": lost_placement,
        },
    )


def restore_coordinator(actor: Actor, job: Job, incident: Incident) -> PlaybookRun:
    """Have a job's coordinator started again where it was, once its node is back."""
    return request_run(
        actor,
        "restore-coordinator",
        job.pk,
        cluster_id=job.cluster_id,
        title=f"Restore the coordinator of {job.name}",
        incident=incident,
        job_id=job.pk,
        node_id=job.coordinator_node_id,
    )


@change()
def start_job(actor: Actor, job_id: str, reason: str = "requested") -> PlaybookRun:
    """Have a job's coordinator and ranks started, from its newest checkpoint if it has one."""
    job = jobs.begin_start(actor, job_id, reason)
    return request_run(
        actor,
        "start-job",
        job_id,
        cluster_id=job.cluster_id,
        title=f"Start {job.name}",
        job_id=job_id,
        context={"reason": reason},
    )


@change()
def restart_job(actor: Actor, job_id: str, reason: str) -> PlaybookRun:
    """Start a job anew as a whole: what was under way for single replicas of it is moot."""
    job = Job.objects.get(pk=job_id)
    moot = PlaybookRun.objects.filter(
        job=job,
        playbook__in=["replica-lost", "start-job", "restore-coordinator"],
        state__in=RUN_UNFINISHED,
    )
    for run in list(moot):
        cancel_run(actor, run.pk, f"the whole job is started anew: {reason}")
    for incident in Incident.objects.filter(job=job, state__in=INCIDENT_UNRESOLVED):
        resolve(actor, incident.pk, f"the whole job is started anew: {reason}")
    return start_job(actor, job_id, reason)


# --- helpers --------------------------------------------------------------------------------------


def _move(
    actor: Actor,
    incident: Incident,
    to: IncidentState,
    *,
    frm: set[IncidentState] | frozenset[IncidentState],
    reason: str = "",
) -> None:
    """Compare-and-set of an incident's state, with its audit row."""
    before = incident.state
    if Incident.objects.filter(pk=incident.pk, state__in=frm).update(state=to):
        audit(
            actor,
            "incident.transition",
            "incident",
            incident.pk,
            cluster_id=incident.cluster_id,
            before={"state": before},
            after={"state": to},
            reason=reason,
        )
        touch(incident.cluster_id)


def _set_run(actor: Actor, run: PlaybookRun, to: RunState, reason: str, verb: str) -> None:
    before = run.state
    finished = None if to in RUN_UNFINISHED else timezone.now()
    PlaybookRun.objects.filter(pk=run.pk).update(
        state=to, state_reason=reason, finished_at=finished
    )
    if run.incident is not None:
        tell(
            run.incident,
            f"{run.pk}/{to}/{timezone.now().timestamp()}",
            EntryKind.STEP,
            f"{run.title}: {to.label.lower()} ({reason})",
        )
    audit(
        actor,
        verb,
        "run",
        run.pk,
        cluster_id=run.cluster_id,
        before={"state": before},
        after={"state": to},
        reason=reason,
    )
    touch(run.cluster_id)
