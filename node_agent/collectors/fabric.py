"""Ports of the fabric's adapters (InfiniBand, RoCE), as Linux shows them below /sys.

The counters' names and meanings: Linux, Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from node_agent.threads import start_thread
from node_agent.wire import PortReading

ADAPTERS = Path("/sys/class/infiniband")
#: A beat carries no more.
MAX_PORTS = 64
PERIOD_S = 1.0
#: An answer older than this is no reading any more.
STALE_S = 10.0
#: Our names, and the kernel's.
_COUNTERS = {
    "symbol_errors": "symbol_error",
    "link_recoveries": "link_error_recovery",
    "link_downs": "link_downed",
    "receive_errors": "port_rcv_errors",
    "discards": "port_xmit_discards",
}


class Ports:
    """The last known state of the ports, kept fresh by a thread: an adapter may answer late, or
    never, and no beat waits for that."""

    def __init__(self, closed: threading.Event, adapters: Path = ADAPTERS) -> None:
        self._closed = closed
        self._adapters = adapters
        self._read: list[PortReading] = []
        self._read_at = -STALE_S
        start_thread("fabric", self._keep_fresh)

    def latest(self) -> list[PortReading]:
        """[] once the last answer is older than STALE_S."""
        return self._read if time.monotonic() - self._read_at < STALE_S else []

    def _keep_fresh(self) -> None:
        while True:
            self._read, self._read_at = read_ports(self._adapters), time.monotonic()
            if self._closed.wait(PERIOD_S):
                return


def read_ports(adapters: Path = ADAPTERS) -> list[PortReading]:
    """Every port, by name; [] where there is no such adapter, or one is just being removed."""
    try:
        ports = sorted(adapters.glob("*/ports/*"))[:MAX_PORTS]
    except OSError:
        return []
    return [_read(port) for port in ports if _text(port / "state")]


def _read(port: Path) -> PortReading:
    # "4: ACTIVE"; anything less carries no traffic
    return PortReading(
        name=f"{port.parent.parent.name}/{port.name}",
        up=float(_text(port / "state").startswith("4")),
        **{ours: _number(port / "counters" / theirs) for ours, theirs in _COUNTERS.items()},
    )


def _number(path: Path) -> float | None:
    text = _text(path)
    return float(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # the port is gone, or has no such counter
        return ""
