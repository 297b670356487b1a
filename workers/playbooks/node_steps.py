"""Steps on one node that several playbooks take: empty it, restart or reset it, let it return."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.accounts.selectors import OWNED, username
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.actions.nodes import OUR_DRAIN
from controlplane.fleet.changes import change
from controlplane.fleet.choices import (
    COMMAND_FINISHED,
    IN_SERVICE,
    TAKEN_OUT,
    CommandState,
    NodeState,
    Rung,
)
from controlplane.fleet.models import Command, Gpu, Node, RepairRecord
from controlplane.health.choices import Urgency
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import Effect, RunState
from controlplane.incidents.models import PlaybookRun
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JOB_ACTIVE, PlacementState
from controlplane.jobs.models import IN_ITS_PLACE, Placement
from node_agent import wire
from workers import guards, losses, power, triage
from workers.intake.failures import judge_again
from workers.playbooks.base import (
    Done,
    End,
    GoTo,
    NeedsOperator,
    Outcome,
    Skip,
    StepContext,
    StepDefinition,
    Wait,
)

#: A rank that its agent was told to kill is gone within this time. Of an agent that is heard later
#: than that, and has not said so, the power is cut.
KILL_S = 4.0
#: How a run says that its node is silent, also when it asks for a person.
NOT_HEARD = "its agent is not heard"
#: A BMC that was told to switch its node off is told again after so long, in seconds.
GOES_OFF_S = 30.0
#: A reset of the cards takes some seconds each.
RESET_S = 180.0
#: A field diagnostic is over by then, begun in a node that had to boot first.
EXAMINED_S = settings.BOOT_DEADLINE_S + settings.FIELD_DIAGNOSTIC_S


#: States in which nothing can be placed on a node any more.
OUT_ALREADY = TAKEN_OUT - {NodeState.DRAINING, NodeState.DRAIN_FAILED} | {NodeState.RMA}


def node_of(ctx: StepContext) -> Node:
    """The node that the run is about, with its lease and rack."""
    return Node.objects.select_related("lease", "cluster", "rack").get(pk=ctx.run.node_id)


def actor_of(ctx: StepContext) -> Actor:
    """The person who ordered the run; automation where nobody did."""
    by = ctx.run.requested_by
    return Actor(ActorKind.USER, by, ctx.run.pk) if by else SYSTEM


# --- emptying -------------------------------------------------------------------------------------


def quarantine(ctx: StepContext) -> Outcome:
    """Kill what runs on the node, by its agent or else by its power, and mark it quarantined.

    Nothing of it may run anywhere else before this is done.
    """
    if decision_is_stale(ctx):
        return _decide_anew()
    node = node_of(ctx)
    out = node.state in OUT_ALREADY
    if out and not _alive_on(node).exists():
        return Done(text=f"{node.name} is out already: {node.get_state_display().lower()}")
    if ctx.values.get("urgency") == Urgency.IDLE and not out and held_on(node).exists():
        return GoTo(
            to="decide",
            text=f"{node.name} was given work meanwhile, and what is wanted can wait",
            apply=lambda: guards.release(ctx.run),  # it is in service, for however long
        )
    live = losses.may_run_on(node)
    if not node.lease.reachable:
        return _cut_power(ctx, node, NOT_HEARD)
    ours = Command.objects.filter(requester__startswith=f"{ctx.requester()}.", verb="stop_process")
    orders = list(ours.order_by("created_at"))
    told = {_whom(order) for order in orders}
    if not live:
        text = f"{node.name} holds no work; quarantined"
        return Done(text=text, apply=_take_out(ctx, node, told))
    unasked = [placement for placement in live if placement.pk not in told]
    if unasked:
        return Wait(
            text=f"{node.name} is told to kill what runs there",
            wake_s=KILL_S,
            apply=lambda: _order_kill(ctx, node, unasked, len(orders)),
        )
    if any(order.state not in COMMAND_FINISHED for order in orders):
        # Time in which we did not hear it says nothing of it; its lease ends where that lasts.
        if node.lease.last_beat_at < orders[-1].created_at + timedelta(seconds=KILL_S):
            return Wait(text="waiting for its agent to say that nothing runs", wake_s=1.0)
        why = f"the node's agent was heard {KILL_S:g} s after its order and had not answered"
        return _cut_power(ctx, node, why)
    if all(order.state == CommandState.DONE for order in orders):
        return Done(
            text=f"what ran on {node.name} was killed; the node is quarantined",
            apply=_take_out(ctx, node, told),
        )
    return _cut_power(ctx, node, "the node's agent could not kill what runs there")


@change()
def look_again_once_heard() -> None:
    """Let the runs that asked for a person, for their node was silent, look again once it is heard:
    nothing else wakes them. What they had reserved is given back, for they may not be wanted any
    more."""
    asking = PlaybookRun.objects.filter(
        state=RunState.NEEDS_OPERATOR,
        state_reason__contains=NOT_HEARD,
        node__lease__reachable=True,
    )
    for run in asking.select_for_update(no_key=True, skip_locked=True, of=("self",)):
        guards.release(run)
        incidents.look_again(run.pk, "the node is heard again", afresh=False)


def held_on(node: Node) -> QuerySet[Placement]:
    """What has its place on a node. A warm spare keeps nobody from taking the node out: its job has
    another when the node is out."""
    return _alive_on(node).filter(IN_ITS_PLACE)


def _alive_on(node: Node) -> QuerySet[Placement]:
    return Placement.objects.filter(node=node).exclude(state=PlacementState.ENDED)


def words_of_quarantine(_context: Mapping[str, Any]) -> Sequence[str]:
    """The exact commands of the step that quarantines the node, for plans and dry runs."""
    return (
        "agent of {node}: stop_process, SIGKILL, for each rank on it",
        f"if it is silent, or is heard {KILL_S:g} s later and has not answered: "
        "BMC of {node}: ComputerSystem.Reset ForceOff",
        "mark {node} quarantined: nothing lands on it",
    )


def back_at_work(ctx: StepContext, node: Node) -> str:
    """Why the node must not be touched after all; "" if it is to be taken out.

    The guards may have kept this run waiting, and the world went on: a node that was only silent
    and beats again is well, and one that holds a replica that nobody lost is in use, or that lives
    after all.
    """
    if not node.lease.reachable or ctx.run.requested_by or ctx.values.get("hardware"):
        return ""
    if ctx.values.get("only_if_silent"):
        return f"{node.name} beats again: nothing to repair"
    there = Placement.objects.select_related("node__lease", "replica").filter(
        IN_ITS_PLACE, node=node
    )
    lost = there.filter(pk=ctx.values.get("lost_placement", "")).first()
    running = there.filter(state=PlacementState.RUNNING)
    if running.exclude(pk=lost.pk if lost else "").exists():
        return f"{node.name} holds another replica by now, and beats"
    if lost and ctx.values.get("code") in triage.SILENCE_ALONE and losses.lives(lost):
        return f"replica {lost.replica.index} lives on {node.name}, which beats again"
    return ""


def no_longer_wanted(ctx: StepContext) -> str:
    """Why the run must not touch its node after all; "" if it must: see `back_at_work`."""
    return back_at_work(ctx, node_of(ctx))


def _whom(order: Command) -> str:
    """The placement that this is about."""
    action = msgspec.json.decode(order.payload, type=wire.Command).action
    return action.placement if isinstance(action, wire.StopProcess) else ""


def _order_kill(ctx: StepContext, node: Node, live: list[Placement], first: int) -> None:
    """`first`: how many orders of this step there are already."""
    for position, placement in enumerate(live, first):
        order = wire.StopProcess(placement=placement.pk, grace_s=0)
        fleet.queue_command(
            actor_of(ctx), node.pk, order, requester=ctx.requester(str(position)), ttl_s=30
        )


def _cut_power(ctx: StepContext, node: Node, why: str) -> Outcome:
    if not node.bmc_url:
        return NeedsOperator(
            text=f"{why}, and {node.name} has no BMC on record: switch it off by hand"
        )
    try:
        waits = None if power.read(node).off else _switch_off(ctx, node)
    except power.PowerError as error:
        raise power.PowerError(f"{why}: {error}") from error
    if waits is not None:
        return replace(waits, text=f"{why}: {waits.text}")
    return Done(
        text=f"{why}: {node.name} is off, as its BMC says, and quarantined",
        apply=_take_out(ctx, node),
    )


def _switch_off(ctx: StepContext, node: Node) -> Wait | None:
    """Have a node switched off that is not off. None once it is; what to wait for before."""
    goes_off = "the BMC has been told to switch the node off"
    told_off = float(ctx.values.get("told_off") or 0.0)
    # A second order may be refused. A moment that is yet to come was told by another clock.
    if 0 <= time.time() - told_off < GOES_OFF_S:
        return Wait(text=goes_off)
    power.switch(node, "ForceOff", ctx.step)
    if power.read(node).off:
        return None
    return Wait(text=goes_off, context={"told_off": time.time()})


def _take_out(ctx: StepContext, node: Node, killed: Collection[str] | None = None) -> Any:
    """`killed`: the placements whose processes are gone; None if the node has no power. Conflict
    if another was started there since."""
    reason = str(ctx.values.get("reason", "")) or ctx.run.title

    def apply() -> None:
        live = list(_alive_on(node).select_related("replica__job", "node"))
        if killed is not None and any(placement.pk not in killed for placement in live):
            raise Conflict(f"{node.name} was given work meanwhile, which is to be killed too")
        for placement in live:
            jobs.end_placement(
                actor_of(ctx), placement.pk, f"{node.name} was taken out", free_node=False
            )
            if placement.replica.job.state in JOB_ACTIVE and not placement.standby:
                placement.refresh_from_db(fields=["ended_at"])  # who asked hears that it has
                # Its loss may be told only after this, and would then be old news.
                incidents.bring_back(placement, timezone.now(), emptied=True)
        # Locked only now: whoever ends or places a process locks its replica before its node.
        locked = Node.objects.select_for_update(no_key=True).get(pk=node.pk)
        if locked.state not in OUT_ALREADY:
            fleet.transition(actor_of(ctx), node.pk, NodeState.QUARANTINED, reason=reason)
        if _alive_on(node).exists():
            raise Conflict(f"{node.name} was given work in this very moment")
        if not node.drained_by:
            owner = f"{OUR_DRAIN}{ctx.run.incident_id or ctx.run.pk}"
            fleet.set_drained_by(SYSTEM, node.pk, owner, reason)

    return apply


# --- repairing ------------------------------------------------------------------------------------


def repair(ctx: StepContext) -> Outcome:
    """Take the rung that was decided on. Looks first whether it was taken already."""
    rung = Rung(ctx.values["rung"])
    node = node_of(ctx)
    if decision_is_stale(ctx) and node.state != NodeState.REPAIRING:
        return _decide_anew()
    if rung == Rung.RMA:
        return _hand_to_vendor(ctx, node)
    if rung == Rung.RESET_GPU:
        return _reset_cards(ctx, node)
    if rung == Rung.FIELD_DIAGNOSTIC:
        return Skip(text="the card is examined first")
    return _restart(ctx, node, rung)


def decision_is_stale(ctx: StepContext) -> bool:
    """Whether a graver failure came after the rung was decided on."""
    decided_for = ctx.values.get("decided_for")
    return decided_for is not None and decided_for != ctx.values.get("action")


def _decide_anew() -> Outcome:
    return GoTo(to="decide", text="a graver failure came meanwhile")


def words_of_repair(context: Mapping[str, Any]) -> Sequence[str]:
    """The exact commands of the rung that was decided on, for plans and dry runs."""
    rung = context.get("rung", "")
    words = {
        Rung.RESET_GPU: "agent of {node}: reset_gpus",
        Rung.REBOOT: "BMC of {node}: ComputerSystem.Reset ForceRestart (On if it is off)",
        Rung.POWER_CYCLE: "BMC of {node}: ComputerSystem.Reset ForceOff, then On",
        Rung.RMA: "mark {node} for RMA and open the card's case with its evidence; nothing runs",
    }
    if not rung:
        return ("the rung of the repair ladder that is decided on",)
    return tuple(filter(None, [words.get(Rung(rung))]))


def words_of_examination(context: Mapping[str, Any]) -> Sequence[str]:
    """The exact commands of the vendor's field diagnostic, if that is the rung; else none."""
    examined = context.get("rung") == Rung.FIELD_DIAGNOSTIC
    return ("agent of {node}: field_diagnose, on the card that failed",) if examined else ()


