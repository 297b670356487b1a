"""The automation page: playbooks and their modes, budgets, breakers, maintenance, recent runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.accounts.access import Access, needs
from controlplane.accounts.choices import Role
from controlplane.accounts.models import Actor
from controlplane.accounts.views import signed_in
from controlplane.dashboard.nodes import hours_of
from controlplane.dashboard.selectors import playbooks as selectors
from controlplane.dashboard.selectors.fleet import cluster_for
from controlplane.errors import Conflict
from controlplane.export import Column, as_file, is_wanted
from controlplane.fleet import actions as fleet
from controlplane.fleet.models import Cluster
from controlplane.fleet.selectors import clusters_for, may
from controlplane.form_actions import act, reason_of, whole
from controlplane.incidents import actions as incidents
from controlplane.incidents import limits
from controlplane.incidents.choices import Mode, Scope
from controlplane.incidents.models import PlaybookRun
from controlplane.incidents.selectors import runs_for
from controlplane.live import live_page
from controlplane.paging import page_of, pages_of, sort_words

RUNS_PER_PAGE = 20
#: Ids sort by the time of their making.
RUN_SORTS = {"-began": "pk"}
RUN_COLUMNS: tuple[Column[PlaybookRun], ...] = (
    Column("id", lambda run: run.pk),
    Column("title", lambda run: run.title),
    Column("playbook", lambda run: run.playbook),
    Column("version", lambda run: run.version),
    Column("state", lambda run: run.state),
    Column("state_reason", lambda run: run.state_reason),
    Column("cluster_id", lambda run: run.cluster_id),
    Column("cluster_name", lambda run: run.cluster.name),
    Column("node_id", lambda run: run.node_id),
    Column("node_name", lambda run: run.node.name if run.node else None),
    Column("job_id", lambda run: run.job_id),
    Column("job_name", lambda run: run.job.name if run.job else None),
    Column("incident_id", lambda run: run.incident_id),
    Column("requested_by", lambda run: run.requested_by or None),
    Column("created_at", lambda run: run.created_at),
    Column("finished_at", lambda run: run.finished_at),
    Column("deadline", lambda run: run.deadline),
)
#: What is bulky, and in no column.
_BULK = ("context", "node__report", "incident__postmortem", "incident__impact")


@signed_in
@needs(Access.SIGNED_IN)
def playbooks(request: HttpRequest) -> HttpResponseBase:
    """How far automation may go in `cluster`, and what it did there lately."""
    clusters = list(clusters_for(request.user))
    wanted = request.GET.get("cluster")
    chosen = next((one for one in clusters if one.id == wanted), None)
    if wanted and chosen is None:
        raise Http404("no such cluster")
    found = chosen or (clusters[0] if clusters else None)
    if is_wanted(request) and found:
        runs = runs_for(request.user).filter(cluster=found).prefetch_related(None).defer(*_BULK)
        pages = pages_of(runs, request.GET, sorts=RUN_SORTS)
        known = {"sort": sort_words(RUN_SORTS)}
        return as_file(request, f"runs-{found.name}", RUN_COLUMNS, pages, known)
    return _page(request, found)


@require_POST
@signed_in
@needs(Access.ADMIN)
def set_mode(request: HttpRequest, cluster_id: str) -> HttpResponse:
    """Say how far `playbook` may go by itself."""
    found = cluster_for(request.user, cluster_id)
    playbook = request.POST.get("playbook", "")

    def operation(actor: Actor) -> None:
        mode = request.POST.get("mode", "")
        if mode not in Mode.values:
            raise Conflict(f"a mode is one of {', '.join(Mode.values)}")
        incidents.set_mode(actor, cluster_id, playbook, Mode(mode), reason_of(request))

    return _act(request, found, operation, role=Role.ADMIN, form=f"mode-{playbook}")


@require_POST
@signed_in
@needs(Access.ADMIN)
def set_limit(request: HttpRequest, cluster_id: str) -> HttpResponse:
    """Say how many nodes automation may have out at once, over a `scope`."""
    found = cluster_for(request.user, cluster_id)
    scope = request.POST.get("scope", "")

    def operation(actor: Actor) -> None:
        nodes = whole(request.POST.get("nodes", ""), 100_000)
        if scope not in Scope.values or nodes is None:
            raise Conflict("a limit is a number of nodes, for one of the scopes shown")
        incidents.set_limit(actor, cluster_id, Scope(scope), nodes, reason_of(request))

    return _act(request, found, operation, role=Role.ADMIN, form=f"limit-{scope}")


@require_POST
@signed_in
@needs(Access.OPERATOR)
def close_breaker(request: HttpRequest, breaker_id: str) -> HttpResponse:
    found = selectors.breaker_for(request.user, breaker_id)
    return _act(
        request,
        found.cluster,
        lambda actor: incidents.close_breaker(actor, breaker_id, reason_of(request)),
    )


@require_POST
@signed_in
@needs(Access.OPERATOR)
def open_maintenance(request: HttpRequest, cluster_id: str) -> HttpResponse:
    """Announce work on a cluster or one `rack` of it, in `delay` hours from now, for `hours`."""
    found = cluster_for(request.user, cluster_id)

    def operation(actor: Actor) -> None:
        starts_at = timezone.now() + timedelta(hours=_delay_of(request))
        fleet.open_maintenance(
            actor,
            cluster_id,
            starts_at=starts_at,
            ends_at=starts_at + timedelta(hours=hours_of(request)),
            reason=reason_of(request),
            rack_id=request.POST.get("rack") or None,
        )

    return _act(request, found, operation, form="announce")


@require_POST
@signed_in
@needs(Access.OPERATOR)
def close_maintenance(request: HttpRequest, window_id: str) -> HttpResponse:
    found = selectors.window_for(request.user, window_id)
    return _act(
        request,
        found.cluster,
        lambda actor: fleet.close_maintenance(actor, window_id, reason_of(request)),
    )


def _delay_of(request: HttpRequest) -> float:
    try:
        delay = float(request.POST.get("delay") or 0)
    except ValueError:
        raise Conflict("say in how many hours it begins, such as 0 or 12") from None
    if not 0 <= delay <= 24 * 365:
        raise Conflict("a maintenance begins within a year from now")
    return delay


def _act(
    request: HttpRequest,
    found: Cluster,
    operation: Callable[[Actor], object],
    *,
    role: Role = Role.OPERATOR,
    form: str = "",
) -> HttpResponse:
    """Do one action in this cluster, and show the page anew.

    Where it was refused, `form` on the page holds what was typed in it.
    """

    def again(status: int) -> HttpResponse:
        found_now = cluster_for(request.user, found.id)
        return _page(request, found_now, status=status, refused={form: request.POST})

    back = f"{reverse('automation-page')}?cluster={found.id}"
    return act(request, found.id, operation, back=back, again=again, role=role)


def _page(
    request: HttpRequest,
    found: Cluster | None,
    status: int = 200,
    refused: Mapping[str, Mapping[str, str]] | None = None,
) -> HttpResponse:
    clusters = list(clusters_for(request.user))
    query = request.GET.copy()
    if found is not None:
        # The address of an order does not say which cluster the page is about, nor does its own
        # when the first one is meant: another could be the first one by then.
        query["cluster"] = found.id

    def context() -> dict[str, Any]:
        base = {
            "live_path": reverse("automation-page"),
            "live_query": query,
            "clusters": clusters,
            "cluster": found,
            "refused": refused or {},
        }
        if found is None:
            return base
        runs = runs_for(request.user).filter(cluster=found).prefetch_related(None)
        out = limits.out_nodes(found.pk)
        windows, windows_total = selectors.windows_in(found)
        return base | {
            "rows": selectors.playbooks_in(found),
            "budgets": selectors.budgets_in(found, out),
            "out": selectors.with_runs(out),
            "out_total": len(out),
            "breakers": limits.open_breakers([found.id]),
            "elsewhere": limits.open_breakers(
                one.id for one in clusters if one.id != found.id
            ).select_related("cluster"),
            "closed": selectors.closed_breakers(found),
            "windows": windows,
            "windows_total": windows_total,
            "racks": found.racks.order_by("name"),
            "runs": page_of(runs, request.GET, sorts=RUN_SORTS, size=RUNS_PER_PAGE),
            "may_act": may(request.user, Role.OPERATOR, found.id),
            "may_change": may(request.user, Role.ADMIN, found.id),
        }

    return live_page(request, "dashboard/playbooks", clusters, context, status=status)
