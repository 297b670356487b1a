"""A job's coordinator went down with its node: start it again where it was, once the node is back.

The ranks know its address and keep calling; its record of the epoch lies on shared storage. The
job trains on meanwhile, but a replica that dies then has to wait for it.
"""

from __future__ import annotations

from controlplane import crypto
from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import COMMAND_FINISHED, CommandState, NodeState
from controlplane.fleet.models import Command, Node
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.incidents.choices import Effect
from controlplane.jobs import actions as jobs
from controlplane.jobs.models import Job
from node_agent import wire
from workers.playbooks.base import (
    Done,
    End,
    NeedsOperator,
    Outcome,
    Playbook,
    StepContext,
    StepDefinition,
    Wait,
)


def await_node(ctx: StepContext) -> Outcome:
    """Wait until the coordinator's node is in service and reachable.

    End if the coordinator never went: only a reboot ends one for good, any other end its agent
    answers by starting it again.
    """
    node = Node.objects.select_related("lease").get(pk=ctx.run.node_id)
    job = Job.objects.get(pk=ctx.run.job_id)
    if node.state not in (NodeState.AVAILABLE, NodeState.ALLOCATED) or not node.lease.reachable:
        return Wait(text=f"{node.name} is {node.get_state_display().lower()}", wake_s=2.0)
    # After any other end its agent started it again by itself.
    ended = Signal.objects.filter(
        kind=SignalKind.PROCESS_EXITED,
        placement_id=job.coordinator_placement,
        data__reason="reboot",
    )
    if not ended.exists():
        return End(text=f"{node.name} is heard again, and the coordinator never went")
    return Done(text=f"{node.name} may work again")


def start(ctx: StepContext) -> Outcome:
    """Start the coordinator again on the port that its ranks know.

    Asks for a person if it does not start there.
    """
    job = Job.objects.get(pk=ctx.run.job_id)
    command = Command.objects.filter(requester=ctx.requester()).first()
    port = int(job.coordinator_address.rpartition(":")[2])
    if command is None:

        def order() -> None:
            fleet.queue_command(
                SYSTEM,
                str(ctx.run.node_id),
                wire.StartCoordinator(
                    job=job.pk,
                    placement=ctx.placement_id(),
                    token=crypto.job_token(job.pk),
                    min_replicas=job.min_replicas,
                    port=port,
                ),
                requester=ctx.requester(),
            )

        return Wait(
            text=f"the node is told to start the coordinator on port {port} again", apply=order
        )
    if command.state not in COMMAND_FINISHED:
        return Wait(text="the coordinator is starting")
    if command.state != CommandState.DONE:
        return NeedsOperator(
            text=f"the coordinator did not start: {command.error or command.state}"
        )
    address = str(command.output["address"])

    def apply() -> None:
        jobs.set_coordinator(SYSTEM, job.pk, str(ctx.run.node_id), address, ctx.placement_id())

    return Done(text=f"the coordinator answers at {address} again", apply=apply)


PLAYBOOK = Playbook(
    name="restore-coordinator",
    version=1,
    summary="Starts a lost coordinator again where it was, once its node is back.",
    deadline_s=7200,
    steps=(
        StepDefinition(
            key="await-node",
            title="Wait for its node",
            act=await_node,
            effect=Effect.NONE,
            timeout_s=3600,
            prose="Follow the run that repairs the node. If it does not come back, kill the job's "
            "ranks and start the job anew: see docs/playbooks.md.",
        ),
        StepDefinition(
            key="start",
            title="Start it where it was",
            act=start,
            effect=Effect.FENCED,
            prose="With the job's DRYDOCK_TOKEN set, start `python -m runtime.replica.coordinator "
            "--job JOB --state-dir SHARED_DIR/JOB/coordinator --listen ADDRESS:PORT` on the same "
            "node and port, so that the ranks find it by the address they know.",
            undo="Stop the process.",
        ),
    ),
)