def _reset_cards(ctx: StepContext, node: Node) -> Outcome:
    requester = ctx.requester()
    command = Command.objects.filter(requester=requester, verb="reset_gpus").first()
    if command is None:

        def order() -> None:
            _enter_repair(ctx, node, Rung.RESET_GPU, RESET_S + 60)
            verb = wire.ResetGpus(uuids=[])
            fleet.queue_command(actor_of(ctx), node.pk, verb, requester=requester, ttl_s=RESET_S)

        return Wait(text=f"{node.name} is told to reset its cards", apply=order)
    if command.state not in COMMAND_FINISHED:
        return Wait(text="the reset is under way", wake_s=2.0)
    if command.state == CommandState.DONE:
        return Done(text="the cards were reset", evidence={"command": command.pk})
    why = command.error or command.get_state_display().lower()
    return _given_up(ctx, node, not_helped(ctx, f"the reset failed: {why}"))


def examine(ctx: StepContext) -> Outcome:
    """Order the vendor's field diagnostic, where that is the rung."""
    if ctx.values["rung"] != Rung.FIELD_DIAGNOSTIC:
        return Skip(text="no field diagnostic is called for")
    node = node_of(ctx)
    state = power.read(node) if node.bmc_url else None
    if state is not None and not (state.on or state.off):
        return _in_between(node, state)
    if state is not None and state.off:  # it may have been emptied by its power
        power.switch(node, "On", ctx.step)
    limit_s = settings.FIELD_DIAGNOSTIC_S
    requester = ctx.requester()

    def order() -> None:
        fleet.transition(
            actor_of(ctx),
            node.pk,
            NodeState.REPAIRING,
            reason=Rung.FIELD_DIAGNOSTIC.label.lower(),
            deadline_s=EXAMINED_S + 600,
        )
        verb = wire.FieldDiagnose(uuid=str(ctx.values["gpu"]), limit_s=limit_s)
        fleet.queue_command(
            actor_of(ctx), node.pk, verb, requester=requester, ttl_s=EXAMINED_S + 60
        )

    return Done(
        text=f"{node.name} is told to run the field diagnostic",
        context={"examination": requester},
        apply=order,
    )


