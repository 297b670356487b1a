"""What a planned move of a replica and a warm spare cost those that train: gaps between commits.

    python benchmarks/standby.py [--times 10] [--replicas 4] [--options '{"width": 1152}']

Moves one replica after another to a new process, each as soon as it is level; then has a warm spare
take the place of a replica that is killed. All in one run, whose sample ledger and states must be
whole at its end: else its exit status is 1. The targets: a move pauses the job for at most a step
and 0.5 s; a spare is in full service within 5 s of the kill. Each worst is compared with them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from runtime.torture import launch  # noqa: E402 - the path must be set first
from runtime.torture.ledger import audit  # noqa: E402
from runtime.torture.watch import Watch  # noqa: E402

PATIENCE_S = 120.0
CALM_STEPS = 20
PAUSE_S = 0.5  # beside the step that a move may cost
SERVICE_S = 5.0


@dataclass(frozen=True)
class Figures:
    """What a run found."""

    replicas: int
    steps: int
    step_s: float  # median
    pauses_s: Sequence[float]  # by a move
    rescues_s: Sequence[float]  # the gap by a kill
    services_s: Sequence[float]  # from a kill to the spare's first step
    lost: int  # samples
    duplicated: int
    states: int  # that the replicas ended with: one, if all is well
    problems: Sequence[str]  # of the sample ledger, and of replicas that crashed

    @property
    def whole(self) -> bool:
        """Nothing was lost, nothing trained on twice, and all ended well with one state."""
        return self.states == 1 and not (self.lost or self.duplicated or self.problems)


class Job:
    """A training job that can be waited for."""

    def __init__(self, fleet: launch.Fleet) -> None:
        self.fleet = fleet
        self.watch = Watch(fleet.folder)
        self._settled = False

    def start(self, replica: int, standby: str = "") -> launch.Rank:
        rank = self.fleet.start(replica, standby=standby)
        self.watch.follow(replica, rank.placement)
        return rank

    def settle(self, steps: int) -> None:
        """Let all end at this number of steps."""
        self._settled = True
        self.fleet.settle(steps)

    def unwell(self) -> list[str]:
        """Of each present replica that did not come to the job's end: how it ended."""
        found = []
        for rank in self.fleet.ranks.values():
            told = bool(self.watch.find("ended", rank.placement))
            if any(rank.codes) or not told:
                found.append(
                    f"replica {rank.replica} ended with {rank.codes}"
                    + ("" if told else " and without the last step")
                )
        return found

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for it. Raises SystemExit when it takes too long, or when a replica ends of which
        nobody wanted that."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            fallen = [] if self._settled else self.fleet.ended()
            if fallen:
                first = fallen[0]
                raise SystemExit(
                    f"replica {first.replica} ended with {first.codes} before this: {what}"
                )
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
        figures = measure(Job(fleet), options.times)
    print("\n".join(report(figures)))
    sys.exit(0 if figures.whole else 1)


def measure(job: Job, times: int) -> Figures:
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
    job.settle(steps)
    job.until(lambda: len(fleet.ended()) == fleet.replicas, "all have ended")
    job.watch.poll()
    present = {rank.placement for rank in fleet.ranks.values()}
    events = {  # who moved away ended before the others, as it should
        placement: [e for e in own if e.what != "ended" or placement in present]
        for placement, own in job.watch.events.items()
    }
    found = audit(events, steps)
    ends = {e.data["digest"] for e in job.watch.find("ended", *present)}
    return Figures(
        replicas=fleet.replicas,
        steps=steps,
        step_s=job.median_step_s(),
        pauses_s=pauses,
        rescues_s=rescues,
        services_s=services,
        lost=found.lost,
        duplicated=found.duplicated,
        states=len(ends),
        problems=[*job.unwell(), *(str(problem) for problem in found.problems)],
    )


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


def report(found: Figures) -> Iterator[str]:
    """In words, each beside its target."""
    times, step_ms = len(found.pauses_s), f"{1000 * found.step_s:6.0f} ms"
    yield (
        f"{times} moves, {times} kills with a warm spare, {found.replicas} replicas, "
        f"{found.steps} steps"
    )
    yield f"step                    median {step_ms}"
    yield told("pause by a move", found.pauses_s, found.step_s + PAUSE_S)
    yield told("gap by a kill", found.rescues_s)
    yield told("kill to full service", found.services_s, SERVICE_S)
    samples = "MISSED" if found.lost or found.duplicated else "kept"
    yield (
        f"samples                 {found.lost} lost, {found.duplicated} duplicated  "
        f"(both 0: {samples})"
    )
    yield f"states at the end       {'equal' if found.states == 1 else 'DIFFER'}"
    yield from found.problems


def told(what: str, seconds: Sequence[float], target_s: float | None = None) -> str:
    worst = max(seconds)
    line = (
        f"{what:23} median {1000 * statistics.median(seconds):6.0f} ms, "
        f"worst {1000 * worst:6.0f} ms"
    )
    if target_s is None:
        return line
    return f"{line}  (<= {1000 * target_s:.0f} ms: {'kept' if worst <= target_s else 'MISSED'})"


if __name__ == "__main__":
    main()
