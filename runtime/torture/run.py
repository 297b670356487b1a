"""One run from its first step to its last: left alone, or disturbed fault by fault.

Every wait has a deadline and says what it waited for. Never judges what it sees: that is for the
report.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path

from runtime.torture import ending, holder, storage
from runtime.torture.faults import Fault
from runtime.torture.injector import order_file
from runtime.torture.kinds import ANY, AWAY, DONOR, KINDS, Kind, Order
from runtime.torture.launch import Fleet, Rank
from runtime.torture.run_record import Death, RunRecord
from runtime.torture.watch import Watch
from runtime.torture.writer import all_ended

PATIENCE_S = 60.0
POLL_S = 0.01
REJOINED_STEPS = 3  # commits with all members before a replica counts as back
LAST_STEPS = 10  # undisturbed steps at the end, beside
LAST_S = 1.5  # as many as this time takes, so that all hear of the end in time
AWAY_S = 0.3  # how long the coordinator stays dead, if something else is the fault
FROM_OUTSIDE = (ANY, DONOR, AWAY)  # moments that the victim cannot know
MAX_DEATHS = 8  # of replicas that nobody touched; then there is no point in going on


class Hung(RuntimeError):
    """What was waited for did not come."""


class Run:
    """One run: its processes, the faults that were made, and what was found wrong."""

    def __init__(self, fleet: Fleet, patience_s: float = PATIENCE_S) -> None:
        self.fleet = fleet
        self.watch = Watch(fleet.folder)
        self.patience_s = patience_s
        self.made: list[RunRecord] = []
        self.deaths: list[Death] = []
        self.problems: list[str] = []
        self.steps: int | None = None  # once known
        self.damaged: set[tuple[Path, int]] = set()  # checkpoints, as `storage.mark` has them
        self.flipped: set[str] = set()  # digests of states in holders' memory that we have damaged
        self._doomed: set[str] = set()  # placements that may end
        self._sent_away: set[str] = set()  # of those who end of their own will
        self._struck: set[str] = set()  # placements that a fault was aimed at, and is not over
        self._coordinator_struck = False  # it may end
        self._finishing = False

    def start(self) -> None:
        """Start all, and wait until they train."""
        self._start_coordinator()
        self.start_holders()
        for replica in range(self.fleet.replicas):
            self.start_replica(replica)

    def settle(self, steps: int) -> None:
        """The run has this many steps."""
        self.steps = steps
        self.fleet.settle(steps)

    def settle_soon(self, at_least: int) -> None:
        """End the run a little later than now, and not before so many steps."""
        commits = self.watch.find("commit", self.fleet.ranks[0].placement)[-50:]
        step_s = (commits[-1].at - commits[0].at) / max(1, len(commits) - 1)
        last = LAST_STEPS + int(LAST_S / max(step_s, 1e-3))
        self.settle(max(at_least, self.watch.newest() + 1 + last))

    def finish(self) -> None:
        """Wait until all have ended at the same edge."""
        self._finishing = True
        while not self._all_ended():
            before = self.watch.newest()
            self.until(
                functools.partial(self._moved_on, before),
                f"the next step after {before}, or the end at {self.steps} steps",
            )
        self.until(lambda: all_ended(self.fleet.folder), "the writers have ended")
        self.problems += [f"at the end, {one}" for one in storage.what_is_unsound(self)]

    def disturb(self, fault: Fault) -> None:
        """Make one fault and see to its victims. Raises Hung."""
        calm = self._veterans() if fault.hasty else None
        self.await_steps(fault.calm_steps, f"calm before fault {fault.number}", calm)
        made = RunRecord(fault, self.watch.newest())
        self.made.append(made)
        if storage.stored(self, made):
            return
        kind = KINDS[fault.kind]
        targets = self._strike(made, kind)
        if kind.on_coordinator or fault.phase == AWAY:
            self._restore_coordinator(made, kind)
        if kind.breaks or fault.first is not None:
            self._await_survivors(made)
        self._end(made, kind, targets)

    def recover(self) -> list[int]:
        """Wait until all replicas train together. Returns the places in `made` of the faults that
        are over with it. Raises Hung."""
        over = [place for place, made in enumerate(self.made) if not made.back_at]
        numbers = [self.made[place].fault.number for place in over]
        what = f"all replicas train together, after faults {numbers}"
        self.until(self._together, what)
        self.await_steps(REJOINED_STEPS, what)
        now = time.monotonic()
        for place in over:
            self.made[place].back_at = now
        self._struck.clear()
        return over

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait; replace whoever dies meanwhile. Raises Hung, and SystemExit if told to end."""
        deadline = time.monotonic() + self.patience_s
        while True:
            ending.heed()
            self.watch.poll()
            self._look_after_the_dead()
            if condition():
                return
            if time.monotonic() > deadline:
                raise Hung(f"not within {self.patience_s:g} s: {what}")
            time.sleep(POLL_S)

    # --- a fault, from order to end -------------------------------------------------------------

    def _strike(self, made: RunRecord, kind: Kind) -> list[Rank]:
        """Give the orders and wait until all blows have fallen. Returns who was struck."""
        fault, ranks = made.fault, self.fleet.ranks
        targets = [ranks[replica] for replica in fault.targets]
        if fault.phase == "sync":
            targets = [self._newcomer(made, struck=True)]
        elif fault.phase == DONOR:
            newcomer = self._newcomer(made)
            self.until(
                lambda: bool(self.watch.find("phase", newcomer.placement)),
                f"{_name(newcomer)} takes the state over, fault {fault.number}",
            )
            made.struck.clear()  # timed from the second blow on
        elif fault.phase == AWAY:
            self._coordinator_struck = True
            os.kill(self._coordinator_pid(), signal.SIGKILL)
        if fault.phase in FROM_OUTSIDE and kind.signal:
            self._signal(made, kind, targets)
            return targets
        for rank in targets if fault.phase != "sync" else []:
            self.order(made, rank)
        if fault.phase == "regroup":
            self._kill(made, ranks[_first(fault)])
        made.struck += self.await_blows(made, targets)
        return targets

    def await_blows(
        self, made: RunRecord, targets: list[Rank], who: Callable[[Rank], str] = storage.of_rank
    ) -> list[float]:
        """Until who was ordered to strike has; when each did. `who`: see `order`."""
        placements = [who(rank) for rank in targets]

        def blows() -> list[float]:
            found = self.watch.find("struck", *placements)
            return [event.at for event in found if event.data["fault"] == made.fault.number]

        self.until(
            lambda: len(blows()) == len(targets),
            f"replicas {[rank.replica for rank in targets]} come to {made.fault.phase} and are "
            f"struck there, fault {made.fault.number}",
        )
        return blows()

    def _newcomer(self, made: RunRecord, *, struck: bool = False) -> Rank:
        """Kill the fault's first victim, and when the others train on start it anew."""
        dead = self.fleet.ranks[_first(made.fault)]
        self._kill(made, dead)
        self._await_survivors(made)
        self.reap(dead)
        rank = self.start_replica(dead.replica, made if struck else None)
        made.returning.add(rank.placement)
        return rank

    def order(
        self, made: RunRecord, rank: Rank, who: Callable[[Rank], str] = storage.of_rank
    ) -> None:
        """Have this replica strike, when it comes to the fault's phase; or `who` is with it, by the
        name for its orders."""
        kind = KINDS[made.fault.kind]
        self._aim(made, kind, [rank])
        order = Order(
            fault=made.fault.number,
            kind=kind.name,
            phase=ANY if made.fault.phase in FROM_OUTSIDE else made.fault.phase,
            delay_s=made.fault.delay_s,
            seconds=made.fault.seconds,
            pid=self._coordinator_pid() if kind.on_coordinator else 0,
            rank=made.fault.rank if who is storage.of_rank else 0,
            replica=rank.replica,
            other=-1 if made.fault.other is None else made.fault.other,
        )
        path = order_file(self.fleet.folder, who(rank))
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(asdict(order)))
        draft.replace(path)

    def _signal(self, made: RunRecord, kind: Kind, targets: list[Rank]) -> None:
        """Strike from outside, wherever the victims happen to be."""
        self._aim(made, kind, targets)
        time.sleep(made.fault.delay_s)
        pids = [rank.processes[made.fault.rank].pid for rank in targets]
        made.struck.append(time.monotonic())
        for pid in [self._coordinator_pid()] if kind.on_coordinator else pids:
            os.kill(pid, kind.signal)

    def _aim(self, made: RunRecord, kind: Kind, targets: list[Rank]) -> None:
        self._coordinator_struck |= kind.on_coordinator
        if kind.target != "replica":
            return
        placements = {rank.placement for rank in targets}
        self._struck |= placements
        made.hurt |= placements
        if made.fault.other is not None:
            made.hurt.add(self.fleet.ranks[made.fault.other].placement)
        if kind.drops:
            made.gone |= placements
        if kind.ends is not None:
            self._doomed |= placements
        if kind.ends == 0:
            self._sent_away |= placements

    def doom(self, made: RunRecord, ranks: list[Rank]) -> None:
        """They will be killed, all of them."""
        placements = {rank.placement for rank in ranks}
        self._doomed |= placements
        made.hurt |= placements
        made.gone |= placements

    def _kill(self, made: RunRecord, rank: Rank) -> None:
        self.doom(made, [rank])
        made.struck.append(time.monotonic())
        rank.processes[made.fault.rank].kill()

    def _end(self, made: RunRecord, kind: Kind, targets: list[Rank]) -> None:
        """See to those who were struck, each in the way the plan says."""
        fault = made.fault
        if fault.ending in ("woken", "killed") and kind.name == "stop":
            time.sleep(fault.seconds)
        for rank in [] if kind.on_coordinator else targets:
            if fault.ending == "woken":
                rank.processes[fault.rank].send_signal(signal.SIGCONT)
                made.returning.add(rank.placement)
            elif fault.ending == "killed":
                self._kill_silent(rank)
            elif fault.ending == "stays":
                made.returning |= made.hurt
        for rank in list(self.fleet.ranks.values()):
            if rank.placement in self._doomed:
                self.reap(rank)
                made.returning.discard(rank.placement)
                made.returning.add(self.start_replica(rank.replica).placement)

    def _kill_silent(self, rank: Rank) -> None:
        """The blow fell before; this is only its end."""
        self._doomed.add(rank.placement)
        rank.kill()

    def reap(self, rank: Rank) -> None:
        """Wait until a replica that was doomed is dead, and kill what it started.

        A replica that was told to end must exit with status 0. Of any other, one rank must have
        died of SIGKILL. If not, that is noted among the problems. Raises Hung if the replica does
        not die in time.
        """
        self.until(lambda: rank.ended, f"{_name(rank)} is dead")
        rank.end()
        if rank.placement in self._sent_away:
            if any(rank.codes):
                self.problems.append(f"{_name(rank)}, told to end, ended with {rank.codes}")
        elif -signal.SIGKILL not in rank.codes:
            self.problems.append(f"{_name(rank)} ended with {rank.codes} before it could be killed")

    def _restore_coordinator(self, made: RunRecord, kind: Kind) -> None:
        """Wake it or start it anew, once it was away for a while."""
        coordinator = self.fleet.coordinator
        assert coordinator is not None  # noqa: S101 - it was started first
        time.sleep(made.fault.seconds if kind.on_coordinator else AWAY_S)
        if kind.on_coordinator and made.fault.ending == "woken":
            coordinator.send_signal(signal.SIGCONT)
            self._coordinator_struck = False
        else:
            self.until(lambda: coordinator.poll() is not None, "the coordinator is dead")
            self._start_coordinator()
        if kind.on_coordinator:
            self.until(self._all_connected, "all living replicas found the coordinator again")
            made.over_at = time.monotonic()

    # --- waiting --------------------------------------------------------------------------------

    def await_steps(self, steps: int, what: str, only: list[Rank] | None = None) -> None:
        """All replicas make so many steps, or these."""
        base = self.watch.newest()
        ranks = list(self.fleet.ranks.values()) if only is None else only
        self.until(lambda: all(self._step_of(rank) >= base + steps for rank in ranks), what)

    def _together(self) -> bool:
        everyone = list(range(self.fleet.replicas))
        last = [self.watch.commits.get(rank.placement) for rank in self.fleet.ranks.values()]
        return all(
            event is not None
            and event.data["members"] == everyone
            and event.data["epoch"] == self._epoch()
            for event in last
        )

    def _veterans(self) -> list[Rank]:
        """The present ranks that were members already."""
        return [r for r in self.fleet.ranks.values() if r.placement in self.watch.commits]

    def _await_survivors(self, made: RunRecord) -> None:
        """Whoever was not harmed trains on, in an epoch without those that are gone."""
        left = [rank for rank in self._veterans() if rank.placement not in made.hurt]
        self.until(
            lambda: all(self._went_on(rank, made) for rank in left),
            f"replicas {[rank.replica for rank in left]} train on without "
            f"{list(made.fault.victims)}, fault {made.fault.number}",
        )

    def _went_on(self, rank: Rank, made: RunRecord) -> bool:
        grants = self.watch.find("granted", rank.placement, since=min(made.struck))
        epochs = [
            int(event.data["epoch"])
            for event in grants
            if made.gone.isdisjoint(event.data["members"].values())
        ]
        return bool(epochs) and self._epoch_of(rank) >= epochs[0]

    def _epoch(self) -> int:
        return max((self._epoch_of(rank) for rank in self.fleet.ranks.values()), default=0)

    def _epoch_of(self, rank: Rank) -> int:
        event = self.watch.commits.get(rank.placement)
        return int(event.data["epoch"]) if event else 0

    def _step_of(self, rank: Rank) -> int:
        event = self.watch.commits.get(rank.placement)
        return int(event.data["step"]) if event else -1

    def _all_connected(self) -> bool:
        alive = [r.replica for r in self._veterans() if r.placement not in self._doomed]
        try:
            peers: Collection[str] = self.fleet.status().get("peers", {})
        except OSError:  # not listening yet
            return False
        return all(str(replica) in peers for replica in alive)

    def _moved_on(self, step: int) -> bool:
        return self._all_ended() or self.watch.newest() > step

    def _all_ended(self) -> bool:
        return len(self.fleet.ended()) == self.fleet.replicas

    # --- processes ------------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        self.fleet.start_coordinator()
        self._coordinator_struck = False
        self.until(self.fleet.listening, "the coordinator listens")

    def _coordinator_pid(self) -> int:
        assert self.fleet.coordinator is not None  # noqa: S101 - it was started first
        return self.fleet.coordinator.pid

    def start_holders(self) -> None:
        self.fleet.start_holders()
        for replica in range(self.fleet.replicas) if self.fleet.saves_s else []:
            if (name := holder.name_of(replica)) not in self.watch.events:
                self.watch.follow(replica, name)
        self.await_holders()

    def await_holders(self) -> None:
        self.until(self.fleet.hold, "the holders listen")

    def start_replica(self, replica: int, struck: RunRecord | None = None) -> Rank:
        """A new process; it has its order from the fault by which it is `struck`."""
        prepare = None if struck is None else functools.partial(self.order, struck)
        rank = self.fleet.start(replica, prepare)
        self.watch.follow(replica, rank.placement)
        return rank

    def _look_after_the_dead(self) -> None:
        coordinator = self.fleet.coordinator
        code = None if coordinator is None else coordinator.poll()
        if code is not None and not self._coordinator_struck:
            raise Hung(f"the coordinator, untouched, ended with {code}; the run is given up")
        for rank in self.fleet.ended():
            if rank.placement in self._doomed or (self._finishing and not any(rank.codes)):
                continue
            code = next((code for code in rank.codes if code), 0)
            targeted = rank.placement in self._struck
            self._doomed.add(rank.placement)
            self.deaths.append(Death(rank.replica, rank.placement, code, targeted))
            if len(self.deaths) > MAX_DEATHS:
                raise Hung(f"{len(self.deaths)} replicas died of themselves; the run is given up")
            if not self._finishing:
                rank.end()
                self.start_replica(rank.replica)


def _first(fault: Fault) -> int:
    assert fault.first is not None  # noqa: S101 - the plan's promise for such a phase
    return fault.first


def _name(rank: Rank) -> str:
    return f"replica {rank.replica} ({rank.placement})"
