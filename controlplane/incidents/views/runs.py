"""The page of one playbook run, and what an operator does to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_POST

from controlplane.accounts.access import Access, needs
from controlplane.accounts.choices import Role
from controlplane.accounts.models import Actor
from controlplane.accounts.views import signed_in
from controlplane.fleet.selectors import may
from controlplane.form_actions import act, reason_of
from controlplane.incidents import actions, selectors
from controlplane.incidents.models import PlaybookRun
from controlplane.incidents.views.incidents import incident_page
from controlplane.live import live_page


@signed_in
@needs(Access.VIEWER)
def run(request: HttpRequest, run_id: str) -> HttpResponse:
    return run_page(request, selectors.run_for(request.user, run_id))


@require_POST
@signed_in
@needs(Access.OPERATOR)
def retry(request: HttpRequest, run_id: str) -> HttpResponse:
    """Let a run that asked for a person try its step again."""
    return _act(request, run_id, lambda actor: actions.retry_run(actor, run_id, reason_of(request)))


@require_POST
@signed_in
@needs(Access.OPERATOR)
def pause(request: HttpRequest, run_id: str) -> HttpResponse:
    return _act(request, run_id, lambda actor: actions.pause_run(actor, run_id, reason_of(request)))


@require_POST
@signed_in
@needs(Access.OPERATOR)
def resume(request: HttpRequest, run_id: str) -> HttpResponse:
    return _act(
        request, run_id, lambda actor: actions.resume_run(actor, run_id, reason_of(request))
    )


@require_POST
@signed_in
@needs(Access.OPERATOR)
def cancel(request: HttpRequest, run_id: str) -> HttpResponse:
    return _act(request, run_id, lambda actor: actions.call_off(actor, run_id, reason_of(request)))


def _act(request: HttpRequest, run_id: str, operation: Callable[[Actor], object]) -> HttpResponse:
    found = selectors.run_for(request.user, run_id)
    return act(
        request,
        found.cluster_id,
        operation,
        back=home_of(found),
        again=lambda status: home_page(request, run_id, status),
    )


def home_of(found: PlaybookRun) -> str:
    """Where a run is looked at: on its incident's page, if it has one."""
    if found.incident_id is not None:
        return reverse("incident", args=[found.incident_id])
    return reverse("run", args=[found.id])


def home_page(request: HttpRequest, run_id: str, status: int) -> HttpResponse:
    found = selectors.run_for(request.user, run_id)
    if found.incident_id is not None:
        incident = selectors.incident_for(request.user, found.incident_id)
        return incident_page(request, incident, status=status)
    return run_page(request, found, status=status)


def run_page(request: HttpRequest, found: PlaybookRun, status: int = 200) -> HttpResponse:
    def context() -> dict[str, Any]:
        return {
            "live_path": reverse("run", args=[found.id]),
            "run": found,
            "typed": request.POST,
            "runs": [found],
            "requested_by": selectors.requester_of(found),
            "may_act": may(request.user, Role.OPERATOR, found.cluster_id),
        }

    return live_page(request, "incidents/run", [found.cluster], context, status=status)
