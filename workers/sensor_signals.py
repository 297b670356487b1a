"""What the keeper follows in the nodes' readings: each finding becomes a signal, once.

It remembers what it has read; losing that costs the time until it has read enough again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import structlog
from django.conf import settings
from django.db import InterfaceError, InternalError, OperationalError
from django.utils import timezone

from controlplane.fleet.models import Gpu, Node, RepairRecord
from controlplane.health import actions as health
from controlplane.health.actions import KEPT_BY_CARD, record_signal
from controlplane.health.choices import SignalKind
from controlplane.health.models import Baseline, Signal
from workers.detectors import (
    CARD_FLAGS,
    GROWTH_PARTS,
    CardWatch,
    ErrorCounter,
    Finding,
    Growth,
    PortWatch,
)

log = structlog.get_logger(__name__)

#: A baseline is written down anew once it is exceeded by this share.
RISE = 0.01

#: A port that was not told of for this long is followed no more: its adapter was taken out.
PORT_EXPIRY_S = 3600.0
#: What was told within this time is not told again by a keeper that was started anew.
REPEAT_WINDOW = timedelta(days=7)

Shown = Mapping[str, Any]
#: Of each node that was heard: when, and what its cards, or its ports, showed.
Heard = Mapping[str, tuple[datetime, Sequence[Shown]]]


class Sensors:
    """Every card and port that is heard of."""

    def __init__(self) -> None:
        #: corrected memory errors of each card, by its uuid
        self.counters: dict[str, ErrorCounter] = {}
        #: what each card says of itself, by its uuid
        self.flags: dict[str, dict[str, float]] = {}
        self.cards: dict[str, CardWatch] = {}
        #: by their node's id, and their own name
        self.ports: dict[str, dict[str, PortWatch]] = {}
        self._where: dict[str, str] = {}  # the node of each card that we met
        self._written: dict[str, float] = {}  # the baselines, by the card's uuid
        #: what was found and is to be written down: kept while the database is away
        self._due: deque[Callable[[], None]] = deque()

    def follow(self, cards: Heard, ports: Heard) -> None:
        """Take in what was read in one pass, and write down what was found."""
        self._meet_cards({str(card["uuid"]): node for node, _at, card in _each(cards)})
        for node_id, at, card in _each(cards):
            uuid = str(card["uuid"])
            if self._where.get(uuid) != node_id:
                continue  # whatever was found could not be written down, and would be lost
            self._follow_errors(node_id, uuid, at, card)
            self._follow_flags(node_id, uuid, at, card)
            for found in self.cards[uuid].read(at.timestamp(), card):
                self._due.append(partial(_tell_finding, node_id, uuid, at, found))
        self._meet_ports(ports)
        for node_id, at, port in _each(ports):
            name = str(port["name"])
            for found in self.ports[node_id][name].read(at.timestamp(), port):
                self._due.append(partial(_tell_finding, node_id, "", at, found, port=name))
        self._write()

    def _write(self) -> None:
        """One finding that cannot be written keeps no other from it."""
        while self._due:
            try:
                self._due[0]()
            except (OperationalError, InternalError, InterfaceError):
                raise  # the database, or our session, is away: in the next pass
            except Exception:
                log.exception("sensors.finding_not_written")
            self._due.popleft()
        risen = {
            uuid: watch.nvlink_baseline
            for uuid, watch in self.cards.items()
            if watch.nvlink_baseline > self._written.get(uuid, 0.0) * (1 + RISE)
        }
        if risen:
            health.record_baselines(risen)
            self._written |= risen

    def _meet_cards(self, heard: Mapping[str, str]) -> None:
        """Begin to follow the cards that are new to us, from what is on record of them; `heard`: in
        which node each is. Links of another chassis may be fewer: there its best is yet to be seen.

        One whose node's report is not on record yet is met once it is.
        """
        new = [uuid for uuid, node in heard.items() if self._where.get(uuid) != node]
        if new:
            there = dict(Gpu.objects.filter(pk__in=new).values_list("pk", "node"))
            new = [uuid for uuid in new if there.get(uuid) == heard[uuid]]
        if not new:
            return
        known = {
            one.gpu_id: one.nvlink_mb_s
            for one in Baseline.objects.filter(gpu__in=new)
            if one.node_id == heard[one.gpu_id]
        }
        self._written |= {uuid: known.get(uuid, 0.0) for uuid in new}
        told, flags = _told_before({uuid: heard[uuid] for uuid in new})
        for uuid in new:
            self.cards[uuid] = CardWatch(
                settings.READING_HOLD_S, known.get(uuid, 0.0), told.get(uuid, ())
            )
            self.flags[uuid] = flags.get(uuid, {})
        # Only now: whom we failed to read about is met in the next pass.
        self._where |= {uuid: heard[uuid] for uuid in new}

    def _meet_ports(self, heard: Heard) -> None:
        """The same of ports; those that a node has not told of for PORT_EXPIRY_S are forgotten."""
        new: dict[str, set[str]] = {}
        for node_id, (at, told_now) in heard.items():
            there = self.ports.setdefault(node_id, {})
            names = {str(port["name"]) for port in told_now}
            gone = [n for n, one in there.items() if at.timestamp() - one.heard_at > PORT_EXPIRY_S]
            for name in gone:
                del there[name]
            if names - set(there):
                new[node_id] = names - set(there)
        told = _told_of_ports(new) if new else {}
        for node_id, names in new.items():
            for name in names:
                self.ports[node_id][name] = PortWatch(told.get((node_id, name), ()))

    def _follow_errors(self, node_id: str, uuid: str, at: datetime, card: Shown) -> None:
        """Tell of a card whose corrected memory errors accelerate."""
        count = card.get("ecc_corrected")
        if count is None:
            return
        counter = self.counters.get(uuid)
        if counter is None:
            counter = self.counters[uuid] = ErrorCounter(settings.ECC_DRIFT_WINDOW_S)
        growth = counter.read(at.timestamp(), float(count))
        if growth is not None:
            self._due.append(partial(_tell_growth, node_id, uuid, at, growth))

    def _follow_flags(self, node_id: str, uuid: str, at: datetime, card: Shown) -> None:
        """Tell of each flag that a card newly shows, or with another value; of what it keeps in its
        own memory also that it is well again."""
        shown = {name: float(card[name]) for name in CARD_FLAGS if card.get(name) is not None}
        before = self.flags[uuid]
        self.flags[uuid] = before | shown  # what could not be read is as it was
        for name, value in shown.items():
            if value != before.get(name, 0.0) and (value or name in KEPT_BY_CARD):
                raw = f"{name} of {uuid} is {value:g}"
                self._due.append(
                    partial(_tell_reading, node_id, uuid, at, name, raw, {"value": value})
                )


def _each(heard: Heard) -> Iterator[tuple[str, datetime, Mapping[str, Any]]]:
    for node_id, (at, shown) in heard.items():
        for one in shown:
            yield node_id, at, one


def _told_before(
    where: Mapping[str, str],
) -> tuple[dict[str, set[str]], dict[str, dict[str, float]]]:
    """What was recorded of these cards in their present nodes and not repaired since.

    The readings of REPEAT_WINDOW, and the flags as they were last recorded: so a keeper that was
    started anew does not record them again.
    """
    uuids = list(where)
    repaired = dict(
        RepairRecord.objects.filter(gpu__in=uuids).order_by("at").values_list("gpu", "at")
    )
    since = timezone.now() - REPEAT_WINDOW
    told: dict[str, set[str]] = {}
    flags: dict[str, dict[str, float]] = {}
    signals = Signal.objects.filter(gpu__in=uuids, kind=SignalKind.READING).order_by("observed_at")
    for uuid, node, at, data in signals.values_list("gpu", "node", "observed_at", "data"):
        if node != where[uuid]:
            continue  # in another node it is news
        if uuid in repaired and at < repaired[uuid] and data["reading"] not in KEPT_BY_CARD:
            continue
        if data["reading"] in CARD_FLAGS:
            flags.setdefault(uuid, {})[data["reading"]] = float(data["value"])
        elif at >= since:
            told.setdefault(uuid, set()).add(data["reading"])
    return told, flags


def _told_of_ports(nodes: Collection[str]) -> dict[tuple[str, str], set[str]]:
    """The same of these nodes' ports: by node, and the port's name."""
    since = timezone.now() - REPEAT_WINDOW
    signals = Signal.objects.filter(
        node__in=nodes, gpu=None, kind=SignalKind.READING, observed_at__gte=since
    )
    told: dict[tuple[str, str], set[str]] = {}
    for node_id, data in signals.values_list("node", "data"):
        told.setdefault((node_id, str(data.get("port", ""))), set()).add(str(data["reading"]))
    return told


def _tell_growth(node_id: str, uuid: str, at: datetime, growth: Growth) -> None:
    parts = ", ".join(f"{errors:.0f}" for errors in growth.errors)
    raw = (
        f"ecc_corrected of {uuid}: {parts} in each {growth.window_s / GROWTH_PARTS:g} s, "
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
