"""What playbooks share that start a replica's process on a node, end one, or wait for a node.

They hold for a replica on one node; see `multi_node` for one on several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from django.db.models import Q
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import COMMAND_FINISHED, IN_SERVICE, CommandState, NodeState
from controlplane.fleet.models import Command, MaintenanceWindow, Node
from controlplane.health.choices import Urgency
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import RUN_ACTIVE, ApprovalState, EntryKind
from controlplane.incidents.models import PlaybookRun
from controlplane.jobs import actions as jobs
from controlplane.jobs.models import Job, Placement, Replica
from controlplane.jobs.selectors import may_return
from node_agent import wire
from workers.playbooks.base import Done, GoTo, NeedsOperator, Outcome, StepContext, Wait
from workers.playbooks.start_rank import START_ORDER_S, start_rank_command

#: What gives a node back at its end.
RETURNING = ("repair-node", "return-node", "admit-node")
#: A person is asked for a node after so many seconds, once nothing is under way that gives one
#: back: a boot, a diagnostic and the watch after it take most of that.
PLACE_S = 2700.0
#: A start takes so long at most, in seconds, with the orders to end what hangs and what was begun
#: before, and that to end it if nobody answers: each is awaited until its result is given up.
START_S = 400.0


def replica_of(ctx: StepContext) -> Replica:
    """The replica that the run is about, with its job."""
    return Replica.objects.select_related("job").get(
        job_id=ctx.run.job_id, index=ctx.values["replica"]
    )


def await_free(ctx: StepContext, why: str, evidence: dict[str, str] | None = None) -> Outcome:
    """Wait until a node is free; ask for a person after PLACE_S if none will be by itself.

    One will be while a node is being repaired, or kept by an announced maintenance. Repairs that
    wait for idleness or an approval while their node works on do not count: that may take days.
    """
    now = timezone.now()
    waited_s = (now - (ctx.step.started_at or now)).total_seconds()
    there = {"cluster": ctx.run.cluster_id}
    repairs = PlaybookRun.objects.filter(**there, playbook__in=RETURNING, state__in=RUN_ACTIVE)
    put_off = Q(context__urgency=Urgency.IDLE) | Q(approvals__state=ApprovalState.WAITING)
    repairs = repairs.exclude(pk__in=repairs.filter(put_off, node__state__in=sorted(IN_SERVICE)))
    works = MaintenanceWindow.objects.filter(**there, closed_at=None)
    comes = repairs.exists() or works.filter(starts_at__lte=now, ends_at__gt=now).exists()
    if waited_s > PLACE_S and not comes:
        return NeedsOperator(text=f"waited {waited_s:.0f} s: {why}", evidence=evidence or {})
    return Wait(text=why, wake_s=2.0, evidence=evidence or {})


def can_restart_on(node: Node, job: Job) -> bool:
    """Whether a replica of the job may be started anew on the node that it has.

    The node is in service, and neither a hold nor a maintenance keeps the job from it.
    """
    works = node.state in (NodeState.ALLOCATED, NodeState.AVAILABLE)
    return works and may_return(node, job)


def order_start(
    ctx: StepContext, replica: Replica, target: Node, first: Callable[[], object] = lambda: None
) -> Outcome:
    """Place a replica on a node, and order its rank to be started there.

    `first` is called in the same transaction, before. If the node was taken meanwhile, the run goes
    back to the step that chooses a place.
    """
    jobs.check_active(replica.job)
    placement_id = ctx.placement_id()

    def apply() -> None:
        first()
        jobs.place(SYSTEM, replica.pk, target.pk, placement_id=placement_id)
        order = start_rank_command(replica, placement_id)
        fleet.queue_command(
            SYSTEM, target.pk, order, requester=ctx.requester(), ttl_s=START_ORDER_S
        )

    return Wait(
        text=f"{target.name} is told to start it",
        context={"placement": placement_id},
        apply=apply,
        on_conflict=GoTo(
            to="choose-place", node_id=target.pk, text=f"{target.name} was taken meanwhile"
        ),
    )


def runs_on(node: Node, start: Command) -> Done:
    """The step is finished: the node has started the process, as `start` answered."""
    return Done(
        text=f"process {start.output.get('pid')} runs on {node.name}",
        evidence={"command": start.pk, "output": start.output},
    )


def start_failed(ctx: StepContext, target: Node, command: Command) -> Outcome:
    """Go back to the step that chooses a place, which will pass this node over.

    Before that, see that nothing of this start can be running on the node. Asks for a person if
    the node does not say so.
    """
    stop = Command.objects.filter(requester=ctx.requester(), verb="stop_process").first()
    if command.state == CommandState.EXPIRED and stop is None:

        def order_stop() -> None:
            order = wire.StopProcess(placement=ctx.placement_id(), grace_s=0)
            fleet.queue_command(SYSTEM, target.pk, order, requester=ctx.requester())

        return Wait(text=f"{target.name} did not answer; told to stop it", apply=order_stop)
    if stop is not None and stop.state not in COMMAND_FINISHED:
        return Wait(text=f"waiting for {target.name} to say that nothing runs")
    if stop is not None and stop.state != CommandState.DONE:
        return NeedsOperator(text=f"{target.name} neither started it nor says that it did not")

    def apply() -> None:
        if not jobs.end_placement(SYSTEM, ctx.placement_id(), command.error, free_node=True):
            # A warm spare has taken its place meanwhile.
            jobs.vacate(SYSTEM, Placement.objects.get(pk=ctx.placement_id()))

    return GoTo(
        to="choose-place",
        text=f"{target.name} did not start it: {command.error or command.state}",
        context={"passed_over": [*ctx.values["passed_over"], target.pk]},
        apply=apply,
    )


def see_ended(
    ctx: StepContext, placement: Placement, why: str, noted: Mapping[str, Any] | None = None
) -> Outcome | None:
    """Have a process killed at once, whose state is held elsewhere; None once nothing of it runs.

    `why` begins the outcome's text. `noted` is merged into the run's context with the order.
    """
    node, context = placement.node, noted or {}
    stop = Command.objects.filter(requester=ctx.requester("stop"), verb="stop_process").first()
    if stop is None and not node.lease.reachable:
        # Its own repair takes a silent node out, and what ran there with it.
        return Wait(text=f"{why}; {node.name} is not heard", context=context, wake_s=2.0)
    if stop is None:

        def order() -> None:
            verb = wire.StopProcess(placement=placement.pk, grace_s=0)
            fleet.queue_command(SYSTEM, node.pk, verb, requester=ctx.requester("stop"))

        return Wait(text=f"{why}; {node.name} is told to end it", context=context, apply=order)
    if stop.state not in COMMAND_FINISHED:
        return Wait(text=f"{why}; waiting for {node.name} to say that nothing of it runs")
    if stop.state != CommandState.DONE:
        return NeedsOperator(text=f"{why}; {node.name} does not say that nothing of it runs")
    return None


def trains_again(ctx: StepContext, at: datetime, text: str) -> Done:
    """The step is finished; the incident's timeline and the run say since when it trains."""

    def apply() -> None:
        key = f"restored/{ctx.values['replica']}/{at.timestamp()}"
        incidents.add_timeline_entry(ctx.incident, key, EntryKind.JOB, text, at=at)
        incidents.set_restored(ctx.run)

    return Done(text=text, apply=apply)
