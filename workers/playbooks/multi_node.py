"""A replica on several nodes: its processes are started together, and none outlives the others.

Nothing of a start begins anywhere before nothing is left of the one before.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from django.db.models import QuerySet

from controlplane.accounts.models import SYSTEM, Actor
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import COMMAND_FINISHED, CommandState
from controlplane.fleet.models import Command, Node
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Placement, Replica
from node_agent import wire
from workers import losses
from workers.playbooks.base import Done, GoTo, NeedsOperator, Outcome, StepContext, Wait
from workers.playbooks.start_rank import START_ORDER_S, start_rank_command

#: Where the processes of a start meet on its first node: below the ports that systems give out.
FIRST_PORT, PORTS = 20_000, 12_000

#: A process that may be there still, and the order to end it, if one was given.
Left = tuple[Placement, Command | None]


def start_all(
    ctx: StepContext,
    replica: Replica,
    node_ids: Sequence[str],
    *,
    again: str,
    first: Callable[[], object] = lambda: None,
    give_up: Callable[[], object] = lambda: None,
) -> Outcome:
    """Have a replica started on these nodes, having done what comes `first`.

    If one does not start it, all are ended, that node is passed over, and the step `again` chooses
    anew; `give_up` is what else is to be done then.
    """
    commands = list(starts_of(ctx))
    if not commands:
        jobs.check_active(replica.job)
        names = [Node.objects.get(pk=node_id).name for node_id in node_ids]

        def order() -> None:
            first()
            order_starts(ctx, replica, node_ids)

        return Wait(
            text=f"{', '.join(names)} are told to start it together",
            context={"placements": [ctx.placement_id(str(n)) for n in range(len(node_ids))]},
            apply=order,
            on_conflict=GoTo(to=again, text="one of the nodes was taken meanwhile", apply=give_up),
        )
    failed = [c for c in commands if c.state in COMMAND_FINISHED and c.state != CommandState.DONE]
    if failed:
        return _start_failed(ctx, replica, failed, again, give_up)
    up = sum(command.state == CommandState.DONE for command in commands)
    if up < len(commands):
        return Wait(text=f"{up} of its {len(commands)} nodes have started it")
    return Done(text=f"the replica runs on all of its {up} nodes")


def starts_of(ctx: StepContext) -> QuerySet[Command]:
    """This turn's orders to start it."""
    return Command.objects.filter(requester__startswith=f"{ctx.requester()}.", verb="start_rank")


def order_starts(ctx: StepContext, replica: Replica, node_ids: Sequence[str]) -> None:
    """Place a replica on these nodes, in the order of their ranks, and have it started there."""
    start = ctx.placement_id("0")
    address = Node.objects.get(pk=node_ids[0]).address
    port = FIRST_PORT + zlib.crc32(start.encode()) % PORTS
    for node_rank, node_id in enumerate(node_ids):
        placement_id = ctx.placement_id(str(node_rank))
        jobs.place(SYSTEM, replica.pk, node_id, placement_id=placement_id, node_rank=node_rank)
        meets = wire.Together(
            nodes=len(node_ids), node_rank=node_rank, address=address, port=port, start=start
        )
        order = start_rank_command(replica, placement_id, together=meets)
        requester = ctx.requester(str(node_rank))
        fleet.queue_command(SYSTEM, node_id, order, requester=requester, ttl_s=START_ORDER_S)


def went_unheard(ctx: StepContext, command: Command) -> bool:
    """Whether an order of this step came to nothing since its node was silent: it is no fault of
    the node's, and is given once more."""
    since = ctx.step.started_at or command.created_at
    return ran_out(command) and losses.was_silent(command.node_id, since)


def ran_out(command: Command) -> bool:
    """Whether an order came to nothing while it was valid, also if what failed then was heard."""
    at = command.finished_at
    late = command.state == CommandState.FAILED and at is not None and at > command.expires_at
    return late or command.state == CommandState.EXPIRED


