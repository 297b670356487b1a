"""A node is unfit: take it out, power-cycle it, validate it, and return it as a spare."""

from __future__ import annotations

from django.conf import settings

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import NodeState, Rung
from controlplane.fleet.models import Node
from controlplane.incidents.choices import Effect
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Placement
from workers import guards, power
from workers.playbooks.base import (
    Ask,
    Back,
    Done,
    End,
    Outcome,
    Playbook,
    Skip,
    StepContext,
    StepDefinition,
    Wait,
)
from workers.playbooks.validation import await_soak, run_diagnostic


def quarantine(ctx: StepContext) -> Outcome:
    node = _node(ctx)
    if node.state == NodeState.QUARANTINED:
        return Done(text=f"{node.name} is quarantined already")
    reason = _back_at_work(ctx, node)
    if reason:
        return End(text=reason)
    # Off before anything of its is started elsewhere. Off when it is off already changes nothing.
    power.switch(node, "ForceOff")
    if power.read(node).on:
        return Wait(text="its BMC has been told to switch it off")

    def apply() -> None:
        for placement in Placement.objects.filter(node=node).exclude(state=PlacementState.ENDED):
            jobs.end_placement(SYSTEM, placement.pk, "its node was taken out", free_node=False)
        fleet.transition(
            SYSTEM, node.pk, NodeState.QUARANTINED, reason=str(ctx.values.get("reason", ""))
        )

    return Done(text=f"{node.name} is off and quarantined: nothing runs there", apply=apply)


def power_cycle(ctx: StepContext) -> Outcome:
    node = _node(ctx)
    state = power.read(node)
    before = ctx.values.get("boot_before")
    if before is None:
        attempt = guards.may_repair(node, Rung.POWER_CYCLE)
        if not attempt.allowed:
            return Ask(text=attempt.reason)

        def apply() -> None:
            fleet.transition(
                SYSTEM,
                node.pk,
                NodeState.REPAIRING,
                reason="power cycle",
                deadline_s=settings.BOOT_DEADLINE_S,
            )
            fleet.record_repair(node.pk, Rung.POWER_CYCLE, ctx.step.pk)

        # What is about to be done is written down first: whoever takes over looks whether it was.
        return Wait(
            text=f"about to power-cycle; {attempt.reason}",
            wake_s=0,
            context={"boot_before": node.boot_id, "was_off": not state.on},
            apply=apply,
        )
    if state.on and state.boot_id and state.boot_id != before:
        return Done(text="it has been power-cycled: its boot id changed")
    if state.on and not state.boot_id and ctx.values["was_off"]:
        return Done(text="it was off and is on now: it has been power-cycled")
    if state.on and not state.boot_id and ctx.step.attempts > 1:
        return Ask(text="its BMC cannot tell whether it has been restarted; look before going on")
    power.switch(node, "ForceRestart" if state.on else "On")
    return Done(
        text="switched on" if not state.on else "power-cycled", evidence={"boot_before": before}
    )


def await_boot(ctx: StepContext) -> Outcome:
    node = _node(ctx)
    if node.state == NodeState.REPAIR_FAILED:
        return Back(
            to="power-cycle",
            text=f"it did not come back within {settings.BOOT_DEADLINE_S:g} s",
            context={"boot_before": None},
        )
    if node.boot_id == ctx.values["boot_before"]:
        return Wait(text="not heard since it was switched on")
    if not node.lease.reachable:
        return Wait(text="it booted; its beats are awaited")
    return Done(
        text=f"it beats again under boot id {node.boot_id}", evidence={"boot_id": node.boot_id}
    )


def validate(ctx: StepContext) -> Outcome:
    return run_diagnostic(ctx, _node(ctx), level=2)


def soak(ctx: StepContext) -> Outcome:
    return await_soak(ctx, _node(ctx))


def return_as_spare(ctx: StepContext) -> Outcome:
    node = _node(ctx)
    if node.state == NodeState.AVAILABLE:
        return Skip(text=f"{node.name} is available already")

    def apply() -> None:
        fleet.transition(SYSTEM, node.pk, NodeState.AVAILABLE, reason="repaired and validated")
        fleet.set_spare(SYSTEM, node.pk, True)

    return Done(text=f"{node.name} is available, as a spare", apply=apply)


PLAYBOOK = Playbook(
    name="repair-node",
    version=2,
    deadline_s=7200,
    steps=(
        StepDefinition(
            key="quarantine",
            title="Switch it off and quarantine it",
            act=quarantine,
            effect=Effect.IDEMPOTENT,
            disruptive=True,
            timeout_s=1800,
            prose="Switch the node off through its BMC (ForceOff), see that it is off, then mark "
            "it quarantined so that nothing lands on it.",
            undo="Switch it on and validate it.",
        ),
        StepDefinition(
            key="power-cycle",
            title="Power-cycle it",
            act=power_cycle,
            effect=Effect.NON_REPEATABLE,
            disruptive=True,
            prose="Note the boot id, then switch the node on. If you are not sure whether somebody "
            "did so already, compare the boot id first.",
        ),
        StepDefinition(
            key="await-boot",
            title="See it come back",
            act=await_boot,
            effect=Effect.NONE,
            timeout_s=settings.BOOT_DEADLINE_S * 2,
            prose="The agent beats again, and the boot id is not the one from before.",
        ),
        StepDefinition(
            key="validate",
            title="Validate it",
            act=validate,
            effect=Effect.FENCED,
            timeout_s=900,
            prose="Run the node's level-2 diagnostic. A skipped test is not a passed one.",
        ),
        StepDefinition(
            key="soak",
            title="Watch it for a while",
            act=soak,
            effect=Effect.NONE,
            timeout_s=settings.SOAK_S * 4 + 60,
            prose="No hardware signal and no lost beat during the soak.",
        ),
        StepDefinition(
            key="return",
            title="Return it as a spare",
            act=return_as_spare,
            effect=Effect.IDEMPOTENT,
            prose="Mark it available and a spare.",
            undo="Quarantine it.",
        ),
    ),
)


def _back_at_work(ctx: StepContext, node: Node) -> str:
    """Why the node must not be touched after all; "" if it is to be taken out.

    The guards may have kept this run waiting, and the world went on: a node that was only silent
    and beats again is well, and one that holds a replica that nobody lost is in use.
    """
    if not node.lease.reachable:
        return ""
    if ctx.values.get("only_if_silent"):
        return f"{node.name} beats again: nothing to repair"
    others = Placement.objects.filter(node=node, state=PlacementState.RUNNING)
    if others.exclude(pk=ctx.values.get("lost_placement", "")).exists():
        return f"{node.name} holds another replica by now, and beats"
    return ""


def _node(ctx: StepContext) -> Node:
    return Node.objects.select_related("lease").get(pk=ctx.run.node_id)
