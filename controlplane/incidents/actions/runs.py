"""Requests for runs, and what people do to a run. The engine alone moves its steps."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db.models import Q, QuerySet
from django.utils import timezone

from controlplane import doorbell
from controlplane.accounts.actions import audit
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.accounts.selectors import OWNED
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.changes import change, touch
from controlplane.fleet.choices import IN_SERVICE, NodeState
from controlplane.fleet.models import Command, Node
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.incidents.actions.incidents import add_timeline_entry
from controlplane.incidents.choices import (
    RUN_ACTIVE,
    RUN_UNFINISHED,
    ApprovalState,
    EntryKind,
    RunState,
    StepState,
)
from controlplane.incidents.models import (
    Approval,
    Incident,
    Playbook,
    PlaybookRun,
    PlaybookStep,
    Reservation,
)
from controlplane.incidents.plans import NODE_ORDERS
from controlplane.jobs import actions as jobs
from controlplane.jobs.actions.jobs import STOP_TTL_S
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Placement
from node_agent import wire

#: States of a node that is to be emptied and is not yet.
BEING_DRAINED = (NodeState.DRAINING, NodeState.DRAIN_FAILED)


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
    requested_by: str = "",
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
        requested_by=requested_by,
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
    _take_turn(actor, run, reason or "tried again", "run.retry", afresh=True)


@change()
def look_again(run_id: str, news: str, actor: Actor = SYSTEM, *, afresh: bool) -> None:
    """Let a run that asked for a person try its step again by itself: `news` is what it did not
    know when it asked, in words. Nothing for one that did not ask; a person's pause holds.

    `afresh`: it is about something else by now, so that its rounds count from here.
    """
    run = PlaybookRun.objects.select_for_update(no_key=True, of=("self",)).get(pk=run_id)
    if run.state == RunState.NEEDS_OPERATOR:
        _take_turn(actor, run, news, "run.news", afresh=afresh)


def _take_turn(actor: Actor, run: PlaybookRun, reason: str, verb: str, *, afresh: bool) -> None:
    """Another turn: what was refused before is asked for anew, and `afresh` the rounds count from
    here."""
    now = timezone.now()
    PlaybookStep.objects.filter(run=run, state=StepState.NEEDS_OPERATOR).update(
        state=StepState.READY, wake_at=now, started_at=now, attempts=0
    )
    to = RunState.RUNNING if run.steps.exists() else RunState.PENDING
    _set_run(actor, run, to, reason, verb)
    turn = {**run.context, "retry": int(run.context.get("retry", 0)) + 1}
    turn.pop("signed", None)
    if afresh:
        turn["round"] = 0
        turn.pop("went_for", None)
        if "passed_over" in turn:  # nodes that did not start it, perhaps for what has been mended
            turn["passed_over"] = []
    void_approvals(actor, valid_approvals(run), f"another turn of its run: {reason}")
    PlaybookRun.objects.filter(pk=run.pk).update(deadline=_fresh_deadline(run), context=turn)
    doorbell.ring_after_commit()


@change()
def pause_run(actor: Actor, run_id: str, reason: str) -> None:
    """Keep a run from taking its next step until a person lets it go on.

    A step that is under way is taken again when the run goes on, and looks first what it has done.
    Raises Conflict unless the run is at work.
    """
    run = lock_run(run_id)
    if run.state not in RUN_ACTIVE:
        raise Conflict(f"this run is {run.get_state_display().lower()}; there is nothing to pause")
    # Whoever works on a step loses its lock: the step is taken again, and looks first.
    PlaybookStep.objects.filter(run=run, state=StepState.RUNNING).update(
        state=StepState.READY, lock_token="", lock_expires_at=None, wake_at=timezone.now()
    )
    _set_run(actor, run, RunState.PAUSED, reason, "run.pause")


@change()
def resume_run(actor: Actor, run_id: str, reason: str) -> None:
    """Let a paused run go on, or one that asked for a person try again. Raises Conflict else."""
    run = lock_run(run_id)
    if run.state != RunState.PAUSED:
        retry_run(actor, run_id, reason)
        return
    now = timezone.now()
    # Also one that was worked on, or had failed and was to be tried again: its time is its own.
    PlaybookStep.objects.filter(run=run, state__in=[StepState.WAITING, StepState.READY]).update(
        wake_at=now, started_at=now
    )
    to = RunState.RUNNING if run.steps.exists() else RunState.PENDING
    _set_run(actor, run, to, reason, "run.resume")
    PlaybookRun.objects.filter(pk=run_id).update(deadline=_fresh_deadline(run))
    doorbell.ring_after_commit()


@change()
def cancel_run(actor: Actor, run_id: str, reason: str) -> None:
    """Stop a run where it stands; what is done stays done. Raises Conflict if it is finished.

    Orders that no node has finished are called back, and what it had started and does not train
    yet is killed. A node that it was to drain, and where nothing was killed yet, goes on as it was.
    """
    run = lock_run(run_id)
    if run.state not in RUN_UNFINISHED:
        raise Conflict(f"this run is {run.get_state_display().lower()} already")
    if run.playbook == NODE_ORDERS["drain"] and run.node is not None:
        _end_drain(actor, run, run.node, reason)
    for step_id in run.steps.values_list("pk", flat=True):
        fleet.call_back_commands(step_id)
    _stop_standby(actor, run, reason)
    _stop_coordinators(actor, run)
    # But not what was started to replace another and is up: its replica has nothing else by now.
    up = Q(state=PlacementState.RUNNING, joined_at=None, moved_from=None)
    stillborn = Placement.objects.filter(
        Q(state=PlacementState.STARTING) | up,
        pk__in=[run.context.get("placement", ""), *run.context.get("placements", [])],
    )
    for placement in stillborn.select_related("replica"):
        _stop_waiting(actor, run, placement)
        # One that is up may have the cards still: its node is free once it is seen to end.
        free = placement.state == PlacementState.STARTING
        jobs.end_placement(actor, placement.pk, f"cancelled: {reason}", free_node=free)
    PlaybookStep.objects.filter(run=run).exclude(
        state__in=[StepState.DONE, StepState.SKIPPED, StepState.FAILED]
    ).update(state=StepState.SKIPPED, lock_token="", lock_expires_at=None, wake_at=None)
    leave_nothing(actor, run)
    _set_run(actor, run, RunState.CANCELLED, reason or "cancelled", "run.cancel")


@change()
def leave_nothing(actor: Actor, run: PlaybookRun) -> None:
    """Release what a run that is over had reserved; its plan waits for approval no more."""
    Reservation.objects.filter(run=run, released_at=None).update(released_at=timezone.now())
    waiting = Approval.objects.filter(run=run, state=ApprovalState.WAITING)
    void_approvals(actor, waiting, "its run is over")


def _end_drain(actor: Actor, run: PlaybookRun, node: Node, reason: str) -> None:
    """Give a node back to what it did before this drain, unless its emptying has begun, or it is in
    other hands by now."""
    found = run.context.get("found")
    # Nothing there is killed or switched off before the guards have reserved it for this run; a
    # step that they refused, or that a pause put off, has a time at which it started all the same.
    let_go = run.reservations.filter(node=node)
    if found is None or let_go.exists() or node.state not in BEING_DRAINED:
        return
    _judge_again(node, _drained_since(run))
    why = f"its drain was called off: {reason}"
    fleet.transition(actor, node.pk, _state_before(node, found["state"]), reason=why)
    own = f"{OWNED}{run.requested_by}"
    if node.drained_by == own:
        # An earlier drain that came to nothing wrote what this one found: it is over with this.
        over = found["state"] == NodeState.DRAIN_FAILED or found["drained_by"] == own
        fleet.set_drained_by(actor, node.pk, "" if over else found["drained_by"], why)


def _drained_since(run: PlaybookRun) -> datetime:
    """When its node was in service last: a drain that came to nothing may have come before."""
    drains = PlaybookRun.objects.filter(
        node=run.node, playbook=run.playbook, created_at__lte=run.created_at
    )
    began = drains.filter(context__found__state__in=sorted(IN_SERVICE)).order_by("-created_at")
    return next(iter(began.values_list("created_at", flat=True)[:1]), run.created_at)


def _judge_again(node: Node, since: datetime) -> None:
    """What its hardware told while it was being emptied led to nothing, for it was in somebody's
    hands."""
    # Triage sees to those that it has not handled, and holds them perhaps.
    handled = Signal.objects.filter(
        kind__in=(SignalKind.KERNEL_LINE, SignalKind.READING), node=node, triaged_at__gte=since
    )
    handled.exclude(failures=None).update(triaged_at=None)
    doorbell.ring_after_commit()


def _state_before(node: Node, found: str) -> NodeState:
    """That in which its drain found a node; by now its replica may have moved away. Where a process
    is not seen to have left, nothing else may be placed beside it yet."""
    if found == NodeState.SUSPECT:
        return NodeState.SUSPECT
    last = Placement.objects.filter(node=node).order_by("created_at").last()
    if last is None:
        return NodeState.AVAILABLE
    ends = Signal.objects.filter(kind=SignalKind.PROCESS_EXITED, placement_id=last.pk)
    left = last.state == PlacementState.ENDED
    free = left and (found == NodeState.AVAILABLE or ends.exists())
    return NodeState.AVAILABLE if free else NodeState.ALLOCATED


def _stop_coordinators(actor: Actor, run: PlaybookRun) -> None:
    """One that this run had started, or is having started, and that its job does not know."""
    known = run.job.coordinator_placement if run.job else ""
    for step_id in run.steps.values_list("pk", flat=True):
        for start in Command.objects.filter(
            verb="start_coordinator", requester__startswith=f"{step_id}."
        ):
            action = msgspec.json.decode(start.payload, type=wire.Command).action
            if isinstance(action, wire.StartCoordinator) and action.placement != known:
                stop = wire.StopProcess(placement=action.placement)
                requester = f"end/{action.placement}"
                fleet.queue_command(
                    actor, start.node_id, stop, requester=requester, ttl_s=STOP_TTL_S
                )


def _stop_waiting(actor: Actor, run: PlaybookRun, placement: Placement) -> None:
    """Its node may have taken the order to start it, and a process says nothing before it has
    imported what it needs, or of a replica on several nodes before all have found each other."""
    order = wire.StopProcess(placement=placement.pk, grace_s=0)
    requester = f"{run.pk}.cancel.{placement.replica.index}.{placement.node_rank}"
    fleet.queue_command(actor, placement.node_id, order, requester=requester, ttl_s=STOP_TTL_S)


def _stop_standby(actor: Actor, run: PlaybookRun, reason: str) -> None:
    """A process that stood by for a replica is killed; the one that trains is not touched."""
    standby = Placement.objects.filter(pk=run.context.get("placement", ""), standby=True)
    for placement in standby.exclude(state=PlacementState.ENDED):
        order = wire.StopProcess(placement=placement.pk, grace_s=0)
        requester = f"{run.pk}.cancel"
        fleet.queue_command(actor, placement.node_id, order, requester=requester, ttl_s=STOP_TTL_S)
        jobs.give_up_move(actor, placement.pk, f"cancelled: {reason}")
        if run.context.get("spare"):
            jobs.keep_as_spare(actor, placement.node_id, f"{run.title}: cancelled")


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


def _fresh_deadline(run: PlaybookRun) -> datetime:
    """As long again as its playbook may take; an hour where the workers have not told yet."""
    known = Playbook.objects.filter(pk=run.playbook).first()
    return timezone.now() + timedelta(seconds=known.deadline_s if known else 3600)


def valid_approvals(run: PlaybookRun) -> QuerySet[Approval]:
    """Those that hold a plan of this run, approved or waiting for approval."""
    return Approval.objects.filter(
        run=run, state__in=[ApprovalState.WAITING, ApprovalState.APPROVED]
    )


def void_approvals(actor: Actor, approvals: QuerySet[Approval], why: str) -> None:
    """Let these count no more. Who approved one, and when, stands."""
    locked = approvals.select_for_update(no_key=True, of=("self",))
    for approval in locked.select_related("run__incident"):
        Approval.objects.filter(pk=approval.pk).update(
            state=ApprovalState.VOID, decided_at=approval.decided_at or timezone.now()
        )
        audit(
            actor,
            "approval.void",
            "approval",
            approval.pk,
            cluster_id=approval.cluster_id,
            before={"state": approval.state},
            after={"state": ApprovalState.VOID, "digest": approval.digest},
            reason=why,
        )
        run = approval.run
        if run.incident is not None:
            text = f"{run.title}: the plan is void: {why}"
            add_timeline_entry(run.incident, f"{approval.pk}/void", EntryKind.STEP, text)
        touch(approval.cluster_id)


def lock_run(run_id: str) -> PlaybookRun:
    """The run, locked after its incident: the order in which everybody takes them."""
    incident_id = PlaybookRun.objects.values_list("incident_id", flat=True).get(pk=run_id)
    if incident_id is not None:
        Incident.objects.select_for_update(no_key=True, of=("self",)).get(pk=incident_id)
    return PlaybookRun.objects.select_for_update(no_key=True, of=("self",)).get(pk=run_id)


def _set_run(actor: Actor, run: PlaybookRun, to: RunState, reason: str, verb: str) -> None:
    before = run.state
    finished = None if to in RUN_UNFINISHED else timezone.now()
    PlaybookRun.objects.filter(pk=run.pk).update(
        state=to, state_reason=reason, finished_at=finished
    )
    if run.incident is not None:
        add_timeline_entry(
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
