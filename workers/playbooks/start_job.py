"""A job is to run, for the first time or as a whole again: coordinator, ranks, first step."""

from __future__ import annotations

from collections.abc import Sequence

from django.conf import settings

from controlplane import crypto
from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import COMMAND_FINISHED, CommandState
from controlplane.fleet.models import Command, Node
from controlplane.incidents.candidates import free_nodes
from controlplane.incidents.choices import RUN_UNFINISHED, Effect
from controlplane.incidents.models import PlaybookRun
from controlplane.jobs import actions as jobs
from controlplane.jobs.actions.jobs import STOP_TTL_S
from controlplane.jobs.choices import JOB_ACTIVE, JobState, PlacementState
from controlplane.jobs.models import IN_ITS_PLACE, Job, Placement, Replica
from node_agent import wire
from workers.placement import choose_coordinator_node, choose_near, choose_nodes
from workers.playbooks.base import (
    Done,
    GoTo,
    NeedsOperator,
    Outcome,
    Playbook,
    StepContext,
    StepDefinition,
    Wait,
)
from workers.playbooks.multi_node import start_all, starts_of, went_unheard
from workers.playbooks.start_rank import start_rank_command


def choose(ctx: StepContext) -> Outcome:
    """Choose the free nodes for all replicas, and the one for the coordinator.

    Wait while too few nodes are free. Nodes that failed to start their part before are passed over.
    """
    job = _job(ctx)
    passed_over = ctx.values.get("passed_over", [])
    free = free_nodes(job.cluster_id, job.pk)
    candidates = [one for one in free if one.node_id not in passed_over]
    fitting = [one for one in candidates if one.has(job.gpus_per_node)]
    count = job.world_replicas * job.nodes_per_replica
    chosen = (choose_near if job.nodes_per_replica > 1 else choose_nodes)(fitting, count)
    if len(chosen) < count:
        text = f"{len(chosen)} of {count} nodes are free"
        too_small = len(candidates) - len(fitting)
        if too_small:
            text += f"; {too_small} more have fewer than the {job.gpus_per_node} cards it needs"
        failed = sorted(one.name for one in free if one.node_id in passed_over)
        if failed:
            text += f"; passed over, for they did not start their part: {', '.join(failed)}"
        return Wait(text=text)
    coordinator = choose_coordinator_node(candidates, chosen)
    names = ", ".join(node.name for node in chosen)
    return Done(
        text=f"ranks on {names}; coordinator on {coordinator.name}",
        context={
            "nodes": [node.node_id for node in chosen],
            "coordinator_node": coordinator.node_id,
        },
    )


def start_coordinator(ctx: StepContext) -> Outcome:
    """Start the job's coordinator, and note its address; skip that if ranks know one already.

    Back to the choice of nodes if it does not start.
    """
    job = _job(ctx)
    if job.coordinator_address and _has_ranks(job):
        return Done(text=f"ranks of it know the coordinator at {job.coordinator_address}")
    requester = ctx.requester()
    command = Command.objects.filter(requester=requester).first()
    if command is None:
        placement_id = ctx.placement_id()

        def order() -> None:
            fleet.queue_command(
                SYSTEM,
                ctx.values["coordinator_node"],
                wire.StartCoordinator(
                    job=job.pk,
                    placement=placement_id,
                    token=crypto.job_token(job.pk),
                    min_replicas=job.min_replicas,
                ),
                requester=requester,
            )

        return Wait(
            text="the node is told to start the coordinator",
            context={"coordinator_placement": placement_id},
            apply=order,
        )
    if command.state not in COMMAND_FINISHED:
        return Wait(text="the coordinator is starting")
    if command.state != CommandState.DONE:
        at_fault = [] if went_unheard(ctx, command) else [command.node_id]
        return GoTo(
            to="choose-nodes",
            text=f"the coordinator did not start: {command.error or command.state}",
            context={"passed_over": [*ctx.values.get("passed_over", []), *at_fault]},
            apply=lambda: _stop_unknown(ctx),
        )
    address = str(command.output["address"])

    def apply() -> None:
        jobs.set_coordinator(
            SYSTEM,
            job.pk,
            ctx.values["coordinator_node"],
            address,
            ctx.values["coordinator_placement"],
        )

    return Done(text=f"the coordinator answers at {address}", apply=apply)