def await_verdict(ctx: StepContext) -> Outcome:
    """A card that passes is validated next; one that fails goes up the ladder, and so does one that
    is not even listed after a restart. Where there is no verdict a person looks."""
    if ctx.values["rung"] != Rung.FIELD_DIAGNOSTIC:
        return Skip(text="no card is examined")
    node = node_of(ctx)
    command = Command.objects.filter(
        requester=ctx.values.get("examination") or "", verb="field_diagnose"
    ).first()
    if command is None:
        return GoTo(to="examine", text="the examination is to be tried again")
    if command.state not in COMMAND_FINISHED and (why := _not_under_way(node, command)):
        return _no_verdict(
            ctx, node, why, lambda: fleet.call_back_commands(_requesting_step(command))
        )
    if command.state not in COMMAND_FINISHED:
        return Wait(text="the field diagnostic is under way", wake_s=30.0)
    found = command.output.get("outcome") if command.state == CommandState.DONE else None
    evidence = {"command": command.pk, **command.output}
    if found == "passed":
        return Done(
            text="the card passed the field diagnostic",
            evidence=evidence,
            apply=lambda: _record_examination(ctx),
        )
    if found == "failed":
        outcome = not_helped(ctx, "the card failed the field diagnostic")
        return _given_up(
            ctx, node, replace(outcome, evidence=evidence), lambda: _record_examination(ctx)
        )
    if found == "absent" and _was_restarted(ctx):
        outcome = not_helped(ctx, "the card is not even listed after a restart")
        return _given_up(ctx, node, replace(outcome, evidence=evidence))
    absent = "the card is not listed" if found == "absent" else ""
    return _no_verdict(ctx, node, absent or command.error or command.get_state_display().lower())


