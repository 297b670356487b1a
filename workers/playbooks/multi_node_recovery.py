"""How `replica-lost` restarts a replica that runs on several nodes; see `multi_node`."""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.accounts.models import SYSTEM
from controlplane.fleet.models import Node
from controlplane.health.choices import Action
from controlplane.incidents.candidates import free_nodes, wanted_by
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Placement, Replica
from workers import losses
from workers.placement import Candidate, choose_spare
from workers.playbooks.base import (
    Done,
    GoTo,
    NeedsOperator,
    Outcome,
    Skip,
    StepContext,
    Wait,
)
from workers.playbooks.multi_node import (
    gone_of,
    left_of,
    names_of,
    order_ends,
    placements_of,
    refused,
    start_all,
    starts_of,
    went_unheard,
)
from workers.playbooks.replica_steps import await_free, can_restart_on, replica_of, trains_again

#: A node that was told to kill a process answers within this many seconds.
KILL_ORDER_S = 30.0


def end_what_is_left(ctx: StepContext) -> Outcome:
    """Have ended what a replica still has on any of its nodes: without the one that was lost it
    trains nothing, and what is started anew must not meet it."""
    replica = replica_of(ctx)
    there = list(replica.alive)
    if replica.job.nodes_per_replica == 1:
        return Skip(text="the replica uses a single node")
    left = left_of(ctx, there)
    if not left:
        return Done(
            text=f"nothing of the replica runs on any of its {replica.job.nodes_per_replica} nodes"
        )
    silent = next((one for one, _ in left if not one.node.lease.reachable), None)
    if silent is not None:
        return GoTo(
            to="find-cause",
            node_id=silent.node_id,
            text=f"{silent.node.name} went silent before its process was seen to end",
            context={"lost_placement": silent.pk},
        )
    bad = refused(left)
    if bad is not None:
        placement, stop = bad
        return GoTo(
            to="take-node-out",
            node_id=placement.node_id,
            text=f"{placement.node.name} does not end its process ({stop.error or stop.state}): it "
            "is unfit",
            context={
                "lost_placement": placement.pk,
                "node_fit": False,
                "code": "",  # that of the node that was lost first is not this one's
                "action": Action.POWER_CYCLE,
                "gpu": "",
            },
        )
    names = names_of([one for one, _ in left])
    if any(stop is None for _, stop in left):
        return Wait(
            text=f"{names} are told to end what is left of it",
            apply=lambda: order_ends(ctx, left, grace_s=0, ttl_s=KILL_ORDER_S),
        )
    return Wait(text=f"waiting for {names} to say that nothing of it runs")


def choose_places(ctx: StepContext, replica: Replica) -> Outcome:
    """A node for each place of a replica on several: the one that it had, unless that is unfit or
    not to be had any more."""
    job = replica.job
    free = {
        one.node_id: one
        for one in free_nodes(job.cluster_id, job.pk)
        if one.node_id not in ctx.values["passed_over"]
    }
    last = [_last_at(replica, node_rank) for node_rank in range(job.nodes_per_replica)]
    stay = [one for one in last if _can_reuse_node(ctx, one, free)]
    chosen = {one.node_rank: one.node for one in stay}
    reasons = []
    for one in last:
        if one in stay:
            continue
        taken = {node.pk for node in chosen.values()}
        choice = choose_spare(
            [c for c in free.values() if c.node_id not in (one.node_id, *taken)],
            [],  # near the others, not spread as replicas are: each step goes over all of them
            wanted_by(one.node, job.gpus_per_node),
        )
        if choice is None:
            return await_free(ctx, f"no node is free for the place of {one.node.name}")
        chosen[one.node_rank] = Node.objects.select_related("rack").get(pk=choice.node_id)
        reasons.append(f"{choice.name} for {one.node.name}: {choice.reason}")
    return Done(
        text="; ".join(reasons) or "the replica returns on the nodes that it had",
        context={"targets": [chosen[rank].pk for rank in range(job.nodes_per_replica)]},
    )


def _last_at(replica: Replica, node_rank: int) -> Placement:
    stays = replica.placements.filter(node_rank=node_rank)
    return stays.select_related("node__rack", "node__lease", "replica__job").latest("created_at")


def _can_reuse_node(ctx: StepContext, last: Placement, free: Mapping[str, Candidate]) -> bool:
    """Whether a place may be on the node that it was on last."""
    if last.node_id in ctx.values["passed_over"] or not last.node.lease.reachable:
        return False
    lost_to_it = last.pk == ctx.values["lost_placement"] and not ctx.values["node_fit"]
    holds_it = last.state != PlacementState.ENDED and can_restart_on(last.node, last.replica.job)
    return not lost_to_it and (holds_it or last.node_id in free)


