"""The list of incidents and the on-call page."""

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
from controlplane.acting import act, reason_of
from controlplane.fleet.selectors import clusters_for, may
from controlplane.incidents import actions, selectors
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, Severity
from controlplane.incidents.models import Incident
from controlplane.live import live_page
from controlplane.paging import page_of

#: Ids sort by the time of their making.
SORTS = {"-opened": "pk", "-began": "occurred_at"}


@signed_in
@needs(Access.SIGNED_IN)
def incidents(request: HttpRequest) -> HttpResponse:
    """Incidents by `state` (unresolved, resolved), `severity`, `code`, `cluster`, `node`, `job`."""

    def context() -> dict[str, Any]:
        found = selectors.incidents_for(request.user)
        state = request.GET.get("state", "")
        if state == "unresolved":
            found = found.filter(state__in=INCIDENT_UNRESOLVED)
        elif state == "resolved":
            found = found.exclude(state__in=INCIDENT_UNRESOLVED)
        for name in ("severity", "code", "cluster", "node", "job"):
            if wanted := request.GET.get(name):
                found = found.filter(**{name: wanted})
        return {
            "page": page_of(found, request.GET, sorts=SORTS),
            "state": state,
            "query": request.GET,
            "clusters": clusters_for(request.user),
            "severities": Severity,
        }

    return live_page(request, "incidents/list", clusters_for(request.user), context)


@signed_in
@needs(Access.VIEWER)
def incident(request: HttpRequest, incident_id: str) -> HttpResponse:
    return incident_page(request, selectors.incident_for(request.user, incident_id))


@signed_in
@needs(Access.VIEWER)
def export(request: HttpRequest, incident_id: str) -> HttpResponse:
    """The post-mortem as a Markdown file."""
    found = selectors.incident_for(request.user, incident_id)
    response = HttpResponse(found.postmortem, content_type="text/markdown; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{found.id}.md"'
    return response


@require_POST
@signed_in
@needs(Access.OPERATOR)
def acknowledge(request: HttpRequest, incident_id: str) -> HttpResponse:
    return _act(request, incident_id, lambda actor: actions.acknowledge(actor, incident_id))


@require_POST
@signed_in
@needs(Access.OPERATOR)
def note(request: HttpRequest, incident_id: str) -> HttpResponse:
    text = request.POST.get("text", "").strip()
    return _act(request, incident_id, lambda actor: actions.add_note(actor, incident_id, text))


@require_POST
@signed_in
@needs(Access.OPERATOR)
def resolve(request: HttpRequest, incident_id: str) -> HttpResponse:
    """A person says that it is over; refused while a playbook is at work on it."""
    return _act(
        request,
        incident_id,
        lambda actor: actions.resolve_by_hand(actor, incident_id, reason_of(request)),
    )


@require_POST
@signed_in
@needs(Access.OPERATOR)
def postmortem(request: HttpRequest, incident_id: str) -> HttpResponse:
    text = request.POST.get("text", "")
    return _act(
        request, incident_id, lambda actor: actions.save_postmortem(actor, incident_id, text)
    )


def _act(request: HttpRequest, incident_id: str, deed: Callable[[Actor], object]) -> HttpResponse:
    """Do one action as an operator of the incident's cluster, and show the page anew."""
    found = selectors.incident_for(request.user, incident_id)
    return act(
        request,
        found.cluster_id,
        deed,
        back=reverse("incident", args=[incident_id]),
        again=lambda status: incident_page(
            request, selectors.incident_for(request.user, incident_id), status=status
        ),
    )


def incident_page(request: HttpRequest, found: Incident, status: int = 200) -> HttpResponse:
    """The on-call page; runs and approvals answer with it too, where they belong to an incident."""

    def context() -> dict[str, Any]:
        runs = selectors.runs_of(found)
        return {
            "live_path": reverse("incident", args=[found.id]),
            "incident": found,
            "runs": runs,
            "ask": selectors.ask_of(found, runs),
            "deeds": selectors.deeds_of(runs),
            "moments": selectors.moments_of(found),
            "impact": selectors.impact_of(found),
            "failures": selectors.failures_of(found),
            "timeline": selectors.timeline_of(found),
            "may_act": may(request.user, Role.OPERATOR, found.cluster_id),
        }

    return live_page(request, "incidents/incident", [found.cluster], context, status=status)
