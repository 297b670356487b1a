"""What is asked before every disruptive step: may automation take this node out now?

The answer is given in the transaction that claims the step, under the cluster's row lock, and a
share of the budgets is reserved with it: a limit cannot be exceeded by two workers at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from django.db.models import Count, Q
from django.utils import timezone

from controlplane.fleet.choices import Rung
from controlplane.fleet.models import Cluster, Gpu, Node, RepairRecord
from controlplane.incidents import actions as incidents
from controlplane.incidents import limits
from controlplane.incidents.choices import ApprovalState, Mode
from controlplane.incidents.models import PlaybookRun, Reservation
from controlplane.incidents.plans import ONLY_SHOWN, Plan, code_of, job_of, plan_of_run


@dataclass(frozen=True)
class Decision:
    """What the guards say of a run that wants to act.

    `go`: act. `wait`: ask again soon. `ask`: only a person can act. `approve`: a person must
    approve the plan first. `show`: show the plan and do nothing.
    """

    word: Literal["go", "wait", "ask", "approve", "show"]
    text: str = ""
    plan: Plan | None = None
    #: What the run must remember, where the word is `go`.
    context: Mapping[str, object] | None = None
    #: Where the word is `wait`: whether it ends without anybody's doing before the run's deadline,
    #: and is awaited until then.
    passes: bool = False


GO = Decision("go")


def judge(run: PlaybookRun, does: dict[str, Iterable[str]]) -> Decision:
    """Whether the run may disrupt its node now, its share of the budgets reserved if it may.

    `does` gives the exact words of the run's disruptive steps. Must be called inside the
    transaction that claims the step. What a person ordered passes, unless another run has the node
    in hand: they have read the objections in its dry run.
    """
    if run.node_id is None:
        raise ValueError(f"{run.playbook} has a disruptive step but no node")
    Cluster.objects.select_for_update(no_key=True).get(pk=run.cluster_id)
    node = Node.objects.select_related("rack", "cluster", "lease").get(pk=run.node_id)
    if run.requested_by:
        return _reserve(run, node, "", None) or GO
    mode = limits.mode_of(run.cluster_id, run.playbook)
    if mode == Mode.OFF:
        return Decision("ask", f"the playbook is switched off in {node.cluster.name}")
    if mode == Mode.DRY_RUN:
        plan = plan_of_run(run, does)
        return Decision("show", ONLY_SHOWN, plan)
    context: dict[str, object] = {}
    if mode == Mode.APPROVE:
        approved = _approval_of(run, does)
        if isinstance(approved, Decision):
            return approved
        context = approved
    code = code_of(run)
    job_id = job_of(run, node)
    objections = limits.blockers_of(node, code=code, job_id=job_id, run=run)
    words = "; ".join(objection.text for objection in objections)
    kinds = {objection.kind for objection in objections}
    if "breaker" in kinds:
        # Closing the breaker does not replay what it stopped: by then it is stale.
        return Decision("ask", words)
    if objections:
        return Decision("wait", words, passes=kinds == {"passes"})
    return _reserve(run, node, code, job_id) or Decision("go", context=context)


def judge_nondisruptive(run: PlaybookRun) -> Decision:
    """Whether a run of a playbook that disrupts nothing may do what it is there for.

    It takes no node out, so all that may speak against it is that somebody switched it off.
    """
    if run.requested_by or limits.mode_of(run.cluster_id, run.playbook) != Mode.OFF:
        return GO
    return Decision("ask", f"the playbook is switched off in {run.cluster.name}")


def attempts_at(node: Node, rung: Rung, gpu_uuid: str = "") -> int:
    """How often this rung was tried in 24 hours: on the card that failed, or on the worst card."""
    since = timezone.now() - timedelta(hours=24)
    cards = Gpu.objects.filter(pk=gpu_uuid) if gpu_uuid else Gpu.objects.filter(node=node)
    counts = cards.annotate(
        attempts=Count("repairs", filter=Q(repairs__rung=rung, repairs__at__gte=since))
    )
    of_node = RepairRecord.objects.filter(node=node, gpu=None, rung=rung, at__gte=since).count()
    return max(counts.values_list("attempts", flat=True), default=of_node)


def has_reservation(run: PlaybookRun) -> bool:
    """Whether the run has its node in hand: the guards let it go, and it has not ended since."""
    return Reservation.objects.filter(run=run, node=run.node_id, released_at=None).exists()


def release(run: PlaybookRun) -> None:
    """Give back what the run had reserved."""
    Reservation.objects.filter(run=run, released_at=None).update(released_at=timezone.now())


def _approval_of(run: PlaybookRun, does: dict[str, Iterable[str]]) -> Decision | dict[str, object]:
    """What to remember if a person has approved the plan; else the decision to wait for that.

    An approval holds for the world as it was read. Once the run has begun to act on it, what the
    run itself changed no longer voids it; going back to an earlier step does.
    """
    turn = int(run.context.get("round", 0))
    signed = run.context.get("signed")
    if signed == turn:
        return {}
    plan = plan_of_run(run, does)
    approval = incidents.request_approval(run, plan)
    if approval.state == ApprovalState.APPROVED:
        return {"signed": turn}
    return Decision("approve", "waits until a person approves the plan", plan)


def _reserve(run: PlaybookRun, node: Node, code: str, job_id: str | None) -> Decision | None:
    """Reserve the node for the run; a decision only if another run has it."""
    held = Reservation.objects.filter(node=node, released_at=None)
    if held.exclude(run=run).exists():
        return Decision("wait", f"another run has {node.name} in hand")
    if not held.exists():
        Reservation.objects.create(
            cluster_id=run.cluster_id,
            node=node,
            run=run,
            rack=node.rack,
            job_id=job_id,
            code=code,
        )
    return None