def start_ranks(ctx: StepContext) -> Outcome:
    """Start each replica's process on its node, and wait until all run.

    A replica that is lost meanwhile is left to the run that brings it back. Back to the choice of
    nodes if a node falls silent before it was told, or does not start its part.
    """
    job = _job(ctx)
    placed = Placement.objects.filter(replica__job=job, created_at__gte=ctx.run.created_at)
    silent = Node.objects.filter(pk__in=ctx.values["nodes"], lease__reachable=False).first()
    if silent is not None and not placed.exists():
        text = f"{silent.name} went silent before it was told"

        def give_up() -> None:
            _begin_anew(job, text)

        return GoTo(to="choose-nodes", node_id=silent.pk, text=text, apply=give_up)
    if job.nodes_per_replica > 1:
        return _start_together(ctx, job)
    commands = Command.objects.filter(requester__startswith=f"{ctx.requester()}.")
    if not commands:
        replicas = job.replicas.select_related("job")
        places = [*zip(replicas, ctx.values["nodes"], strict=True)]
        due = [replica for replica, node_id in places if _is_due(ctx, replica, node_id)]
        if not due:
            return Done(text="all ranks run, or are brought back by runs of their own")
        jobs.check_active(job)

        def apply() -> None:
            for replica, node_id in places:
                if _is_due(ctx, replica, node_id):  # still
                    _order_rank(ctx, replica, node_id)

        return Wait(
            text=f"{len(due)} nodes are told to start their ranks",
            context={"placements": [_placement_id(ctx, replica) for replica in due]},
            apply=apply,
            on_conflict=_taken(job),
        )
    # What was lost meanwhile a run of its own brings back, on whichever node.
    there = Placement.objects.filter(replica__job=job).exclude(state=PlacementState.ENDED)
    ours = commands.filter(node__in=there.values("node"))
    failed = [c for c in ours if c.state in COMMAND_FINISHED and c.state != CommandState.DONE]
    if failed:
        return _not_started(ctx, failed)
    running = sum(c.state == CommandState.DONE for c in ours)
    if running < len(ours):
        return Wait(text=f"{running} of {len(ours)} ranks run")
    return Done(text=f"{running} ranks run")


def _stop_unknown(ctx: StepContext) -> None:
    """A coordinator that may have started after all, and that its job will not know."""
    placement = ctx.values["coordinator_placement"]
    fleet.queue_command(
        SYSTEM,
        ctx.values["coordinator_node"],
        wire.StopProcess(placement=placement),
        requester=f"end/{placement}",
        ttl_s=STOP_TTL_S,
    )


def _taken(job: Job) -> GoTo:
    """Another run placed a rank on a node that was chosen. The coordinator that was started for
    these nodes ends, unless ranks of this job know it."""
    text = "one of the nodes was taken meanwhile"

    def begin_anew() -> None:
        if not _has_ranks(job):
            _begin_anew(job, text)

    return GoTo(to="choose-nodes", text=text, apply=begin_anew)


def _begin_anew(job: Job, why: str) -> None:
    """Take the job back to the point before its ranks run, unless it is over by now."""
    if Job.objects.get(pk=job.pk).state in JOB_ACTIVE:
        jobs.begin_start(SYSTEM, job.pk, why)


def _has_ranks(job: Job) -> bool:
    there = Placement.objects.filter(replica__job=job)
    return there.exclude(state=PlacementState.ENDED).exists()


def _not_started(ctx: StepContext, failed: Sequence[Command]) -> Outcome:
    """Where nodes were silent they are told again once all are heard; else a person decides."""
    nodes = Node.objects.select_related("lease").in_bulk([one.node_id for one in failed])
    bad = [one for one in failed if not went_unheard(ctx, one)]
    if bad:
        said = (f"{nodes[one.node_id].name} ({one.error or one.state})" for one in bad)
        return NeedsOperator(text=f"did not start their ranks: {', '.join(sorted(said))}")
    names = ", ".join(sorted(one.name for one in nodes.values()))
    if not all(one.lease.reachable for one in nodes.values()):
        return Wait(text=f"{names} went silent before they started their ranks, and are awaited")
    return GoTo(to="start-ranks", node_id=failed[0].node_id, text=f"{names} are heard again")


