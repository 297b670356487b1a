"""What the keeper follows in the nodes' readings: each finding becomes a signal, once.

It remembers what it has read; losing that costs the time until it has read enough again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import structlog
from django.conf import settings

from controlplane.fleet.models import Gpu, Node, RepairRecord
from controlplane.health import actions as health
from controlplane.health.actions import record_signal
from controlplane.health.choices import SignalKind
from controlplane.health.models import Baseline, Signal
from workers.readings import FLAGS, PARTS, ErrorCounter, Growth
from workers.watching import CardWatch, Finding, PortWatch

log = structlog.get_logger(__name__)

#: A baseline is written down anew once it is exceeded by this share.
RISE = 0.01

#: Of each node that was heard: when, and what its cards, or its ports, showed.
Heard = Mapping[str, tuple[datetime, Sequence[Mapping[str, Any]]]]


class Sensors:
    """Every card and port that is heard of."""

    def __init__(self) -> None:
        #: corrected memory errors of each card, by its uuid
        self.counters: dict[str, ErrorCounter] = {}
        #: what each card says of itself, by its uuid
        self.flags: dict[str, dict[str, float]] = {}
        self.cards: dict[str, CardWatch] = {}
        #: by their node's id and their own name
        self.ports: dict[tuple[str, str], PortWatch] = {}
        self._written: dict[str, float] = {}  # the baselines, by the card's uuid

    def follow(self, cards: Heard, ports: Heard) -> None:
        """Take in what was read in one pass."""
        self._meet(str(card["uuid"]) for _node, _at, card in _each(cards))
        for node_id, at, card in _each(cards):
            uuid = str(card["uuid"])
            self._follow_errors(node_id, uuid, at, card)
            self._follow_flags(node_id, uuid, at, card)
            for found in self.cards[uuid].read(at.timestamp(), card):
                _tell_finding(node_id, uuid, at, found)
        for node_id, at, port in _each(ports):
            name = str(port["name"])
            watch = self.ports.setdefault((node_id, name), PortWatch())
            for found in watch.read(at.timestamp(), port):
                _tell_finding(node_id, "", at, found, port=name)
        self._write_baselines()

    def _meet(self, uuids: Iterable[str]) -> None:
        """Begin to follow the cards that are new, from the baselines that they are known by."""
        new = {uuid for uuid in uuids if uuid not in self.cards}
        if not new:
            return
        known = dict(Baseline.objects.filter(gpu__in=new).values_list("gpu", "nvlink_mb_s"))
        self._written |= known
        for uuid in new:
            self.cards[uuid] = CardWatch(settings.READING_HOLD_S, known.get(uuid, 0.0))

    def _write_baselines(self) -> None:
        risen = {
            uuid: watch.nvlink_baseline
            for uuid, watch in self.cards.items()
            if watch.nvlink_baseline > self._written.get(uuid, 0.0) * (1 + RISE)
        }
        if risen:
            health.record_baselines(risen)
            self._written |= risen

    def _follow_errors(
        self, node_id: str, uuid: str, at: datetime, card: Mapping[str, Any]
    ) -> None:
        """Tell of a card whose corrected memory errors accelerate."""
        count = card.get("ecc_corrected")
        if count is None:
            return
        counter = self.counters.get(uuid)
        if counter is None:
            counter = self.counters[uuid] = ErrorCounter(settings.ECC_DRIFT_WINDOW_S)
        growth = counter.read(at.timestamp(), float(count))
        if growth is not None:
            _tell_growth(node_id, uuid, at, growth)

    def _follow_flags(self, node_id: str, uuid: str, at: datetime, card: Mapping[str, Any]) -> None:
        """Tell of each flag that a card newly shows, or with another value. Who forgot what it has
        told looks it up: a flag that stays says nothing new, however often we are started."""
        shown = {name: float(card[name]) for name in FLAGS if card.get(name) is not None}
        before = self.flags.get(uuid)
        if before is None:
            before = _told_flags(uuid) if any(shown.values()) else {}
        self.flags[uuid] = before | shown  # what could not be read is as it was
        for name, value in shown.items():
            if value and value != before.get(name):
                raw = f"{name} of {uuid} is {value:g}"
                _tell_reading(node_id, uuid, at, name, raw, {"value": value})


def _each(heard: Heard) -> Iterator[tuple[str, datetime, Mapping[str, Any]]]:
    for node_id, (at, shown) in heard.items():
        for one in shown:
            yield node_id, at, one


def _told_flags(uuid: str) -> dict[str, float]:
    """What was last told of each flag of this card, if it has not been repaired since."""
    told: dict[str, float] = {}
    signals = Signal.objects.filter(gpu=uuid, kind=SignalKind.READING, data__reading__in=FLAGS)
    repair = RepairRecord.objects.filter(gpu=uuid).order_by("-at").first()
    if repair is not None:
        signals = signals.filter(observed_at__gte=repair.at)
    for signal in signals.order_by("observed_at"):
        told[signal.data["reading"]] = float(signal.data["value"])
    return told


def _tell_growth(node_id: str, uuid: str, at: datetime, growth: Growth) -> None:
    parts = ", ".join(f"{errors:.0f}" for errors in growth.errors)
    raw = (
        f"ecc_corrected of {uuid}: {parts} in each {growth.window_s / PARTS:g} s, "
        f"{growth.count:.0f} in all"
    )
    found = {"errors": list(growth.errors), "window_s": growth.window_s, "count": growth.count}
    _tell_reading(node_id, uuid, at, "ecc_corrected", raw, found)


def _tell_finding(node_id: str, uuid: str, at: datetime, found: Finding, port: str = "") -> None:
    shown = ", ".join(f"{name} {value:g}" for name, value in found.values.items())
    raw = f"{found.reading} of {port or uuid}: {shown}"
    values: dict[str, Any] = {**found.values, "port": port} if port else dict(found.values)
    _tell_reading(node_id, uuid, at, found.reading, raw, values)


def _tell_reading(
    node_id: str, uuid: str, at: datetime, name: str, raw: str, found: dict[str, Any]
) -> None:
    """`uuid`: the card that shows it; "" for a port of the node."""
    node = Node.objects.get(pk=node_id)
    card = Gpu.objects.filter(pk=uuid, node=node).first() if uuid else None
    if uuid and card is None:
        log.warning("sensors.reading_of_unknown_card", node=node_id, card=uuid)
        return
    subject = uuid or f"{node_id}:{found.get('port', '')}"
    record_signal(
        f"{name[:12]}:{subject[-34:]}:{at.timestamp():.0f}",
        SignalKind.READING,
        source="keeper",
        observed_at=at,
        node=node,
        gpu=card,
        raw=raw,
        data={"reading": name, **found},
    )
