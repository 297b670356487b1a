"""A node is unfit: take it out, repair it up its ladder, validate it, and return it as a spare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Q, QuerySet
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import IN_SERVICE, NodeState, Rung
from controlplane.fleet.models import Command, Gpu, Node, RepairRecord
from controlplane.health.actions import memory_of
from controlplane.health.choices import Action, Urgency
from controlplane.incidents.choices import Effect
from controlplane.incidents.models import PlaybookStep
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JOB_ACTIVE, OF_ALL_NODES, PlacementState
from controlplane.jobs.durability import saved_since
from controlplane.jobs.models import Checkpoint, Job, Placement
from workers import guards, triage
from workers.playbooks import node_steps
from workers.playbooks.base import (
    Done,
    End,
    GoTo,
    NeedsOperator,
    Outcome,
    Playbook,
    StepContext,
    StepDefinition,
    Wait,
)
from workers.playbooks.validation import await_soak, run_diagnostic
from workers.repair_ladder import Record, cards_named, choose_rung, next_rung

#: States in which a node may hold work, that is emptied before anybody is asked about it.
MAY_HOLD_WORK = IN_SERVICE | {NodeState.DRAINING, NodeState.DRAIN_FAILED}
#: What people are asked to do with a node that is out.
ONCE_WELL = "once it is well, cancel this and return it"
#: A job that saved longer ago than this saves once more before its node is emptied.
SAVE_HOLDS = timedelta(minutes=5)
#: The same fault of the same card within this time after a repair means that it did not help.
IN_VAIN_WITHIN = timedelta(days=30)


def decide(ctx: StepContext) -> Outcome:
    """Choose the rung of the repair ladder to take: see `repair_ladder.choose_rung`.

    Wait until the node is idle, or its jobs have saved, if the failure leaves time for that. End if
    the node needs no repair after all. Asks for a person if no rung is left and the node is out of
    service, or may stay at work until it is idle; otherwise it is emptied first.
    """
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
        card_known=bool(card) and bool(ctx.values.get("blamed", True)),
        can_examine=node.can_examine and node.reachable and _has_step(ctx, "examine"),
        not_below=next_rung(tried) if tried else "",
        not_helped=str(ctx.values.get("not_helped_why") or ""),
    )
    evidence = {
        "attempts in 24 h": ", ".join(f"{k}: {n}" for k, n in record.attempts.items() if n)
        or "none",
        "tried in vain for this code": ", ".join(sorted(record.in_vain)) or "nothing",
        **_shown_record(card),
    }
    urgency = ctx.values.get("urgency", Urgency.NOW)
    if choice is None and (urgency == Urgency.IDLE or node.state not in MAY_HOLD_WORK):
        out = "" if node.state in MAY_HOLD_WORK else f"; {ONCE_WELL}"
        return NeedsOperator(text=f"{_nothing_left(ctx)}{out}", evidence=evidence)
    words = f"{_nothing_left(ctx)}; it is emptied first"
    if choice is not None:
        words = f"{Rung(choice.rung).label}: {choice.reason}"
    busy = node_steps.held_on(node)
    if urgency == Urgency.IDLE and busy.exists():
        return Wait(text=f"{words}; once {node.name} is idle", wake_s=30.0, evidence=evidence)
    if urgency == Urgency.NEXT_CHECKPOINT:
        saved = _await_checkpoints(ctx, busy.filter(replica__job__state__in=JOB_ACTIVE), words)
        if isinstance(saved, Wait):
            return replace(saved, evidence=evidence)
        evidence["checkpoint"] = saved
        words = f"{words}; {saved}"
    return Done(
        text=words,
        evidence=evidence,
        context={
            "rung": choice.rung if choice else "",
            "why": choice.reason if choice else f"{_nothing_left(ctx)}; {ONCE_WELL}",
            "boot_before": None,
            "not_helped": tried,
            "decided_in": ctx.values.get("retry", 0),
            "asked_again": None,
            "decided_for": str(ctx.values.get("action", "")),
            "cards": ctx.values.get("cards") or [*node.gpus.values_list("pk", flat=True)],
        },
    )


def _nothing_left(ctx: StepContext) -> str:
    """Why automation takes no rung, with what came of the one that did not help."""
    action = str(ctx.values.get("action", Action.POWER_CYCLE))
    left = "no rung of the repair ladder is left for automation to take"
    if action not in triage.NODE_REPAIRS:
        left = f"only people can mend it ({Action(action).label.lower()})"
    why = ctx.values.get("not_helped_why") if ctx.values.get("not_helped") else ""
    return f"{left}: {why}" if why else left


def _await_checkpoints(
    ctx: StepContext, busy: QuerySet[Placement], words: str, noted: str = "checkpoint_asked"
) -> Wait | str:
    """Wait until each job on the node has saved a checkpoint since the repair was wanted, which it
    is told to do at its next step's edge: one that is left when the node is not. In words what came
    of it, once there is no more to wait for. `noted`: where the run's context says when it was
    asked for."""
    there = {p.replica.job_id: p.replica.job for p in busy.select_related("replica__job")}
    if not there:
        return "the node holds no job"
    asked = ctx.values.get(noted)
    if asked is None:

        def ask() -> None:
            for job in there.values():
                jobs.direct(SYSTEM, job.pk, "checkpoint", reason=f"{ctx.run.title}: {words}")

        return Wait(
            text=f"{words}; at the next checkpoint, which is asked for",
            wake_s=1.0,
            context={noted: timezone.now().isoformat()},
            apply=ask,
        )
    since = datetime.fromisoformat(asked)
    goes_on = [job for job in there.values() if _others_train(job, busy)]
    saved = _left_by(busy, since).order_by("step")
    steps = dict(saved.values_list("job_id", "step"))
    missing = ", ".join(sorted(job.name for pk, job in there.items() if pk not in steps))
    if not missing:
        return ", ".join(f"{there[pk].name} saved step {step}" for pk, step in steps.items())
    if timezone.now() - since > timedelta(seconds=settings.CHECKPOINT_WAIT_S):
        return f"{missing} saved none within {settings.CHECKPOINT_WAIT_S:g} s"
    alone = any(job not in goes_on for pk, job in there.items() if pk not in steps)
    where = " that does not go with the node" if alone else ""
    return Wait(text=f"{words}; once {missing} has saved a checkpoint{where}", wake_s=1.0)


def _left_by(busy: QuerySet[Placement], since: datetime) -> QuerySet[Checkpoint]:
    """What was saved since then that is left when the node is not."""
    there = {p.replica.job_id: p.replica.job for p in busy.select_related("replica__job")}
    goes_on = [job for job in there.values() if _others_train(job, busy)]
    left = Q(tier__in=OF_ALL_NODES) | Q(job__in=goes_on)
    return saved_since(Checkpoint.objects.filter(left, job__in=there), since)


def _others_train(job: Job, busy: QuerySet[Placement]) -> bool:
    """Whether replicas that are not on the node hold the job's state in their memory, and give it
    to the one that leaves."""
    leaving = busy.filter(replica__job=job).values("replica")
    training = Placement.objects.filter(
        replica__job=job, state=PlacementState.RUNNING, standby=False, joined_at__isnull=False
    )
    return not job.whole and training.exclude(replica__in=leaving).exists()


def _has_step(ctx: StepContext, key: str) -> bool:
    """Not every run does: one keeps the steps of the version that it began with."""
    return ctx.run.steps.filter(key=key).exists()


def quarantine(ctx: StepContext) -> Outcome:
    """As everywhere; but where what the job had saved is old by the time that the guards let the
    run go, it saves once more first."""
    node = node_steps.node_of(ctx)
    busy = node_steps.held_on(node).filter(replica__job__state__in=JOB_ACTIVE)
    if node.lease.reachable and _saved_long_ago(ctx, busy):
        words = f"what was saved is older than {SAVE_HOLDS.total_seconds():.0f} s"
        saved = _await_checkpoints(ctx, busy, words, noted="asked_again")
        if isinstance(saved, Wait):
            return saved
    return node_steps.quarantine(ctx)


def _saved_long_ago(ctx: StepContext, busy: QuerySet[Placement]) -> bool:
    """Whether what waited for the next checkpoint has one that is old by now, and has not begun.
    A job that saved none is not waited for again."""
    asked = ctx.values.get("checkpoint_asked")
    begun = Command.objects.filter(requester__startswith=f"{ctx.requester()}.")
    if ctx.values.get("urgency") != Urgency.NEXT_CHECKPOINT or asked is None or begun.exists():
        return False
    newest = _left_by(busy, datetime.fromisoformat(asked)).order_by("at").last()
    return newest is not None and timezone.now() - newest.at > SAVE_HOLDS


def repair(ctx: StepContext) -> Outcome:
    """Take the rung that was decided on. Where there is none the node is empty by now, and people
    are asked; once they have it tried again it is decided anew."""
    if ctx.values["rung"]:
        return node_steps.repair(ctx)
    again = ctx.values.get("retry", 0) != ctx.values["decided_in"]
    if again or node_steps.decision_is_stale(ctx):
        return GoTo(
            to="decide", text="the repair is tried again, or a graver failure came meanwhile"
        )
    return NeedsOperator(text=str(ctx.values["why"]))


def words_of_repair(context: Mapping[str, Any]) -> Sequence[str]:
    """Nothing, where it was decided that only people can mend the node."""
    return () if context.get("rung") == "" else node_steps.words_of_repair(context)


def validate(ctx: StepContext) -> Outcome:
    """Run the level-2 diagnostic; a failure that the repaired card explains climbs the ladder."""
    node = node_steps.node_of(ctx)
    if node.report.get("boot_id", node.boot_id) != node.boot_id:
        return Wait(text="the node's cards are not listed yet since it booted")
    return run_diagnostic(
        ctx,
        node,
        level=2,
        on_failed=lambda why, output: _not_validated(ctx, node, why, output),
        lacking=lambda: _in_words(_missing_cards(ctx, node)),
    )


def _not_validated(ctx: StepContext, node: Node, why: str, output: Mapping[str, object]) -> Outcome:
    """Climb, but let no card go back for what another one has, or the host, or for what the
    vendor's own tool does not find."""
    if ctx.values["rung"] == Rung.FIELD_DIAGNOSTIC:
        return NeedsOperator(text=f"the card passed the field diagnostic; {why}")
    card = str(ctx.values.get("gpu", ""))
    theirs = Gpu.objects.filter(Q(node=node) | Q(pk=card))
    named = cards_named(output, dict(theirs.values_list("uuid", "pci_address")))
    lost = [gpu.pk for gpu in _missing_cards(ctx, node)] == [card]
    if card and named and card not in named and not lost:
        return NeedsOperator(text=f"{why}; that is not of the card that was repaired")
    return node_steps.not_helped(ctx, why, blamed=card in named or lost)


