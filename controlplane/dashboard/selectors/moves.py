"""What the page of a job shows of its replicas' moves: those that were ordered, and a dry run."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.accounts.selectors import usernames
from controlplane.errors import Conflict
from controlplane.incidents.models import PlaybookRun
from controlplane.incidents.move_plans import (
    AS_WHOLE,
    PLAYBOOK,
    plan_move,
    plan_of_move,
    targets_of,
)
from controlplane.incidents.plans import Plan
from controlplane.jobs.models import Job
from workers.placement import Candidate

LIST_LIMIT = 8


@dataclass(frozen=True)
class Asked:
    """A move that is being thought about: where it could go, and what it would do."""

    replica: int
    node_id: str
    leaving: str  # of a replica on several nodes the one that it is to leave
    plan: Plan | None = None
    targets: list[Candidate] = field(default_factory=list)
    #: Why it cannot be done as asked.
    refusal: str = ""


@dataclass(frozen=True)
class Ordered:
    """A move that was ordered, and by whom."""

    run: PlaybookRun
    by: str


def asked_of(job: Job, index: int, node_id: str, leaving: str) -> Asked:
    """The dry run of moving a replica, to this node or else to the one that suits it best; of one
    on several nodes off the one that it is `leaving`."""
    try:
        targets = targets_of(job, index, leaving=leaving)
    except Conflict as conflict:
        return Asked(index, node_id, leaving, refusal=conflict.detail)
    known = node_id if node_id in [one.node_id for one in targets] else ""
    try:
        move = plan_move(job, index, known, leaving=leaving)
    except Conflict as conflict:
        return Asked(index, "", leaving, targets=targets, refusal=conflict.detail)
    return Asked(index, move.target.pk, leaving, plan_of_move(move), targets)


def moves_of(job: Job) -> list[Ordered]:
    """The newest moves of a job's replicas, newest first."""
    runs = list(
        job.runs.filter(playbook__in=(PLAYBOOK, AS_WHOLE)).order_by("-created_at")[:LIST_LIMIT]
    )
    names = usernames({run.requested_by for run in runs})
    return [Ordered(run, names[run.requested_by]) for run in runs]