def end_what_was_begun(ctx: StepContext, replica: Replica) -> Outcome | None:
    """Before a start that is tried again: have ended what an earlier turn of this run had begun and
    nobody saw train, for two starts of one replica must never meet; or go on with it if it is up by
    now. None once nothing is left of it."""
    begun = _begun(ctx, replica)
    if not begun:
        return None
    up = [one for one in begun if one.state == PlacementState.RUNNING and losses.lives(one)]
    if len(up) == replica.job.nodes_per_replica:
        return Done(text=f"the replica runs on {names_of(up)} by now")
    left = [
        (one, None if stop is not None and went_unheard(ctx, stop) else stop)
        for one, stop in left_of(ctx, begun)
    ]
    bad = refused(left)
    if bad is not None:
        return NeedsOperator(text=f"{bad[0].node.name} does not say that nothing of it runs there")
    names = names_of([one for one, _ in left])
    if any(stop is None for _, stop in left):
        return Wait(
            text=f"{names} may have started it after all: told to end it first",
            apply=lambda: order_ends(ctx, left, grace_s=0, ttl_s=KILL_ORDER_S),
        )
    if left:
        return Wait(text=f"waiting for {names} to say that nothing of it runs")

    def end() -> None:
        for one in begun:
            jobs.end_placement(SYSTEM, one.pk, "its start came to nothing", free_node=True)

    return Wait(text="nothing is left of the start before", wake_s=0, apply=end)


def _begun(ctx: StepContext, replica: Replica) -> list[Placement]:
    """What this run had placed, and nobody has seen to since."""
    ours = [ctx.values.get("placement", ""), *ctx.values.get("placements", [])]
    begun = replica.alive.filter(pk__in=ours, standby=False)
    settled = ctx.run.steps.filter(key="end-what-is-left").first()
    if settled is not None and settled.finished_at is not None:
        begun = begun.filter(created_at__gt=settled.finished_at)
    return list(begun)


def start_together(ctx: StepContext, replica: Replica) -> Outcome:
    """Start the replica's processes on all chosen nodes, once nothing of an earlier start is left.

    Back to the first step if a node fell silent before all had started, and to the choice of places
    if one does not start its process.
    """
    begun = placements_of(ctx)
    there = [one for one in begun if one.state != PlacementState.ENDED]
    silent = next((one for one in there if not one.node.lease.reachable), None)
    if silent is not None:
        return GoTo(
            to="find-cause",
            text=f"{silent.node.name} went silent before all had started it",
            context={"lost_placement": silent.pk},
        )
    if not starts_of(ctx) and (ending := end_what_was_begun(ctx, replica)) is not None:
        return ending
    targets = ctx.values["targets"]

    def end() -> None:
        for one in replica.alive:
            moves = one.node_id not in targets
            jobs.end_placement(SYSTEM, one.pk, ctx.incident.cause, free_node=moves)

    return start_all(ctx, replica, targets, again="choose-place", first=end)


def await_all(ctx: StepContext) -> Outcome:
    """Wait until the processes on all nodes train; back to the first step if one is lost again."""
    placements = placements_of(ctx)
    gone = gone_of(placements)
    if gone is not None:
        return GoTo(
            to="find-cause",
            text=f"the replica was lost again on {gone.node.name}",
            context={"lost_placement": gone.pk},
        )
    joined = [one.joined_at for one in placements if one.joined_at is not None]
    if len(joined) < len(placements):
        up = sum(one.started_at is not None for one in placements)
        return Wait(text=f"{up} of its {len(placements)} nodes' processes are up")
    text = f"replica {ctx.values['replica']} trains again on {names_of(placements)}"
    return trains_again(ctx, max(joined), text)


def lacks_a_place(ctx: StepContext, replica: Replica) -> bool:
    """Whether a replica on several nodes is there in part only, or one was begun by this run and is
    not up: what there is of it trains nothing, however well its nodes are heard."""
    nodes = replica.job.nodes_per_replica
    starting = replica.alive.filter(state=PlacementState.STARTING)
    if nodes == 1:  # what was to replace another is of that move
        begun = starting.filter(pk=ctx.values.get("placement", ""), moved_from=None)
        return begun.exists()
    return replica.alive.count() < nodes or ("placements" in ctx.values and starting.exists())
