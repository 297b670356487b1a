"""Pages about incidents, and the few things a person does there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.views.decorators.http import require_POST

from controlplane.accounts.choices import Role
from controlplane.accounts.selectors import actor_of
from controlplane.accounts.views import signed_in
from controlplane.errors import Conflict
from controlplane.fleet.selectors import clusters_for, may
from controlplane.incidents import actions, selectors
from controlplane.incidents.choices import INCIDENT_UNRESOLVED
from controlplane.incidents.models import Incident
from controlplane.live import live_page

PAGE_SIZE = 50


@signed_in
def incidents(request: HttpRequest) -> HttpResponse:
    """All incidents, newest first; `state=unresolved` or `resolved`, `before` an id to page on."""

    def context() -> dict[str, Any]:
        found = selectors.incidents_for(request.user)
        state = request.GET.get("state", "")
        if state == "unresolved":
            found = found.filter(state__in=INCIDENT_UNRESOLVED)
        elif state == "resolved":
            found = found.exclude(state__in=INCIDENT_UNRESOLVED)
        if before := request.GET.get("before"):
            found = found.filter(pk__lt=before)
        rows = list(found[: PAGE_SIZE + 1])
        more = rows[PAGE_SIZE - 1].id if len(rows) > PAGE_SIZE else ""
        return {"incidents": rows[:PAGE_SIZE], "more": more, "state": state}

    return live_page(request, "incidents/list", clusters_for(request.user), context)


@signed_in
def incident(request: HttpRequest, incident_id: str) -> HttpResponse:
    return _page(request, selectors.incident_for(request.user, incident_id))


@signed_in
def export(request: HttpRequest, incident_id: str) -> HttpResponse:
    """The post-mortem as a Markdown file."""
    found = selectors.incident_for(request.user, incident_id)
    response = HttpResponse(found.postmortem, content_type="text/markdown; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{found.id}.md"'
    return response


@require_POST
@signed_in
def acknowledge(request: HttpRequest, incident_id: str) -> HttpResponse:
    return _act(request, incident_id, lambda actor: actions.acknowledge(actor, incident_id))


@require_POST
@signed_in
def note(request: HttpRequest, incident_id: str) -> HttpResponse:
    text = request.POST.get("text", "").strip()
    return _act(request, incident_id, lambda actor: actions.add_note(actor, incident_id, text))


@require_POST
@signed_in
def postmortem(request: HttpRequest, incident_id: str) -> HttpResponse:
    text = request.POST.get("text", "")
    return _act(
        request, incident_id, lambda actor: actions.save_postmortem(actor, incident_id, text)
    )


@require_POST
@signed_in
def retry(request: HttpRequest, incident_id: str, run_id: str) -> HttpResponse:
    reason = request.POST.get("reason", "").strip()
    return _act(
        request, incident_id, lambda actor: actions.retry_run(actor, run_id, reason), run_id
    )


@require_POST
@signed_in
def cancel(request: HttpRequest, incident_id: str, run_id: str) -> HttpResponse:
    reason = request.POST.get("reason", "").strip()
    return _act(
        request, incident_id, lambda actor: actions.cancel_run(actor, run_id, reason), run_id
    )


def _act(
    request: HttpRequest, incident_id: str, deed: Callable[[Any], object], run_id: str = ""
) -> HttpResponse:
    """Do one action as an operator of the incident's cluster, and show the page anew.

    404 to whoever may not see the incident, 403 to whoever may only see it, 409 where the
    action says that the present state does not allow it.
    """
    found = selectors.incident_for(request.user, incident_id)
    if run_id and not found.runs.filter(pk=run_id).exists():
        raise Http404("no such run")
    if not may(request.user, Role.OPERATOR, found.cluster_id):
        raise PermissionDenied("Only operators of this cluster may act on its incidents.")
    try:
        deed(actor_of(request))
    except Conflict as conflict:
        messages.error(request, conflict.detail)
        return _page(request, selectors.incident_for(request.user, incident_id), status=409)
    return HttpResponseRedirect(reverse("incident", args=[incident_id]))


def _page(request: HttpRequest, found: Incident, status: int = 200) -> HttpResponse:
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
            "timeline": selectors.timeline_of(found),
            "may_act": may(request.user, Role.OPERATOR, found.cluster_id),
        }

    return live_page(request, "incidents/incident", [found.cluster], context, status=status)