def _missing_cards(ctx: StepContext, node: Node) -> list[Gpu]:
    """The cards that the node had when this run began, are gone, and were not replaced."""
    before = {*ctx.values.get("cards", []), ctx.values.get("gpu", "")} - {""}
    now = set(node.gpus.values_list("pk", flat=True))
    missing = before - now
    return list(Gpu.objects.filter(pk__in=missing)) if len(missing) > len(now - before) else []


def _in_words(missing: list[Gpu]) -> str:
    return ", ".join(f"card {gpu.serial} is no longer listed" for gpu in missing)


def soak(ctx: StepContext) -> Outcome:
    """Watch the node for SOAK_S; a fault or a silence meanwhile asks for a person."""
    return await_soak(ctx, node_steps.node_of(ctx))


def return_whole(ctx: StepContext) -> Outcome:
    """As everywhere; but not without a card that it had. Whoever looks for that may switch the node
    off and on: what it passed before counts no more."""
    node = node_steps.node_of(ctx)
    missing = _in_words(_missing_cards(ctx, node))
    if not missing or node.state == NodeState.VALIDATION_FAILED:
        return node_steps.return_to_service(ctx)

    def fail() -> None:
        if node.state == NodeState.VALIDATING:
            fleet.transition(SYSTEM, node.pk, NodeState.VALIDATION_FAILED, reason=missing)

    return NeedsOperator(text=missing, apply=fail)


