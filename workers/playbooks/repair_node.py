"""A node is unfit: take it out, repair it up its ladder, validate it, and return it as a spare."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.utils import timezone

from controlplane.fleet.choices import Rung
from controlplane.fleet.models import RepairRecord
from controlplane.health.models import Failure
from controlplane.incidents.choices import Effect
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Placement
from workers import guards, triage
from workers.playbooks import node_steps
from workers.playbooks.base import (
    Ask,
    Done,
    End,
    Outcome,
    Playbook,
    StepContext,
    StepDefinition,
    Wait,
)
from workers.playbooks.validation import await_soak, run_diagnostic
from workers.repair import Record, choose_rung, next_rung

#: The same fault of the same card within this time after a repair means that it did not help.
IN_VAIN_WITHIN = timedelta(days=30)


def decide(ctx: StepContext) -> Outcome:
    node = node_steps.node_of(ctx)
    reason = node_steps.back_at_work(ctx, node)
    if reason:
        return End(text=reason)
    tried = str(ctx.values.get("not_helped") or "")
    card = str(ctx.values.get("gpu", ""))
    record = _record(ctx, card)
    choice = choose_rung(
        str(ctx.values.get("action", "power_cycle")),
        record,
        limit=settings.REPAIR_ATTEMPTS_PER_DAY,
        card_known=bool(card),
        not_below=next_rung(tried) if tried else "",
    )
    evidence = {
        "attempts in 24 h": ", ".join(f"{k}: {n}" for k, n in record.attempts.items() if n)
        or "none",
        "tried in vain for this code": ", ".join(sorted(record.in_vain)) or "nothing",
    }
    if choice is None:
        return Ask(
            text="no rung of the repair ladder is left for automation to take", evidence=evidence
        )
    words = f"{Rung(choice.rung).label}: {choice.reason}"
    busy = Placement.objects.filter(node=node).exclude(state=PlacementState.ENDED)
    if ctx.values.get("urgency", "now") == "idle" and busy.exists():
        return Wait(text=f"{words}; once {node.name} is idle", wake_s=30.0, evidence=evidence)
    return Done(
        text=words,
        evidence=evidence,
        context={
            "rung": choice.rung,
            "why": choice.reason,
            "boot_before": None,
            "not_helped": tried,
            "decided_for": str(ctx.values.get("action", "")),
        },
    )


def validate(ctx: StepContext) -> Outcome:
    return run_diagnostic(
        ctx,
        node_steps.node_of(ctx),
        level=2,
        on_failed=lambda why: node_steps.not_helped(ctx, why),
    )


def soak(ctx: StepContext) -> Outcome:
    return await_soak(ctx, node_steps.node_of(ctx))


PLAYBOOK = Playbook(
    name="repair-node",
    version=3,
    summary="Takes an unfit node out, repairs it up the ladder, validates it, returns it as a "
    "spare.",
    deadline_s=7 * 86_400,
    steps=(
        StepDefinition(
            key="decide",
            title="Decide on the repair, and when",
            act=decide,
            effect=Effect.NONE,
            timeout_s=7 * 86_400,
            prose="Start at the rung that the failure calls for: reset the GPU, reboot, power "
            "cycle. Look at the card's repair record by its serial: the same fault after a restart "
            "goes to the vendor. What can wait is done when the node holds no work.",
        ),
        node_steps.QUARANTINE,
        StepDefinition(
            key="repair",
            title="Repair it",
            act=node_steps.repair,
            effect=Effect.NON_REPEATABLE,
            disruptive=True,
            does=node_steps.words_of_repair,
            timeout_s=600,
            prose="Note the boot id, then take the rung that was decided on. If you are not sure "
            "whether somebody did so already, compare the boot id first.",
        ),
        node_steps.AWAIT_BOOT,
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
            act=node_steps.return_to_service,
            effect=Effect.IDEMPOTENT,
            prose="Mark it available and a spare.",
            undo="Quarantine it.",
        ),
    ),
)


def _record(ctx: StepContext, card: str) -> Record:
    """The repair record: of the card that failed where it is known, of the whole node else."""
    node = node_steps.node_of(ctx)
    attempts = {
        rung.value: guards.attempts_at(node, rung, card)
        for rung in (Rung.RESET_GPU, Rung.REBOOT, Rung.POWER_CYCLE)
    }
    code = str(ctx.values.get("code", ""))
    if not card or not code:
        return Record(attempts)
    since = timezone.now() - IN_VAIN_WITHIN
    earlier = Failure.objects.filter(gpu_id=card, observed_at__gte=since)
    # A card that is gone may bear any code: what called for the same is the same fault.
    vague = code in triage.VAGUE_CODES
    earlier = earlier.filter(needed=ctx.values["action"]) if vague else earlier.filter(code=code)
    first = earlier.order_by("observed_at").first()
    if first is None:
        return Record(attempts)
    repairs = RepairRecord.objects.filter(gpu_id=card, at__gte=first.observed_at)
    # What this very run did shows in `not_helped`, not as an earlier attempt in vain.
    own = tuple(ctx.run.steps.values_list("pk", flat=True))
    in_vain = {
        rung for rung, step in repairs.values_list("rung", "step_id") if not step.startswith(own)
    }
    return Record(attempts, frozenset(in_vain))
