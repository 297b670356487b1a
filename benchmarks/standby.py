"""What a planned move of a replica and a warm spare cost those that train: gaps between commits.

    python benchmarks/standby.py [--times 10] [--replicas 4] [--options '{"width": 1152}']

Moves one replica after another to a new process, each as soon as it is level; then has a warm spare
take the place of a replica that is killed. All in one run, whose sample ledger and states must be
whole at its end. The targets: a move pauses the job for at most a step and 0.5 s; a spare is in
full service within 5 s of the kill.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from runtime.torture import launch  # noqa: E402 - the path must be set first
from runtime.torture.ledger import audit  # noqa: E402
from runtime.torture.watch import Watch  # noqa: E402

PATIENCE_S = 120.0
CALM_STEPS = 20


class Job:
    """A training job that can be waited for."""

    def __init__(self, fleet: launch.Fleet) -> None:
        self.fleet = fleet
        self.watch = Watch(fleet.folder)

    def start(self, replica: int, standby: str = "") -> launch.Rank:
        rank = self.fleet.start(replica, standby=standby)
        self.watch.follow(replica, rank.placement)
        return rank

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise SystemExit(f"not within {PATIENCE_S:g} s: {what}")
            time.sleep(0.01)
            self.watch.poll()

    def train_on(self, steps: int = CALM_STEPS) -> None:
        goal = self.watch.newest() + steps
        self.until(lambda: self.watch.newest() >= goal, f"step {goal}")

    def in_service(self, rank: launch.Rank) -> float:
        """When it first committed a step together with the others."""
        self.until(lambda: rank.placement in self.watch.commits, f"{rank.placement} trains")
        return self.watch.find("commit", rank.placement)[0].at

    def longest_gap_s(self, placement: str, since: float, until: float) -> float:
        at = [event.at for event in self.watch.find("commit", placement)]
        return max(b - a for a, b in pairwise(at) if b > since and a < until)

    def median_step_s(self) -> float:
        gaps = [
            b.at - a.at
            for placement in self.watch.events
            for a, b in pairwise(self.watch.find("commit", placement))
        ]
        return statistics.median(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="moves, and as many kills")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--options", type=json.loads, default={}, help="of the torture's script")
    parser.add_argument("--mode", default="reproducible")
    options = parser.parse_args()
    script = launch.Script(
        Path(launch.__file__).with_name("script.py"), options=options.options, mode=options.mode
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        launch.Fleet(Path(folder) / "run", script, options.replicas) as fleet,
    ):
        print_figures(Job(fleet), options.times)


def print_figures(job: Job, times: int) -> None:
    fleet = job.fleet
    fleet.start_coordinator()
    job.until(fleet.listening, "the coordinator listens")
    for replica in range(fleet.replicas):
        job.start(replica)
    job.train_on()
    witness = fleet.ranks[0].placement
    pauses, rescues, services = [], [], []
    for number in range(times):
        replica = 1 + number % (fleet.replicas - 1)
        pauses.append(move(job, replica, witness))
        gap, service = rescue(job, replica, witness)
        rescues.append(gap)
        services.append(service)
    steps = job.watch.newest() + 2 * CALM_STEPS
    fleet.settle(steps)
    job.until(lambda: len(fleet.ended()) == fleet.replicas, "all have ended")
    job.watch.poll()
    present = {rank.placement for rank in fleet.ranks.values()}
    events = {  # who moved away ended before the others, as it should
        placement: [e for e in own if e.what != "ended" or placement in present]
        for placement, own in job.watch.events.items()
    }
    found = audit(events, steps, drops=False)
    ends = {e.data["digest"] for e in job.watch.find("ended", *present)}
    step_s = job.median_step_s()
    print(
        f"{times} moves, {times} kills with a warm spare, {fleet.replicas} replicas, {steps} steps"
    )
    print(f"step                    median {1000 * step_s:6.0f} ms")
    show("pause by a move", pauses, f"target {1000 * (step_s + 0.5):.0f} ms")
    show("gap by a kill", rescues, "")
    show("kill to full service", services, "target 5000 ms")
    print(f"samples                 {found.lost} lost, {found.duplicated} duplicated")
    print(f"states at the end       {'equal' if len(ends) == 1 else 'DIFFER'}")
    for problem in found.problems:
        print(problem)


def move(job: Job, replica: int, witness: str) -> float:
    """Move a replica to a new process. Returns the witness's longest gap, in seconds."""
    leaver = job.fleet.ranks[replica]
    started = time.monotonic()
    mover = job.start(replica, standby="migrate")
    entered = job.in_service(mover)
    job.until(lambda: leaver.process.poll() == 0, "the leaver has ended")
    job.train_on()
    return job.longest_gap_s(witness, started, entered)


def rescue(job: Job, replica: int, witness: str) -> tuple[float, float]:
    """Kill a replica beside a warm spare. Returns the witness's longest gap, and how long it took
    until the spare trained, in seconds."""
    dead = job.fleet.ranks[replica]
    spare = job.start(replica, standby="spare")
    job.until(lambda: "ready" in job.fleet.status()["peers"].values(), "the spare is level")
    job.train_on()
    killed = time.monotonic()
    dead.process.kill()
    entered = job.in_service(spare)
    job.train_on()
    return job.longest_gap_s(witness, killed, entered), entered - killed


def show(what: str, seconds: list[float], target: str) -> None:
    told = (
        f"median {1000 * statistics.median(seconds):6.0f} ms, worst {1000 * max(seconds):6.0f} ms"
    )
    print(f"{what:23} {told}  {target}".rstrip())


if __name__ == "__main__":
    main()
