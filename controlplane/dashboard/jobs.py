"""The page of one job, and what an operator may order there: moves of its replicas, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse, QueryDict
from django.urls import reverse
from django.views.decorators.http import require_POST

from controlplane.accounts.access import Access, needs
from controlplane.accounts.choices import Role
from controlplane.accounts.models import Actor
from controlplane.accounts.views import signed_in
from controlplane.dashboard.selectors import moves
from controlplane.errors import Conflict
from controlplane.fleet.selectors import may, nodes_for
from controlplane.form_actions import act, reason_of, whole
from controlplane.incidents import actions as incidents
from controlplane.jobs import actions as jobs
from controlplane.jobs import durability, selectors
from controlplane.jobs.models import Job
from controlplane.jobs.views import WINDOWS, window_word
from controlplane.live import live_page

MAX_REPLICA = 4096


@signed_in
@needs(Access.VIEWER)
def job(request: HttpRequest, job_id: str) -> HttpResponse:
    """One job; `move` shows the dry run of moving this replica, to `node` if that is named, off
    `leaving` where it is on several."""
    return _page(request, selectors.job_for(request.user, job_id))


@require_POST
@signed_in
@needs(Access.OPERATOR)
def move(request: HttpRequest, job_id: str) -> HttpResponse:
    """Have `replica` move to `node`, or to the one that suits it best, for `reason`; off `leaving`
    where it is on several."""
    found = selectors.job_for(request.user, job_id)

    def operation(actor: Actor) -> None:
        incidents.move_replica(
            actor,
            found.pk,
            _replica(request.POST.get("replica", "")),
            node_id=_node(request, found, request.POST.get("node", "")),
            leaving=_node(request, found, request.POST.get("leaving", "")),
            reason=reason_of(request),
        )

    return _act(request, found, operation, "#job-shape")


@require_POST
@signed_in
@needs(Access.OPERATOR)
def start(request: HttpRequest, job_id: str) -> HttpResponse:
    """Have the agents of free nodes start a job that was registered, for `reason`."""
    found = selectors.job_for(request.user, job_id)

    def operation(actor: Actor) -> None:
        incidents.start_registered(actor, found.pk, reason_of(request))

    return _act(request, found, operation, "#job-shape")


@require_POST
@signed_in
@needs(Access.OPERATOR)
def checkpoint(request: HttpRequest, job_id: str) -> HttpResponse:
    """Have the job save a checkpoint on each of its tiers, at its next edge."""
    found = selectors.job_for(request.user, job_id)

    def operation(actor: Actor) -> None:
        selectors.demand_ranks(found)
        jobs.direct(actor, found.pk, "checkpoint", reason="asked for on the job's page")

    return _act(request, found, operation, "#checkpoints-h")


def _act(
    request: HttpRequest, found: Job, operation: Callable[[Actor], None], part: str
) -> HttpResponse:
    """Do what an operator orders on a job's page, and lead back to the part that shows it."""
    return act(
        request,
        found.cluster_id,
        operation,
        back=reverse("job", args=[found.pk]) + part,
        again=lambda status: _page(
            request, selectors.job_for(request.user, found.pk), status=status
        ),
    )


def _replica(text: str) -> int:
    """The number of a replica. Raises Conflict if it is none."""
    index = whole(text, MAX_REPLICA)
    if index is None:
        raise Conflict("say which replica is to move, by its number")
    return index


def _node(request: HttpRequest, found: Job, node_id: str) -> str:
    """The id of a node that the caller may see, or "". Raises Conflict if there is no such node."""
    nodes = nodes_for(request.user).filter(cluster=found.cluster_id)
    if node_id and not nodes.filter(pk=node_id).exists():
        raise Conflict(f"the cluster of {found.name} has no such node")
    return node_id


def _query(request: HttpRequest) -> QueryDict:
    """What the address asks for; below a move that was refused it asks for that one."""
    query = request.GET.copy()
    for name, field in {"move": "replica", "node": "node", "leaving": "leaving"}.items():
        if typed := request.POST.get(field):
            query[name] = typed
    return query


def _page(request: HttpRequest, found: Job, status: int = 200) -> HttpResponse:
    def context() -> dict[str, Any]:
        may_act = may(request.user, Role.OPERATOR, found.cluster_id)
        query = _query(request)
        asked = whole(query.get("move", ""), MAX_REPLICA) if may_act else None
        node, leaving = query.get("node", ""), query.get("leaving", "")
        checkpoints = durability.last_checkpoints(found)
        troubles = durability.troubles_of(found)
        return {
            "live_path": reverse("job", args=[found.pk]),
            "live_query": query,
            "typed": request.POST,
            "job": found,
            "commit_late_after_s": selectors.commit_late_after_s(found),
            "slots": selectors.slots(found),
            "warm_spares": list(found.held_warm_spares),
            "marks": selectors.marks(found),
            "checkpoint": next(iter(checkpoints), None),
            "tiers": durability.tiers_of(found, checkpoints),
            "checkpoints": checkpoints[:8],
            "troubles": durability.group_reports(found, troubles, checkpoints)[:8],
            "ledger": selectors.sample_ledger(found),
            "incidents": found.incidents.order_by("-id")[:8],
            "windows": {word: label for word, (label, _) in WINDOWS.items()},
            "window": window_word(request),
            "may_act": may_act,
            "may_start": may_act and incidents.may_be_started(found),
            "moves": moves.moves_of(found),
            "asked": moves.asked_of(found, asked, node, leaving) if asked is not None else None,
        }

    return live_page(request, "jobs/job", [found.cluster], context, status=status)
