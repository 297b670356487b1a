"""The answer of the command palette: what fits the words typed so far, as options of its list."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from controlplane.accounts.access import Access, needs
from controlplane.accounts.views import signed_in
from controlplane.dashboard.selectors.search import search as search_for


@require_GET
@signed_in
@needs(Access.SIGNED_IN)
def search(request: HttpRequest) -> HttpResponse:
    """A few of each kind of thing that `q` may mean."""
    found = search_for(request.user, request.GET.get("q", ""))
    response = render(request, "dashboard/_palette_found.html", {"found": found})
    response["Cache-Control"] = "no-store"
    return response
