"""Writes about how far automation may go: modes, limits, breakers, and approvals of plans."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.conf import settings
from django.utils import timezone

from controlplane import doorbell
from controlplane.accounts.actions import audit
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict
from controlplane.fleet.changes import change, touch
from controlplane.health.models import Failure
from controlplane.incidents.actions.incidents import add_timeline_entry
from controlplane.incidents.actions.requests import call_off
from controlplane.incidents.actions.runs import lock_run, valid_approvals, void_approvals
from controlplane.incidents.choices import (
    RUN_UNFINISHED,
    ApprovalState,
    EntryKind,
    Mode,
    Scope,
    StepState,
)
from controlplane.incidents.models import (
    Approval,
    Breaker,
    BudgetLimit,
    Playbook,
    PlaybookMode,
    PlaybookRun,
    PlaybookStep,
)
from controlplane.incidents.modes import modes_of
from controlplane.incidents.plans import Plan


@change()
def publish_playbooks(playbooks: list[Playbook]) -> None:
    """Write down which playbooks the workers know, for pages and dry runs."""
    names = [playbook.pk for playbook in playbooks]
    Playbook.objects.exclude(pk__in=names).delete()
    Playbook.objects.bulk_create(
        playbooks,
        update_conflicts=True,
        unique_fields=["name"],
        update_fields=["version", "summary", "deadline_s", "steps"],
    )


@change()
def set_mode(actor: Actor, cluster_id: str, playbook: str, mode: Mode, reason: str) -> None:
    """Say how far a playbook may go by itself in one cluster.

    Runs that are under way obey from their next disruptive step on; of a playbook that has none,
    from the next step that acts. Raises Conflict if there is no such playbook, or the mode means
    nothing for it.
    """
    known = Playbook.objects.filter(pk=playbook).first()
    if known is None:
        raise Conflict(f"there is no playbook {playbook!r}")
    modes = modes_of(known)
    if mode not in modes.allowed:
        raise Conflict(modes.why_no_others)
    before = PlaybookMode.objects.filter(cluster_id=cluster_id, playbook=playbook).first()
    PlaybookMode.objects.update_or_create(
        cluster_id=cluster_id, playbook=playbook, defaults={"mode": Mode(mode)}
    )
    audit(
        actor,
        "playbook.set_mode",
        "playbook",
        playbook,
        cluster_id=cluster_id,
        before={"mode": before.mode if before else Mode.AUTOMATIC},
        after={"mode": Mode(mode)},
        reason=reason,
    )
    if mode != Mode.APPROVE:
        waiting = Approval.objects.filter(
            cluster_id=cluster_id, run__playbook=playbook, state=ApprovalState.WAITING
        )
        void_approvals(actor, waiting, f"{playbook} asks for no approval any more: {reason}")
    touch(cluster_id)
    _look_again(PlaybookRun.objects.filter(cluster_id=cluster_id, playbook=playbook))


@change()
def set_limit(actor: Actor, cluster_id: str, scope: Scope, nodes: int, reason: str) -> None:
    """Limit how many nodes automation may have out at once; 0 stops it. Raises Conflict below 0."""
    if nodes < 0:
        raise Conflict("a limit is a number of nodes, 0 or more")
    before = BudgetLimit.objects.filter(cluster_id=cluster_id, scope=scope).first()
    BudgetLimit.objects.update_or_create(
        cluster_id=cluster_id, scope=Scope(scope), defaults={"nodes": nodes}
    )
    audit(
        actor,
        "budget.set_limit",
        "budget",
        f"{cluster_id}/{Scope(scope)}",
        cluster_id=cluster_id,
        before={"nodes": before.nodes if before else None},
        after={"nodes": nodes},
        reason=reason,
    )
    touch(cluster_id)
    doorbell.ring_after_commit()


# --- breakers -------------------------------------------------------------------------------------


@change()
def open_breaker_on_burst(cluster_id: str, code: str) -> Breaker | None:
    """Open the breaker of a code that BREAKER_NODES nodes showed within BREAKER_WINDOW_S.

    Many nodes with one fault at once are more often a bad driver, a bad job or a bad rule than
    many bad nodes; then taking nodes out makes it worse. Returns the breaker if it is open.
    """
    there = Breaker.objects.filter(cluster_id=cluster_id, code=code, closed_at=None).first()
    if there is not None:
        return there
    window = timedelta(seconds=settings.BREAKER_WINDOW_S)
    closed = Breaker.objects.filter(cluster_id=cluster_id, code=code).order_by("-closed_at").first()
    since = timezone.now() - window
    if closed is not None and closed.closed_at is not None:
        since = max(since, closed.closed_at)  # what came before it was closed has been judged
    nodes = (
        Failure.objects.filter(node__cluster_id=cluster_id, code=code, created_at__gte=since)
        .values("node")
        .distinct()
        .count()
    )
    if nodes < settings.BREAKER_NODES:
        return None
    reason = f"{code} on {nodes} nodes within {settings.BREAKER_WINDOW_S:g} s"
    breaker = Breaker(cluster_id=cluster_id, code=code, reason=reason)
    # The unique constraint is the turnstile: whoever comes second finds the first's.
    Breaker.objects.bulk_create([breaker], ignore_conflicts=True)
    found = Breaker.objects.filter(cluster_id=cluster_id, code=code, closed_at=None).first()
    if found == breaker:
        audit(
            SYSTEM,
            "breaker.open",
            "breaker",
            breaker.pk,
            cluster_id=cluster_id,
            after={"code": code},
            reason=reason,
        )
        touch(cluster_id)
    return found


@change()
def close_breaker(actor: Actor, breaker_id: str, reason: str) -> None:
    """Let automation act on this code again. What it stopped stays stopped until a person goes on.

    Raises Conflict if it is closed already.
    """
    breaker = Breaker.objects.select_for_update(no_key=True, of=("self",)).get(pk=breaker_id)
    if breaker.closed_at is not None:
        raise Conflict("this breaker is closed already")
    now = timezone.now()
    Breaker.objects.filter(pk=breaker_id).update(closed_at=now, closed_by=actor.id)
    audit(
        actor,
        "breaker.close",
        "breaker",
        breaker_id,
        cluster_id=breaker.cluster_id,
        before={"reason": breaker.reason},
        after={"closed_at": now.isoformat()},
        reason=reason,
    )
    touch(breaker.cluster_id)


# --- approvals ------------------------------------------------------------------------------------


@change()
def request_approval(run: PlaybookRun, plan: Plan) -> Approval:
    """The approval that holds or waits for this very plan; others of the run become void."""
    valid = valid_approvals(run)
    there = valid.filter(digest=plan.digest).first()
    if there is not None:
        return there
    void_approvals(SYSTEM, valid, "the world changed, and it must be approved anew")
    approval = Approval.objects.create(
        cluster_id=run.cluster_id, run=run, plan=plan.as_dict(), digest=plan.digest
    )
    audit(
        SYSTEM,
        "approval.request",
        "approval",
        approval.pk,
        cluster_id=run.cluster_id,
        after={"run": run.pk, "digest": plan.digest},
    )
    _tell(run, approval.pk, "a person is asked to approve the plan")
    touch(run.cluster_id)
    return approval


@change()
def approve(actor: Actor, approval_id: str, digest: str, reason: str) -> None:
    """Sign a plan. `digest` names the plan that was read; raises Conflict if it is another now."""
    approval = _waiting(approval_id)
    if approval.digest != digest:
        raise Conflict("the plan has changed since you read it; read it again")
    _decide(actor, approval, ApprovalState.APPROVED, reason)
    _look_again(PlaybookRun.objects.filter(pk=approval.run_id))


@change()
def reject(actor: Actor, approval_id: str, reason: str) -> None:
    """Refuse a plan: its run is cancelled, what it would have done is a person's to do."""
    approval = _waiting(approval_id)
    _decide(actor, approval, ApprovalState.REJECTED, reason)
    call_off(actor, approval.run_id, f"its plan was rejected: {reason}")


