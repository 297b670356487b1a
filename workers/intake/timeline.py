"""Telling an incident's timeline of a signal, in words."""

from __future__ import annotations

from datetime import timedelta

from django.db.models import Q

from controlplane.fleet.models import Node
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, EntryKind
from controlplane.incidents.models import Incident

#: So many lines, so long before a loss, are told with it.
NOTES, NOTED_BEFORE = 10, timedelta(seconds=60)


def add_signal_entry(incident: Incident, signal: Signal) -> None:
    """Put the signal into the incident's timeline, in words."""
    incidents.add_timeline_entry(
        incident,
        f"signal/{signal.pk}",
        EntryKind.SIGNAL,
        _signal_text(signal),
        at=signal.observed_at,
        data={"signal": signal.pk, "source": signal.source, "raw": signal.raw, **signal.data},
    )


def add_to_node_incident(signal: Signal) -> None:
    """What a node says while an incident about it is open belongs to that incident's story."""
    node: Node | None = signal.node
    if node is None or signal.kind == SignalKind.COORDINATOR_RESTARTED:
        return
    about = Q(node=node) | Q(runs__node=node) | Q(failures__node=node)
    for incident in Incident.objects.filter(about, state__in=INCIDENT_UNRESOLVED).distinct():
        add_signal_entry(incident, signal)


def add_preceding_lines(incident: Incident, signal: Signal) -> None:
    """Lines that called for nothing by themselves, such as a driver that tidies up, belong to the
    story of the loss that they were told with."""
    since = signal.observed_at - NOTED_BEFORE
    lines = Signal.objects.filter(
        node=signal.node_id, kind=SignalKind.KERNEL_LINE, failures=None, raw__contains="Xid"
    )
    for line in lines.filter(observed_at__range=(since, signal.observed_at))[:NOTES]:
        add_signal_entry(incident, line)


def _signal_text(signal: Signal) -> str:
    node = signal.node.name if signal.node else ""
    if signal.kind == SignalKind.PEER_LOST:
        how = {
            "reset": "its connection was reset",
            "agent": "its agent said so",
            "heartbeat": "it stopped answering",
            "unreached": "the others cannot reach it",
        }.get(str(signal.data.get("how")), str(signal.data.get("how")))
        step = signal.data.get("step")
        return f"{signal.source} saw replica {signal.replica} go at step {step}: {how}"
    if signal.kind == SignalKind.PROCESS_EXITED:
        if signal.data.get("reason") == "reboot":
            return f"{node}: process {signal.data.get('pid')} ended with the reboot"
        number = signal.data.get("signal")
        end = (
            f"killed by signal {number}"
            if number
            else f"exit status {signal.data.get('exit_code')}"
        )
        return f"{node}: process {signal.data.get('pid')} ended, {end}"
    if signal.kind == SignalKind.LEASE_LOST:
        return f"{node} has not been heard within its lease"
    if signal.kind == SignalKind.BOOT:
        return f"{node} booted ({signal.boot_id})"
    return signal.raw or f"{node}: {signal.get_kind_display()}"
