"""Pages of spares and repairs: pools, nodes under repair, the record of cards, RMA cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from django.views.decorators.http import require_POST

from controlplane.accounts.access import Access, needs
from controlplane.accounts.choices import Role
from controlplane.accounts.models import Actor
from controlplane.accounts.views import signed_in
from controlplane.dashboard.selectors import repairs as selectors
from controlplane.export import Column, as_file, is_wanted, refusal
from controlplane.fleet.choices import Rung
from controlplane.fleet.models import Node, RepairRecord
from controlplane.fleet.selectors import clusters_for, may
from controlplane.form_actions import act, reason_of
from controlplane.incidents import actions
from controlplane.incidents.choices import CaseState
from controlplane.incidents.models import RmaCase
from controlplane.live import live_page
from controlplane.paging import page_of, pages_of

OUT_SORTS = {"since": "state_since"}
CASE_SORTS = {"-opened": "opened_at"}
#: The node, with what `selectors.under_repair` tells of it.
OUT_COLUMNS: tuple[Column[Node], ...] = (
    Column("id", lambda node: node.pk),
    Column("name", lambda node: node.name),
    Column("cluster_id", lambda node: node.cluster_id),
    Column("cluster_name", lambda node: node.cluster.name),
    Column("state", lambda node: node.state),
    Column("state_since", lambda node: node.state_since),
    Column("state_deadline", lambda node: node.state_deadline),
    Column("state_reason", lambda node: node.state_reason),
    Column("hold_reason", lambda node: node.hold_reason),
    Column("rung", lambda node: node.rung),  # type: ignore[attr-defined]
    Column("last_rung", lambda node: node.last_rung),  # type: ignore[attr-defined]
    Column("last_repair_at", lambda node: node.last_repair_at),  # type: ignore[attr-defined]
)
CASE_COLUMNS: tuple[Column[RmaCase], ...] = (
    Column("id", lambda case: case.pk),
    Column("state", lambda case: case.state),
    Column("gpu_uuid", lambda case: case.gpu_id),
    Column("gpu_serial", lambda case: case.gpu.serial),
    Column("gpu_model", lambda case: case.gpu.model),
    Column("node_id", lambda case: case.node_id),
    Column("node_name", lambda case: case.node.name),
    Column("cluster_id", lambda case: case.cluster_id),
    Column("cluster_name", lambda case: case.cluster.name),
    Column("incident_id", lambda case: case.incident_id),
    Column("reason", lambda case: case.reason),
    Column("vendor_reference", lambda case: case.vendor_reference),
    Column("opened_at", lambda case: case.opened_at),
    Column("closed_at", lambda case: case.closed_at),
)
REPAIR_COLUMNS: tuple[Column[RepairRecord], ...] = (
    Column("id", lambda repair: repair.pk),
    Column("at", lambda repair: repair.at),
    Column("rung", lambda repair: repair.rung),
    Column("gpu_uuid", lambda repair: repair.gpu_id),
    Column("gpu_serial", lambda repair: repair.gpu.serial if repair.gpu else None),
    Column("gpu_model", lambda repair: repair.gpu.model if repair.gpu else None),
    Column("node_id", lambda repair: repair.node_id),
    Column("node_name", lambda repair: repair.node.name),
    Column("cluster_id", lambda repair: repair.node.cluster_id),
    Column("cluster_name", lambda repair: repair.node.cluster.name),
    Column("step_id", lambda repair: repair.step_id),
)


@signed_in
@needs(Access.SIGNED_IN)
def repairs(request: HttpRequest) -> HttpResponseBase:
    """Spares, nodes under repair, repaired cards; `cases` chooses which RMA cases are listed."""
    if is_wanted(request):
        return _file(request)
    clusters = list(clusters_for(request.user))

    def context() -> dict[str, Any]:
        state = request.GET.get("cases", "")
        # Two lists on one page: each has a cursor of its own.
        nodes_query = {"cursor": request.GET.get("nodes_cursor", "")}
        cases_query = {"cursor": request.GET.get("cases_cursor", "")}
        return {
            "pools": selectors.pools_of(clusters),
            "racks": selectors.pools_by_rack(clusters),
            "reservations": selectors.reservations_in(clusters),
            "out": page_of(selectors.under_repair(request.user), nodes_query, sorts=OUT_SORTS),
            "rungs": dict(Rung.choices),
            "records": selectors.records_in(clusters),
            "cases": page_of(
                selectors.cases_by(request.user, state), cases_query, sorts=CASE_SORTS
            ),
            "cases_state": state,
            "case_states": [("", "Not closed"), *CaseState.choices, ("all", "All")],
        }

    return live_page(request, "dashboard/repairs", clusters, context)


@signed_in
@needs(Access.VIEWER)
def case(request: HttpRequest, case_id: str) -> HttpResponse:
    """One RMA case with its evidence."""
    return _page(request, selectors.case_for(request.user, case_id))


@signed_in
@needs(Access.VIEWER)
def bundle(request: HttpRequest, case_id: str) -> HttpResponse:
    """The evidence as a file to send along with the card."""
    found = selectors.case_for(request.user, case_id)
    response = JsonResponse(found.bundle, json_dumps_params={"indent": 2, "ensure_ascii": False})
    name = f"rma-{found.gpu.serial}-{found.id}.json"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


@require_POST
@signed_in
@needs(Access.OPERATOR)
def send(request: HttpRequest, case_id: str) -> HttpResponse:
    """Note that the vendor has it, under `vendor_reference`."""
    reference = request.POST.get("vendor_reference", "")[:100]
    return _act(
        request,
        case_id,
        lambda actor: actions.send_case(actor, case_id, reference, reason_of(request)),
    )


@require_POST
@signed_in
@needs(Access.OPERATOR)
def close(request: HttpRequest, case_id: str) -> HttpResponse:
    return _act(
        request, case_id, lambda actor: actions.close_case(actor, case_id, reason_of(request))
    )


def _act(request: HttpRequest, case_id: str, operation: Callable[[Actor], object]) -> HttpResponse:
    found = selectors.case_for(request.user, case_id)
    return act(
        request,
        found.cluster_id,
        operation,
        back=reverse("rma-case", args=[case_id]),
        again=lambda status: _page(
            request, selectors.case_for(request.user, case_id), status=status
        ),
    )


def _page(request: HttpRequest, found: RmaCase, status: int = 200) -> HttpResponse:
    def context() -> dict[str, Any]:
        return {
            "live_path": reverse("rma-case", args=[found.id]),
            "case": found,
            "typed": request.POST,
            "may_act": may(request.user, Role.OPERATOR, found.cluster_id),
        }

    return live_page(request, "dashboard/case", [found.cluster], context, status=status)


def _file(request: HttpRequest) -> HttpResponseBase:
    """One of the page's lists, chosen by `list`: nodes, cases, or every repair by itself."""
    wanted, user = request.GET.get("list", ""), request.user
    if wanted == "nodes":
        out = pages_of(selectors.under_repair(user), {}, sorts=OUT_SORTS)
        return as_file(request, "repairs-nodes", OUT_COLUMNS, out)
    if wanted == "cases":
        found = selectors.cases_by(user, request.GET.get("cases", ""))
        whole = pages_of(found, {}, sorts=CASE_SORTS)
        known = {"cases": (*CaseState.values, "all")}
        return as_file(request, "rma-cases", CASE_COLUMNS, whole, known)
    if wanted == "repairs":
        done = pages_of(selectors.repairs_of(user), {}, sorts={"-at": "at"})
        return as_file(request, "repairs", REPAIR_COLUMNS, done)
    return refusal("list", wanted, ("nodes", "cases", "repairs"))
