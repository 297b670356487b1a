"""A job that restarts as a whole moves: it saves, ends, and goes on from there on another node.

No second process can follow such a job from step to step, so it stands still meanwhile. Nothing of
it is started anywhere before nothing of it runs where it was.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.conf import settings
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.fleet.choices import COMMAND_FINISHED, CommandState
from controlplane.fleet.models import Command, Node
from controlplane.incidents.candidates import free_nodes, wanted_by
from controlplane.incidents.choices import RUN_UNFINISHED, Effect
from controlplane.incidents.models import PlaybookRun
from controlplane.incidents.move_plans import AS_WHOLE, SAVE_S
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import OF_ALL_NODES, PlacementState
from controlplane.jobs.durability import saved_since
from controlplane.jobs.models import LEFT, Placement
from workers import losses
from workers.placement import choose_spare
from workers.playbooks.base import (
    Done,
    Fail,
    NeedsOperator,
    Outcome,
    Playbook,
    StepContext,
    StepDefinition,
    Wait,
)
from workers.playbooks.multi_node import (
    Left,
    left_of,
    names_of,
    order_ends,
    placements_of,
    refused,
    start_all,
    starts_of,
    went_unheard,
)
from workers.playbooks.multi_node_recovery import end_what_was_begun
from workers.playbooks.node_steps import actor_of
from workers.playbooks.replica_steps import START_S, order_start, runs_on, start_failed

#: An agent that is heard takes the order to end it within this many seconds, or nothing is done.
SAVE_STOP_ORDER_S = 30.0
END = "save-and-end"


def save(ctx: StepContext) -> Outcome:
    """Have a checkpoint that is sure to be there: whoever started its ranks may not give them the
    time to save at their end (torchrun kills its own after 30 s)."""
    before = _placement(ctx, "from")
    job, asked_at = before.replica.job, ctx.values.get("asked_at")
    if asked_at is None:
        return Wait(
            text="the job is asked to save",
            context={"asked_at": timezone.now().isoformat()},
            apply=lambda: jobs.direct(actor_of(ctx), job.pk, "checkpoint", reason=ctx.run.title),
        )
    since = datetime.fromisoformat(asked_at)
    saved = saved_since(job.checkpoints.filter(tier__in=OF_ALL_NODES), since).first()
    if saved is not None:
        return Done(text=f"step {saved.step} is saved")
    if before.state == PlacementState.ENDED or _being_brought_back(ctx):
        return _not_moved(f"the job's process on {before.node.name} has ended by itself")
    if timezone.now() - since > timedelta(seconds=SAVE_S):
        return Done(text=f"the job has told of no checkpoint within {SAVE_S:g} s")
    return Wait(text="the job saves")


def end(ctx: StepContext) -> Outcome:
    """Let it end on all its nodes together: none waits for another that trains on."""
    there = _there(ctx)
    orders = Command.objects.filter(requester__startswith=f"{ctx.step.pk}.")
    gone = next((one for one in there if _has_ended(one)), None)
    if gone is not None and not orders:
        return _not_moved(f"the job's process on {gone.node.name} has ended by itself")
    left = [
        (one, None if stop is not None and went_unheard(ctx, stop) else stop)
        for one, stop in left_of(ctx, there)
    ]
    if not left:

        def free() -> None:
            for one in there:
                jobs.end_placement(SYSTEM, one.pk, f"moved: {ctx.run.title}", free_node=True)
                jobs.vacate(SYSTEM, one)
            if ctx.values["spare"]:
                jobs.keep_as_spare(SYSTEM, _placement(ctx, "from").node_id, ctx.run.title)

        return Done(text=f"nothing of the job runs on {names_of(there)} any more", apply=free)
    if _being_brought_back(ctx):
        return _not_moved("the job was lost meanwhile, and is brought back by a run of its own")
    untold = [one for one, stop in left if stop is None]
    silent = [one for one in untold if not one.node.lease.reachable] if orders else []
    due: list[Left] = [(one, None) for one in untold if one not in silent]
    if due:
        return Wait(
            text=f"{names_of([one for one, _ in due])} are told to let it save and end",
            apply=lambda: order_ends(
                ctx, due, grace_s=SAVE_S, ttl_s=SAVE_S + SAVE_STOP_ORDER_S, actor=actor_of(ctx)
            ),
        )
    told = [(one, stop) for one, stop in left if stop is not None]
    taken = [(one, stop) for one, stop in told if stop.state != CommandState.REFUSED]
    if len(told) == len(there) and not taken:
        return _not_moved(f"{names_of(there)} refused to end it: {told[0][1].error}")
    # Where any has taken the order, those that refused it leave with that one.
    if (bad := refused(taken)) is not None:
        why = bad[1].error or bad[1].get_state_display().lower()
        return NeedsOperator(text=f"{bad[0].node.name} does not say that nothing of it runs: {why}")
    if silent:
        text = f"{names_of(silent)} went silent before saying that nothing of it runs: awaited"
        return Wait(text=text)
    return Wait(text=f"the job saves and ends on {names_of([one for one, _ in left])}")


def choose_place(ctx: StepContext) -> Outcome:
    """The node that it was to move to, or else the one that suits it best by now."""
    if _being_brought_back(ctx):
        return _not_moved("the job is brought back by a run of its own")
    if len(_there(ctx)) > 1:
        return _choose_places(ctx)
    before = _placement(ctx, "from")
    job = before.replica.job
    free = [
        one
        for one in free_nodes(job.cluster_id, job.pk)
        if one.node_id not in ctx.values["passed_over"]
    ]
    wanted = [one for one in free if one.node_id == ctx.values["target"]]
    others = [one for one in free if one.node_id != before.node_id]
    choice = choose_spare(
        wanted or others or free, [], wanted_by(before.node, job.gpus_per_replica)
    )
    if choice is None:
        return Wait(text="no node is free that the job fits on; it stands still", wake_s=2.0)
    text = f"the job resumes on {choice.name}"
    return Done(
        text=text if wanted else f"{text}, since the node that was chosen is not free any more",
        context={"target": choice.node_id},
    )


def _choose_places(ctx: StepContext) -> Outcome:
    """The same for a replica on several nodes: those that it stays on, where they are to be had."""
    moved = _placement(ctx, "from")
    there, job = _there(ctx), moved.replica.job
    free = {
        one.node_id: one
        for one in free_nodes(job.cluster_id, job.pk)
        if one.node_id not in ctx.values["passed_over"]
    }
    wanted = {one.node_rank: one.node_id for one in there}
    wanted[moved.node_rank] = ctx.values["target"]
    chosen = {rank: free[node_id] for rank, node_id in wanted.items() if node_id in free}
    for one in there:
        if one.node_rank in chosen:
            continue
        taken = {node.node_id for node in chosen.values()}
        rest = [node for node in free.values() if node.node_id not in taken]
        others = [node for node in rest if node.node_id != moved.node_id]
        choice = choose_spare(others or rest, [], wanted_by(one.node, job.gpus_per_node))
        if choice is None:
            return Wait(text=f"{len(chosen)} of {len(there)} nodes are free", wake_s=2.0)
        chosen[one.node_rank] = free[choice.node_id]
    nodes = [chosen[rank] for rank in range(len(there))]
    return Done(
        text=f"the job resumes on {', '.join(node.name for node in nodes)}",
        context={"targets": [node.node_id for node in nodes]},
    )


def start(ctx: StepContext) -> Outcome:
    """Start the job's process on each chosen node, once nothing of an earlier attempt is left.

    Fails if another run brings the job back by now. Back to the choice of a place if a node does
    not start its part.
    """
    if _being_brought_back(ctx):
        return _not_moved("the job is brought back by a run of its own")
    replica = _placement(ctx, "from").replica
    command = Command.objects.filter(requester=ctx.requester(), verb="start_rank").first()
    ordered = command is not None or starts_of(ctx).exists()
    if not ordered and (ending := end_what_was_begun(ctx, replica)) is not None:
        return ending
    if len(_there(ctx)) > 1:
        return start_all(ctx, replica, ctx.values["targets"], again="choose-place")
    target = Node.objects.get(pk=ctx.values["target"])
    if command is None:
        return order_start(ctx, replica, target)
    if command.state == CommandState.DONE:
        return runs_on(target, command)
    if command.state in COMMAND_FINISHED:
        return start_failed(ctx, target, command)
    return Wait(text=f"waiting for {target.name} to start it")


def await_step(ctx: StepContext) -> Outcome:
    """Wait until the job commits a step where it was started.

    Done too if it found nothing left to do and left. Fails if it is lost there: its incident brings
    it back.
    """
    before = _placement(ctx, "from")
    nows = placements_of(ctx) or [_placement(ctx, "placement")]
    now = nows[before.node_rank if len(nows) > 1 else 0]
    job, where = now.replica.job, now.node.name
    if _being_brought_back(ctx):
        return _not_moved(f"the job was lost on {where}, and is brought back by a run of its own")
    if now.end_reason.startswith(LEFT):
        return Done(text=f"on {where} it found nothing left to do, and has {now.end_reason}")
    gone = next((one for one in nows if _has_ended(one)), None)
    if gone is not None:
        return Wait(
            text=f"the job's process on {gone.node.name} has ended; its loss is being taken up"
        )
    if now.joined_at is None:
        state = "loads its newest checkpoint" if now.started_at else "is starting"
        return Wait(text=f"the process on {where} {state}")
    text = f"{job.name} moved from {before.node.name} to {where}"
    if before.ended_at is not None:
        text += f", and stood still for {(now.joined_at - before.ended_at).total_seconds():.0f} s"
    return Done(text=text)


PLAYBOOK = Playbook(
    name=AS_WHOLE,
    version=4,
    summary="Moves a job that restarts as a whole: it saves, ends, and resumes on another node.",
    deadline_s=2 * 86_400,
    steps=(
        StepDefinition(
            key="save",
            title="Let it save",
            act=save,
            effect=Effect.IDEMPOTENT,
            timeout_s=2 * SAVE_S,
            prose="Ask it for a checkpoint, and wait until it tells of one that all nodes reach.",
        ),
        StepDefinition(
            key=END,
            title="Let it end",
            act=end,
            effect=Effect.IDEMPOTENT,
            timeout_s=SAVE_S + 2 * SAVE_STOP_ORDER_S + 1800,
            prose="Send SIGTERM to its process and wait until it is gone: at the end of its step "
            f"it saves once more, and leaves. After {SAVE_S:g} s it is killed (its ranks by "
            "torchrun after 30 s), and goes on from the checkpoint of before. Nodes that went "
            "silent are awaited, and told again.",
            undo="Start it again where it was.",
        ),
        StepDefinition(
            key="choose-place",
            title="Choose where it goes on",
            act=choose_place,
            effect=Effect.NONE,
            timeout_s=900,
            prose="The node that was ordered; where that was taken meanwhile, a spare, or another "
            "free node, or the one that it came from. Its other nodes, if it has several, stay.",
        ),
        StepDefinition(
            key="start",
            title="Start it there",
            act=start,
            effect=Effect.FENCED,
            timeout_s=START_S,
            prose="Start its program on the chosen node with the job's coordinator and token, and "
            "on its other nodes.",
            undo="Stop the process on the chosen node.",
        ),
        StepDefinition(
            key="await-step",
            title="See it train",
            act=await_step,
            effect=Effect.NONE,
            timeout_s=settings.REPLICA_START_DEADLINE_S,
            prose="It loads its newest checkpoint, and its first step is told.",
        ),
    ),
)


def _placement(ctx: StepContext, role: str) -> Placement:
    found = Placement.objects.select_related("node", "replica__job")
    return found.get(pk=ctx.values[role])


def _there(ctx: StepContext) -> list[Placement]:
    """What it had when the move was ordered, on each of its nodes."""
    found = Placement.objects.filter(pk__in=ctx.values.get("there", [ctx.values["from"]]))
    return list(found.select_related("node__lease", "replica__job").order_by("node_rank"))


def _not_moved(why: str) -> Fail:
    return Fail(text=f"not moved: {why}")


def _has_ended(placement: Placement) -> bool:
    return placement.state == PlacementState.ENDED or losses.told_gone(placement)


def _being_brought_back(ctx: StepContext) -> bool:
    """Whether the job was lost while it moved: then that is another run's."""
    subject = f"replica-lost/{ctx.run.job_id}/{ctx.values['replica']}"
    runs = PlaybookRun.objects.filter(subject=subject, state__in=sorted(RUN_UNFINISHED))
    return runs.exists()