def _not_under_way(node: Node, command: Command) -> str:
    """Why nothing will come of an order to examine; "" if it may be under way."""
    deadline_s = settings.BOOT_DEADLINE_S
    now = timezone.now()
    # However long it was off: it was switched on only to be examined.
    unheard = now - max(node.lease.last_beat_at, command.created_at)
    if not node.lease.reachable and unheard > timedelta(seconds=deadline_s):
        return f"{node.name} has not been heard for {deadline_s:g} s"
    queued = command.state == CommandState.QUEUED
    if queued and now - command.created_at > timedelta(seconds=deadline_s):
        return f"the node's agent has not taken the order within {deadline_s:g} s"
    return ""


def _no_verdict(
    ctx: StepContext, node: Node, why: str, apply: Callable[[], object] = lambda: None
) -> Outcome:
    text = f"the field diagnostic came to no verdict: {why}"
    return _given_up(ctx, node, NeedsOperator(text=text, context={"examination": None}), apply)


def _requesting_step(command: Command) -> str:
    """The step that asked for a command: see `StepContext.requester`."""
    return command.requester.rpartition(".")[0]


def _record_examination(ctx: StepContext) -> None:
    """Only what came to a verdict: a tool that does not work says nothing of the card."""
    gpu = str(ctx.values["gpu"])
    fleet.record_repair(
        str(ctx.run.node_id), Rung.FIELD_DIAGNOSTIC, ctx.step.pk, gpu_uuid=gpu, turn=ctx.round
    )


