"""What people order for a node: drain, quarantine, diagnose, reset, reboot, return, retire.

They have read the dry run, so the guards do not hold them up; everything else is as in a repair.
"""

from __future__ import annotations

from datetime import timedelta

from django.db.models import QuerySet
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.accounts.selectors import OWNED
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.actions.nodes import OUR_DRAIN
from controlplane.fleet.choices import COMMAND_FINISHED, CommandState, NodeState, Rung
from controlplane.fleet.models import Command
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import RUN_ACTIVE, RUN_UNFINISHED, Effect
from controlplane.incidents.models import PlaybookRun
from controlplane.incidents.move_plans import AS_WHOLE, SAVE_S, plan_move
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Placement
from node_agent import wire
from workers.playbooks import node_steps
from workers.playbooks.base import (
    Done,
    End,
    Fail,
    NeedsOperator,
    Outcome,
    Playbook,
    StepContext,
    StepDefinition,
    Wait,
)
from workers.playbooks.validation import DIAGNOSTIC_S, run_diagnostic
from workers.repair_ladder import diagnosis_passed

#: A drain that is not done by then has failed, in seconds.
DRAIN_S = 1500.0
#: A replica that has not moved away by then is stopped, in seconds.
MOVE_S = 300.0
#: The same of a job that restarts as a whole, which saves twice and is then told to end.
MOVE_WHOLE_S = 2 * SAVE_S + 60.0


def drain(ctx: StepContext) -> Outcome:
    """Mark the node as draining, so that it takes no new work; done if it is out already."""
    node = node_steps.node_of(ctx)
    if node.state in (NodeState.DRAINING, NodeState.QUARANTINED):
        return Done(text=f"{node.name} is {node.get_state_display().lower()} already")
    actor = node_steps.actor_of(ctx)
    reason = str(ctx.values.get("reason", ""))

    def apply() -> None:
        fleet.transition(actor, node.pk, NodeState.DRAINING, reason=reason, deadline_s=DRAIN_S)
        fleet.set_drained_by(actor, node.pk, f"{OWNED}{actor.id}", reason)

    # What it goes back to if the drain is called off before anything there is killed.
    found = {"state": node.state, "drained_by": node.drained_by}
    return Done(text=f"{node.name} takes no new work", context={"found": found}, apply=apply)


def move_away(ctx: StepContext) -> Outcome:
    """Let its replicas train elsewhere before it is emptied; what cannot move is stopped there."""
    node = node_steps.node_of(ctx)
    held = Placement.objects.filter(node=node, standby=False).exclude(state=PlacementState.ENDED)
    placement = held.select_related("replica__job").first()
    if placement is None:
        return Done(text=f"nothing trains on {node.name}")
    job, index = placement.replica.job, placement.replica.index
    moves = PlaybookRun.objects.filter(job=job)
    run = moves.filter(context__drains=ctx.run.pk).first() or _move_of_all(moves)
    waited = timezone.now() - (ctx.step.started_at or timezone.now())
    limit_s = MOVE_WHOLE_S if job.whole else MOVE_S
    if run is not None and run.state in RUN_ACTIVE and waited < timedelta(seconds=limit_s):
        return Wait(text=f"replica {index} of {job.name} moves: {run.title}", wake_s=1.0)
    if run is not None:
        why = run.state_reason or f"not moved within {limit_s:g} s"
        return Done(text=f"replica {index} of {job.name} is stopped on {node.name}: {why}")
    try:
        plan_move(job, index, leaving=node.pk)
    except Conflict as conflict:
        words = f"replica {index} of {job.name} is stopped on {node.name}: {conflict.detail}"
        return Done(text=words)

    def order() -> None:
        incidents.move_replica(
            node_steps.actor_of(ctx),
            job.pk,
            index,
            leaving=node.pk,
            reason=f"{ctx.run.title}: {ctx.values.get('reason', '')}",
            drains=ctx.run.pk,
        )

    return Wait(text=f"replica {index} of {job.name} is to train elsewhere", apply=order)


def _move_of_all(moves: QuerySet[PlaybookRun]) -> PlaybookRun | None:
    """The move of a job on several nodes off another of them: it takes none that is drained."""
    wide = moves.filter(playbook=AS_WHOLE, job__nodes_per_replica__gt=1)
    return wide.filter(state__in=sorted(RUN_ACTIVE)).first()


def end_quarantined(ctx: StepContext) -> Outcome:
    """End the run with the node quarantined, also if its validation had failed before."""
    node = node_steps.node_of(ctx)
    text = f"{node.name} stays quarantined until somebody returns it"
    if node.state != NodeState.VALIDATION_FAILED:
        return End(text=text)
    reason = str(ctx.values.get("reason", ""))

    def apply() -> None:
        """It was out already, and empty: only its state is to say so."""
        fleet.transition(node_steps.actor_of(ctx), node.pk, NodeState.QUARANTINED, reason=reason)
        if not node.drained_by:
            fleet.set_drained_by(SYSTEM, node.pk, f"{OUR_DRAIN}{ctx.run.pk}", reason)

    return End(text=text, apply=apply)


def retire(ctx: StepContext) -> Outcome:
    """Strike the node off, unless a run that is not over has something in mind for it."""
    node = node_steps.node_of(ctx)
    others = PlaybookRun.objects.filter(node=node, state__in=sorted(RUN_UNFINISHED))
    other = others.exclude(pk=ctx.run.pk).first()
    if other is not None:
        return Fail(text=f"“{other.title}” is not over: cancel it, then retire {node.name}")
    reason = str(ctx.values.get("reason", ""))

    def apply() -> None:
        fleet.transition(node_steps.actor_of(ctx), node.pk, NodeState.RETIRED, reason=reason)

    return Done(text=f"{node.name} is retired; its history stays", apply=apply)