PLAYBOOK = Playbook(
    name="repair-node",
    version=5,
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
            "cycle, the vendor's field diagnostic, RMA. Look at the card's repair record by its "
            "serial: the same fault after a restart is not restarted again. What can wait is done "
            "at the job's next checkpoint (if no other replica of it trains, one in shared or "
            "object storage), or when the node holds no work.",
        ),
        replace(
            node_steps.QUARANTINE,
            act=quarantine,
            timeout_s=node_steps.QUARANTINE.timeout_s + settings.CHECKPOINT_WAIT_S,
        ),
        StepDefinition(
            key="repair",
            title="Repair it",
            act=repair,
            effect=Effect.NON_REPEATABLE,
            disruptive=True,
            does=words_of_repair,
            timeout_s=600,
            prose="Note the boot id, then take the rung that was decided on. If you are not sure "
            "whether somebody did so already, compare the boot id first. What only people can mend "
            "stays quarantined until they have.",
        ),
        StepDefinition(
            key="examine",
            title="Examine the card",
            act=node_steps.examine,
            effect=Effect.FENCED,
            disruptive=True,
            does=node_steps.words_of_examination,
            prose="Run the vendor's field diagnostic on the card, if that is the rung that was "
            "decided on.",
        ),
        StepDefinition(
            key="verdict",
            title="Await the verdict",
            act=node_steps.await_verdict,
            effect=Effect.NONE,
            timeout_s=node_steps.EXAMINED_S + 300,
            prose="It may take hours. A card that fails goes back to the vendor with its log.",
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
            act=return_whole,
            effect=Effect.IDEMPOTENT,
            prose="Cancel this run, then Return and Make it a spare on the node's page.",
            undo="Quarantine it.",
        ),
    ),
)