def _was_restarted(ctx: StepContext) -> bool:
    """Whether this run has restarted the node for the card."""
    restarts = RepairRecord.objects.filter(rung__in=(Rung.REBOOT, Rung.POWER_CYCLE))
    return restarts.filter(gpu_id=ctx.values["gpu"], at__gte=ctx.run.created_at).exists()


def _given_up(
    ctx: StepContext, node: Node, outcome: Outcome, apply: Callable[[], object] = lambda: None
) -> Outcome:
    """The outcome, the node being marked as one whose repair failed; with what else to `apply`."""

    def give_up() -> None:
        apply()
        if node.state == NodeState.REPAIRING:
            fleet.transition(actor_of(ctx), node.pk, NodeState.REPAIR_FAILED, reason=outcome.text)

    return replace(outcome, apply=give_up)


def _restart(ctx: StepContext, node: Node, rung: Rung) -> Outcome:
    """Reboot or power-cycle, proven by the boot id; looks first whether it happened already."""
    state = power.read(node)
    if not (state.on or state.off):
        return _in_between(node, state)
    before = ctx.values.get("boot_before")
    words = rung.label.lower()
    if before is None or node.state != NodeState.REPAIRING:  # somebody may have returned it since

        def enter() -> None:
            _enter_repair(ctx, node, rung, settings.BOOT_DEADLINE_S)

        # What is about to be done is written down first: whoever takes over looks whether it was.
        return Wait(
            text=f"about to {words}",
            wake_s=0,
            context={"boot_before": before or node.boot_id, "was_off": state.off},
            apply=enter,
        )
    if state.on and state.boot_id and state.boot_id != before:
        return Done(text=f"the node was restarted ({words}): its boot id changed")
    if state.on and not state.boot_id and ctx.values.get("was_off"):
        return Done(text="the node was off and is on now: it has been restarted")
    if state.on and not state.boot_id and ctx.step.attempts > 1:
        return NeedsOperator(
            text="the BMC cannot tell whether the node has been restarted; look before going on"
        )
    try:
        if rung == Rung.POWER_CYCLE and state.on:
            waits = _switch_off(ctx, node)
            if waits is not None:  # to switch it on now would change nothing, or not last
                return waits
            power.switch(node, "On", ctx.step)
        else:
            power.switch(node, "ForceRestart" if state.on else "On", ctx.step)
    except power.PowerError as error:
        if state.boot_id:
            raise  # looked at again: the boot id will tell
        return NeedsOperator(
            text=f"{error}; whether it was restarted cannot be told: look before going on"
        )
    return Done(
        text=f"{node.name} was {'restarted through its BMC' if state.on else 'switched on'}",
        evidence={"boot_before": before},
    )


def _in_between(node: Node, state: power.Power) -> Wait:
    """An order that is given while the power changes may be lost, or undo what is under way."""
    return Wait(text=f"{node.name} is neither on nor off: its BMC says {state.state}")


def _enter_repair(ctx: StepContext, node: Node, rung: Rung, deadline_s: float) -> None:
    fleet.transition(
        actor_of(ctx),
        node.pk,
        NodeState.REPAIRING,
        reason=rung.label.lower(),
        deadline_s=deadline_s,
    )
    fleet.record_repair(
        node.pk, rung, ctx.step.pk, gpu_uuid=str(ctx.values.get("gpu", "")), turn=ctx.round
    )


def _hand_to_vendor(ctx: StepContext, node: Node) -> Outcome:
    card = Gpu.objects.filter(pk=ctx.values.get("gpu", "")).first()
    if card is None:
        return NeedsOperator(
            text="which card goes back is not known: look, then open the case by hand"
        )
    reason = str(ctx.values.get("why", ""))

    def apply() -> None:
        incidents.open_case(SYSTEM, card, node, ctx.run.incident, reason)
        fleet.record_repair(node.pk, Rung.RMA, ctx.step.pk, gpu_uuid=card.pk)
        fleet.transition(SYSTEM, node.pk, NodeState.RMA, reason=f"card {card.serial}: {reason}")

    return End(
        text=f"{node.name} is out for RMA: card {card.serial} goes back, evidence collected",
        evidence={"serial": card.serial, "reason": reason},
        apply=apply,
    )


