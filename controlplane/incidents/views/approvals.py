"""Signing a plan, or refusing to."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_POST

from controlplane.accounts.access import Access, needs
from controlplane.accounts.models import Actor
from controlplane.accounts.views import signed_in
from controlplane.form_actions import act, reason_of
from controlplane.incidents import actions, selectors
from controlplane.incidents.views.runs import home_of, home_page


@require_POST
@signed_in
@needs(Access.OPERATOR)
def approve(request: HttpRequest, approval_id: str) -> HttpResponse:
    """Sign the plan that was shown: `digest` names it, so that no other is signed by mistake."""
    digest = request.POST.get("digest", "")
    return _act(
        request,
        approval_id,
        lambda actor: actions.approve(actor, approval_id, digest, reason_of(request)),
    )


@require_POST
@signed_in
@needs(Access.OPERATOR)
def reject(request: HttpRequest, approval_id: str) -> HttpResponse:
    return _act(
        request,
        approval_id,
        lambda actor: actions.reject(actor, approval_id, reason_of(request)),
    )


def _act(
    request: HttpRequest, approval_id: str, operation: Callable[[Actor], object]
) -> HttpResponse:
    found = selectors.approval_for(request.user, approval_id)
    return act(
        request,
        found.cluster_id,
        operation,
        back=home_of(found.run),
        again=lambda status: home_page(request, found.run_id, status),
    )
