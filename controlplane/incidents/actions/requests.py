"""Who asks for which run: one function for each reason."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict
from controlplane.fleet.changes import change, touch
from controlplane.fleet.choices import COMMAND_FINISHED, CommandState, NodeState
from controlplane.fleet.models import Command, Node
from controlplane.health.choices import Action, SignalKind, Urgency
from controlplane.health.models import Signal
from controlplane.ids import new_id
from controlplane.incidents.actions.incidents import add_timeline_entry, resolve, resolve_if_over
from controlplane.incidents.actions.merging import (
    incident_of_replica,
    merge_into,
    open_for_loss,
    open_for_replica,
    title_of_loss,
)
from controlplane.incidents.actions.runs import cancel_run, lock_run, look_again, request_run
from controlplane.incidents.choices import (
    INCIDENT_UNRESOLVED,
    RUN_UNFINISHED,
    EntryKind,
    RunState,
    StepState,
)
from controlplane.incidents.models import (
    Incident,
    PlaybookRun,
    PlaybookStep,
)
from controlplane.incidents.move_plans import AS_WHOLE, Move, plan_move
from controlplane.incidents.move_plans import PLAYBOOK as MOVE_PLAYBOOK
from controlplane.incidents.plans import NODE_ORDERS, check_order
from controlplane.incidents.selectors import LOSS, restartable_losses
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JOB_ACTIVE, JobState, PlacementState, ReplicaState
from controlplane.jobs.models import IN_ITS_PLACE, LEFT, SENT_AWAY, Job, Placement, Replica
from controlplane.jobs.selectors import left_together, was_sent_away
from workers.triage import ACTIONS, FOR_PEOPLE

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


@change()
def repair_node(
    actor: Actor,
    node_id: str,
    incident: Incident | None,
    reason: str,
    *,
    only_if_silent: bool = False,
    lost_placement: str = "",
    action: Action = Action.POWER_CYCLE,
    gpu_uuid: str = "",
    code: str = "",
    urgency: Urgency = Urgency.NOW,
) -> PlaybookRun:
    """Have a node taken out, repaired, validated and returned as a spare.

    `only_if_silent`: silence is all that speaks against it, so a word from it ends the repair.
    `lost_placement` is the one that may be ended with it; another on it is a reason to stop.
    `action` is what the failure calls for, `gpu_uuid` the card that failed where one is known,
    `code` the failure's.
    A repair that waits until the node is idle is nobody's incident: it may take days. One that is
    under way for less takes over what this one calls for, and decides anew, also if it had asked
    for a person.
    """
    node = Node.objects.get(pk=node_id)
    context: dict[str, Any] = {
        "reason": reason,
        "only_if_silent": only_if_silent,
        "lost_placement": lost_placement,
        "hardware": bool(gpu_uuid),
        "action": action,
        "gpu": gpu_uuid,
        "code": code,
        "urgency": urgency,
    }
    idle = urgency == Urgency.IDLE
    # What waits for idleness may take days: of incidents only the node's own waits with it.
    its_own = incident is not None and incident.subject == f"node/{node_id}"
    run = request_run(
        actor,
        "repair-node",
        node_id,
        cluster_id=node.cluster_id,
        title=f"Repair {node.name}" + (" when idle" if idle else ""),
        incident=incident if its_own or not idle else None,
        node_id=node_id,
        context=context,
    )
    wanted = _both(run.context, context)
    if not idle and wanted != run.context:
        PlaybookRun.objects.filter(pk=run.pk).update(
            incident=incident, title=f"Repair {node.name}", context=wanted
        )
        touch(node.cluster_id, ("run", run.pk))
        _let_go_on_within(incident, run.incident, node)
        PlaybookStep.objects.filter(run=run, state=StepState.WAITING).update(wake_at=timezone.now())
        if news := _news_of_need(run.context, wanted):
            look_again(run.pk, news, afresh=True)
    return run


def _let_go_on_within(incident: Incident | None, before: Incident | None, node: Node) -> None:
    """Nothing else would end the incident that a repair leaves: a node's own is a part of that
    which took its repair over, another is over if nothing else of it is under way. Unless
    something of it is left to people, who would not be shown it there."""
    if incident is None or before is None or before == incident:
        return
    if before.subject == f"node/{node.pk}":
        if not before.failures.filter(needed__in=sorted(FOR_PEOPLE)).exists():
            merge_into(incident, [before])
    else:
        why = f"the repair of {node.name} goes on in “{incident.title}”"
        resolve_if_over(SYSTEM, before.pk, why)


def _news_of_need(before: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What a repair is for that it was not for before, in words; "" if only the words differ."""
    news = {
        ("action", "gpu"): "a graver failure came meanwhile",
        ("urgency",): "it is wanted sooner by now",
        ("only_if_silent", "hardware"): "more than silence speaks against the node by now",
        ("lost_placement",): "another replica was lost with the node",
    }
    told = (
        text
        for keys, text in news.items()
        if any(key in before and before[key] != wanted[key] for key in keys)
    )
    return next(told, "")