def _record(ctx: StepContext, card: str) -> Record:
    """The repair record: of the card that failed where it is known, of the whole node else."""
    node = node_steps.node_of(ctx)
    attempts = {
        rung.value: guards.attempts_at(node, rung, card)
        for rung in (Rung.RESET_GPU, Rung.REBOOT, Rung.POWER_CYCLE, Rung.FIELD_DIAGNOSTIC)
    }
    code = str(ctx.values.get("code", ""))
    beyond = triage.beyond_remapping(memory_of(card)) if card else ""
    if not card or not code:
        return Record(attempts, beyond_remapping=beyond)
    return Record(attempts, _in_vain(ctx, card, code), beyond)


def _in_vain(ctx: StepContext, card: str, code: str) -> frozenset[str]:
    """The rungs that other runs took for this very code of this card: what was done to the card for
    another reason says nothing of it. What this run did shows in `not_helped`."""
    since = timezone.now() - IN_VAIN_WITHIN
    repairs = RepairRecord.objects.filter(gpu_id=card, at__gte=since)
    found = repairs.values_list("rung", "step_id")
    taken = [(rung, step.partition(".")[0]) for rung, step in found]  # it may name a turn of it
    steps = PlaybookStep.objects.filter(pk__in=[step for _, step in taken], run__context__gpu=card)
    # A card that is gone may bear any code: what called for the same is the same fault.
    vague = code in triage.VAGUE_CODES
    same = Q(run__context__action=ctx.values["action"]) if vague else Q(run__context__code=code)
    ours = set(steps.filter(same).exclude(run=ctx.run).values_list("pk", flat=True))
    return frozenset(rung for rung, step in taken if step in ours)


def _shown_record(card: str) -> dict[str, str]:
    """The card's record in words, as evidence: what was done to it, where, and its memory."""
    gpu = Gpu.objects.filter(pk=card).first()
    if gpu is None:
        return {"record": "of the whole node: no card is known to have failed"}
    since = timezone.now() - IN_VAIN_WITHIN
    repairs = RepairRecord.objects.filter(gpu=gpu, at__gte=since).select_related("node")
    done = [
        f"{Rung(one.rung).label.lower()} on {one.node.name}, {one.at:%Y-%m-%d %H:%M} UTC"
        for one in repairs.order_by("at")
    ]
    memory = [f"{name.replace('_', ' ')}: {value:g}" for name, value in memory_of(card).items()]
    return {
        f"card {gpu.serial}, repairs of 30 days": "; ".join(done) or "none",
        f"card {gpu.serial}, memory": ", ".join(memory) or "no row was remapped",
    }
