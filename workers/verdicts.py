"""What triage says of a stored signal: the rows' side of the pure rules in `triage`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.db.models import Q

from controlplane.health.catalogue import catalogue
from controlplane.health.choices import SignalKind
from controlplane.health.models import Failure, Signal
from node_agent.collectors.xid import SxidLine, XidLine
from workers import triage
from workers.triage.logs import NEAR_S, Stamp, judge_log

#: Signals in which hardware speaks for itself.
HARDWARE_SPEAKS = (SignalKind.KERNEL_LINE, SignalKind.READING)
#: Of one fault so many kinds of word are judged, of so many signals at most.
KINDS, SIGNALS = 20, 1000
#: Codes of which each line may say something else.
_EACH_ITS_OWN = frozenset({74, *range(144, 151), 154})
#: So many lines around one are looked at.
AROUND = 200
#: Of them those that may decide on another.
_DECIDING = Q(raw__contains="Xid") | Q(raw__contains="NVIDIA GPU") | Q(raw__contains="fallen off")


def verdict_of(signal: Signal, rules: triage.Catalogue | None = None) -> triage.LineVerdict | None:
    """What a kernel line, with what its node said around it, or a card's readings mean; None if
    nothing. `rules`: the catalogues to judge by, those of today if not given."""
    rules = rules or catalogue()
    if signal.kind == SignalKind.READING:
        return triage.judge_reading(signal.gpu.pci_address if signal.gpu else "", signal.data)
    alone = triage.judge_line(signal.raw, rules)
    if alone is None or signal.node_id is None:
        return alone
    reach = timedelta(seconds=NEAR_S)
    around = (
        Signal.objects.filter(
            _DECIDING,
            node_id=signal.node_id,
            kind=SignalKind.KERNEL_LINE,
            observed_at__range=(signal.observed_at - reach, signal.observed_at + reach),
        )
        .exclude(pk=signal.pk)
        .order_by("-observed_at")
        .values_list("observed_at", "raw")[:AROUND]
    )
    lines = sorted([*around, (signal.observed_at, signal.raw)], key=lambda one: one[0])
    ours = lines.index((signal.observed_at, signal.raw))
    stamps = [Stamp("wall", at.timestamp()) for at, _raw in lines]
    found = list(judge_log([raw for _at, raw in lines], rules, stamps))[ours]
    return alone if found is None else found.verdict


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
