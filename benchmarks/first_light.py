"""What a lost replica costs, played again and again against the running product (`make up`).

    python benchmarks/first_light.py [--runs 20] [--scenario kill-process]

Prints, beside each figure, what bounds it on this machine, measured in the same run: the median
step for the survivors' gap, the import of torch at the ranks' priority for the replica's return.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from controlplane.local import processes, runfile  # noqa: E402 - the path must be set first

RANK_NICE = 10
#: The exit status of what was not measured, since it cannot be here: no failure of `make bench`.
LEFT_OUT = 77


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--scenario", default="kill-process", choices=["kill-process", "kill-node"])
    options = parser.parse_args()
    need_product()
    results = []
    for number in range(options.runs):
        results.append(play(options.scenario))
        tell(number + 1, results[-1])
    green = [result for result in results if result["ok"]]
    print(f"\n{options.scenario}: {len(green)} of {len(results)} green in a row")
    print(f"{'':<34}{'median':>9}{'worst':>9}   {'target':<10}bound here")
    row(
        "longest gap between commits, s",
        [r["longest_gap_s"] for r in green],
        "< 1",
        f"a step takes {step_s():.3f} s",
    )
    row(
        "replica in full service, s",
        [r["seconds"]["replica_commit"] for r in green],
        "< 15",
        f"importing torch at nice {RANK_NICE} takes {import_s():.2f} s",
    )
    row("incident resolved, s", [r["seconds"]["resolved"] for r in green], "", "")
    row("samples lost or duplicated", [sum(r["samples"].values()) for r in green], "0", "")
    ours, ranks = memory_mb()
    print(
        f"memory of everything but the ranks: {ours:.0f} MB PSS (target < 1500); "
        f"ranks: {ranks:.0f} MB"
    )
    return 0 if len(green) == len(results) else 1


def need_product() -> None:
    """End with LEFT_OUT, and a word, where no product runs."""
    if not runfile.read():
        print(f"{Path(sys.argv[0]).name}: left out, since no product runs here (`make up`)")
        sys.exit(LEFT_OUT)


def play(scenario: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "manage.py", "scenario", scenario, "--json"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout.strip():
        sys.exit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def tell(number: int, result: dict[str, Any]) -> None:
    seconds = result["seconds"]
    print(
        f"{number:>3} {'ok ' if result['ok'] else 'NOT'} gap {result['longest_gap_s'] or 0:.3f} s, "
        f"survivors {seconds.get('survivors_commit')} s, "
        f"replica {seconds.get('replica_commit')} s, "
        f"resolved {seconds.get('resolved')} s {' '.join(result['problems'])}",
        flush=True,
    )


def row(name: str, values: list[float], target: str, bound: str) -> None:
    if values:
        print(
            f"{name:<34}{statistics.median(values):>9.3f}{max(values):>9.3f}   {target:<10}{bound}"
        )


def step_s() -> float:
    """Median time between commits of the demo job over its newest minute of reports."""
    code = (
        "from controlplane.jobs.models import ProgressSample as P; import statistics as s\n"
        "print(s.median(P.objects.order_by('-at').values_list('step_s', flat=True)[:60]))"
    )
    done = subprocess.run(
        [sys.executable, "manage.py", "shell", "--no-imports", "-v0", "-c", code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def import_s() -> float:
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "import torch, torch.distributed"],
        check=True,
        preexec_fn=lambda: os.nice(RANK_NICE) and None,
    )
    return time.monotonic() - start


def memory_mb() -> tuple[float, float]:
    """PSS of the product without the ranks, and of the ranks, in MB."""
    ours = ranks = 0.0
    for process in with_children([*processes.marked(runfile.home()), *_supervisor()]):
        try:
            pss = process.memory_full_info().pss / 1e6
            trains = is_rank(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        ours, ranks = (ours, ranks + pss) if trains else (ours + pss, ranks)
    return ours, ranks


def with_children(found: Iterable[psutil.Process]) -> list[psutil.Process]:
    """These and all that they have started, each once.

    Some bear no mark: PostgreSQL's backends write what `ps` shows over their environment.
    """
    family: dict[int, psutil.Process] = {}
    for process in found:
        with suppress(psutil.NoSuchProcess):
            for one in [process, *process.children(recursive=True)]:
                family.setdefault(one.pid, one)
    return [*family.values()]


def is_rank(process: psutil.Process) -> bool:
    """Whether it trains, and is none of those that ranks start: writers and holders."""
    return "DRYDOCK_RANK" in process.environ()


def _supervisor() -> list[psutil.Process]:
    return [psutil.Process(json.loads(runfile.path().read_text())["pid"])]


if __name__ == "__main__":
    sys.exit(main())
