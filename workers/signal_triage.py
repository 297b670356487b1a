"""What triage says of a stored signal: the rows' side of the pure rules in `triage`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Q, QuerySet

from controlplane.fleet.models import Node
from controlplane.health.actions import card_at
from controlplane.health.catalogue import catalogue
from controlplane.health.choices import SignalKind
from controlplane.health.models import Failure, Signal
from controlplane.jobs.models import Placement
from node_agent.collectors.xid import SxidLine, XidLine
from workers import triage
from workers.triage.lines import LOST, NVLINK, PROGRAM_CODES
from workers.triage.logs import DAY_S, IN_BURSTS, NEAR_S, SEEN_LATER_S, Stamp, judge_log

#: Signals in which hardware speaks for itself.
HARDWARE_SPEAKS = (SignalKind.KERNEL_LINE, SignalKind.READING, SignalKind.GPU_UNREADABLE)
#: Of one fault so many kinds of word are judged, of so many signals at most.
KINDS, SIGNALS = 20, 1000
#: Codes of which each line may say something else.
_EACH_ITS_OWN = frozenset({74, *range(144, 151), 154})
#: So many lines around one are looked at, and as many of before.
AT_MOST = 200
_NEAR = timedelta(seconds=NEAR_S)
#: Of them those that may decide on another.
_DECIDING = Q(raw__contains="Xid") | Q(raw__contains="NVIDIA GPU") | Q(raw__contains="fallen off")
#: Those that may say that a card is lost.
_LOST = Q(raw__contains=f": {LOST},") | Q(raw__contains="fallen off")


def verdict_of(signal: Signal, rules: triage.Catalogue | None = None) -> triage.LineVerdict | None:
    """What a kernel line, with what its node said around it and long before, or a card's readings,
    or that it shows none, mean; None if nothing. `rules`: the catalogues to judge by, those of
    today if not given."""
    rules = rules or catalogue()
    pci = signal.gpu.pci_address if signal.gpu else ""
    if signal.kind == SignalKind.READING:
        return triage.judge_reading(pci, signal.data)
    if signal.kind == SignalKind.GPU_UNREADABLE:
        silent = (signal.repeated_at or signal.observed_at) - signal.observed_at
        held = silent >= timedelta(seconds=settings.READING_HOLD_S)
        return triage.judge_silence(pci, str(signal.data.get("reason", ""))) if held else None
    alone = triage.judge_line(signal.raw, rules)
    if alone is None or signal.node_id is None:
        return alone
    this = (signal.observed_at, signal.raw, signal.repeated_at, signal.count)
    before = _newest(_long_before(signal))
    around = _newest(_around(signal).exclude(pk=signal.pk))
    lines = sorted([*around, *before, this], key=lambda one: one[0])
    stamps = [
        Stamp("wall", at.timestamp(), until.timestamp() if until else None, count)
        for at, _raw, until, count in lines
    ]
    elsewhere = _elsewhere(signal) if before else {}
    raws = [raw for _at, raw, *_ in lines]
    found = list(judge_log(raws, rules, stamps, elsewhere))[lines.index(this)]
    return alone if found is None else found.verdict


def _around(signal: Signal) -> QuerySet[Signal]:
    """What its node said near it."""
    near = (signal.observed_at - _NEAR, signal.observed_at + _NEAR)
    return _lines_of(signal).filter(_DECIDING, observed_at__range=near)


def _long_before(signal: Signal) -> QuerySet[Signal]:
    """What was said before that, and decides all the same: that a card was lost on what a switch
    sees; and the same code on what repeats, if this card said it and not the one in its place."""
    told = _lines_of(signal).filter(observed_at__lt=signal.observed_at - _NEAR)
    parsed = triage.parse(signal.raw)
    if isinstance(parsed, SxidLine):
        since = signal.observed_at - timedelta(seconds=SEEN_LATER_S)
        return told.filter(_LOST, observed_at__gte=since)
    if not isinstance(parsed, XidLine) or parsed.code not in {*IN_BURSTS, NVLINK}:
        return told.none()
    card = signal.gpu or card_at(signal.node_id or "", parsed.pci)
    # Triage names the card of no note, nor one that had left its node's report by then.
    nameless = Q(gpu=None, observed_at__gte=card.first_seen_at) if card else Q(gpu=None)
    told = told.filter(Q(gpu=card) | nameless, raw__contains=f": {parsed.code},")
    if parsed.code == NVLINK:
        return told  # however long ago
    return told.filter(observed_at__gte=signal.observed_at - timedelta(seconds=DAY_S))


def _elsewhere(signal: Signal) -> dict[int, int]:
    """On how many other nodes cards said the same code within the day, if it is of a program's
    doing. Of its job's nodes; where none of ours ran nobody knows what did: of its cluster's."""
    parsed = triage.parse(signal.raw)
    if not isinstance(parsed, XidLine) or parsed.code not in PROGRAM_CODES:
        return {}
    at = signal.observed_at
    since = at - timedelta(seconds=DAY_S)
    here = Placement.objects.filter(node_id=signal.node_id, created_at__lte=at)
    held = here.exclude(ended_at__lt=at).order_by("-created_at")
    job = held.values_list("replica__job", flat=True).first()
    stays = Placement.objects.filter(replica__job=job).exclude(ended_at__lt=since)
    of_job = Q(pk__in=stays.values("node"))
    nodes = Node.objects.filter(of_job if job else Q(cluster__nodes=signal.node_id))
    told = Signal.objects.filter(
        kind=SignalKind.KERNEL_LINE,
        node__in=nodes.exclude(pk=signal.node_id),
        observed_at__range=(since, at + _NEAR),
        raw__contains=f": {parsed.code},",
    )
    return {parsed.code: told.values("node").distinct().count()}


def _lines_of(signal: Signal) -> QuerySet[Signal]:
    return Signal.objects.filter(node_id=signal.node_id, kind=SignalKind.KERNEL_LINE)


def _newest(told: QuerySet[Signal]) -> list[tuple[datetime, str, datetime | None, int]]:
    """When each line was said, its words, when for the last time, and how often."""
    lines = told.order_by("-observed_at").values_list("observed_at", "raw", "repeated_at", "count")
    return list(lines[:AT_MOST])


def deciding_signals(failure: Failure) -> list[Signal]:
    """What hardware said of one fault, oldest first: of what repeats itself the first one only."""
    told = failure.signals.filter(kind__in=HARDWARE_SPEAKS).order_by("observed_at", "pk")
    first: dict[object, str] = {}
    for pk, raw, data in told.values_list("pk", "raw", "data")[:SIGNALS]:
        if len(first) < KINDS:
            first.setdefault(_kind_of(raw, data), pk)
    return list(told.filter(pk__in=first.values()).select_related("node", "gpu"))


def _kind_of(raw: str, data: Mapping[str, Any]) -> object:
    if "reading" in data:
        return data["reading"], data.get("value")
    parsed = triage.parse(raw)
    if isinstance(parsed, XidLine) and parsed.code not in _EACH_ITS_OWN:
        return "xid", parsed.code
    if isinstance(parsed, SxidLine):
        return "sxid", parsed.code
    return raw