def await_boot(ctx: StepContext) -> Outcome:
    """Wait until the node sends beats under another boot id than before its restart.

    Skip if it was not restarted. If it is not back within BOOT_DEADLINE_S, the rung did not help.
    """
    node = node_of(ctx)
    before = ctx.values.get("boot_before")
    if before is None:
        return Skip(text="the node was not restarted")
    back = node.boot_id != before and node.lease.reachable
    if node.state == NodeState.REPAIR_FAILED and not back:
        why = f"the node did not come back within {settings.BOOT_DEADLINE_S:g} s"
        return not_helped(ctx, why, blamed=False)
    if node.boot_id == before:
        return Wait(text="not heard since it was restarted")
    if not node.lease.reachable:
        return Wait(text="the node booted; its beats are awaited")
    return Done(
        text=f"the node beats again under boot id {node.boot_id}",
        evidence={"boot_id": node.boot_id},
    )


def not_helped(ctx: StepContext, why: str, *, blamed: bool = True) -> Outcome:
    """The rung did not cure it: go on from the decision where this playbook has one, else ask.

    Unless the card is `blamed` for it, restarts are all that may come of it.
    """
    restarts_left = ctx.values["rung"] in (Rung.RESET_GPU, Rung.REBOOT)
    if not (ctx.run.steps.filter(key="decide").exists() and (blamed or restarts_left)):
        return NeedsOperator(text=why)
    return GoTo(
        to="decide",
        text=why,
        context={
            "not_helped": ctx.values["rung"],
            "not_helped_why": why,
            "blamed": blamed,
            "boot_before": None,
        },
    )


# --- returning ------------------------------------------------------------------------------------


def return_to_service(ctx: StepContext) -> Outcome:
    """Make the validated node available, as a spare if the run is to; release what drained it.

    Ends without that if somebody else drained the node: it stays out until they return it. Back to
    its validation if that has failed since.
    """
    node = node_of(ctx)
    spare = bool(ctx.values.get("spare", not ctx.run.requested_by))
    if node.state in IN_SERVICE - {NodeState.SUSPECT}:
        return Skip(text=f"{node.name} is in service already")
    if node.state == NodeState.VALIDATION_FAILED:
        return GoTo(to="validate", text="not validated by now: it must pass its diagnostic first")
    theirs = (f"{OWNED}{ctx.run.requested_by}", "")
    if (
        ctx.run.playbook != "return-node"
        and node.drained_by not in theirs
        and not node.drained_by.startswith(OUR_DRAIN)
    ):
        return _stays_out(ctx, node)

    def apply() -> None:
        actor = actor_of(ctx)
        fleet.transition(actor, node.pk, NodeState.AVAILABLE, reason="repaired and validated")
        fleet.set_drained_by(actor, node.pk, "", "it is back")
        fleet.set_reset_pending(actor, node.pk, "")
        if spare:
            fleet.set_spare(actor, node.pk, True)
        judge_again(node)

    return Done(text=f"{node.name} is available{', as a spare' if spare else ''}", apply=apply)


def _stays_out(ctx: StepContext, node: Node) -> End:
    """It has passed, and is out as it was before: it must not look like one whose validation is
    under way until that has run out."""
    text = f"done; {node.name} stays out, for {username(node.drained_by)} drained it"

    def apply() -> None:
        if node.state == NodeState.VALIDATING:
            fleet.transition(actor_of(ctx), node.pk, NodeState.QUARANTINED, reason=text)

    return End(text=text, apply=apply)


# --- steps that repairs and orders share ----------------------------------------------------------

QUARANTINE = StepDefinition(
    key="quarantine",
    title="Empty it and quarantine it",
    act=quarantine,
    effect=Effect.IDEMPOTENT,
    disruptive=True,
    obsolete_reason=no_longer_wanted,
    does=words_of_quarantine,
    timeout_s=1800,
    prose="Kill what runs on it through its agent. If the agent does not answer, switch "
    "the node off through its BMC (ForceOff) and see that it is off. Then mark it "
    "quarantined, so that nothing lands on it.",
    undo="Validate it and return it.",
)

AWAIT_BOOT = StepDefinition(
    key="await-boot",
    title="See it come back",
    act=await_boot,
    effect=Effect.NONE,
    timeout_s=settings.BOOT_DEADLINE_S * 2,
    prose="The agent beats again, and the boot id is not the one from before.",
)
