"""The page of the audit trail: who wrote what, why, and whether the chain holds it."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse

from controlplane.accounts import chain
from controlplane.accounts.access import Access, needs
from controlplane.accounts.choices import Role
from controlplane.accounts.views import signed_in
from controlplane.dashboard.selectors import trail
from controlplane.fleet.selectors import audit_for, clusters_for, may_everywhere
from controlplane.live import live_page
from controlplane.paging import page_of


@signed_in
@needs(Access.SIGNED_IN)
def audit(request: HttpRequest) -> HttpResponse:
    """What was written in one's clusters, newest first, narrowed by the form's fields."""

    def context() -> dict[str, Any]:
        asked = trail.Asked.of(request.GET)
        found = trail.narrowed(audit_for(request.user), asked)
        page = page_of(found, request.GET, sorts={"-id": "id"})
        whole_trail = may_everywhere(request.user, Role.ADMIN)
        return {
            "asked": asked,
            "page": page,
            "rows": trail.rows_of(page.rows),
            "clusters": clusters_for(request.user),
            "whole_trail": whole_trail,
            "head": chain.head() if whole_trail else None,
            "unchained": chain.unchained() if whole_trail else 0,
            "verification": trail.last_verification() if whole_trail else None,
        }

    return live_page(request, "audit/list", clusters_for(request.user), context)
