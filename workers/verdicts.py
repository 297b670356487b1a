"""What triage says of a stored signal: the rows' side of the pure rules in `triage`."""

from __future__ import annotations

from controlplane.health.catalogue import xids
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from workers import triage

#: Signals in which hardware speaks for itself.
HARDWARE_SPEAKS = (SignalKind.KERNEL_LINE, SignalKind.READING)


def verdict_of(signal: Signal) -> triage.LineVerdict | None:
    """What a kernel line or a card's readings mean; None if nothing."""
    if signal.kind == SignalKind.READING:
        data = signal.data
        pci = signal.gpu.pci_address if signal.gpu else ""
        return triage.judge_errors(pci, data.get("errors", ()), data.get("window_s", 0.0))
    return triage.judge_line(signal.raw, xids())
