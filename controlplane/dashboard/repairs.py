"""Pages of spares and repairs: pools, nodes under repair, the record of cards, RMA cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import reverse
from django.views.decorators.http import require_POST

from controlplane.accounts.access import Access, needs
from controlplane.accounts.choices import Role
from controlplane.accounts.models import Actor
from controlplane.accounts.views import signed_in
from controlplane.acting import act, reason_of
from controlplane.dashboard.selectors import repairs as selectors
from controlplane.fleet.choices import Rung
from controlplane.fleet.selectors import clusters_for, may
from controlplane.incidents import actions
from controlplane.incidents.choices import CaseState
from controlplane.incidents.models import RmaCase
from controlplane.live import live_page
from controlplane.paging import page_of


@signed_in
@needs(Access.SIGNED_IN)
def repairs(request: HttpRequest) -> HttpResponse:
    """Spares, nodes under repair, repaired cards; `cases` chooses which RMA cases are listed."""
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
            "out": page_of(
                selectors.under_repair(request.user), nodes_query, sorts={"since": "state_since"}
            ),
            "rungs": dict(Rung.choices),
            "records": selectors.records_in(clusters),
            "cases": page_of(
                selectors.cases_by(request.user, state), cases_query, sorts={"-opened": "opened_at"}
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


def _act(request: HttpRequest, case_id: str, deed: Callable[[Actor], object]) -> HttpResponse:
    found = selectors.case_for(request.user, case_id)
    return act(
        request,
        found.cluster_id,
        deed,
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
            "may_act": may(request.user, Role.OPERATOR, found.cluster_id),
        }

    return live_page(request, "dashboard/case", [found.cluster], context, status=status)