def _waiting(approval_id: str) -> Approval:
    lock_run(Approval.objects.values_list("run_id", flat=True).get(pk=approval_id))
    approval = (
        Approval.objects.select_for_update(no_key=True, of=("self",))
        .select_related("run__incident")
        .get(pk=approval_id)
    )
    if approval.state != ApprovalState.WAITING or approval.run.state not in RUN_UNFINISHED:
        state = approval.get_state_display().lower()
        of_run = approval.run.get_state_display().lower()
        raise Conflict(f"this plan is {state} (its run: {of_run}); nobody waits for it")
    return approval


def _decide(actor: Actor, approval: Approval, to: ApprovalState, reason: str) -> None:
    Approval.objects.filter(pk=approval.pk).update(
        state=to, decided_at=timezone.now(), decided_by=actor.id, reason=reason
    )
    audit(
        actor,
        f"approval.{'approve' if to == ApprovalState.APPROVED else 'reject'}",
        "approval",
        approval.pk,
        cluster_id=approval.cluster_id,
        before={"state": ApprovalState.WAITING},
        after={"state": to, "digest": approval.digest},
        reason=reason,
    )
    _tell(approval.run, f"{approval.pk}/{to}", f"the plan was {to.label.lower()}: {reason}", actor)
    touch(approval.cluster_id)


def _tell(run: PlaybookRun, key: str, text: str, actor: Actor = SYSTEM) -> None:
    if run.incident is not None:
        data: dict[str, Any] = {} if actor is SYSTEM else {"by": actor.id}
        add_timeline_entry(
            run.incident,
            f"{run.pk}/{key}/{timezone.now().timestamp()}",
            EntryKind.STEP,
            f"{run.title}: {text}",
            data=data,
        )


def _look_again(runs: Any) -> None:
    """Let waiting steps of these runs look again at once."""
    PlaybookStep.objects.filter(run__in=runs, state=StepState.WAITING).update(
        wake_at=timezone.now()
    )
    doorbell.ring_after_commit()
