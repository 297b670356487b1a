"""Our checkpoints beside torch.save, DCP, safetensors and torchsnapshot, and the machine's limits.

    python benchmarks/checkpoint.py [--quick] [--ours] [--device cuda] [--sizes 0.25,1,4]
                                    [--rounds 5,5,1] [--json F] [--plot F]

All save the same float32 state, in turns in one run, each turn in a process of its own. safetensors
and torchsnapshot are installed on first use, outside the repository (`--here`: they are taken from
the running environment, or left out). With `--device cuda` the state is on a card, and the copy
beside it is one into pinned memory. A save is watched beside a
training loop's work until it is durable, and loaded again from a cold disk. Before each timed thing
as much memory is touched as it needs: a virtual machine gets what it has not used for seconds more
slowly than a disk reads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.checkpoints import picture, report
from benchmarks.checkpoints.contenders import OURS
from benchmarks.checkpoints.measuring import Plan, measure
from benchmarks.checkpoints.memory import have_at_hand

#: Of one size that are in memory at once, in the contender that takes most.
STATES = 8


def main() -> None:
    options = arguments()
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {what}", file=sys.stderr, flush=True)

    folder = Path(tempfile.mkdtemp(prefix="drydock-checkpoint-", dir=options.folder))
    try:
        plan = Plan(
            options.rounds, options.step_ms, only_ours=options.ours,
            device=options.device, here=options.here,
        )  # fmt: skip
        say("memory is touched")
        have_at_hand(int(STATES * max(options.rounds) * (1 << 30)))
        results = {"machine": machine(), "step_ms": options.step_ms, "rows": [], "failed": {}}
        for rows, failed in measure(plan, folder, say):
            results |= {"rows": rows, "failed": failed}
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.plot is not None:
        options.plot.write_text(picture.svg(results))
    print("\n".join(report.lines(results)))
    if {one.name for one in OURS} & set(failed):
        sys.exit(1)


def machine() -> dict[str, object]:
    cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    return {
        "cores": os.cpu_count(),
        "processor": cpu or platform.processor(),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="0.25 GiB, 2 turns")
    parser.add_argument("--ours", action="store_true", help="and the limits, without the others")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--here", action="store_true", help="install nothing")
    parser.add_argument(
        "--sizes", type=sizes, default=(0.25, 1.0, 4.0), help="of the state, in GiB"
    )
    parser.add_argument(
        "--rounds",
        type=turns,
        default=(5, 5, 1),
        help="turns of each contender, for each size or all",
    )
    parser.add_argument("--step-ms", type=float, default=200.0, help="of work between two steps")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an SVG")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.rounds = (0.25,), (2,)
    if len(options.rounds) == 1:
        options.rounds *= len(options.sizes)
    if len(options.rounds) != len(options.sizes):
        parser.error(
            f"--rounds has {len(options.rounds)} numbers for {len(options.sizes)} --sizes: give "
            "one for each, or one for all"
        )
    options.rounds = dict(zip(options.sizes, options.rounds, strict=True))
    return options


def turns(text: str) -> tuple[int, ...]:
    return tuple(int(count) for count in text.split(",") if count)


def sizes(text: str) -> tuple[float, ...]:
    return tuple(float(size) for size in text.split(",") if size)


if __name__ == "__main__":
    main()
