"""Durable execution of playbook steps: claim, act, apply under the lock, queue the next.

Any process may die at any instruction: the rows say what is done, and a step whose worker died is
taken by another once its lease ends. An outcome is applied only by whoever still holds the lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from controlplane import doorbell
from controlplane.accounts.models import SYSTEM
from controlplane.errors import Conflict
from controlplane.fleet.changes import change, touch
from controlplane.ids import new_id
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import (
    RUN_ACTIVE,
    STEP_FINISHED,
    Effect,
    EntryKind,
    RunState,
    StepState,
)
from controlplane.incidents.models import Incident, PlaybookRun, PlaybookStep
from workers import guards, intake
from workers.playbooks import PLAYBOOKS
from workers.playbooks.base import (
    Done,
    End,
    Fail,
    GoTo,
    NeedsOperator,
    Outcome,
    Skip,
    StepContext,
    StepDefinition,
    Wait,
)
from workers.power import PowerError

log = structlog.get_logger(__name__)

#: A step that failed this often, by errors or dead workers, asks for a person.
MAX_ATTEMPTS = 5
#: A run that went back this often asks for a person; the first time for each node is apart.
MAX_ROUNDS = 5
#: A step that the guards refused is asked about again after this long, in seconds.
GUARD_RETRY_S = 5.0
#: How the outcome of a step begins that the guards refused when it was last due.
NOT_NOW = "not now: "
#: How the outcome of a step begins that was to ask, and looks at what it has just been told first.
ONCE_MORE = "looks once more: "
#: A plan that waits for approval is held against the world this often: a change voids it.
APPROVAL_RETRY_S = 10.0

ACTIVE_RUN = Q(run__state__in=sorted(RUN_ACTIVE))


def drain(subject: str, *, owner: str, stopping: Callable[[], bool] = lambda: False) -> None:
    """Do all there is to do: triage signals, create the steps of requested runs, take due steps.

    `subject` also wakes the steps that wait for news of it, see `wake`. Once `stopping` says so no
    further step is begun: what is due is another worker's.
    """
    if subject:
        wake(subject)
    while not stopping() and intake.triage_signals() + create_steps() + take_step(owner):
        pass


def wake(subject: str) -> None:
    """Make due the steps that may be waiting for news of a node, a job, an incident or a command.

    A step that is being worked on is marked too, so that news during its work is not missed.
    """
    kind, _, key = subject.partition("/")
    about = {
        "node": Q(run__node_id=key),
        "job": Q(run__job_id=key),
        "incident": Q(run__incident_id=key),
        # Whoever waits for an order may be a later step than the one that gave it.
        "step": Q(run__steps=key.split(".")[0]),
    }[kind]
    attentive = Q(state__in=[StepState.WAITING, StepState.RUNNING])
    # One row at a time: a statement that locks several steps could wait for one that locks others.
    for step_id in PlaybookStep.objects.filter(about, attentive).values_list("pk", flat=True):
        PlaybookStep.objects.filter(attentive, pk=step_id).update(wake_at=timezone.now())


def create_steps() -> int:
    """Give each requested run its steps, from the playbook as it is now. Returns how many runs."""
    runs = 0
    while _create_steps_of():
        runs += 1
    return runs


def take_step(owner: str) -> int:
    """Claim one due step, act, and apply what came of it. Returns 0 if none was due."""
    step = claim(owner)
    if step is None:
        return 0
    if step.state == StepState.RUNNING:  # the guards may have refused it
        outcome = _act(step)
        _apply(step, outcome)
    return 1


@change()
def claim(owner: str) -> PlaybookStep | None:
    """Lock and return the step that has been due longest; None if none is due.

    A disruptive step must pass the guards in this same transaction. One that they refuse is
    returned in another state than running, with the reason in its outcome. A step that is not
    wanted any more is not shown to them. In a playbook without disruptive steps the guards are
    asked before its first step that acts.
    """
    now = timezone.now()
    step = (
        PlaybookStep.objects.select_for_update(skip_locked=True, no_key=True, of=("self", "run"))
        .select_related("run__incident")
        .filter(ACTIVE_RUN, state__in=[StepState.READY, StepState.WAITING], wake_at__lte=now)
        .order_by("wake_at")
        .first()
    )
    if step is None:
        return None
    definition = _definition(step)
    if definition is not None and definition.disruptive:
        obsolete = not guards.has_reservation(step.run) and _is_obsolete(step, definition)
        words = PLAYBOOKS[step.run.playbook].does(step.run.context)
        if not obsolete and not _pass_guards(step, guards.judge(step.run, words), now):
            return step
    elif (
        definition is not None
        and _is_first_action(step, definition)
        and not _pass_guards(step, guards.judge_nondisruptive(step.run), now)
    ):
        return step
    if step.state == StepState.READY:
        step.attempts += 1
    step.state = StepState.RUNNING
    step.lock_token = new_id("lck")
    step.lock_owner = owner
    step.lock_expires_at = now + timedelta(seconds=settings.STEP_LEASE_S)
    step.started_at = step.started_at or now
    step.wake_at = None
    step.save()
    touch(step.run.cluster_id, ("run", step.run_id))
    return step


def release_expired(now: datetime) -> int:
    """Free the steps whose worker has not been heard within its lease. Returns how many."""
    expired = PlaybookStep.objects.filter(state=StepState.RUNNING, lock_expires_at__lt=now)
    return expired.update(
        state=StepState.READY, lock_token="", lock_expires_at=None, wake_at=timezone.now()
    )


def work_is_due(now: datetime) -> bool:
    """Whether a doorbell ring was lost, or a timer has come."""
    due = PlaybookStep.objects.filter(
        ACTIVE_RUN, state__in=[StepState.READY, StepState.WAITING], wake_at__lte=now
    )
    return (
        due.exists()
        or intake.untriaged().exists()
        or PlaybookRun.objects.filter(state=RunState.PENDING).exists()
    )


# --- the parts of taking a step -------------------------------------------------------------------


def _definition(step: PlaybookStep) -> StepDefinition | None:
    playbook = PLAYBOOKS.get(step.run.playbook)
    return playbook.step(step.key) if playbook else None


def _is_first_action(step: PlaybookStep, definition: StepDefinition) -> bool:
    """Whether it is the first look of a step that does something, in a playbook without disruptive
    ones. One that waits has begun."""
    acts = step.state == StepState.READY and definition.effect != Effect.NONE
    return acts and not PLAYBOOKS[step.run.playbook].disruptive


def _is_obsolete(step: PlaybookStep, definition: StepDefinition) -> bool:
    """Whether the step says that it is not wanted any more, or fails to say: then `_act` meets the
    error too and counts it, while here it would stop every other run."""
    try:
        with transaction.atomic():
            return bool(definition.obsolete_reason(StepContext(step)))
    except Exception:
        log.exception("step.error", run=step.run_id, step=step.key)
        return True


def _act(step: PlaybookStep) -> Outcome:
    """Let the playbook act, outside of any transaction; an error becomes an outcome too."""
    definition = _definition(step)
    if definition is None:
        return NeedsOperator(text=f"this version of the playbook has no step {step.key!r}")
    if step.attempts > MAX_ATTEMPTS:
        return NeedsOperator(text=f"gave up after {MAX_ATTEMPTS} attempts; last: {step.outcome}")
    with structlog.contextvars.bound_contextvars(run=step.run_id, step=step.key):
        try:
            if definition.disruptive and not guards.has_reservation(step.run):
                if why := definition.obsolete_reason(StepContext(step)):
                    return _Obsolete(text=why)
                return Wait(text="the step is wanted again", wake_s=0)
            return definition.act(StepContext(step))
        except Conflict as conflict:
            return Wait(text=conflict.detail)
        except PowerError as error:
            log.warning("step.power_error", error=str(error))
            return Wait(text=str(error), wake_s=2.0)
        except Exception as error:
            log.exception("step.error")
            # Kept as an attempt: the step is tried again, later each time, and then asks.
            return _Failed(text=f"{type(error).__name__}: {error}")


class _Failed(Outcome):
    """The step raised; it is tried again later."""


class _Obsolete(End):
    """The step was not taken: it is skipped with those that were to come."""


def _apply(step: PlaybookStep, outcome: Outcome) -> None:
    """Write the outcome, if the step is still ours; a conflict found while writing is a wait."""
    try:
        _apply_guarded(step, outcome)
    except Conflict as conflict:
        _apply_guarded(step, outcome.on_conflict or Wait(text=conflict.detail))
    except Exception as error:
        log.exception("step.apply_error", step=step.pk)
        _apply_guarded(step, _Failed(text=f"{type(error).__name__}: {error}"))


@change()
def _apply_guarded(claimed: PlaybookStep, outcome: Outcome) -> None:
    # Locks are taken in one order everywhere: incident, run, step, and the cluster last.
    if claimed.run.incident_id is not None:
        Incident.objects.select_for_update(no_key=True, of=("self",)).get(
            pk=claimed.run.incident_id
        )
    run = PlaybookRun.objects.select_for_update(no_key=True, of=("self",)).get(pk=claimed.run_id)
    step = (
        PlaybookStep.objects.select_for_update(no_key=True)
        .filter(pk=claimed.pk, lock_token=claimed.lock_token, state=StepState.RUNNING)
        .first()
    )
    if step is None or run.state not in RUN_ACTIVE:
        log.warning("step.stale_outcome_dropped", step=claimed.pk, outcome=outcome.text)
        return
    merged = run.incident_id != claimed.run.incident_id
    if merged and (outcome.apply is not None or _ends(outcome, run, step)):
        if step.effect == Effect.NON_REPEATABLE and not isinstance(outcome, Wait):
            step.attempts += 1  # what it has done it must not do again, if it cannot tell
        outcome = Wait(
            text="the run's incident was merged into another: the step looks again", wake_s=0
        )
    now = timezone.now()
    news_meanwhile = step.wake_at is not None
    puts_off = news_meanwhile and _recheck_before_asking(outcome, step, now)
    if puts_off:
        outcome = replace(outcome, text=f"{ONCE_MORE}{outcome.text}")
    looks_again = (puts_off and isinstance(outcome, NeedsOperator)) or (
        news_meanwhile and _ends(outcome, run, step)
    )
    if looks_again:
        # It may be what the run is there for: nothing is applied before the step has looked again.
        outcome = Wait(text=outcome.text, wake_s=0)
    if outcome.apply is not None:
        outcome.apply()
    run.context = {**run.context, **outcome.context}
    step.lock_token = ""
    step.lock_expires_at = None
    step.outcome = outcome.text
    step.evidence = {**step.evidence, **outcome.evidence}
    if isinstance(outcome, Done | Skip | End):
        _finish_step(run, step, outcome, now)
    elif isinstance(outcome, GoTo):
        _go_back(run, step, outcome, now)
    elif isinstance(outcome, Wait):
        if looks_again:  # however long it took to come to this
            step.started_at = now
        if _waited_s(step, now) > step.timeout_s and not puts_off:
            _ask(run, step, f"waited {_waited_s(step, now):.0f} s: {outcome.text}")
        else:
            step.state = StepState.WAITING
            step.wake_at = now if news_meanwhile else now + timedelta(seconds=outcome.wake_s)
            run.state = RunState.WAITING
    elif isinstance(outcome, _Failed):
        step.state = StepState.READY
        step.wake_at = now + timedelta(seconds=min(2**step.attempts, 60))
    else:
        _ask(run, step, outcome.text)
    step.save()
    run.save()
    touch(run.cluster_id, ("run", run.pk))


def _following(run: PlaybookRun, step: PlaybookStep) -> QuerySet[PlaybookStep]:
    later = PlaybookStep.objects.filter(run=run, position__gt=step.position)
    return later.exclude(state__in=STEP_FINISHED)


def _ends(outcome: Outcome, run: PlaybookRun, step: PlaybookStep) -> bool:
    """Whether the run is over with it."""
    if isinstance(outcome, End):
        return True
    return isinstance(outcome, Done | Skip) and not _following(run, step).exists()


def _recheck_before_asking(outcome: Outcome, step: PlaybookStep, now: datetime) -> bool:
    """Whether the step was to ask for a person and may look at what it was told meanwhile first.

    Once: news that keep coming must keep nobody from being asked.
    """
    if step.outcome.startswith(ONCE_MORE):
        return False
    if isinstance(outcome, NeedsOperator):
        # It may ask because it cannot tell what it did: to look is to do it again.
        return step.effect != Effect.NON_REPEATABLE
    return isinstance(outcome, Wait) and _waited_s(step, now) > step.timeout_s


def _waited_s(step: PlaybookStep, now: datetime) -> float:
    return (now - (step.started_at or now)).total_seconds()


def _finish_step(run: PlaybookRun, step: PlaybookStep, outcome: Outcome, now: datetime) -> None:
    step.state = StepState.SKIPPED if isinstance(outcome, Skip | _Obsolete) else StepState.DONE
    if isinstance(outcome, Fail):
        step.state = StepState.FAILED
    step.finished_at = None if isinstance(outcome, _Obsolete) else now
    step.wake_at = None
    _tell(run, step, outcome.text)
    if run.incident_id is not None:
        # Other runs of this incident may be waiting for just this: those about the same node, for
        # one crash of a job has as many runs as it lost replicas.
        about = f"node/{run.node_id}" if run.node_id else f"incident/{run.incident_id}"
        doorbell.ring_after_commit(about)
    following = _following(run, step)
    if _ends(outcome, run, step):
        following.update(state=StepState.SKIPPED, wake_at=None)
        run.state = RunState.FAILED if isinstance(outcome, Fail) else RunState.SUCCEEDED
        run.state_reason = outcome.text
        run.finished_at = now
        incidents.leave_nothing(SYSTEM, run)
        if run.incident is not None:
            # The rows must say "finished" before the incident asks whether anything is at work.
            step.save()
            run.save()
            words = f"{run.title}: {outcome.text}"
            incidents.resolve_if_over(SYSTEM, run.incident.pk, words)
        return
    upcoming = following.order_by("position")[:1].get()
    run.state = RunState.RUNNING
    PlaybookStep.objects.filter(pk=upcoming.pk).update(state=StepState.READY, wake_at=now)


def _go_back(run: PlaybookRun, step: PlaybookStep, outcome: GoTo, now: datetime) -> None:
    rounds = int(run.context.get("round", 0)) + 1
    run.context = {**run.context, "round": rounds}
    went_for = list(run.context.get("went_for", []))
    if outcome.node_id and outcome.node_id not in went_for:
        went_for.append(outcome.node_id)
        run.context["went_for"] = went_for
    if rounds - len(went_for) > MAX_ROUNDS:
        _ask(run, step, f"went back {MAX_ROUNDS} times already; now: {outcome.text}")
        return
    target = PlaybookStep.objects.get(run=run, key=outcome.to)
    again = PlaybookStep.objects.filter(
        run=run, position__gte=target.position, position__lte=step.position
    )
    again.exclude(pk=step.pk).update(
        state=StepState.BLOCKED, started_at=None, finished_at=None, attempts=0
    )
    step.state = StepState.BLOCKED
    step.started_at = None
    step.attempts = 0
    step.wake_at = None
    if target.pk == step.pk:
        step.state = StepState.READY
        step.wake_at = now
    else:
        PlaybookStep.objects.filter(pk=target.pk).update(state=StepState.READY, wake_at=now)
    run.state = RunState.RUNNING
    _tell(run, step, f"{outcome.text}; going back to “{target.title}”")


def _ask(run: PlaybookRun, step: PlaybookStep, text: str) -> None:
    step.state = StepState.NEEDS_OPERATOR
    step.outcome = text
    step.wake_at = None
    run.state = RunState.NEEDS_OPERATOR
    run.state_reason = text
    _tell(run, step, f"needs a person: {text}")


def _pass_guards(step: PlaybookStep, decision: guards.Decision, now: datetime) -> bool:
    """Whether the guards said go; where they did not, what they said is written down."""
    run = step.run
    if decision.word != "approve" and step.outcome and run.state_reason == step.outcome:
        run.state_reason = ""  # an approval was waited for, and is not any more
        run.save(update_fields=["state_reason"])
    if decision.word == "go":
        if step.outcome.startswith(NOT_NOW):
            # However long they held it up: that time was not the step's.
            step.started_at = None
            step.outcome = ""
        if decision.context:
            run.context = {**run.context, **decision.context}
            run.save(update_fields=["context"])
        return True
    step.started_at = step.started_at or now
    step.outcome = decision.text
    if decision.plan is not None:
        step.evidence = {"plan": decision.plan.as_dict()}
    if decision.word == "show":
        _finish_dry_run(run, step, now)
    elif decision.word == "approve":
        # However long the person takes: their time is not the step's.
        step.started_at = None
        step.state = StepState.WAITING
        step.wake_at = now + timedelta(seconds=APPROVAL_RETRY_S)
        run.state = RunState.WAITING
        run.state_reason = decision.text
        run.deadline = max(run.deadline, now + timedelta(days=7))
        run.save(update_fields=["state", "state_reason", "deadline"])
    elif decision.word == "ask" or (
        not decision.passes and (now - step.started_at).total_seconds() > step.timeout_s
    ):
        _ask(run, step, f"not done: {decision.text}")
        run.save(update_fields=["state", "state_reason"])
    else:
        if decision.passes:  # as long as the run may take
            step.started_at = None
        step.outcome = f"{NOT_NOW}{decision.text}"
        step.state = StepState.WAITING
        step.wake_at = now + timedelta(seconds=GUARD_RETRY_S)
    step.save()
    touch(run.cluster_id, ("run", run.pk))
    return False


def _finish_dry_run(run: PlaybookRun, step: PlaybookStep, now: datetime) -> None:
    """A dry run ends at its first disruptive step. That ends no incident: nothing was done."""
    step.state = StepState.SKIPPED
    step.finished_at = now
    step.wake_at = None
    PlaybookStep.objects.filter(run=run, position__gt=step.position).update(
        state=StepState.SKIPPED, wake_at=None
    )
    run.state = RunState.SUCCEEDED
    run.state_reason = step.outcome
    run.finished_at = now
    run.save(update_fields=["state", "state_reason", "finished_at"])
    incidents.leave_nothing(SYSTEM, run)
    _tell(run, step, step.outcome)


def _tell(run: PlaybookRun, step: PlaybookStep, text: str) -> None:
    if run.incident is not None:
        key = f"{step.pk}/{timezone.now().timestamp()}"
        incidents.add_timeline_entry(run.incident, key, EntryKind.STEP, f"{step.title}: {text}")


@change()
def _create_steps_of() -> bool:
    run = (
        PlaybookRun.objects.select_for_update(skip_locked=True, of=("self",))
        .select_related("incident")
        .filter(state=RunState.PENDING)
        .order_by("created_at")
        .first()
    )
    if run is None:
        return False
    now = timezone.now()
    playbook = PLAYBOOKS.get(run.playbook)
    if playbook is None:
        run.state = RunState.NEEDS_OPERATOR
        run.state_reason = f"there is no playbook {run.playbook!r} any more"
        run.save()
        return True
    PlaybookStep.objects.bulk_create(
        PlaybookStep(
            run=run,
            position=position,
            key=definition.key,
            title=definition.title,
            prose=definition.prose,
            undo=definition.undo,
            effect=definition.effect,
            disruptive=definition.disruptive,
            timeout_s=definition.timeout_s,
            state=StepState.READY if position == 0 else StepState.BLOCKED,
            wake_at=now if position == 0 else None,
        )
        for position, definition in enumerate(playbook.steps)
    )
    run.version = playbook.version
    run.state = RunState.RUNNING
    run.deadline = now + timedelta(seconds=playbook.deadline_s)
    run.save()
    touch(run.cluster_id, ("run", run.pk))
    return True
