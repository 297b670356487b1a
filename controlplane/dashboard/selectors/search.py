"""What the command palette finds: a few of each kind, and only what the caller may see.

Every kind costs one query at most, whatever is asked; a text that cannot name a thing of some kind
does not look for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from django.contrib.auth.models import AnonymousUser
from django.db.models import Case, Model, Q, QuerySet, Value, When

from controlplane.accounts.models import User
from controlplane.dashboard.selectors.fleet import nodes_for
from controlplane.dashboard.selectors.repairs import cases_for
from controlplane.fleet.models import Cluster, Gpu, Node, Rack
from controlplane.fleet.selectors import clusters_for, gpus_for, racks_for
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, CaseState
from controlplane.incidents.models import Incident, PlaybookRun, RmaCase
from controlplane.incidents.selectors import incidents_for, runs_for
from controlplane.jobs.choices import JOB_UNFINISHED
from controlplane.jobs.models import Job
from controlplane.jobs.selectors import jobs_for

#: A text longer than this names nothing.
MAX_CHARS = 100
#: Cards are looked for by the first characters of a serial or UUID: fewer would fit every card.
MIN_CARD_CHARS = 4
#: A whole id such as `run_01hz…`, its beginning, or the tail of it that pages show.
_ID = re.compile(r"[a-z]{3}_[0-9a-z]*|[0-9a-z]{6,26}")

Row = TypeVar("Row", bound=Model)


@dataclass(frozen=True)
class Some(Generic[Row]):
    """The best of one kind; `more` if others fit as well."""

    rows: list[Row] = field(default_factory=list)
    more: bool = False


@dataclass(frozen=True)
class Found:
    """What fits a text, by kind."""

    nodes: Some[Node] = Some()
    cards: Some[Gpu] = Some()
    jobs: Some[Job] = Some()
    incidents: Some[Incident] = Some()
    runs: Some[PlaybookRun] = Some()
    clusters: Some[Cluster] = Some()
    racks: Some[Rack] = Some()
    cases: Some[RmaCase] = Some()


def search(user: User | AnonymousUser, text: str) -> Found:
    """What `text` may mean: a part of a name, the beginning of a serial or UUID, an id."""
    text = " ".join(text.split())
    if not text or len(text) > MAX_CHARS:
        return Found()
    return Found(
        nodes=_some(_nodes(user, text), 5),
        cards=_some(_cards(user, text), 3) if len(text) >= MIN_CARD_CHARS else Some(),
        jobs=_some(_jobs(user, text), 3),
        incidents=_some(_incidents(user, text), 4),
        runs=_some(_runs(user, text), 2) if _ID.fullmatch(text) else Some(),
        clusters=_some(clusters_for(user).filter(_named(text)).order_by("name"), 2),
        racks=_some(racks_for(user).filter(_named(text)).order_by("name"), 2),
        cases=_some(_cases(user, text), 2),
    )


def _some(fitting: QuerySet[Row], limit: int) -> Some[Row]:
    rows = list(fitting[: limit + 1])
    return Some(rows[:limit], len(rows) > limit)


def _named(text: str) -> Q:
    return Q(name__icontains=text) | _by_id(text)


def _by_id(text: str) -> Q:
    if not _ID.fullmatch(text):
        return Q(pk=text)
    return Q(pk__startswith=text) | Q(pk__endswith=text)


def _first(condition: Q) -> Case:
    return Case(When(condition, then=Value(0)), default=Value(1))


def _nodes(user: User | AnonymousUser, text: str) -> QuerySet[Node]:
    fitting = nodes_for(user).filter(_named(text) | Q(address__startswith=text))
    return fitting.order_by(_first(Q(name__istartswith=text)), "name")


def _cards(user: User | AnonymousUser, text: str) -> QuerySet[Gpu]:
    # Compared as they are printed, from the first character: a plain scan of 100,000 of them then
    # still answers while somebody types.
    printed = Q(serial__startswith=text) | Q(serial__startswith=text.upper())
    uuid = text.lower().removeprefix("gpu-")
    found = gpus_for(user).filter(printed | Q(uuid__startswith=f"GPU-{uuid}"))
    return found.order_by("serial")


def _jobs(user: User | AnonymousUser, text: str) -> QuerySet[Job]:
    active = _first(Q(state__in=sorted(JOB_UNFINISHED)))
    return jobs_for(user).filter(_named(text)).order_by(active, "-created_at")


def _incidents(user: User | AnonymousUser, text: str) -> QuerySet[Incident]:
    title = Q()
    for word in text.split():
        title &= Q(title__icontains=word) | Q(code__iexact=word)
    unresolved = _first(Q(state__in=sorted(INCIDENT_UNRESOLVED)))
    return incidents_for(user).filter(title | _by_id(text)).order_by(unresolved, "-id")


def _runs(user: User | AnonymousUser, text: str) -> QuerySet[PlaybookRun]:
    return runs_for(user).prefetch_related(None).filter(_by_id(text))


def _cases(user: User | AnonymousUser, text: str) -> QuerySet[RmaCase]:
    fitting = Q(gpu__serial__istartswith=text) | Q(vendor_reference__icontains=text) | _by_id(text)
    not_closed = _first(~Q(state=CaseState.CLOSED))
    return cases_for(user).defer("bundle").filter(fitting).order_by(not_closed, "-opened_at")
