"""One seed, one schedule: a job, faults at random, then peace, in which it must train again.

`run(seed)` raises Failed with a trace if an invariant broke or the job did not come back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from runtime.replica import link
from tests.runtime.simulation.chaos import Chaos
from tests.runtime.simulation.clock import Clock
from tests.runtime.simulation.fleet import Fleet
from tests.runtime.simulation.history import Violation

RECOVERY_S = 120.0
PERSON_S = 30.0  # how long it takes a person to decide about a lost record
PARTED_S = 30.0
TRACE_LINES = 300


class Failed(AssertionError):
    """A schedule went wrong; says which and how."""


@dataclass(frozen=True)
class Outcome:
    """What came of a schedule."""

    steps: int
    epochs: int
    strays: int
    recovery_s: float  # from the end of the faults until all trained together


def run(seed: int, *, only: Sequence[str] = (), lines: int = TRACE_LINES) -> Outcome:
    """Play one schedule. Raises Failed with the last `lines` of what happened.

    `only`: the faults that may happen, by their names in Chaos; none means all.
    """
    try:
        return _play(Clock(seed, tracing=False), only)
    except Exception:
        clock = Clock(seed, tracing=True)  # the same again, aloud
        try:
            _play(clock, only)
        except Exception as error:
            told = "\n".join(clock.trace[-lines:] if lines else [])
            raise Failed(f"seed {seed}: {error!r}\n{told}") from error
        raise


def _play(clock: Clock, only: Sequence[str]) -> Outcome:
    with _simulated(clock):
        fleet = Fleet(clock)
        try:
            chaos = Chaos(fleet)
            for number in range(fleet.world):
                clock.at(clock.random.uniform(0.0, 2.0), fleet.start, number)
            clock.run(clock.now + clock.random.uniform(1.0, 5.0))
            recovery_s = 0.0
            for _ in range(clock.random.choice((1, 1, 2))):
                chaos.rage(only)
                recovery_s = _recover(fleet, chaos)
            history = fleet.history
            return Outcome(len(history.line), history.newest.epoch, history.strays, recovery_s)
        finally:
            for process in (*fleet.replicas, fleet.coordinator):
                process.end()


def steps_while_two_are_parted(seed: int, world: int) -> tuple[int, int, set[int]]:
    """So many train, then the last two do not reach each other for half a minute: how many steps
    are made meanwhile, how many epochs are granted, and who trains a minute after the network is
    whole again."""
    clock = Clock(seed, tracing=False)
    with _some_that_train(clock, world) as fleet:
        one, other = (replica.name for replica in fleet.living()[-2:])
        before, epoch = len(fleet.history.line), fleet.history.newest.epoch
        fleet.network.block(one, other)
        clock.run(clock.now + PARTED_S)
        made = len(fleet.history.line) - before
        granted = fleet.history.newest.epoch - epoch
        fleet.network.heal(one, other)
        clock.run(clock.now + 2 * PARTED_S, fleet.trains_together)
        return made, granted, set(fleet.history.newest.members)


def epochs_of_a_doubt(seed: int, round_trip_s: float) -> list[set[int]]:
    """Three train in a network in which an answer takes so long, and two of them do not hear each
    other for as long as makes a doubt: the members of all epochs until they train again."""
    clock = Clock(seed, tracing=False)
    with _some_that_train(clock) as fleet:
        one, other = (replica.name for replica in clock.random.sample(fleet.living(), 2))
        distance_s = round_trip_s / 4  # from each to the middle of the network
        fleet.network.lags |= dict.fromkeys([r.name for r in fleet.living()], distance_s)
        before = fleet.history.newest.epoch
        fleet.network.block(one, other)
        clock.run(clock.now + PARTED_S, lambda: fleet.coordinator.coordinator.doubt.open)
        fleet.network.heal(one, other)
        clock.run(clock.now + PARTED_S, lambda: fleet.history.newest.epoch > before)
        clock.run(clock.now + PARTED_S, fleet.trains_together)
        grants = fleet.history.grants.items()
        return [set(record.members) for epoch, record in grants if epoch > before]


def epochs_of_a_leave(seed: int) -> tuple[list[set[int]], int, int]:
    """Three train, and one is told to end: the members of all epochs until it is back, which one it
    was, and how often anybody was severed from its peers."""
    clock = Clock(seed, tracing=True)
    with _some_that_train(clock) as fleet:
        before = fleet.history.newest.epoch
        victim = clock.random.choice(fleet.living())
        victim.wish_leave()
        clock.run(clock.now + PARTED_S, lambda: victim.left)
        clock.run(clock.now + PARTED_S, lambda: len(fleet.history.newest.members) == 3)
        grants = fleet.history.grants.items()
        made = [record for epoch, record in grants if epoch > before]
        severed = sum("is severed" in line for line in clock.trace)
        return [set(record.members) for record in made], victim.number, severed


@contextmanager
def _some_that_train(clock: Clock, world: int = 3) -> Iterator[Fleet]:
    """A job of so many, once all train; they end with it."""
    with _simulated(clock):
        fleet = Fleet(clock, world=world)
        try:
            for number in range(fleet.world):
                fleet.start(number)
            clock.run(clock.now + PARTED_S, fleet.trains_together)
            yield fleet
        finally:
            for process in (*fleet.replicas, fleet.coordinator):
                process.end()


def _recover(fleet: Fleet, chaos: Chaos) -> float:
    """After the last fault. Returns how long the job took to recover; Violation if too long."""
    chaos.mend()
    ending = [replica for replica in fleet.living() if replica.ending]
    if not ending and not (chaos.stopping and fleet.has_ended()):
        _start_enough(fleet, anew=chaos.stopping)
    if chaos.lost_record:
        fleet.clock.at(PERSON_S, chaos.decide)

    def done() -> bool:
        have_ended = bool(ending) and not any(replica.alive for replica in ending)
        over = have_ended or (chaos.stopping and fleet.has_ended())
        return over or fleet.trains_together()

    began = fleet.clock.now
    if not fleet.clock.run(began + RECOVERY_S, done):
        raise Violation(f"after {RECOVERY_S} s: {fleet.describe()}")
    return fleet.clock.now - began


def _start_enough(fleet: Fleet, *, anew: bool) -> None:
    """So many that the job can go on; at times all that it began with, and always if it begins
    `anew`: those that are there may still hear that it has ended."""
    began = bool(fleet.disk.read().epoch)
    for number in range(fleet.world):
        running = {replica.number for replica in fleet.living() if not replica.member.standby}
        few = anew or not began or len(running) < fleet.min_replicas
        if number not in running and (few or fleet.clock.random.random() < 0.5):
            fleet.start(number)


@contextmanager
def _simulated(clock: Clock) -> Iterator[None]:
    """The real Link reads this clock; what the real code logs is in the trace, in other words."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with patch.object(link, "time", clock):
            yield
    finally:
        logging.disable(before)