def choose_reset(_ctx: StepContext) -> Outcome:
    """Say that the rung to take is a reset of the cards."""
    return Done(text="the cards are reset", context={"rung": Rung.RESET_GPU.value})


def choose_reboot(_ctx: StepContext) -> Outcome:
    """Say that the rung to take is a reboot."""
    return Done(
        text="the node is rebooted", context={"rung": Rung.REBOOT.value, "boot_before": None}
    )


def validate(ctx: StepContext) -> Outcome:
    """Run the level-2 diagnostic; a failure asks for a person."""
    return run_diagnostic(ctx, node_steps.node_of(ctx), level=2)


def diagnose(ctx: StepContext) -> Outcome:
    """Run the gentle diagnostic beside whatever runs; the node's state stays as it is."""
    node = node_steps.node_of(ctx)
    command = Command.objects.filter(requester=ctx.requester(), verb="diagnose").first()
    if command is None:

        def order() -> None:
            fleet.queue_command(
                node_steps.actor_of(ctx),
                node.pk,
                wire.Diagnose(level=1),
                requester=ctx.requester(),
                ttl_s=DIAGNOSTIC_S,
            )

        return Wait(text=f"{node.name} is told to run its level-1 diagnostic", apply=order)
    if command.state not in COMMAND_FINISHED:
        return Wait(text="the diagnostic is running", wake_s=2.0)
    evidence = {"command": command.pk, **command.output}
    if command.state != CommandState.DONE:
        return NeedsOperator(
            text=f"no diagnosis: {command.error or command.state}", evidence=evidence
        )
    passed, reason = diagnosis_passed(command.output)
    return Done(text=reason if passed else f"not healthy: {reason}", evidence=evidence)


_STAY = StepDefinition(
    key="stay",
    title="Leave it quarantined",
    act=end_quarantined,
    effect=Effect.NONE,
    prose="It stays out until somebody returns it.",
)
_REPAIR = StepDefinition(
    key="repair",
    title="Do it",
    act=node_steps.repair,
    effect=Effect.NON_REPEATABLE,
    disruptive=True,
    does=node_steps.words_of_repair,
    timeout_s=600,
    prose="Note the boot id first, so that it is done once.",
)
_VALIDATE = StepDefinition(
    key="validate",
    title="Validate it",
    act=validate,
    effect=Effect.FENCED,
    timeout_s=900,
    prose="Run the node's level-2 diagnostic. A skipped test is not a passed one.",
)
_RETURN = StepDefinition(
    key="return",
    title="Return it to service",
    act=node_steps.return_to_service,
    effect=Effect.IDEMPOTENT,
    prose="Cancel this run, then Return on the node's page.",
    undo="Quarantine it.",
)


def _order(name: str, summary: str, *steps: StepDefinition) -> Playbook:
    return Playbook(name=name, version=1, summary=summary, deadline_s=7200, steps=steps)


def _choice(act: object, title: str) -> StepDefinition:
    return StepDefinition(
        key="choose",
        title=title,
        act=act,  # type: ignore[arg-type]
        effect=Effect.NONE,
        prose="What was ordered.",
    )


PLAYBOOKS = (
    _order(
        "drain-node",
        "Empties a node for a person and quarantines it; its replicas move away first.",
        StepDefinition(
            key="drain",
            title="Let it take no new work",
            act=drain,
            effect=Effect.IDEMPOTENT,
            prose="Mark it draining, with your name.",
            undo="Return it.",
        ),
        StepDefinition(
            key="move-away",
            title="Let its replica train elsewhere",
            act=move_away,
            effect=Effect.IDEMPOTENT,
            timeout_s=2 * MOVE_WHOLE_S,
            prose="Move it from the job's page. One that cannot move is stopped with the node, and "
            "returns on a spare; the others cover it.",
        ),
        node_steps.QUARANTINE,
        _STAY,
    ),
    _order("quarantine-node", "Empties a node and keeps it out.", node_steps.QUARANTINE, _STAY),
    _order(
        "diagnose-node",
        "Runs the gentle diagnostic on a node, beside whatever runs there.",
        StepDefinition(
            key="diagnose",
            title="Run its diagnostic",
            act=diagnose,
            effect=Effect.FENCED,
            timeout_s=900,
            prose="Run the node's level-1 diagnostic.",
        ),
    ),
    _order(
        "reset-node",
        "Empties a node, resets its cards, validates it, and returns it.",
        _choice(choose_reset, "Choose the reset"),
        node_steps.QUARANTINE,
        _REPAIR,
        _VALIDATE,
        _RETURN,
    ),
    _order(
        "reboot-node",
        "Empties a node, reboots it, validates it, and returns it.",
        _choice(choose_reboot, "Choose the reboot"),
        node_steps.QUARANTINE,
        _REPAIR,
        node_steps.AWAIT_BOOT,
        _VALIDATE,
        _RETURN,
    ),
    _order(
        "return-node",
        "Validates a node that is out, and returns it to service.",
        _VALIDATE,
        _RETURN,
    ),
    _order(
        "retire-node",
        "Strikes a node that is out off the fleet for good.",
        StepDefinition(
            key="retire",
            title="Retire it",
            act=retire,
            effect=Effect.IDEMPOTENT,
            prose="Mark it retired. Nothing expects it any more and no limit counts it; its "
            "history, and that of its cards, stays.",
            undo="Enrol the machine anew, under another name.",
        ),
    ),
)
