"""The page of failures: what triage made of what was observed, over time, and its price."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render

from controlplane.accounts.access import Access, needs
from controlplane.accounts.views import signed_in
from controlplane.dashboard.selectors import failures as selectors
from controlplane.dashboard.selectors import lemons, rules
from controlplane.export import Column, as_file, is_wanted
from controlplane.fleet.selectors import clusters_for
from controlplane.health.choices import Action, FaultClass
from controlplane.health.models import Failure
from controlplane.incidents import pricing
from controlplane.incidents.selectors import WINDOWS, failures_in
from controlplane.live import live_page
from controlplane.paging import page_of, pages_of, sort_words
from workers.lemons import DAYS, LEMON

SORTS = {"-seen": "observed_at", "code": "code", "-count": "count"}
#: A failure and the name of the job that it speaks of.
FailureRow = tuple[Failure, str | None]
COLUMNS: tuple[Column[FailureRow], ...] = (
    Column("id", lambda row: row[0].pk),
    Column("code", lambda row: row[0].code),
    Column("fault_class", lambda row: row[0].fault_class),
    Column("summary", lambda row: row[0].summary),
    Column("needed", lambda row: row[0].needed),
    Column("urgency", lambda row: row[0].urgency),
    Column("rule", lambda row: row[0].rule),
    Column("node_id", lambda row: row[0].node_id),
    Column("node_name", lambda row: row[0].node.name if row[0].node else None),
    Column("cluster_id", lambda row: row[0].node.cluster_id if row[0].node else None),
    Column("cluster_name", lambda row: row[0].node.cluster.name if row[0].node else None),
    Column("gpu_uuid", lambda row: row[0].gpu_id),
    Column("gpu_serial", lambda row: row[0].gpu.serial if row[0].gpu else None),
    Column("job_id", lambda row: row[0].job_id or None),
    Column("job_name", lambda row: row[1]),
    Column("replica", lambda row: row[0].replica),
    Column("count", lambda row: row[0].count),
    Column("first_seen_at", lambda row: row[0].observed_at),
    Column("last_seen_at", lambda row: row[0].last_seen_at),
    Column("incident_id", lambda row: selectors.incident_of(row[0])),
    Column("raw_lines", lambda row: "\n".join(selectors.raw_lines(row[0]))),
)


@signed_in
@needs(Access.SIGNED_IN)
def failures(request: HttpRequest) -> HttpResponseBase:
    """Failures by `code`, `fault_class`, `cluster`, `node`, `card`, over `window`; the chart tells
    apart `by` code, model, driver, rack or age of the card."""
    chosen = selectors.FailureFilter.of(request.GET)
    clusters = list(clusters_for(request.user))
    within = chosen.within(clusters)
    found = chosen.apply(failures_in(within))
    if is_wanted(request):
        whole = pages_of(selectors.with_story(found), request.GET, sorts=SORTS)
        known = {"window": WINDOWS, "fault_class": FaultClass.values, "sort": sort_words(SORTS)}
        return as_file(request, "failures", COLUMNS, map(_with_jobs, whole), known)

    def context() -> dict[str, Any]:
        page = page_of(selectors.with_story(found), request.GET, sorts=SORTS)
        return {
            "page": page,
            "jobs": selectors.job_names(page.rows),
            "filter": chosen,
            "windows": {word: label for word, (label, _) in WINDOWS.items()},
            "classes": FaultClass,
            "codes": selectors.codes_of(failures_in(clusters)),
            "clusters": clusters,
            "by": {word: label for word, (label, _) in selectors.BY.items()},
            "chart": selectors.chart_of(found, chosen),
            "impacts": pricing.impact_by_code(within, chosen.since),
        }

    return live_page(request, "dashboard/failures", clusters, context)


@signed_in
@needs(Access.SIGNED_IN)
def rule(request: HttpRequest) -> HttpResponse:
    """What would come of another rule for one code: `kind`, `code`, `action`, over `window`."""
    edit = rules.edit_of(request.GET)
    wrong = edit if isinstance(edit, str) else ""
    clusters = list(clusters_for(request.user))
    outcome = None if isinstance(edit, str) else rules.outcome_of(edit, clusters)
    context = {
        "edit": None if isinstance(edit, str) else edit,
        "wrong": wrong,
        "outcome": outcome,
        "asked": request.GET,
        "actions": [(word, Action(word).label) for word in rules.CHOICES],
        "windows": {word: label for word, (label, _) in WINDOWS.items()},
        "default_window": rules.DEFAULT_WINDOW,
        "max_signals": rules.MAX_SIGNALS,
    }
    return render(request, "dashboard/rule.html", context, status=400 if wrong else 200)


@signed_in
@needs(Access.SIGNED_IN)
def lemon_nodes(request: HttpRequest) -> HttpResponse:
    """The nodes that fail more than others, with what their scores are made of."""
    context = {
        "lemons": lemons.lemons_in(clusters_for(request.user)),
        "lemon_from": LEMON,
        "days": DAYS,
    }
    return render(request, "dashboard/lemons.html", context)


def _with_jobs(failures: list[Failure]) -> list[FailureRow]:
    names = selectors.job_names(failures)
    return [(failure, names.get(failure.job_id)) for failure in failures]
