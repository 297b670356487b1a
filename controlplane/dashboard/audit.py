"""The page of the audit trail: who wrote what, why, and whether the chain holds it."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from controlplane.accounts import chain
from controlplane.accounts.access import Access, needs
from controlplane.accounts.choices import Role
from controlplane.accounts.models import AuditEvent
from controlplane.accounts.views import signed_in
from controlplane.dashboard.selectors import audit_trail, people
from controlplane.export import Column, as_file, is_wanted, refusal
from controlplane.fleet.selectors import audit_for, clusters_for, may_everywhere
from controlplane.live import live_page
from controlplane.paging import page_of, pages_of, sort_words

SORTS = {"-id": "id"}
#: A write and the name of who did it.
Written = tuple[AuditEvent, str]
COLUMNS: tuple[Column[Written], ...] = (
    Column("id", lambda row: row[0].pk),
    Column("position", lambda row: row[0].position),
    Column("hash", lambda row: row[0].hash),
    Column("at", lambda row: row[0].at),
    Column("verb", lambda row: row[0].verb),
    Column("actor_kind", lambda row: row[0].actor_kind),
    Column("actor_id", lambda row: row[0].actor_id),
    Column("actor_name", lambda row: row[1]),
    Column("object_type", lambda row: row[0].object_type),
    Column("object_id", lambda row: row[0].object_id),
    Column("cluster_id", lambda row: row[0].cluster_id),
    Column("cluster_name", lambda row: row[0].cluster.name if row[0].cluster else None),
    Column("before", lambda row: row[0].before),
    Column("after", lambda row: row[0].after),
    Column("reason", lambda row: row[0].reason),
    Column("request_id", lambda row: row[0].request_id),
)


@signed_in
@needs(Access.SIGNED_IN)
def audit(request: HttpRequest) -> HttpResponseBase:
    """What was written in one's clusters, newest first, narrowed by the form's fields."""
    asked = audit_trail.Asked.of(request.GET)
    visible = audit_for(request.user)
    if is_wanted(request):
        for field, told in asked.unreadable.items():
            return refusal(field, told, ["a time such as 2026-11-21 03:00"])
        found = audit_trail.narrowed(visible, asked).select_related("cluster")
        whole = pages_of(found, request.GET, sorts=SORTS)
        known = {"sort": sort_words(SORTS)}
        return as_file(request, "audit", COLUMNS, map(_with_names, whole), known)
    clusters = list(clusters_for(request.user))

    def context() -> dict[str, Any]:
        page = page_of(audit_trail.narrowed(visible, asked), request.GET, sorts=SORTS)
        whole_trail = may_everywhere(request.user, Role.ADMIN)
        return {
            "asked": asked,
            "page": page,
            "rows": audit_trail.rows_of(page.rows),
            "clusters": clusters,
            "whole_trail": whole_trail,
            "head": chain.head() if whole_trail else None,
            "unchained": chain.unchained() if whole_trail else 0,
            "verification": audit_trail.last_verification() if whole_trail else None,
        }

    return live_page(request, "audit/list", clusters, context, also=_news(visible))


def _news(visible: QuerySet[AuditEvent]) -> str:
    """What of the trail has been seen: its newest row, and the oldest that is not chained yet.

    Neither what belongs to no cluster nor what the keeper chains is a change of a cluster.
    """
    ids = visible.values_list("pk", flat=True)
    return f".{ids.first()}-{ids.filter(position=None).order_by('pk').first()}"


def _with_names(events: list[AuditEvent]) -> list[Written]:
    names = people.actors(events)
    return [(event, names[event.pk]) for event in events]
