"""How many of the nodes that are called lemons are, beside two simpler rules.

    python benchmarks/lemons.py [--fleets 200]

On made-up fleets of 1,000 nodes with 12 lemons each, a rack's outage, a technician's updates and
other confusions (tests/workers/fleet_history.py). Meta says of its own rule, on its own clusters,
"over 85%" (arXiv 2410.21680).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.workers.fleet_history import made_up_fleet
from workers.lemons import History, score

TARGET = 0.85
Fleet = Mapping[str, History]


def ours(fleet: Fleet) -> set[str]:
    return {one.node for one in score(fleet) if one.lemon}


def twice_out(fleet: Fleet) -> set[str]:
    """Taken out of service twice: the commonest rule of thumb (two reboots, then inspection)."""
    return {node for node, history in fleet.items() if history.outs >= 2}


def three_faults(fleet: Fleet) -> set[str]:
    return {node for node, history in fleet.items() if history.xids >= 3}


RULES: dict[str, Callable[[Fleet], set[str]]] = {
    "ours": ours,
    "out of service twice": twice_out,
    "three faults": three_faults,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fleets", type=int, default=200)
    fleets = [made_up_fleet(seed) for seed in range(parser.parse_args().fleets)]
    there = sum(len(lemons) for _fleet, lemons in fleets)
    print(f"{len(fleets)} fleets, {there} lemons among {sum(len(f) for f, _ in fleets):,} nodes")
    print(f"{'':24}{'right':>8}{'found':>8}")
    for name, rule in RULES.items():
        began = time.monotonic()
        called = [(rule(fleet), lemons) for fleet, lemons in fleets]
        took_ms = (time.monotonic() - began) / len(fleets) * 1e3
        right = sum(len(found & lemons) for found, lemons in called)
        share = right / max(1, sum(len(found) for found, _lemons in called))
        said = f"  target {TARGET:.0%}: {'kept' if share >= TARGET else 'missed'}, "
        print(
            f"{name:24}{share:8.0%}{right / there:8.0%}"
            + (f"{said}{took_ms:.1f} ms a fleet" if rule is ours else "")
        )


if __name__ == "__main__":
    main()
