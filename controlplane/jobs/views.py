"""The list of training jobs, and a job's curves. Its page stands in the dashboard."""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase

from controlplane.accounts.access import Access, needs
from controlplane.accounts.views import signed_in
from controlplane.export import Column, as_file, is_wanted
from controlplane.fleet.selectors import clusters_for
from controlplane.jobs import durability, selectors
from controlplane.jobs.choices import JOB_UNFINISHED
from controlplane.jobs.models import Job
from controlplane.live import live_page
from controlplane.paging import page_of, pages_of, sort_words

#: How far back the curves may be asked to reach, by the word in the address.
WINDOWS: dict[str, tuple[str, float | None]] = {
    "5m": ("5 min", 300),
    "30m": ("30 min", 1800),
    "6h": ("6 h", 6 * 3600),
    "all": ("All", None),
}


MAX_TIME = 253_402_300_800.0  # the year 10000, in Unix time: later than any that a database knows
#: Ids sort by the time of their making.
SORTS = {"-registered": "pk", "name": "name", "state": "state", "-step": "step"}
COLUMNS: tuple[Column[Job], ...] = (
    Column("id", lambda job: job.pk),
    Column("name", lambda job: job.name),
    Column("cluster_id", lambda job: job.cluster_id),
    Column("cluster_name", lambda job: job.cluster.name),
    Column("state", lambda job: job.state),
    Column("program", lambda job: job.program),
    Column("world_replicas", lambda job: job.world_replicas),
    Column("active_replicas", lambda job: job.active_replicas),  # type: ignore[attr-defined]
    Column("min_replicas", lambda job: job.min_replicas),
    Column("gpus_per_replica", lambda job: job.gpus_per_replica),
    Column("nodes_per_replica", lambda job: job.nodes_per_replica),
    Column("step", lambda job: job.step if job.step >= 0 else None),
    Column("step_at", lambda job: job.step_at),
    Column("epoch", lambda job: job.epoch),
    Column("loss", lambda job: job.loss),
    Column("samples_per_s", lambda job: job.samples_per_s),
    Column("recomputed_steps", lambda job: job.recomputed_steps),
    Column("created_at", lambda job: job.created_at),
    Column("started_at", lambda job: job.started_at),
    Column("ended_at", lambda job: job.ended_at),
)


@signed_in
@needs(Access.SIGNED_IN)
def jobs(request: HttpRequest) -> HttpResponseBase:
    """Jobs by `state` ("active" or "ended") and `cluster`."""
    found = selectors.jobs_for(request.user)
    state = request.GET.get("state", "")
    if state == "active":
        found = found.filter(state__in=JOB_UNFINISHED)
    elif state == "ended":
        found = found.exclude(state__in=JOB_UNFINISHED)
    if cluster := request.GET.get("cluster"):
        found = found.filter(cluster=cluster)
    if is_wanted(request):
        whole = pages_of(found, request.GET, sorts=SORTS)
        known = {"state": ("active", "ended"), "sort": sort_words(SORTS)}
        return as_file(request, "jobs", COLUMNS, whole, known)

    def context() -> dict[str, Any]:
        page = page_of(found, request.GET, sorts=SORTS)
        failing = durability.failing_tiers_of(page.rows)
        return {"page": page, "failing": failing, "state": state}

    return live_page(request, "jobs/list", clusters_for(request.user), context)


@signed_in
@needs(Access.VIEWER)
def series(request: HttpRequest, job_id: str) -> HttpResponse:
    """The curves as JSON columns; 204 when there is nothing after the time `after`."""
    found = selectors.job_for(request.user, job_id)
    after = _time(request.GET.get("after"))
    _, window_s = WINDOWS[window_word(request)]
    columns = selectors.series(found, after=after, window_s=window_s)
    if columns is None:
        return HttpResponse(status=204)
    response = JsonResponse(columns)
    response["Cache-Control"] = "no-store"
    return response


def window_word(request: HttpRequest) -> str:
    """How far back the caller wants to look; one of WINDOWS."""
    word = request.GET.get("window", "30m")
    return word if word in WINDOWS else "30m"


def _time(text: str | None) -> float | None:
    """Unix time, in seconds."""
    if text is None:
        return None
    try:
        time = float(text)
    except ValueError:
        time = -1.0
    if not 0 <= time < MAX_TIME:
        raise Http404("after must be a time: seconds since 1970")
    return time