def left_of(ctx: StepContext, placements: Sequence[Placement]) -> list[Left]:
    """Those of which nobody has said that nothing runs: neither their agent of itself, nor in
    answer to this turn's order to end them."""
    found = [(one, _stop_of(ctx, one)) for one in placements if not losses.seen_to_end(one)]
    return [(one, stop) for one, stop in found if stop is None or stop.state != CommandState.DONE]


def order_ends(
    ctx: StepContext,
    left: Sequence[Left],
    *,
    grace_s: float,
    ttl_s: float,
    actor: Actor = SYSTEM,
) -> None:
    """Have them ended that have not been told to; see `left_of`."""
    for placement, stop in left:
        if stop is None:
            order = wire.StopProcess(placement=placement.pk, grace_s=grace_s)
            requester = f"{_stop_requester(ctx, placement)}.{_stops_of(ctx, placement).count()}"
            fleet.queue_command(actor, placement.node_id, order, requester=requester, ttl_s=ttl_s)


def refused(left: Sequence[Left]) -> tuple[Placement, Command] | None:
    """One whose node was told to end it, and does not say that nothing of it runs."""
    told = [(one, stop) for one, stop in left if stop is not None]
    return next(((one, stop) for one, stop in told if stop.state in COMMAND_FINISHED), None)


def names_of(placements: Sequence[Placement]) -> str:
    """The names of the placements' nodes, comma-separated, in the order given."""
    return ", ".join(one.node.name for one in placements)


def _start_failed(
    ctx: StepContext,
    replica: Replica,
    failed: Sequence[Command],
    again: str,
    give_up: Callable[[], object],
) -> Outcome:
    nodes = Node.objects.in_bulk([one.node_id for one in failed])
    name, why = nodes[failed[0].node_id].name, failed[0].error or failed[0].state
    left = [
        (one, None if stop is not None and went_unheard(ctx, stop) else stop)
        for one, stop in left_of(ctx, list(replica.alive))
    ]
    bad = refused(left)
    if bad is not None:
        return NeedsOperator(text=f"{bad[0].node.name} does not say that nothing of it runs there")
    if any(stop is None for _, stop in left):
        return Wait(
            text=f"{name} did not start it ({why}): all are told to end it",
            apply=lambda: order_ends(ctx, left, grace_s=0, ttl_s=60),
        )
    if left:
        where = names_of([one for one, _ in left])
        return Wait(text=f"waiting for {where} to say that nothing of it runs")
    there = list(replica.alive)

    def apply() -> None:
        for placement in there:
            jobs.end_placement(SYSTEM, placement.pk, f"{name} did not start it", free_node=True)
        give_up()

    at_fault = [one.node_id for one in failed if not went_unheard(ctx, one)]
    passed_over = [*ctx.values.get("passed_over", []), *at_fault]
    return GoTo(
        to=again,
        text=f"{name} did not start it: {why}",
        context={"passed_over": passed_over},
        apply=apply,
    )


def _stop_of(ctx: StepContext, placement: Placement) -> Command | None:
    return _stops_of(ctx, placement).order_by("created_at").last()


def _stops_of(ctx: StepContext, placement: Placement) -> QuerySet[Command]:
    requester = f"{_stop_requester(ctx, placement)}."
    return Command.objects.filter(requester__startswith=requester, verb="stop_process")


def _stop_requester(ctx: StepContext, placement: Placement) -> str:
    return ctx.requester(f"stop.{placement.node_rank}")


def placements_of(ctx: StepContext) -> list[Placement]:
    """Those of the run's last start, by rank."""
    found = Placement.objects.filter(pk__in=ctx.values.get("placements", []))
    return list(found.select_related("node__lease", "replica__job").order_by("node_rank"))


def gone_of(placements: Sequence[Placement]) -> Placement | None:
    """The first of these that has ended, was told to be gone, or whose node is not heard."""
    return next(
        (
            one
            for one in placements
            if one.state == PlacementState.ENDED
            or losses.told_gone(one)
            or not one.node.lease.reachable
        ),
        None,
    )
