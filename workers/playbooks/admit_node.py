"""A node has enrolled: it may take work once it has passed its diagnostics."""

from __future__ import annotations

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Node
from controlplane.incidents.choices import Effect
from workers.playbooks.base import Done, Outcome, Playbook, Skip, StepContext, StepDefinition
from workers.playbooks.validation import run_diagnostic


def validate(ctx: StepContext) -> Outcome:
    """Run the level-1 diagnostic; a failure asks for a person."""
    return run_diagnostic(ctx, _node(ctx), level=1)


def admit(ctx: StepContext) -> Outcome:
    """Make the new node available for work."""
    node = _node(ctx)
    if node.state == NodeState.AVAILABLE:
        return Skip(text=f"{node.name} is available already")

    def apply() -> None:
        fleet.transition(SYSTEM, node.pk, NodeState.AVAILABLE, reason="validated on entry")

    return Done(text=f"{node.name} may take work", apply=apply)


PLAYBOOK = Playbook(
    name="admit-node",
    version=1,
    summary="Validates a newly enrolled node and lets it take work.",
    deadline_s=3600,
    steps=(
        StepDefinition(
            key="validate",
            title="Validate it",
            act=validate,
            effect=Effect.FENCED,
            timeout_s=900,
            prose="Run the node's level-1 diagnostic. A skipped test is not a passed one.",
        ),
        StepDefinition(
            key="admit",
            title="Let it take work",
            act=admit,
            effect=Effect.IDEMPOTENT,
            prose="Cancel this run, then Return on the node's page.",
            undo="Quarantine it.",
        ),
    ),
)


def _node(ctx: StepContext) -> Node:
    return Node.objects.select_related("lease").get(pk=ctx.run.node_id)
