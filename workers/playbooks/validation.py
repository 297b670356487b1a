"""Steps that more than one playbook takes before a node may have work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Literal

from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import COMMAND_FINISHED, CommandState, NodeState
from controlplane.fleet.models import Command, Node
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from node_agent import wire
from workers.playbooks.base import Done, GoTo, NeedsOperator, Outcome, StepContext, Wait
from workers.repair_ladder import diagnosis_passed
from workers.signal_triage import HARDWARE_SPEAKS, verdict_of
from workers.triage import condemns_node

#: Longest time that a diagnostic may take, in seconds.
DIAGNOSTIC_S = 600


def run_diagnostic(
    ctx: StepContext,
    node: Node,
    level: Literal[1, 2],
    on_failed: Callable[[str, Mapping[str, object]], Outcome] = lambda why, _: NeedsOperator(
        text=why
    ),
    lacking: Callable[[], str] = lambda: "",
) -> Outcome:
    """Have the node's agent run its diagnostics; the node is `validating` meanwhile.

    `on_failed` says what comes of it if they do not pass, from why and their output; else a person
    is asked. `lacking` says what else the node lacks once they have passed; "" if nothing.
    """
    requester = ctx.requester()
    command = Command.objects.filter(requester=requester).first()
    if command is None:

        def apply() -> None:
            if node.state != NodeState.VALIDATING:
                fleet.transition(
                    SYSTEM,
                    node.pk,
                    NodeState.VALIDATING,
                    reason=f"level-{level} diagnostic",
                    deadline_s=DIAGNOSTIC_S + settings.SOAK_S + 300,
                )
            fleet.queue_command(
                SYSTEM,
                node.pk,
                wire.Diagnose(level=level),
                requester=requester,
                ttl_s=DIAGNOSTIC_S,
            )

        return Wait(text=f"{node.name} is told to run its level-{level} diagnostic", apply=apply)
    if command.state not in COMMAND_FINISHED:
        return Wait(text="the diagnostic is running", wake_s=2.0)
    passed, reason = diagnosis_passed(command.output)
    if passed and (lacks := lacking()):
        passed, reason = False, lacks
    evidence = {"command": command.pk, **command.output}
    if command.state == CommandState.DONE and passed:
        return Done(text=reason, evidence=evidence)

    def fail() -> None:
        if node.state == NodeState.VALIDATING:
            fleet.transition(SYSTEM, node.pk, NodeState.VALIDATION_FAILED, reason=reason)

    outcome = on_failed(f"not validated: {command.error or reason}", command.output)
    return replace(outcome, evidence={**outcome.evidence, **evidence}, apply=fail)


def await_soak(ctx: StepContext, node: Node) -> Outcome:
    """Watch the node for SOAK_S seconds: any hardware signal or lost lease ends in `NeedsOperator`.

    What was told since its diagnostic began counts too.
    """
    if node.state == NodeState.VALIDATION_FAILED:
        return GoTo(to="validate", text="tried again: it must pass its diagnostic first")
    began = ctx.step.started_at or timezone.now()
    since = node.state_since
    heard = Q(recorded_at__gte=since) | Q(repeated_at__gte=since)
    signals = Signal.objects.filter(heard, node=node)
    bad = next((s.raw or s.get_kind_display() for s in signals if _speaks_against(s)), None)
    if bad is not None or not node.lease.reachable:
        reason = bad or "its beats stopped"

        def fail() -> None:
            fleet.transition(SYSTEM, node.pk, NodeState.VALIDATION_FAILED, reason=reason)

        return NeedsOperator(text=f"while watched: {reason}", apply=fail)
    left = began + timedelta(seconds=settings.SOAK_S) - timezone.now()
    if left > timedelta(0):
        return Wait(text=f"watched for {settings.SOAK_S:g} s", wake_s=left.total_seconds())
    return Done(text=f"{node.name} was healthy for {settings.SOAK_S:g} s")


def _speaks_against(signal: Signal) -> bool:
    if signal.kind in (SignalKind.GPU_UNREADABLE, SignalKind.LEASE_LOST):
        return True
    verdict = verdict_of(signal) if signal.kind in HARDWARE_SPEAKS else None
    return verdict is not None and condemns_node(verdict)
