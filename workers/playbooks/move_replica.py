"""A replica moves while it trains: a second process follows it, then takes its place at an edge.

The replica loses nothing by a move that fails: whatever becomes of the second process, the first
trains on.
"""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import COMMAND_FINISHED, CommandState, NodeState
from controlplane.fleet.models import Command, Node
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import Effect
from controlplane.incidents.move_plans import PLAYBOOK as NAME
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Interruption, Placement
from controlplane.jobs.selectors import SAME_MOMENT
from node_agent import wire
from workers import losses
from workers.playbooks.base import (
    Apply,
    Done,
    Fail,
    NeedsOperator,
    Outcome,
    Playbook,
    Skip,
    StepContext,
    StepDefinition,
    Wait,
)
from workers.playbooks.multi_node import left_of, order_ends, ran_out
from workers.playbooks.node_steps import actor_of
from workers.playbooks.replica_steps import runs_on, see_ended
from workers.playbooks.start_rank import start_rank_command

#: A node that is heard starts a rank within this many seconds, or the move is given up.
START_ORDER_S = 20.0
#: The agent may say that a process ended before the job says that it had taken its place.
HEARSAY = timedelta(seconds=3)
#: A process that another has replaced leaves by itself within this time, or is told to, which its
#: node answers within so many seconds.
LEAVE, LEAVE_STOP_ORDER_S = timedelta(seconds=10), 60.0


def start_standby(ctx: StepContext) -> Outcome:
    """Start the replica's second process on the chosen node; give the move up if that fails."""
    standby = _standby(ctx)
    if not standby.standby:
        return Skip(text="the new process has the replica's place already")
    over = _over(ctx, standby)
    if over is not None:
        return over
    where = standby.node
    command = Command.objects.filter(requester=ctx.requester(), verb="start_rank").first()
    if command is None:

        def order() -> None:
            verb = start_rank_command(standby.replica, standby.pk, standby="migrate")
            fleet.queue_command(
                actor_of(ctx), where.pk, verb, requester=ctx.requester(), ttl_s=START_ORDER_S
            )

        return Wait(text=f"{where.name} is told to start it", apply=order)
    if command.state == CommandState.DONE:
        return runs_on(where, command)
    if command.state in COMMAND_FINISHED:
        why = command.error or command.get_state_display().lower()
        return _give_up(ctx, standby, f"{where.name} did not start it: {why}")
    return Wait(text=f"waiting for {where.name} to start it")


def await_place(ctx: StepContext) -> Outcome:
    """Wait until the second process holds the state and has taken the replica's place.

    The move is given up, and the replica trains on, if the process ends before, or has not taken
    the place within REPLICA_START_DEADLINE_S.
    """
    standby = _standby(ctx)
    if not standby.standby:
        return _has_place(ctx, standby)
    over = _over(ctx, standby)
    if over is not None:
        return over
    waited = timezone.now() - (ctx.step.started_at or timezone.now())
    if waited > timedelta(seconds=settings.REPLICA_START_DEADLINE_S):
        limit = f"{settings.REPLICA_START_DEADLINE_S:g} s"
        return _give_up(ctx, standby, f"the new process did not take the place within {limit}")
    state = "fetches the state from its peers" if standby.started_at else "is starting"
    return Wait(text=f"the process on {standby.node.name} {state}; the replica trains")


def _has_place(ctx: StepContext, standby: Placement) -> Outcome:
    """It is the replica's own process: what becomes of it from now on is the replica's story."""
    where, end = standby.node.name, _end_of(standby)
    if standby.state == PlacementState.ENDED:
        return Done(text=f"the replica moved to {where}, and was lost there: its incident goes on")
    if end is not None:

        def bring_back() -> None:
            # Its end may have been told before it was known to be more than a standby.
            incidents.bring_back(standby, end.observed_at)

        text = f"the replica moved to {where}, and was lost there: it is brought back"
        return Done(text=text, apply=bring_back)
    if standby.joined_at is None:
        return Wait(
            text=f"the process on {where} has the replica's place; its first step is awaited"
        )
    if _pause(ctx, standby) is None and timezone.now() - standby.joined_at < HEARSAY:
        return Wait(text=f"{_moved_text(ctx, standby)}; how long the job paused is awaited")
    return Done(text=_moved_text(ctx, standby))


def free_node(ctx: StepContext) -> Outcome:
    """The old process leaves by itself; until it has, nothing else may have its cards."""
    before = Placement.objects.select_related("node__lease").get(pk=ctx.values["from"])
    node, moved = before.node, _moved_text(ctx, _standby(ctx))
    there = Placement.objects.filter(node=node).exclude(state=PlacementState.ENDED)
    if there.exists():
        return Done(text=f"{moved}; {node.name} holds another replica by now")

    def free() -> None:
        jobs.vacate(SYSTEM, before)
        _be_spare(ctx, node)

    if node.state != NodeState.ALLOCATED:
        state = node.get_state_display().lower()
        return Done(text=f"{moved}; {node.name} is {state}", apply=free)

    left = left_of(ctx, [before])
    if not left:
        return Done(text=f"{moved}; {node.name} is free", apply=free)
    [(_, stop)] = left
    if stop and ran_out(stop) and losses.was_silent(node.pk, stop.created_at):
        stop = None  # that it left it unanswered says nothing of the process
    if stop is not None and stop.state in COMMAND_FINISHED:
        return NeedsOperator(
            text=f"{moved}; {node.name} does not say that its old process has ended"
        )
    if stop is None and not node.lease.reachable:
        text = f"{moved}; {node.name}, which has its old process, is not heard"
        return Wait(text=text, wake_s=2.0)
    if stop is not None or timezone.now() - (ctx.step.started_at or timezone.now()) < LEAVE:
        return Wait(text=f"{moved}; the old process on {node.name} is leaving")

    def order() -> None:
        order_ends(ctx, [(before, None)], grace_s=wire.GRACE_S, ttl_s=LEAVE_STOP_ORDER_S)

    return Wait(text=f"{moved}; {node.name} is told to end its old process", apply=order)


