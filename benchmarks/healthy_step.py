"""What a step costs while nothing fails: our replicas beside plain DistributedDataParallel.

    python benchmarks/healthy_step.py [--mode cover|reproducible] [--traffic light|heavy]
                                      [--rounds 30] [--replicas 4] [--device cuda]

The same four processes train the same model on the same samples both ways, in turns of 20 steps, so
that both meet the same machine. DDP beside itself (A/A) says what the machine's noise makes of it.
The target: the 95% interval of ours over DDP within 1%, seen beside the interval of DDP over DDP.
With `--device cuda` all replicas share one card, and both exchange by NCCL over the loopback.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rivals.contenders import BOTH
from benchmarks.rivals.figures import ENOUGH, interval
from benchmarks.rivals.measuring import Bench, healthy_together
from benchmarks.rivals.task import TRAFFIC


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", default="cover", choices=["cover", "reproducible"])
    parser.add_argument("--traffic", default="light", choices=TRAFFIC)
    parser.add_argument("--rounds", type=int, default=30, help="pairs of turns")
    parser.add_argument("--replicas", type=int, default=4, choices=[2, 3, 4, 6, 12])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    if options.rounds < ENOUGH + 1:
        parser.error(f"--rounds is {options.rounds}: give {ENOUGH + 1} or more")
    model = replace(TRAFFIC[options.traffic], device=options.device)
    both = replace(BOTH, mode=options.mode)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.replicas, seed=1)
        try:
            ddp, found = healthy_together(bench, both, options.rounds, model)
        finally:
            bench.end()
    print(f"{'plain DDP':<24}{statistics.median(ddp) * 1e3:7.2f} ms")
    for name, turns in found.items():
        low, high = interval(turns.over_ddp) or (math.nan, math.nan)
        print(
            f"{name:<24}{statistics.median(turns.seconds) * 1e3:7.2f} ms"
            f"{statistics.median(turns.over_ddp) - 1:+9.2%}"
            f"     95% interval {low - 1:+.2%} to {high - 1:+.2%}"
        )


if __name__ == "__main__":
    main()
