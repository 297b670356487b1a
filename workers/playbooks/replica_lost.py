"""A running job lost a replica: find out why, let it return where it can, see it train again.

The survivors need nothing from here: they took over its shards on their own.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta

from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import COMMAND_FINISHED, CommandState, NodeState
from controlplane.fleet.models import Command, Node
from controlplane.health.actions import card_at, record_failure, repeat_failure
from controlplane.health.choices import Action, FaultClass, Urgency
from controlplane.health.models import Failure, Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents.candidates import free_nodes, wanted_by
from controlplane.incidents.choices import RUN_UNFINISHED, Effect, RunState, StepState
from controlplane.incidents.models import PlaybookRun, PlaybookStep
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import LEFT, Interruption, Placement, Replica
from controlplane.jobs.selectors import was_sent_away
from workers import losses, recovery, triage
from workers.placement import choose_spare
from workers.playbooks.base import (
    Done,
    End,
    GoTo,
    NeedsOperator,
    Outcome,
    Playbook,
    Skip,
    StepContext,
    StepDefinition,
    Wait,
)
from workers.playbooks.multi_node_recovery import (
    await_all,
    choose_places,
    end_what_is_left,
    end_what_was_begun,
    lacks_a_place,
    start_together,
)
from workers.playbooks.replica_steps import (
    START_S,
    await_free,
    can_restart_on,
    order_start,
    replica_of,
    runs_on,
    see_ended,
    start_failed,
    trains_again,
)

#: Who leaves says so once what it had saved is written, for which it waits half a minute at most.
FAREWELL_TAKES = timedelta(seconds=40)


def find_cause(ctx: StepContext) -> Outcome:
    """Find out why the replica was lost, from its process, its node and its peers.

    Wait while the evidence may still come. End if nothing was lost after all: the node was only
    silent, and the process trains. Otherwise done: the failure is recorded, and the context says
    whether the node is fit (`node_fit`) and what its cause calls for (`code`, `action`, `gpu`).
    """
    placement = Placement.objects.select_related("node__lease", "replica__job").get(
        pk=ctx.values["lost_placement"]
    )
    since = ctx.step.started_at or timezone.now()
    evidence = losses.evidence_of(placement, ctx.incident.occurred_at, since)
    together = [one for one in placement.replica.alive if one.pk != placement.pk]
    if placement.replica.job.nodes_per_replica > 1:
        first = losses.first_of([placement, *together], ctx.incident.occurred_at, since)
        if isinstance(first, triage.NotYet):
            return Wait(text=first.reason, wake_s=first.wait_s)
        placement, evidence = first
    shown = {k: v for k, v in asdict(evidence).items() if v not in (None, "", (), False)}
    shown |= {"verdicts": [f"{v.code}: {v.action}" for v in evidence.verdicts]}
    verdict = triage.cause_of_loss(evidence)
    if isinstance(verdict, triage.NothingLost) and lacks_a_place(ctx, placement.replica):
        return Done(
            text=f"{placement.node.name} is heard again, but not all of it is there",
            evidence=shown,
            context={"lost_placement": placement.pk, "node_fit": True, "passed_over": []},
        )
    if isinstance(verdict, triage.NothingLost):
        return End(
            text=verdict.summary,
            evidence=shown,
            apply=lambda: incidents.set_restored(ctx.run),
        )
    if isinstance(verdict, triage.NotYet):
        return Wait(text=verdict.reason, wake_s=verdict.wait_s, evidence=shown)
    where = placement.node.name
    card = card_at(placement.node_id, verdict.pci)
    what = f"card {card.index} of {where}: " if card else ""
    sentence = f"{what}{verdict.summary}."
    sentence = sentence[0].upper() + sentence[1:]

    def apply() -> None:
        # A kernel line's failure stands already, from when the line was triaged.
        failure = _known_failure(ctx, placement, verdict) or record_failure(
            fault_class=FaultClass(verdict.fault),
            code=verdict.code,
            summary=verdict.summary,
            needed=Action(verdict.action),
            rule=verdict.rule,
            signals=Signal.objects.filter(placement_id=placement.pk),
            observed_at=ctx.incident.occurred_at,
            node_id=placement.node_id,
            gpu_id=card.pk if card else None,
            job_id=str(ctx.run.job_id),
            replica=ctx.values["replica"],
        )
        title = f"{_job_name(ctx)} lost replica {ctx.values['replica']} on {where}: {verdict.code}"
        if ctx.incident.replica is None:
            title = incidents.title_of_loss(ctx.incident, verdict.code)
        incidents.set_cause(ctx.incident.pk, title, sentence, failure, node_id=placement.node_id)
        if not verdict.node_fit:
            incidents.open_breaker_on_burst(ctx.run.cluster_id, verdict.code)

    return Done(
        text=f"{verdict.code} on {where}: {verdict.summary}",
        evidence={**shown, "rule": verdict.rule},
        context={
            "lost_placement": placement.pk,
            "node_fit": verdict.node_fit,
            "passed_over": [],
            "code": verdict.code,
            "action": verdict.action,
            "gpu": card.pk if card else "",
        },
        apply=apply,
    )


def confirm_takeover(ctx: StepContext) -> Outcome:
    """See that the surviving replicas commit steps without the one that was lost.

    Skip if the job has no other replica, or if the survivors report no commit within 5 s.
    """
    index = ctx.values["replica"]
    if ctx.run.job is not None and ctx.run.job.world_replicas == 1:
        return Skip(text="the job has no other replica: it stands still until this one is back")
    lost = Placement.objects.get(pk=ctx.values["lost_placement"])
    since = ctx.incident.occurred_at
    if was_sent_away(lost):  # it said so when the others trained again
        since -= FAREWELL_TAKES
    pauses = Interruption.objects.filter(
        job_id=ctx.run.job_id, committed_at__gte=since, lost__contains=index
    )
    pause = pauses.order_by("epoch").first()
    if pause is None:
        waited = timezone.now() - (ctx.step.started_at or timezone.now())
        if waited < timedelta(seconds=5):
            return Wait(text="no commit of the survivors has been told yet")
        return Skip(text="the survivors have not told of a commit; going on to bring it back")
    text = (
        f"replicas {', '.join(map(str, pause.replicas))} committed step {pause.step} "
        f"{pause.gap_s:.2f} s after the step before it"
    )
    if pause.taken_over:
        text += f"; they took over shards {', '.join(map(str, pause.taken_over))} of that step"

    def apply() -> None:
        incidents.set_mitigated(ctx.incident.pk, pause.committed_at, text)

    return Done(
        text=text,
        evidence={"gap_s": pause.gap_s, "step": pause.step, "taken_over": pause.taken_over},
        apply=apply,
    )


def choose_place(ctx: StepContext) -> Outcome:
    """Choose how and where the replica returns: see `recovery.decide`.

    A process that stands by for it already comes first. Wait if no node is free, and ask for a
    person once none will be by itself. The context then says `strategy` and `target`.
    """
    placement = Placement.objects.select_related("replica__job", "node__rack").get(
        pk=ctx.values["lost_placement"]
    )
    job = placement.replica.job
    if job.nodes_per_replica > 1:
        return choose_places(ctx, placement.replica)
    alive = Placement.objects.filter(replica__job=job).exclude(state=PlacementState.ENDED)
    taken = Q(replica=placement.replica, warm=True, standby=False) & ~Q(pk=placement.pk)
    successor = alive.filter(Q(moved_from=placement) | taken).select_related("node").first()
    if successor is not None:
        where = successor.node.name
        return Done(
            text=f"the warm spare on {where} has its place"
            if successor.warm
            else f"the replica was being moved to {where}: the process there takes its place",
            context={"strategy": "standby", "target": successor.node_id},
        )
    others = alive.exclude(replica=placement.replica).filter(standby=False)
    spare = choose_spare(
        [
            c
            for c in free_nodes(job.cluster_id, job.pk)
            if c.node_id not in [placement.node_id, *ctx.values["passed_over"]]
        ],
        [p.node.rack.name if p.node.rack else "" for p in others.select_related("node__rack")],
        wanted_by(placement.node, job.gpus_per_replica),
    )
    earlier = Placement.objects.filter(replica__job=job, joined_at__isnull=False, warm=False)
    # Whoever told it to end may be about to take the node away.
    going = spare is not None and was_sent_away(placement)
    situation = recovery.Situation(
        node_fit=bool(ctx.values["node_fit"])
        and not going
        and can_restart_on(placement.node, job)
        and not _is_others(placement)
        and placement.node_id not in ctx.values["passed_over"],
        reset_pending=bool(placement.node.reset_pending),
        saved=losses.saved_for(placement),
        trained_s=losses.trained_s(job),
        spare=spare,
        survivors=others.count(),
        replicas=job.world_replicas,
        gpus_per_replica=job.gpus_per_replica,
        start_s=recovery.expected_start_s(
            [(p.joined_at - p.created_at).total_seconds() for p in earlier if p.joined_at]
        ),
    )
    decision = recovery.decide(situation)
    evidence: dict[str, str] = {
        option.strategy: f"{option.gpu_seconds:.0f} GPU-s: {option.reason}"
        if option.gpu_seconds is not None
        else option.reason
        for option in decision.options
    }
    if situation.survivors == 0:
        evidence["checkpoints"] = recovery.shown(situation.saved)
    if decision.strategy == "wait":
        return await_free(ctx, decision.reason, evidence)
    in_place = decision.strategy == "in_place"
    target = placement.node_id if in_place else spare.node_id if spare else ""
    where = (
        f"in place, on {placement.node.name}" if in_place else f"on {spare.name if spare else ''}"
    )
    return Done(
        text=f"the replica returns {where}: {decision.reason}",
        evidence=evidence,
        context={"strategy": decision.strategy, "target": target},
    )


def _is_others(lost: Placement) -> bool:
    """Whether another replica has the node by now: the run that was to bring this one back may have
    been called off, and its node given back."""
    there = Placement.objects.filter(node=lost.node_id).exclude(state=PlacementState.ENDED)
    return there.exclude(replica=lost.replica_id).exists()


def take_node_out(ctx: StepContext) -> Outcome:
    """See an unfit node emptied and quarantined by a repair run, requesting one if there is none.

    Skip if the node is fit. Done as soon as nothing of the replica can be running there, though the
    repair may go on. Back to the first step if the replica turns out to be alive. Asks for a person
    if the repair ended and the replica may still run there.
    """
    placement = Placement.objects.select_related("node").get(pk=ctx.values["lost_placement"])
    node = placement.node
    if ctx.values["node_fit"]:
        return Skip(text=f"{node.name} is fit and keeps working")
    alone = placement.replica.job.nodes_per_replica == 1
    if ctx.values.get("code") == "node-lost" and placement.end_reason.startswith(LEFT) and alone:
        return Skip(text=f"the process had ended before {node.name} fell silent: two cannot meet")
    steps = PlaybookStep.objects.filter(
        key="quarantine", run__node=node, finished_at__gt=placement.created_at
    )
    if steps.filter(state=StepState.DONE).exists():
        return Done(text=f"{node.name} is quarantined: nothing of the replica runs there")
    if ctx.values.get("code") in triage.SILENCE_ALONE and losses.lives(placement):
        return GoTo(to="find-cause", text=f"the replica is alive on {node.name}, which beats again")
    repairs = PlaybookRun.objects.filter(playbook="repair-node", node=node)
    under_way = repairs.filter(state__in=sorted(RUN_UNFINISHED), context__urgency=Urgency.NOW)
    # One that asked for a person before this was lost is asked again, and knows more then.
    asked_before = Q(state=RunState.NEEDS_OPERATOR) & ~Q(context__lost_placement=placement.pk)
    gone = losses.seen_to_end(placement)
    in_hand = under_way.exclude(asked_before).first()
    # It may be over by itself, but a run that asks for a person may never find that out.
    silence = ctx.values.get("code") in triage.SILENCE_ALONE
    asks = in_hand is not None and in_hand.state == RunState.NEEDS_OPERATOR

    def set_aside() -> None:
        _mark_suspect(node.pk, ctx.incident.cause)

    if in_hand is not None and gone and (asks or not silence):
        return Done(
            text=f"the process ended; {node.name} is being taken out by its repair run, and takes "
            "no new work",
            apply=set_aside,
        )
    if in_hand is not None:
        return Wait(text=f"{node.name} is being taken out by its repair run", wake_s=1.0)
    for_this = repairs.filter(
        context__lost_placement=placement.pk,
        context__urgency=Urgency.NOW,
        finished_at__gt=ctx.incident.occurred_at,
    ).last()
    # A dry run succeeds, and has shown its steps.
    if gone and for_this and (for_this.state != RunState.SUCCEEDED or steps.exists()):
        return Done(
            text=f"the process ended; {node.name} was not taken out, and takes no new work",
            apply=set_aside,
        )
    since = ctx.step.started_at or timezone.now()
    ended = repairs.filter(finished_at__gt=max(since, placement.created_at)).last()
    if ended is not None and ended.state == RunState.SUCCEEDED and steps.count() == 0:
        return GoTo(to="find-cause", text=f"{node.name} was not taken out: {ended.state_reason}")
    if ended is not None:
        return NeedsOperator(
            text=f"{node.name} was not taken out ({ended.state_reason}): until nothing runs there, "
            "its replica must not be started anywhere else"
        )

    def apply() -> None:
        incidents.repair_node(
            SYSTEM,
            node.pk,
            ctx.incident,
            ctx.incident.cause,
            lost_placement=placement.pk,
            action=Action(ctx.values.get("action", Action.POWER_CYCLE)),
            gpu_uuid=str(ctx.values.get("gpu", "")),
            code=str(ctx.values.get("code", "")),
        )

    return Wait(text=f"{node.name} is to be taken out by its repair run", wake_s=1.0, apply=apply)


def _mark_suspect(node_id: str, reason: str) -> None:
    """Nobody has taken the node out yet, and whoever is to may be called off: until somebody has
    looked nothing else is placed there."""
    node = Node.objects.get(pk=node_id)
    if node.state in (NodeState.ALLOCATED, NodeState.AVAILABLE):
        fleet.transition(SYSTEM, node_id, NodeState.SUSPECT, reason=reason)


def start_replica(ctx: StepContext) -> Outcome:
    """Start the replica's process on the chosen node, once nothing of an earlier one is left.

    Back to an earlier step if a node falls silent, refuses, or was taken by another run.
    """
    replica = replica_of(ctx)
    if replica.job.nodes_per_replica > 1:
        return start_together(ctx, replica)
    target = Node.objects.select_related("lease").get(pk=ctx.values["target"])
    lost = Placement.objects.select_related("node__lease").get(pk=ctx.values["lost_placement"])
    command = Command.objects.filter(requester=ctx.requester(), verb="start_rank").first()
    if command is None and (ending := _ending_of_what_hangs(ctx, lost)) is not None:
        return ending
    if command is None and (ending := _ending_of_a_start(ctx, replica)) is not None:
        return ending
    if ctx.values["strategy"] == "standby":
        return _let_standby_have_it(ctx, replica, lost, target)
    if command is None:
        moves = lost.node_id != target.pk
        return order_start(
            ctx,
            replica,
            target,
            lambda: jobs.end_placement(SYSTEM, lost.pk, ctx.incident.cause, free_node=moves),
        )
    if command.state == CommandState.DONE:
        return runs_on(target, command)
    if not target.lease.reachable:
        return GoTo(
            to="find-cause",
            text=f"{target.name} went silent before it started it",
            context={"lost_placement": ctx.placement_id()},
        )
    if command.state in COMMAND_FINISHED:
        return start_failed(ctx, target, command)
    return Wait(text=f"waiting for {target.name} to start the process")


def _ending_of_what_hangs(ctx: StepContext, lost: Placement) -> Outcome | None:
    """Have killed what its peers lost and nobody saw end: it may hold its cards for ever. Of a node
    that is taken out nothing is left; one that cannot end it is."""
    node = lost.node
    stays = node.state in (NodeState.ALLOCATED, NodeState.AVAILABLE)
    if not stays or losses.seen_to_end(lost):
        return None
    if not node.lease.reachable:
        # Where the spare has its place it is the node's own incident.
        gone = lost.state == PlacementState.ENDED
        text = f"{node.name} went silent before its process was seen to end"
        return None if gone else GoTo(to="find-cause", text=text)
    stop = Command.objects.filter(requester=ctx.requester("stop"), verb="stop_process").first()
    if stop is not None and stop.state in COMMAND_FINISHED and stop.state != CommandState.DONE:
        return GoTo(
            to="take-node-out",
            text=f"{node.name} does not end its process ({stop.error or stop.state}): it is unfit",
            context={"node_fit": False, "action": Action.POWER_CYCLE},
        )
    return see_ended(ctx, lost, f"nobody saw its process on {node.name} end")


def _ending_of_a_start(ctx: StepContext, replica: Replica) -> Outcome | None:
    """See `end_what_was_begun`; a node that fell silent since is taken out first."""
    begun = replica.alive.filter(pk=ctx.values.get("placement", ""), node__lease__reachable=False)
    silent = begun.exclude(pk=ctx.values["lost_placement"]).first()
    if silent is not None:
        return GoTo(
            to="find-cause",
            text=f"{silent.node.name} went silent before it started it",
            context={"lost_placement": silent.pk},
        )
    return end_what_was_begun(ctx, replica)


def _let_standby_have_it(
    ctx: StepContext, replica: Replica, lost: Placement, target: Node
) -> Outcome:
    """What was started to replace the lost one takes its place: nothing else is started."""
    successor = replica.placements.filter(node=target).latest("created_at")

    def apply() -> None:
        jobs.end_placement(SYSTEM, lost.pk, ctx.incident.cause, free_node=True)
        if successor.warm:
            _leave_to_the_spares(ctx, lost, successor)

    return Done(
        text=f"the process that stood by on {target.name} has its place",
        context={"placement": successor.pk},
        apply=apply,
    )


def await_rejoin(ctx: StepContext) -> Outcome:
    """Wait until the replica commits a step with the others again.

    Back to the first step if it is lost again. If a warm spare took its place meanwhile, the
    process that was started is ended.
    """
    if replica_of(ctx).job.nodes_per_replica > 1:
        return await_all(ctx)
    placement = Placement.objects.select_related("node__lease").get(pk=ctx.values["placement"])
    quicker = _warm_spare_in_place_of(placement)
    if quicker is not None:
        return _make_way(ctx, placement, quicker)
    # Lost again comes first: it may have joined and died before anybody looked.
    gone = losses.told_gone(placement)
    if gone or placement.state == PlacementState.ENDED or not placement.node.lease.reachable:
        return GoTo(
            to="find-cause",
            text=f"the replica was lost again on {placement.node.name}",
            context={"lost_placement": placement.pk},
        )
    if placement.joined_at is None:
        state = "fetches its state from its peers" if placement.started_at else "is starting"
        return Wait(text=f"the process {state}")
    pause = Interruption.objects.filter(
        job_id=ctx.run.job_id,
        joined__contains=ctx.values["replica"],
        committed_at__gte=placement.created_at,
    ).first()
    text = f"replica {ctx.values['replica']} trains again on {placement.node.name}"
    if pause is not None:
        text += f", let in at step {pause.step} with a pause of {pause.gap_s:.2f} s"
    return trains_again(ctx, placement.joined_at, text)


def _make_way(ctx: StepContext, late: Placement, quicker: Placement) -> Outcome:
    """End a process that was started for a place which a warm spare has taken meanwhile."""
    text = f"the warm spare on {quicker.node.name} has its place"
    ending = see_ended(ctx, late, text)
    if ending is not None:
        return ending
    return Wait(
        text=text,
        context={"placement": quicker.pk},
        apply=lambda: _leave_to_the_spares(ctx, late, quicker),
        wake_s=0,
    )


PLAYBOOK = Playbook(
    name="replica-lost",
    version=6,
    summary="Finds out why a replica was lost and lets it train again, in place or on a spare.",
    deadline_s=7 * 86_400,
    steps=(
        StepDefinition(
            key="find-cause",
            title="Find the cause",
            act=find_cause,
            effect=Effect.NONE,
            timeout_s=7 * 86_400,  # an agent may be away for days while its replica trains
            prose="Look at how the process ended (the agent's event), at the node's kernel log and "
            "cards, and at the node's last beat. A node that is silent or has a hardware fault is "
            "unfit; a process that merely died is not its node's fault.",
        ),
        StepDefinition(
            key="confirm-takeover",
            title="See that the survivors go on",
            act=confirm_takeover,
            effect=Effect.NONE,
            prose="On the job's page the step counter must move again, with one replica less.",
        ),
        StepDefinition(
            key="take-node-out",
            title="Take the unfit node out",
            act=take_node_out,
            effect=Effect.IDEMPOTENT,
            timeout_s=7 * 86_400,  # its repair run asks, where it must wait for long
            prose="See that nothing of it runs on the unfit node any more, by killing it or by "
            "switching the node off, before its replica runs anywhere else: no two processes may "
            "ever believe to be the same replica.",
            undo="Return the node after its validation.",
        ),
        StepDefinition(
            key="end-what-is-left",
            title="End what is left of it",
            act=end_what_is_left,
            effect=Effect.IDEMPOTENT,
            prose="Of a replica on several nodes: kill its process on each of the others, which "
            "train nothing without the one that was lost, and see that nothing of it runs.",
        ),
        StepDefinition(
            key="choose-place",
            title="Choose where it returns",
            act=choose_place,
            effect=Effect.NONE,
            timeout_s=7 * 86_400,  # where none is free, its own may have to wait for its repair
            prose="In place if the node is fit, unless its cards want a reset and a spare costs "
            "less. Otherwise a spare of the same cluster, in the rack that holds the fewest of the "
            "job's other replicas. With no other replica what is newer on the node's own disk than "
            "in shared storage is made again on a spare. Of a replica on several nodes only what "
            "was on the unfit one goes elsewhere.",
        ),
        StepDefinition(
            key="start-replica",
            title="Start it",
            act=start_replica,
            effect=Effect.FENCED,
            timeout_s=START_S,
            prose="Start the rank on the chosen node with the job's coordinator and token; of a "
            "replica on several nodes all, on each of them.",
            undo="Stop the process on the chosen node.",
        ),
        StepDefinition(
            key="await-rejoin",
            title="See it train again",
            act=await_rejoin,
            effect=Effect.NONE,
            timeout_s=settings.REPLICA_START_DEADLINE_S,
            prose="It loads a snapshot from its peers' memory, replays what it missed, proves that "
            "its state equals theirs, and enters at a step's edge.",
        ),
    ),
)


# --- helpers --------------------------------------------------------------------------------------


def _known_failure(ctx: StepContext, placement: Placement, verdict: triage.Cause) -> Failure | None:
    """The failure that stands for this already: of this node, or of a program that ended in the
    same way on many."""
    alike = ctx.incident.failures.filter(code=verdict.code)
    here = alike.filter(node=placement.node).first()
    elsewhere = alike.first() if verdict.fault == "program" else None
    if here is None and elsewhere is not None:
        for signal in Signal.objects.filter(placement_id=placement.pk):
            repeat_failure(elsewhere, signal)
    return here or elsewhere


def _job_name(ctx: StepContext) -> str:
    return ctx.run.job.name if ctx.run.job else ""


def _leave_to_the_spares(ctx: StepContext, left: Placement, spare: Placement) -> None:
    """Free the node of what a warm spare has replaced: it takes the part of the spare's own."""
    jobs.vacate(SYSTEM, left)
    if spare.from_spares:
        jobs.keep_as_spare(SYSTEM, left.node_id, ctx.run.title)


def _warm_spare_in_place_of(placement: Placement) -> Placement | None:
    """The warm spare that was quicker than this process, which has ended before it trained."""
    if placement.state != PlacementState.ENDED or placement.joined_at is not None:
        return None
    others = placement.replica.placements.filter(warm=True, standby=False)
    return others.exclude(state=PlacementState.ENDED).select_related("node").first()
