"""What the failures page shows: a filtered list, and how codes were spread over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timedelta

from django.db.models import (
    Case,
    Count,
    Expression,
    F,
    FloatField,
    Q,
    QuerySet,
    Value,
    When,
)
from django.db.models.fields.json import KeyTextTransform, KeyTransform
from django.db.models.functions import Cast, Extract, Floor
from django.utils import timezone

from controlplane.fleet.models import Cluster
from controlplane.health.models import Failure
from controlplane.incidents.selectors import WINDOWS, first_signals
from controlplane.jobs.models import Job

DEFAULT_WINDOW = "7d"
STRETCHES = 48
#: What the chart can tell apart, by the word in the address: a label, and where it stands.
BY: dict[str, tuple[str, Expression | F]] = {
    "code": ("code", F("code")),
    "model": ("model of the card", F("gpu__model")),
    "driver": (
        "driver that the node has now",
        KeyTextTransform("driver_version", KeyTransform("inventory", F("node__report"))),
    ),
    "rack": ("rack", F("node__rack__name")),
    "age": (
        "age of the card",
        Case(
            *(
                When(
                    gpu__first_seen_at__gt=F("observed_at") - timedelta(days=days), then=Value(age)
                )
                for days, age in (
                    (7, "below 1 week"),
                    (30, "below 1 month"),
                    (180, "below 6 months"),
                )
            ),
            When(gpu=None, then=Value("")),
            default=Value("6 months and more"),
        ),
    ),
}
#: This many codes are told apart in the chart; the rest are one.
CODES_APART = 5


@dataclass(frozen=True)
class FailureFilter:
    """Which failures are asked for; every part is empty where it does not matter."""

    code: str = ""
    fault_class: str = ""
    cluster: str = ""
    node: str = ""  # a part of its name, or its id
    card: str = ""  # a serial or UUID
    window: str = DEFAULT_WINDOW
    by: str = "code"  # what the chart tells apart: see BY

    @classmethod
    def of(cls, query: Mapping[str, str]) -> FailureFilter:
        told = {one.name: query.get(one.name, "").strip() for one in fields(cls)}
        if told["window"] not in WINDOWS:
            told["window"] = DEFAULT_WINDOW
        if told["by"] not in BY:
            told["by"] = "code"
        return cls(**told)

    @property
    def since(self) -> datetime:
        return timezone.now() - timedelta(seconds=WINDOWS[self.window][1])

    def within(self, clusters: Iterable[Cluster]) -> list[Cluster]:
        """Those of the clusters that are asked for."""
        return [cluster for cluster in clusters if self.cluster in ("", cluster.pk)]

    def apply(self, failures: QuerySet[Failure]) -> QuerySet[Failure]:
        """Of the failures `within` the clusters, those that are asked for."""
        found = failures.filter(observed_at__gte=self.since)
        if self.code:
            found = found.filter(code=self.code)
        if self.fault_class:
            found = found.filter(fault_class=self.fault_class)
        if self.node:
            found = found.filter(Q(node__name__icontains=self.node) | Q(node=self.node))
        if self.card:
            found = found.filter(Q(gpu__serial=self.card) | Q(gpu=self.card))
        return found


def with_story(failures: QuerySet[Failure]) -> QuerySet[Failure]:
    """The same, with all that a row of the table shows; its signals as `first_signals`."""
    return (
        failures.select_related("node__cluster", "gpu")
        .defer("node__report")
        .prefetch_related(first_signals(), "incidents")
    )


def raw_lines(failure: Failure) -> list[str]:
    """What was seen first, verbatim; of a failure `with_story`."""
    return [signal.raw for signal in failure.first_signals if signal.raw]  # type: ignore[attr-defined]


def incident_of(failure: Failure) -> str | None:
    """The id of the incident that it belongs to; of a failure `with_story`."""
    return next((incident.pk for incident in failure.incidents.all()), None)


def job_names(failures: list[Failure]) -> dict[str, str]:
    """Names of the jobs that these speak of, by id."""
    wanted = {failure.job_id for failure in failures if failure.job_id}
    return dict(Job.objects.filter(pk__in=wanted).values_list("pk", "name"))


def codes_of(failures: QuerySet[Failure]) -> list[str]:
    """The codes of these failures, each once, in alphabetical order."""
    return list(failures.order_by("code").values_list("code", flat=True).distinct())


# --- Codes over time ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """One code in one stretch of time, as a rectangle in the chart's own units."""

    x: float
    y: float
    width: float
    height: float
    rank: int
    title: str


@dataclass(frozen=True)
class Chart:
    """Failures by code over time, stacked: drawn in a box of `WIDTH` by `HEIGHT`."""

    bars: list[Bar]
    codes: list[tuple[int, str, int]]  # rank, code, how many
    highest: int
    ticks: list[tuple[float, str]]


WIDTH, HEIGHT = 960.0, 120.0


def chart_of(failures: QuerySet[Failure], chosen: FailureFilter) -> Chart:
    """Count these failures by code over the chosen window, as stacked bars.

    The most frequent codes come first; those beyond CODES_APART share a colour.
    """
    since, span = chosen.since, WINDOWS[chosen.window][1]
    counted = _counted(failures, since, span, chosen.by)
    totals: dict[str, int] = {}
    for (_, code), count in counted.items():
        totals[code] = totals.get(code, 0) + count
    ranked = sorted(totals, key=lambda code: (-totals[code], code))
    rank = {code: min(place, CODES_APART) for place, code in enumerate(ranked)}
    stretches: dict[int, dict[str, int]] = {}
    for (place, code), count in counted.items():
        stretches.setdefault(place, {})[code] = count
    highest = max((sum(one.values()) for one in stretches.values()), default=0)
    bars = [
        bar
        for place, codes in sorted(stretches.items())
        for bar in _stacked(place, codes, rank, highest, since, span)
    ]
    return Chart(
        bars,
        [(rank[code], code, totals[code]) for code in ranked],
        highest,
        [
            (WIDTH * part / 4, f"{since + timedelta(seconds=span * part / 4):%m-%d %H:%M}")
            for part in range(4)
        ],
    )


def _counted(
    failures: QuerySet[Failure], since: datetime, span: float, by: str
) -> dict[tuple[int, str], int]:
    """How many of each code, or of what else is told apart, in each stretch of time, counted by the
    database."""
    at = Cast(Extract("observed_at", "epoch"), FloatField())
    place = Floor((at - since.timestamp()) / (span / STRETCHES))
    told = failures.annotate(place=place, apart=BY[by][1]).values_list("place", "apart")
    counted: dict[tuple[int, str], int] = {}
    for found, apart, count in told.annotate(Count("pk")).order_by():
        where = (min(int(found), STRETCHES - 1), apart or "not known")
        counted[where] = counted.get(where, 0) + count
    return counted


def _stacked(
    place: int,
    codes: dict[str, int],
    rank: dict[str, int],
    highest: int,
    since: datetime,
    span: float,
) -> list[Bar]:
    width = WIDTH / STRETCHES
    begins = since + timedelta(seconds=span * place / STRETCHES)
    bars, top = [], HEIGHT
    for code in sorted(codes, key=lambda one: (rank[one], one)):
        height = codes[code] / highest * HEIGHT
        top -= height
        title = f"{code}: {codes[code]}, from {begins:%Y-%m-%d %H:%M} UTC"
        bars.append(
            Bar(
                round(place * width + 1, 2),
                round(top, 2),
                round(width - 2, 2),
                round(height, 2),
                rank[code],
                title,
            )
        )
    return bars
