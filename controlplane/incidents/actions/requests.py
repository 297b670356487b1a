"""Requests for runs of automation: what people and the keeper order of nodes and jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from django.db.models import Exists, OuterRef
from django.utils import timezone

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict
from controlplane.fleet.changes import change
from controlplane.fleet.choices import COMMAND_FINISHED, CommandState, NodeState
from controlplane.fleet.models import Command, Node
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.ids import new_id
from controlplane.incidents.actions.incidents import resolve
from controlplane.incidents.actions.restoring import (
    FAREWELL_GRACE,
    JOB_NEEDS_REPLICAS,
    bring_back,
    bring_back_stopped,
    may_still_run,
)
from controlplane.incidents.actions.runs import cancel_run, lock_run, request_run
from controlplane.incidents.choices import (
    INCIDENT_UNRESOLVED,
    RUN_UNFINISHED,
)
from controlplane.incidents.models import (
    Incident,
    PlaybookRun,
)
from controlplane.incidents.move_plans import AS_WHOLE, Move, plan_move
from controlplane.incidents.move_plans import PLAYBOOK as MOVE_PLAYBOOK
from controlplane.incidents.plans import NODE_ORDERS, check_order
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JOB_ACTIVE, JobState, PlacementState
from controlplane.jobs.models import LEFT, Job, Placement

ADMIT = "admit-node"
WARM_SPARE = "warm-spare"
#: Playbooks whose only aim is that the job goes on.
FOR_THE_JOB = (
    *("replica-lost", MOVE_PLAYBOOK, AS_WHOLE),
    *("start-job", "restore-coordinator", WARM_SPARE),
)


def admit_node(actor: Actor, node_id: str) -> PlaybookRun:
    """Have a newly enrolled node validated and, if it passes, made available."""
    node = Node.objects.get(pk=node_id)
    return request_run(
        actor,
        ADMIT,
        node_id,
        cluster_id=node.cluster_id,
        title=f"Admit {node.name}",
        node_id=node_id,
    )


def admit_enrolled() -> int:
    """Have each node admitted that has enrolled, once: what becomes of that is for a person, as is
    a node on hold. Returns how many; the keeper calls it."""
    tried = PlaybookRun.objects.filter(playbook=ADMIT, node=OuterRef("pk"))
    new = Node.objects.filter(
        ~Exists(tried), state=NodeState.ENROLLED, hold_reason="", lease__reachable=True
    )
    return len([admit_node(SYSTEM, pk) for pk in new.values_list("pk", flat=True)])


@change()
def order_node(actor: Actor, node_id: str, verb: str, reason: str) -> PlaybookRun:
    """Do what a person asks for a node, as a run of its own: see NODE_ORDERS for the verbs.

    Raises Conflict for an unknown verb, without a reason, in a state that does not allow it, while
    another order is under way, or if a node is to return whose repair is not over.
    """
    if not reason.strip():
        raise Conflict("an order needs a reason, for the record")
    node = Node.objects.select_for_update(no_key=True, of=("self",)).get(pk=node_id)
    check_order(node, verb)
    playbook = NODE_ORDERS[verb]
    runs = PlaybookRun.objects.filter(node=node, state__in=RUN_UNFINISHED)
    under_way = runs.filter(playbook__in=NODE_ORDERS.values()).first()
    if under_way is not None:
        raise Conflict(f"“{under_way.title}” is under way; cancel it or wait for it")
    # The guards keep the other orders waiting; a return asks none.
    repair = runs.filter(playbook="repair-node").first()
    if verb == "return" and repair is not None:
        raise Conflict(f"“{repair.title}” is not over: cancel it, then return {node.name}")
    return request_run(
        actor,
        playbook,
        node_id,
        cluster_id=node.cluster_id,
        title=f"{verb.capitalize()} {node.name}",
        node_id=node_id,
        context={"reason": reason, "by": actor.id},
        requested_by=actor.id,
    )


@change()
def move_replica(
    actor: Actor,
    job_id: str,
    index: int,
    *,
    node_id: str = "",
    leaving: str = "",
    reason: str,
    drains: str = "",
) -> PlaybookRun:
    """Have a replica train on another node from a step's edge on, with no loss; a job that lives as
    one saves, ends, and goes on there.

    Where to is chosen as for a replica that lost its node, unless `node_id` says so. `leaving` is
    the node that it leaves, of several. `drains` is the run that empties its node, if one does.
    Raises Conflict without a reason, or where it cannot be moved, or not there.
    """
    if not reason.strip():
        raise Conflict("an order needs a reason, for the record")
    job = Job.objects.select_for_update(no_key=True).get(pk=job_id)
    move = plan_move(job, index, node_id, leaving=leaving)
    return request_run(
        actor,
        move.playbook,
        f"{job_id}/{index}",
        cluster_id=job.cluster_id,
        title=move.title,
        job_id=job_id,
        node_id=move.before.node_id,
        context={
            "replica": index,
            "from": move.before.pk,
            **_way_of(actor, move, reason),
            "spare": move.target.spare,
            "reason": reason,
            "by": actor.id,
            "drains": drains,
        },
        requested_by="" if actor.kind == ActorKind.SYSTEM else actor.id,
    )


def _way_of(actor: Actor, move: Move, reason: str) -> dict[str, Any]:
    """Where to the run is to move it. A node that a process stands by on is allocated at once."""
    if move.replica.job.whole:
        there = [one.pk for one in move.replica.alive]
        return {"target": move.target.pk, "passed_over": [], "there": there}
    standby = jobs.stand_by(
        actor, move.replica.pk, move.target.pk, placement_id=new_id("plc"), reason=reason
    )
    return {"placement": standby.pk}


@change()
def call_off(actor: Actor, run_id: str, reason: str) -> None:
    """A person stops a run where it stands, see `cancel_run`. What it had killed in order to empty
    its node, or ended in order to move it, is brought back by a run of its own.

    Raises Conflict if it is finished, or while it does to a job that restarts as a whole what
    cannot be stopped: nobody keeps two processes of such a job apart.
    """
    run = lock_run(run_id)
    automation = replace(SYSTEM, request_id=actor.request_id)
    if run.playbook != AS_WHOLE:
        cancel_run(actor, run_id, reason)
        for placement in _stopped_on(run.node_id):
            bring_back_stopped(placement, timezone.now(), automation)
        return
    before = _ended_for_move(run)
    cancel_run(actor, run_id, reason)
    if before is None:
        return
    # Of one on several nodes others may run still: bringing it back ends them first.
    jobs.end_placement(actor, before.pk, f"moved: {reason}", free_node=True)
    jobs.vacate(actor, before)
    again = before.replica.alive.exclude(pk__in=run.context.get("there", []))
    if before.replica.job.state == JobState.RUNNING and not again.exists():
        bring_back(before, timezone.now(), automation, emptied=True)


def _stopped_on(node_id: str | None) -> list[Placement]:
    """What the node held and was seen to end as ordered, and nobody has seen to."""
    ends = Signal.objects.filter(
        kind=SignalKind.PROCESS_EXITED, node=node_id, data__requested=True
    ).values("placement_id")
    held = Placement.objects.filter(node=node_id, standby=False, replica__job__state__in=JOB_ACTIVE)
    left = held.exclude(state=PlacementState.ENDED).filter(pk__in=ends)
    return list(left.select_related("replica__job", "node"))


def _ended_for_move(run: PlaybookRun) -> Placement | None:
    """The process of a job that is to move that this run has ended, the one that it moves before
    others. Raises Conflict if one may be ending, or may be started again: a start that came to
    nothing is none."""
    begun = [run.context.get("placement", ""), *run.context.get("placements", [])]
    now = Placement.objects.filter(pk__in=begun).exclude(state=PlacementState.ENDED)
    for placement in now.select_related("node"):
        _demand_not_started(placement)
    moved = run.context["from"]
    there = Placement.objects.filter(pk__in=run.context.get("there", [moved]))
    ended = [one for one in there.select_related("replica__job", "node") if _has_ended(run, one)]
    return min(ended, key=lambda one: one.pk != moved, default=None)


def _demand_not_started(placement: Placement) -> None:
    """Raises Conflict unless it is known that nothing of this start runs, or ever will."""
    name = placement.node.name
    about = Command.objects.filter(node=placement.node_id, payload__contains=f'"{placement.pk}"')
    ends = Signal.objects.filter(kind=SignalKind.PROCESS_EXITED, placement_id=placement.pk)
    if ends.exists() or about.filter(verb="stop_process", state=CommandState.DONE).exists():
        return
    start = about.filter(verb="start_rank").first()
    over = start is not None and start.state in COMMAND_FINISHED - {CommandState.DONE}
    if start is None or not over or placement.state != PlacementState.STARTING:
        raise Conflict(f"it is being started on {name}: wait until it trains there")
    if start.state == CommandState.EXPIRED and start.delivered_at is not None:
        raise Conflict(
            f"{name} may have started it: have the step tried again, which ends it there first, "
            f"or have {name} quarantined"
        )


def _has_ended(run: PlaybookRun, before: Placement) -> bool:
    gone = Signal.objects.filter(kind=SignalKind.PROCESS_EXITED, placement_id=before.pk).exists()
    steps = [f"{step}." for step in run.steps.values_list("pk", flat=True)]
    orders = Command.objects.select_for_update(no_key=True).filter(verb="stop_process")
    stops = [one for one in orders.filter(node=before.node) if one.requester.startswith((*steps,))]
    for stop in stops:
        known = gone or stop.state in (CommandState.DONE, CommandState.REFUSED)
        if not known and stop.state != CommandState.QUEUED:
            raise Conflict(
                f"{before.node.name} may be ending it: wait until it has, or see to it there and "
                "have the step tried again"
            )
    return gone or any(stop.state == CommandState.DONE for stop in stops)


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
def start_registered(actor: Actor, job_id: str, reason: str) -> PlaybookRun:
    """Have Drydock start a job that was registered, by the agents of free nodes.

    Raises Conflict without a reason, or if something of the job runs or is being started.
    """
    if not reason.strip():
        raise Conflict("an order needs a reason, for the record")
    job = Job.objects.select_for_update(no_key=True).get(pk=job_id)
    if not may_be_started(job):
        state = job.get_state_display().lower()
        raise Conflict(f"{job.name} is {state}; only a job of which nothing runs can be started")
    return start_job(actor, job_id, reason)


def may_be_started(job: Job) -> bool:
    """Whether it was never started, or it goes on by Drydock's doing, and nothing of it is left and
    nobody brings it back."""
    runs = PlaybookRun.objects.filter(job=job, playbook__in=FOR_THE_JOB, state__in=RUN_UNFINISHED)
    alive = Placement.objects.filter(replica__job=job).exclude(state=PlacementState.ENDED)
    # A run that was cancelled leaves what it was to bring back as it was.
    ends = Signal.objects.filter(kind=SignalKind.PROCESS_EXITED, placement_id=OuterRef("pk"))
    left = alive.exclude(Exists(ends))
    # Of one that its own scheduler starts nothing is known here that could be left.
    ours = job.state == JobState.STARTING or bool(job.coordinator_address)
    gone = job.state in JOB_NEEDS_REPLICAS and ours and not runs.exists() and not left.exists()
    return job.state == JobState.PENDING or (gone and not _ends_still(job))


def _ends_still(job: Job) -> bool:
    """Whether something that left it runs on, as a writer does that has its last checkpoint."""
    lately = Placement.objects.filter(
        replica__job=job,
        end_reason__startswith=LEFT,
        ended_at__gt=timezone.now() - FAREWELL_GRACE,
    )
    return any(map(may_still_run, lately.select_related("node__lease")))


@change()
def restart_job(actor: Actor, job_id: str, reason: str) -> PlaybookRun:
    """Start a job anew as a whole: what was under way for single replicas of it is moot."""
    job = Job.objects.get(pk=job_id)
    superseded = PlaybookRun.objects.filter(
        job=job,
        playbook__in=FOR_THE_JOB,
        state__in=RUN_UNFINISHED,
    )
    for run in list(superseded):
        cancel_run(actor, run.pk, f"the whole job is started anew: {reason}")
    for incident in Incident.objects.filter(job=job, state__in=INCIDENT_UNRESOLVED):
        resolve(actor, incident.pk, f"the whole job is started anew: {reason}")
    return start_job(actor, job_id, reason)
