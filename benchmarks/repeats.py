"""800,000 repeated kernel lines of 29 faults: how soon they are 29 failures, and how many rows.

    python benchmarks/repeats.py [--lines 800000] [--cards 29]

Each card says one XID 95 over and over, in the logs of nodes with eight cards each, as a driver did
that NVIDIA's own monitor then stored line by line. The logs are read as an agent reads them, what
it tells is recorded and triaged as in service, in a real PostgreSQL that flushes to its disk. The
limit beside it is reading the same lines and looking for the driver's word in them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.servers.own import own_servers  # noqa: E402
from node_agent.collectors import kmsg  # noqa: E402
from node_agent.collectors.repeats import Told  # noqa: E402

CARDS_PER_NODE = 8
TARGET_S = 60.0
PATIENCE_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=int, default=800_000)
    parser.add_argument("--cards", type=int, default=29)
    given = parser.parse_args()
    with own_servers() as home:
        measure(home, given.lines, given.cards)


class Spool:
    """What the agents told and nobody has taken yet; a newer message of an id replaces it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[tuple[str, str], Told] = {}

    def put(self, node: str, told: list[Told]) -> None:
        with self._changed:
            self._waiting |= {(node, one.key): one for one in told}
            self._changed.notify()

    def take(self, timeout_s: float) -> dict[tuple[str, str], Told]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting), timeout_s)
            taken, self._waiting = self._waiting, {}
            return taken


def measure(home: Path, lines: int, cards: int) -> None:
    # Django's models can be imported only once its settings are made.
    from django.core.management import call_command
    from django.db.models import Sum

    from controlplane.health.models import Failure, Signal

    call_command("migrate", verbosity=0)
    logs = written(home, lines, cards)
    limit_s = read_alone(logs)
    nodes = enrolled(logs)
    spool = Spool()
    began = time.perf_counter()
    for name, path in logs.items():
        threading.Thread(target=follow, args=(name, path, spool), daemon=True).start()
    counted = 0
    while counted < lines and time.perf_counter() - began < PATIENCE_S:
        handle(nodes, spool.take(1.0))
        counted = Failure.objects.aggregate(total=Sum("count"))["total"] or 0
    took = time.perf_counter() - began
    rows = Signal.objects.count()
    failures = Failure.objects.count()
    print(f"{lines:,} lines of {cards} faults on {len(logs)} nodes")
    print(f"  {failures} failures that count {counted:,} lines, {rows} rows of signals")
    print(f"  in {took:.1f} s, {lines / took:,.0f} lines/s; target {TARGET_S:.0f} s: "
          f"{'kept' if took < TARGET_S and failures == cards else 'MISSED'}")  # fmt: skip
    print(f"  only read in {limit_s:.1f} s, ratio {took / limit_s:.1f}")


def written(home: Path, lines: int, cards: int) -> dict[str, Path]:
    """One log for each node, by its name; the cards speak in turns."""
    paths = {}
    for node in range(-(-cards // CARDS_PER_NODE)):
        paths[f"node-{node:02d}"] = home / f"node-{node:02d}" / "kernel.log"
    for path in paths.values():
        path.parent.mkdir()
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(path.open("w")) for path in paths.values()]
        for number in range(lines):
            node, card = divmod(number % cards, CARDS_PER_NODE)
            logs[node].write(
                f"[{1000 + number / 1e4:.6f}] NVRM: Xid (PCI:0000:{0x10 + card:02x}:00): 95, "
                "pid=5171, Uncontained: FBHUB. RST: Yes, D-RST: No\n"
            )
    return paths


def read_alone(logs: dict[str, Path]) -> float:
    began = time.perf_counter()
    for path in logs.values():
        with path.open("rb") as log:
            assert all(kmsg.matters(line) for line in log)  # noqa: S101 - else it measures nothing
    return time.perf_counter() - began


def follow(name: str, path: Path, spool: Spool) -> None:
    cursor = path.with_name(kmsg.CURSOR_FILE)
    kmsg.follow(path, cursor, "boot", lambda told: spool.put(name, told), threading.Event())


def enrolled(logs: dict[str, Path]) -> dict[str, Any]:
    from tests.factories import ClusterFactory, GpuFactory, NodeFactory

    cluster = ClusterFactory()
    nodes = {name: NodeFactory(cluster=cluster, name=name, boot_id="boot") for name in logs}
    for node in nodes.values():
        for card in range(CARDS_PER_NODE):
            GpuFactory(node=node, index=card, pci_address=f"00000000:{0x10 + card:02X}:00.0")
    return nodes


def handle(nodes: dict[str, Any], told: dict[tuple[str, str], Told]) -> None:
    """As ingest and the workers do."""
    from controlplane.health.actions import record_events
    from node_agent import wire
    from workers import intake

    for name in {node for node, _key in told}:
        events = [
            wire.Event(
                id=f"ev_{name}_{key}".replace(" ", "_"),
                kind="kernel_line",
                at=one.first_at,
                boot_id="boot",
                source="kmsg",
                raw=one.line,
                data={} if one.count == 1 else {"count": one.count, "last_at": one.last_at},
            )
            for (node, key), one in told.items()
            if node == name
        ]
        record_events(nodes[name].pk, events)
    while intake.triage_signals():
        pass


if __name__ == "__main__":
    main()