def _start_together(ctx: StepContext, job: Job) -> Outcome:
    replica = job.replicas.select_related("job").get()
    brought_back = PlaybookRun.objects.filter(playbook="replica-lost", job=job)
    if brought_back.filter(state__in=sorted(RUN_UNFINISHED)).exists() and starts_of(ctx):
        return Done(text="a node of the replica was lost; a run of its own brings it back")
    return start_all(
        ctx,
        replica,
        ctx.values["nodes"],
        again="choose-nodes",
        give_up=lambda: _begin_anew(job, "one of its nodes did not start it"),
    )


def _is_due(ctx: StepContext, replica: Replica, node_id: str) -> bool:
    """A retry leaves alone what runs already, and what another run has placed elsewhere, or is
    about to."""
    there = _there(replica)
    if there is None:
        return not _is_brought_back(ctx, replica)
    return there.state != PlacementState.RUNNING and there.node_id == node_id


def _order_rank(ctx: StepContext, replica: Replica, node_id: str) -> None:
    """Place one replica and have its rank started."""
    placement_id = _placement_id(ctx, replica)
    jobs.place(SYSTEM, replica.pk, node_id, placement_id=placement_id)
    order = start_rank_command(replica, placement_id)
    fleet.queue_command(SYSTEM, node_id, order, requester=ctx.requester(str(replica.index)))


def _placement_id(ctx: StepContext, replica: Replica) -> str:
    """Of the place that it has, or is to have."""
    there = _there(replica)
    return there.pk if there else ctx.placement_id(str(replica.index))


def _there(replica: Replica) -> Placement | None:
    return replica.placements.filter(IN_ITS_PLACE).exclude(state=PlacementState.ENDED).first()


def _is_brought_back(ctx: StepContext, replica: Replica) -> bool:
    """Whether what this run had placed was lost, and a run of its own chooses where it goes on."""
    placed = replica.placements.filter(IN_ITS_PLACE, created_at__gte=ctx.run.created_at)
    subject = f"replica-lost/{replica.job_id}/{replica.index}"
    runs = PlaybookRun.objects.filter(subject=subject, state__in=sorted(RUN_UNFINISHED))
    return placed.exists() and runs.exists()


def await_first_step(ctx: StepContext) -> Outcome:
    """Wait until the job commits a step."""
    job = _job(ctx)
    if job.state != JobState.RUNNING:
        return Wait(text="the ranks are joining")
    return Done(text=f"the job trains, at step {job.step}")


PLAYBOOK = Playbook(
    name="start-job",
    version=2,
    summary="Starts a job's coordinator and ranks, from its newest checkpoint if it has one.",
    deadline_s=3600,
    steps=(
        StepDefinition(
            key="choose-nodes",
            title="Choose nodes",
            act=choose,
            effect=Effect.NONE,
            timeout_s=1800,
            prose="One free node for each replica, spread over racks, spares left alone; for one "
            "that is on several, nodes of as few racks as possible. Another for the coordinator if "
            "there is one. A node that did not start its part is passed over.",
        ),
        StepDefinition(
            key="start-coordinator",
            title="Start the coordinator",
            act=start_coordinator,
            effect=Effect.FENCED,
            prose="Start `python -m runtime.replica.coordinator` on the chosen node.",
            undo="Stop the process.",
        ),
        StepDefinition(
            key="start-ranks",
            title="Start the ranks",
            act=start_ranks,
            effect=Effect.FENCED,
            timeout_s=1800,
            prose="Start the program on each chosen node, with the coordinator's address. Of a "
            "replica on several nodes, if one does not start it: end all, and choose anew. Nodes "
            "that went silent are awaited.",
            undo="Stop the processes.",
        ),
        StepDefinition(
            key="await-first-step",
            title="See it train",
            act=await_first_step,
            effect=Effect.NONE,
            timeout_s=settings.REPLICA_START_DEADLINE_S * 2,
            prose="The first committed step is told within a minute or two.",
        ),
    ),
)


def _job(ctx: StepContext) -> Job:
    return Job.objects.get(pk=ctx.run.job_id)
