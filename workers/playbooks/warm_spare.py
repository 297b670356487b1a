"""A process that holds a job's state is started on a free node, for whichever replica dies.

Whatever becomes of it, the job trains on.
"""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import COMMAND_FINISHED, CommandState
from controlplane.fleet.models import Command
from controlplane.incidents.actions.requests import WARM_SPARE
from controlplane.incidents.choices import Effect
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Placement
from workers.playbooks.base import (
    Done,
    Fail,
    Outcome,
    Playbook,
    StepContext,
    StepDefinition,
    Wait,
)
from workers.playbooks.replica_steps import runs_on, see_ended
from workers.playbooks.start_rank import START_ORDER_S, start_rank_command

DEADLINE_S = 86_400.0


def start(ctx: StepContext) -> Outcome:
    """Start the warm spare's process on its node; give the spare up if the node does not."""
    spare = _spare(ctx)
    where = spare.node
    if spare.state == PlacementState.ENDED:
        return _ended(spare)
    command = Command.objects.filter(requester=ctx.requester(), verb="start_rank").first()
    if command is None:

        def order() -> None:
            verb = start_rank_command(spare.replica, spare.pk, standby="spare")
            fleet.queue_command(
                SYSTEM, where.pk, verb, requester=ctx.requester(), ttl_s=START_ORDER_S
            )

        return Wait(text=f"{where.name} is told to start it", apply=order)
    if command.state == CommandState.DONE:
        return runs_on(where, command)
    if command.state in COMMAND_FINISHED:
        why = command.error or command.get_state_display().lower()
        return _give_up(ctx, spare, f"{where.name} did not start it: {why}")
    return Wait(text=f"waiting for {where.name} to start it")


def await_state(ctx: StepContext) -> Outcome:
    """Wait until the warm spare holds the job's state and follows its steps.

    Done at once if it has taken a replica's place already. Given up if its process is not up within
    REPLICA_START_DEADLINE_S.
    """
    spare = _spare(ctx)
    if not spare.standby:
        return Done(text=f"the warm spare has the place of replica {spare.replica.index} already")
    if spare.state == PlacementState.ENDED:
        return _ended(spare)
    waited = timezone.now() - (ctx.step.started_at or timezone.now())
    if spare.started_at is None and waited > timedelta(seconds=settings.REPLICA_START_DEADLINE_S):
        limit = f"{settings.REPLICA_START_DEADLINE_S:g} s"
        return _give_up(ctx, spare, f"{spare.node.name} has not said within {limit} that it is up")
    if spare.follows_since is None:
        state = "takes the state from its peers" if spare.started_at else "is starting"
        return Wait(text=f"the process on {spare.node.name} {state}")
    return Done(text=f"the process on {spare.node.name} holds the state, and follows every step")


PLAYBOOK = Playbook(
    name=WARM_SPARE,
    version=1,
    summary="Starts a process that holds a job's state, for whichever replica dies.",
    deadline_s=DEADLINE_S,
    steps=(
        StepDefinition(
            key="start",
            title="Start it",
            act=start,
            effect=Effect.FENCED,
            timeout_s=600,
            prose="Start the rank on the chosen node with the job's coordinator and token, a "
            "placement of its own, and DRYDOCK_STANDBY=spare.",
            undo="Stop that process: the job trains on.",
        ),
        StepDefinition(
            key="await-state",
            title="See it hold the state",
            act=await_state,
            effect=Effect.NONE,
            timeout_s=DEADLINE_S,  # a large state over a slow network takes its time
            prose="It takes the state from the members' memory, proves that it is theirs, and "
            "follows their steps. The job's page shows it.",
        ),
    ),
)


def _spare(ctx: StepContext) -> Placement:
    found = Placement.objects.select_related("node__lease", "replica__job")
    return found.get(pk=ctx.values["placement"])


def _ended(spare: Placement) -> Fail:
    return Fail(text=f"not started on {spare.node.name}: {spare.end_reason}")


def _give_up(ctx: StepContext, spare: Placement, why: str) -> Outcome:
    """See that nothing of it runs, and free its node; unless it trains by now."""
    if not spare.standby:
        return Done(text=f"the warm spare has the place of replica {spare.replica.index} already")
    ending = see_ended(ctx, spare, why)
    if ending is not None:
        return ending
    return Fail(text=why, apply=lambda: jobs.end_warm_spare(SYSTEM, spare.pk, why))