def _both(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What a repair is for that was asked for twice: the gravest action, on the card that calls for
    it, as soon as either wants it."""
    there = str(before.get("action", now["action"]))
    same_card = before.get("gpu") == now["gpu"]
    graver = _gravity(now["action"], same_card) > _gravity(there, same_card)
    same_fault = same_card and there == now["action"]
    wanted = {**before, **now} if graver or same_fault else {**now, **before}
    since = str(before.get("urgency", now["urgency"]))
    return {
        **wanted,
        "urgency": now["urgency"] if Urgency(now["urgency"]).before(since) else since,
        "only_if_silent": bool(before.get("only_if_silent")) and bool(now["only_if_silent"]),
        "hardware": bool(before.get("hardware")) or bool(now["hardware"]),
        "lost_placement": now["lost_placement"] or before.get("lost_placement", ""),
    }


def _gravity(action: str, same_card: bool) -> float:
    """Actions in their order, but for the field diagnostic: it mends nothing of another card, and a
    card that calls for a restart must have had it to be examined."""
    if action != Action.FIELD_DIAGNOSTIC:
        return ACTIONS.index(action)
    return ACTIONS.index("drain_and_reset" if same_card else "update_software") + 0.5


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
    return any(map(_runs_on, lately.select_related("node__lease")))


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


@change()
def bring_back(
    placement: Placement, occurred_at: datetime, actor: Actor = SYSTEM, *, emptied: bool = False
) -> Incident:
    """Open the incident of the replica that this placement held, and have it brought back.

    What is lost with other replicas of its job is one incident with them; not one that went because
    its node was `emptied`. A run that had asked for a person, and did not know of this, goes on.
    """
    job = placement.replica.job
    index = placement.replica.index
    opened = open_for_replica if emptied else open_for_loss
    incident = opened(placement, occurred_at, actor=actor)
    run = request_run(
        actor,
        "replica-lost",
        f"{job.pk}/{index}",
        cluster_id=job.cluster_id,
        title=f"Bring back replica {index} of {job.name}",
        incident=incident,
        job_id=job.pk,
        node_id=placement.node_id,
        context={"replica": index, "lost_placement": placement.pk},
    )
    if run.state == RunState.NEEDS_OPERATOR and (news := _news_of_loss(run, placement)):
        # What never trained is no other story: of that there are as many as a run may start.
        look_again(run.pk, news, actor, afresh=placement.joined_at is not None)
    if incident.replica is None:
        title = title_of_loss(incident, incident.code)
        Incident.objects.filter(pk=incident.pk).update(title=title[:200])
    return incident


@change()
def bring_back_missed(actor: Actor, incident_id: str, reason: str) -> None:
    """A person wants brought back after all what an incident lost and nobody brings back: each such
    replica has a new run. Raises Conflict if there is none, or without a reason."""
    if not reason.strip():
        raise Conflict("an order needs a reason, for the record")
    incident = Incident.objects.select_for_update(no_key=True, of=("self",)).get(pk=incident_id)
    missed = restartable_losses(incident.runs.select_related("job")) if incident.unresolved else []
    if not missed:
        raise Conflict(
            "nothing is to be brought back here: what this incident lost is there, is being "
            "brought back, or is not wanted any more"
        )
    for run in missed:
        lost = Placement.objects.select_related("replica__job", "node").get(
            pk=run.context["lost_placement"]
        )
        bring_back(lost, incident.occurred_at, actor, emptied=True)
    replicas = ", ".join(sorted(str(run.context["replica"]) for run in missed))
    what = f"To be brought back after all: replica {replicas} ({reason})"
    add_timeline_entry(incident, f"bring-back/{timezone.now().timestamp()}", EntryKind.STATE, what)


def _news_of_loss(run: PlaybookRun, lost: Placement) -> str:
    """What a loss tells a run that asked for a person and that it did not know, in words; "" if
    nothing. What is told of one process again and again is news once."""
    where = lost.node.name
    looked_into = Placement.objects.filter(pk=run.context.get("lost_placement")).first()
    itself = looked_into is not None and looked_into.pk == lost.pk
    if not itself and (looked_into is None or not _lost_as_one(looked_into, lost)):
        return f"what it has by now, on {where}, was lost too"
    step = run.steps.filter(state=StepState.NEEDS_OPERATOR).first()
    if step is None or step.started_at is None:
        return ""
    if step.key == "find-cause":
        return f"more was told of its loss on {where}"
    ends = Signal.objects.filter(kind=SignalKind.PROCESS_EXITED, placement_id=lost.pk)
    gone = ends.filter(recorded_at__gt=step.started_at).exists()
    gone = gone or (lost.ended_at is not None and lost.ended_at > step.started_at)
    # These ask because nobody saw to it that nothing of it runs there.
    ending = step.key == "end-what-is-left" or (itself and step.key == "take-node-out")
    return f"its process on {where} has ended" if gone and ending else ""


def _lost_as_one(before: Placement, lost: Placement) -> bool:
    """Whether they are parts of one replica on several nodes, which start and end together."""
    one = before.replica_id == lost.replica_id and before.node_rank != lost.node_rank
    stood_by = (before.moved_from_id is None) != (lost.moved_from_id is None)
    return one and not stood_by and (before.ended_at is None or lost.created_at < before.ended_at)


#: Where the process of a replica that was sent away runs on after its farewell it is ended after so
#: long, and its place given to another.
FAREWELL_GRACE = timedelta(seconds=60)
#: States of a job whose replicas are missed.
JOB_NEEDS_REPLICAS = (JobState.RUNNING, JobState.STARTING)


def bring_back_sent_away() -> int:
    """Have brought back what a SIGTERM that we had not sent told to end, and whose job goes on:
    nobody lost it, and if its machine goes down with it nobody sees its process end. Returns how
    many; the keeper calls it."""
    told = Placement.objects.filter(replica=OuterRef("pk"), end_reason=SENT_AWAY)
    missing = Replica.objects.filter(
        Exists(told), state=ReplicaState.LOST, job__state__in=JOB_NEEDS_REPLICAS
    )
    brought = 0
    for replica in missing:
        with suppress(Conflict):  # it was brought back in this very moment
            brought += _bring_back_sent_away(replica)
    return brought


@change()
def _bring_back_sent_away(replica: Replica) -> bool:
    # The job first, as whoever starts it anew does.
    job = Job.objects.select_for_update(no_key=True).get(pk=replica.job_id)
    last = replica.placements.filter(IN_ITS_PLACE).order_by("ended_at", "created_at").last()
    if job.state not in JOB_NEEDS_REPLICAS or replica.alive.exists() or last is None:
        return False
    if not was_sent_away(last) or _is_being_restored(job, last):
        return False
    bring_back(last, last.ended_at or timezone.now())
    return True


def _is_being_restored(job: Job, last: Placement) -> bool:
    """Whether somebody has seen to its coming back since it left, or something of it runs still."""
    runs = PlaybookRun.objects.filter(job=job)
    starts = runs.filter(playbook="start-job", created_at__gt=last.created_at)
    since = Q(finished_at=None) | Q(finished_at__gt=last.ended_at)
    looked_into = runs.filter(since, playbook="replica-lost", context__lost_placement=last.pk)
    if starts.exists() or looked_into.exists():
        return True
    lingers = timezone.now() - (last.ended_at or timezone.now()) <= FAREWELL_GRACE
    return (lingers or job.nodes_per_replica > 1) and any(map(_runs_on, left_together(last)))


def _runs_on(placement: Placement) -> bool:
    """Whether its process may be there still, as far as its node can tell."""
    ends = Signal.objects.filter(
        node=placement.node_id, kind=SignalKind.PROCESS_EXITED, placement_id=placement.pk
    )
    return placement.node.lease.reachable and not ends.exists()


@change()
def bring_back_stopped(
    placement: Placement, occurred_at: datetime, actor: Actor = SYSTEM
) -> Incident | None:
    """Have a process brought back that ended as ordered. Returns the incident that tells of it, the
    open one of its replica if its loss is in somebody's hands there.

    None if the run that gave the order is there to see to it; one that was called off is not, and
    the only replica of a job has no peer that would miss it.
    """
    orders = Command.objects.filter(
        node=placement.node_id, verb="stop_process", payload__contains=f'"{placement.pk}"'
    )
    steps = {order.requester.partition(".")[0] for order in orders}
    runs = PlaybookStep.objects.filter(pk__in=steps).values_list("run", flat=True).distinct()
    # Locked: who calls one off either sees that the process has ended, or is seen here.
    if any(lock_run(run_id).state in RUN_UNFINISHED for run_id in list(runs)):
        return None
    there = incident_of_replica(placement.replica.job_id, placement.replica.index)
    if there is not None and _is_in_hands(placement, there):
        return there
    return bring_back(placement, occurred_at, actor, emptied=True)


def _is_in_hands(placement: Placement, incident: Incident) -> bool:
    """Whether the incident brings its replica back, or would have, had not a person called that
    off: they know of it."""
    subject = f"{LOSS}/{placement.replica.job_id}/{placement.replica.index}"
    off = Q(state=RunState.CANCELLED, created_at__gt=placement.created_at)
    return incident.runs.filter(Q(state__in=RUN_UNFINISHED) | off, subject=subject).exists()