PLAYBOOK = Playbook(
    name=NAME,
    version=1,
    summary="Moves a replica to another node while it trains, at a step's edge, with no loss.",
    deadline_s=2 * 86_400,
    steps=(
        StepDefinition(
            key="start-standby",
            title="Start a second process of it",
            act=start_standby,
            effect=Effect.FENCED,
            timeout_s=86_400,
            does=lambda _context: ("agent of {node}: start_rank, standing by for the replica",),
            prose="Start the rank on the other node with the job's coordinator and token, the "
            "replica's number, a placement of its own, and DRYDOCK_STANDBY=migrate.",
            undo="Stop that process: the replica trains on.",
        ),
        StepDefinition(
            key="await-place",
            title="See it take the place",
            act=await_place,
            effect=Effect.NONE,
            timeout_s=86_400,  # a node that went silent meanwhile is taken out before that
            prose="It takes the state from all members' memory, follows their steps, and once "
            "level takes the replica's number at a step's edge. The job's page shows the move.",
        ),
        StepDefinition(
            key="free-node",
            title="Free the node that it left",
            act=free_node,
            effect=Effect.FENCED,
            timeout_s=86_400,  # a node that is not heard is awaited, or taken out by its repair
            prose="The old process leaves by itself once it is told that it was replaced. See that "
            "it is gone before anything else is started there.",
        ),
    ),
)


# --- where the move stands ------------------------------------------------------------------------


def _standby(ctx: StepContext) -> Placement:
    found = Placement.objects.select_related("node__lease", "replica__job")
    return found.get(pk=ctx.values["placement"])


def _over(ctx: StepContext, standby: Placement) -> Outcome | None:
    """What is left to do of a move that will not happen; None if it goes on."""
    where, end = standby.node.name, _end_of(standby)
    if standby.state == PlacementState.ENDED:
        return _failed(standby, standby.end_reason, lambda: _be_spare(ctx, standby.node))
    if ctx.values.get("given_up"):
        return _give_up(ctx, standby, ctx.values["given_up"])
    if end is None:
        return None
    if timezone.now() - end.recorded_at < HEARSAY:
        return Wait(text=f"the process on {where} has ended; whether it had the place is awaited")
    how = end.data.get("signal")
    words = f"signal {how}" if how else f"exit status {end.data.get('exit_code')}"
    return _give_up(ctx, standby, f"the process on {where} ended, {words}")


def _give_up(ctx: StepContext, standby: Placement, why: str) -> Outcome:
    """See that nothing of the second process runs, and free its node."""
    ending = see_ended(ctx, standby, why, {"given_up": why})
    if ending is not None:
        return ending

    def free() -> None:
        if jobs.give_up_move(SYSTEM, standby.pk, why):
            _be_spare(ctx, standby.node)

    return _failed(standby, why, free)


def _failed(standby: Placement, why: str, apply: Apply) -> Fail:
    replica = standby.replica.index
    return Fail(text=f"not moved: {why}; replica {replica} trains on where it was", apply=apply)


def _be_spare(ctx: StepContext, node: Node) -> None:
    """There is one spare less while a replica is on it: what it leaves free is one."""
    if ctx.values.get("spare"):
        jobs.keep_as_spare(SYSTEM, node.pk, ctx.run.title)


def _end_of(placement: Placement) -> Signal | None:
    ends = Signal.objects.filter(kind=SignalKind.PROCESS_EXITED, placement_id=placement.pk)
    return ends.first()


def _moved_text(ctx: StepContext, standby: Placement) -> str:
    """The move in a sentence, for the record."""
    before = Placement.objects.select_related("node").get(pk=ctx.values["from"])
    words = f"replica {standby.replica.index} moved from {before.node.name} to {standby.node.name}"
    pause = _pause(ctx, standby)
    return words if pause is None else f"{words}, pause {pause.gap_s:.2f} s"


def _pause(ctx: StepContext, standby: Placement) -> Interruption | None:
    """The regrouping in which it took the place, once that was told."""
    if standby.joined_at is None:
        return None
    pauses = Interruption.objects.filter(
        job_id=ctx.run.job_id,
        joined__contains=standby.replica.index,
        committed_at__gte=standby.joined_at - SAME_MOMENT,
        committed_at__lte=standby.joined_at + SAME_MOMENT,
    )
    return pauses.order_by("epoch").last()
