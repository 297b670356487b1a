"""A node's story: what was seen, found, ordered, done and said of it, newest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Count, Max

from controlplane.accounts.models import AuditEvent
from controlplane.accounts.selectors import username
from controlplane.dashboard.selectors.people import actors
from controlplane.fleet.choices import NodeState, Rung
from controlplane.fleet.models import Command, Node
from controlplane.health.choices import SignalKind
from controlplane.health.models import Failure, Signal
from controlplane.incidents.models import PlaybookRun

PAGE_SIZE = 40

#: The words for what the audit trail says of a node. A change of state is told by its states.
_WORDS: dict[str, str] = {
    "node.enroll": "Enrolled",
    "node.enroll_again": "Enrolled again: another rack or address",
    "node.boot": "Booted: a new boot id",
    "node.drain": "Drained",
    "node.undrain": "Drain given back",
    "node.set_spare": "Spare flag changed",
    "node.revoke_key": "Key revoked",
    "node.set_bmc": "Management controller set",
    "node.cards": "Cards fitted",
    "node.unreachable": "Lease lost",
    "node.reachable": "Heard again",
}


@dataclass(frozen=True)
class Moment:
    """One line of the story."""

    at: datetime
    kind: str  # also the name of its icon
    label: str
    text: str
    by: str = ""
    raw: str = ""
    run: PlaybookRun | None = None
    bad: bool = False


def story_of(node: Node, *, before: datetime | None = None) -> tuple[list[Moment], datetime | None]:
    """A page of the story, and the moment at which the next page begins, if there is one."""
    until = {"before": before} if before else {}
    sources = (_signals, _failures, _commands, _repairs, _runs, _audit)
    moments = [moment for source in sources for moment in source(node, **until)]
    moments.sort(key=lambda moment: moment.at, reverse=True)
    if len(moments) <= PAGE_SIZE:
        return moments, None
    # What happened in one instant stays on one page, since the next begins before it.
    end = moments[PAGE_SIZE - 1].at
    return [moment for moment in moments if moment.at >= end], end


def _signals(node: Node, before: datetime | None = None) -> Iterator[Moment]:
    rows = Signal.objects.filter(node=node).select_related("gpu").order_by("-observed_at")
    if before:
        rows = rows.filter(observed_at__lt=before)
    for one in rows[: PAGE_SIZE + 1]:
        card = f" on GPU {one.gpu.index}" if one.gpu and one.gpu.index is not None else ""
        text = f"{one.get_kind_display()}{card}, from {one.source}"
        kind = "node" if one.kind == SignalKind.BOOT else "signal"
        yield Moment(one.observed_at, kind, "Signal", text, raw=one.raw)


def _failures(node: Node, before: datetime | None = None) -> Iterator[Moment]:
    rows = Failure.objects.filter(node=node).select_related("gpu").order_by("-observed_at")
    if before:
        rows = rows.filter(observed_at__lt=before)
    for one in rows[: PAGE_SIZE + 1]:
        card = f", card {one.gpu.serial}" if one.gpu else ""
        times = f", {one.count} times" if one.count > 1 else ""
        text = f"{one.code}: {one.summary}{card}{times}. Needed: {one.get_needed_display()}"
        yield Moment(one.observed_at, "triage", "Failure", text, bad=True)


def _commands(node: Node, before: datetime | None = None) -> Iterator[Moment]:
    rows = Command.objects.filter(node=node).order_by("-created_at")
    if before:
        rows = rows.filter(created_at__lt=before)
    for one in rows[: PAGE_SIZE + 1]:
        text = f"Command {one.verb}: {one.get_state_display().lower()}"
        if one.error:
            text += f" ({one.error})"
        failed = one.state in ("failed", "refused", "expired")
        yield Moment(one.created_at, "step", "Command", text, bad=failed)


def _repairs(node: Node, before: datetime | None = None) -> Iterator[Moment]:
    """One line for each attempt: it stands in the record of every card and of the node itself."""
    rows = (
        node.repairs.values("step_id", "rung")
        .annotate(done_at=Max("at"), cards=Count("gpu"))
        .order_by("-done_at")
    )
    if before:
        rows = rows.filter(done_at__lt=before)
    for row in rows[: PAGE_SIZE + 1]:
        cards = f"{row['cards']} card{'' if row['cards'] == 1 else 's'}"
        text = f"{Rung(row['rung']).label}, in the record of {cards}"
        yield Moment(row["done_at"], "node", "Repair", text)


def _runs(node: Node, before: datetime | None = None) -> Iterator[Moment]:
    rows = node.runs.select_related("incident").order_by("-created_at")
    if before:
        rows = rows.filter(created_at__lt=before)
    for one in rows[: PAGE_SIZE + 1]:
        text = f"{one.title}: {one.get_state_display().lower()}"
        asked = " by a person" if one.requested_by else ""
        yield Moment(one.created_at, "step", f"Playbook{asked}", text, run=one)


def _audit(node: Node, before: datetime | None = None) -> Iterator[Moment]:
    rows = AuditEvent.objects.filter(object_type="node", object_id=node.id).order_by("-id")
    # Commands and repairs are told by their own rows.
    rows = rows.exclude(verb__startswith="command.").exclude(verb="node.repair")
    if before:
        rows = rows.filter(at__lt=before)
    events = list(rows[: PAGE_SIZE + 1])
    names = actors(events)
    for event in events:
        yield Moment(event.at, "state", "Record", _told(event), by=names[event.pk])


def _told(event: AuditEvent) -> str:
    """A line of the audit trail in words."""
    if event.verb == "node.transition":
        words = f"{_state(event.before)} → {_state(event.after)}"
    elif event.verb == "node.hold":
        words = "Hold" if event.after.get("hold_reason") else "Released"
    elif event.verb == "node.reset_pending":
        pending = event.after.get("reset_pending")
        return f"Reset pending: {pending}" if pending else "Pending reset is done"
    elif event.verb == "node.power":
        words = f"Power order to its chassis: {event.after.get('order', '')}"
    elif event.verb == "node.drain":
        words = f"Drained by {username(event.after.get('drained_by', ''))}"
    else:
        words = _WORDS.get(event.verb, event.verb.removeprefix("node.").replace("_", " "))
    return f"{words}: {event.reason}" if event.reason else words


def _state(values: dict[str, str]) -> str:
    state = values.get("state", "")
    return NodeState(state).label if state in NodeState.values else state
