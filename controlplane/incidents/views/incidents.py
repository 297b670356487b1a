"""The list of incidents and the on-call page."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.accounts.access import Access, needs
from controlplane.accounts.choices import Role
from controlplane.accounts.models import Actor
from controlplane.accounts.views import signed_in
from controlplane.export import Column, as_file, is_wanted
from controlplane.fleet.selectors import clusters_for, may
from controlplane.form_actions import act, reason_of
from controlplane.incidents import actions, selectors
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, Severity
from controlplane.incidents.models import Incident
from controlplane.live import live_page
from controlplane.paging import page_of, pages_of, sort_words

#: Ids sort by the time of their making.
SORTS = {"-opened": "pk", "-began": "occurred_at"}
COLUMNS: tuple[Column[Incident], ...] = (
    Column("id", lambda incident: incident.pk),
    Column("title", lambda incident: incident.title),
    Column("severity", lambda incident: incident.severity),
    Column("state", lambda incident: incident.state),
    Column("code", lambda incident: incident.code),
    Column("cause", lambda incident: incident.cause),
    Column("cluster_id", lambda incident: incident.cluster_id),
    Column("cluster_name", lambda incident: incident.cluster.name),
    Column("node_id", lambda incident: incident.node_id),
    Column("node_name", lambda incident: incident.node.name if incident.node else None),
    Column("job_id", lambda incident: incident.job_id),
    Column("job_name", lambda incident: incident.job.name if incident.job else None),
    Column("replica", lambda incident: incident.replica),
    Column("owner_name", lambda incident: incident.owner.username if incident.owner else None),
    Column("occurred_at", lambda incident: incident.occurred_at),
    Column("opened_at", lambda incident: incident.opened_at),
    Column("mitigated_at", lambda incident: incident.mitigated_at),
    Column("restored_at", lambda incident: incident.restored_at),
    Column("resolved_at", lambda incident: incident.resolved_at),
    Column("lasted_s", lambda incident: _lasted_s(incident)),
    Column("gpu_seconds_lost", lambda incident: incident.gpu_seconds_lost),
)
#: What a file may be asked for, where only some words have a meaning.
WORDS = {
    "state": ("unresolved", "resolved"),
    "severity": Severity.values,
    "window": selectors.WINDOWS,
    "sort": sort_words(SORTS),
}
#: What is bulky, and in no column.
_BULK = ("postmortem", "impact", "node__report", "job__options")


@signed_in
@needs(Access.SIGNED_IN)
def incidents(request: HttpRequest) -> HttpResponseBase:
    """Incidents by `state` (unresolved, resolved), `severity`, `code`, `cluster`, `node`, `job`,
    and by `window`: begun in the time until now."""
    found = _found(request)
    if is_wanted(request):
        whole = pages_of(found.defer(*_BULK), request.GET, sorts=SORTS)
        return as_file(request, "incidents", COLUMNS, whole, WORDS)

    def context() -> dict[str, Any]:
        return {
            "page": page_of(found, request.GET, sorts=SORTS),
            "state": request.GET.get("state", ""),
            "query": request.GET,
            "clusters": clusters_for(request.user),
            "severities": Severity,
            "windows": {word: label for word, (label, _) in selectors.WINDOWS.items()},
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
def bring_back(request: HttpRequest, incident_id: str) -> HttpResponse:
    """What was lost and nobody brings back is wanted back after all."""
    return _act(
        request,
        incident_id,
        lambda actor: actions.bring_back_missed(actor, incident_id, reason_of(request)),
    )


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
def close(request: HttpRequest, incident_id: str) -> HttpResponse:
    """A person is done with it; refused while it is not resolved."""
    return _act(request, incident_id, lambda actor: actions.close_incident(actor, incident_id))


@require_POST
@signed_in
@needs(Access.OPERATOR)
def postmortem(request: HttpRequest, incident_id: str) -> HttpResponse:
    """Save the text, if the one that it was made from (`edited`) is still there."""
    text = request.POST.get("text", "")
    edited = request.POST.get("edited", "")
    return _act(
        request,
        incident_id,
        lambda actor: actions.save_postmortem(actor, incident_id, text, edited=edited),
        unsaved=text,
    )


def _act(
    request: HttpRequest,
    incident_id: str,
    operation: Callable[[Actor], object],
    *,
    unsaved: str | None = None,
) -> HttpResponse:
    """Do one action as an operator of the incident's cluster, and show the page anew.

    A post-mortem that was refused is in the editor there, `unsaved`.
    """
    found = selectors.incident_for(request.user, incident_id)
    return act(
        request,
        found.cluster_id,
        operation,
        back=reverse("incident", args=[incident_id]),
        again=lambda status: incident_page(
            request,
            selectors.incident_for(request.user, incident_id),
            status=status,
            unsaved=unsaved,
        ),
    )


def incident_page(
    request: HttpRequest, found: Incident, status: int = 200, unsaved: str | None = None
) -> HttpResponse:
    """The on-call page; runs and approvals answer with it too, where they belong to an incident."""

    def context() -> dict[str, Any]:
        runs = selectors.runs_of(found)
        timeline, timeline_total = selectors.timeline_of(found)
        return {
            "live_path": reverse("incident", args=[found.id]),
            "incident": found,
            "unsaved": unsaved,
            "typed": request.POST,
            "runs": runs,
            "ask": selectors.ask_of(found, runs),
            "away": selectors.restartable_losses(runs) if found.unresolved else [],
            "deeds": selectors.finished_steps_of(runs),
            "moments": selectors.moments_of(found),
            "impact": selectors.impact_of(found),
            "failures": selectors.failures_of(found),
            "timeline": timeline,
            "timeline_total": timeline_total,
            "may_act": may(request.user, Role.OPERATOR, found.cluster_id),
        }

    return live_page(request, "incidents/incident", [found.cluster], context, status=status)


def _found(request: HttpRequest) -> QuerySet[Incident]:
    found = selectors.incidents_for(request.user)
    state = request.GET.get("state", "")
    if state == "unresolved":
        found = found.filter(state__in=INCIDENT_UNRESOLVED)
    elif state == "resolved":
        found = found.exclude(state__in=INCIDENT_UNRESOLVED)
    for name in ("severity", "code", "cluster", "node", "job"):
        if wanted := request.GET.get(name):
            found = found.filter(**{name: wanted})
    if window := selectors.WINDOWS.get(request.GET.get("window", "")):
        found = found.filter(occurred_at__gte=timezone.now() - timedelta(seconds=window[1]))
    return found


def _lasted_s(incident: Incident) -> float | None:
    """Until it was resolved, in seconds; None while it lasts."""
    if incident.resolved_at is None:
        return None
    return (incident.resolved_at - incident.occurred_at).total_seconds()
