"""What happens to a job in simulation: deaths, silence, partitions, lost disks, and their end.

Draws all it does from the schedule's seed. Judges nothing. Never runs two coordinators at once, nor
lets a past member wake up after the record was lost: membership does not claim to withstand these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.runtime.simulation.fleet import Fleet
from tests.runtime.simulation.replica import Replica

FAULTS_S = 10.0
MAX_REPLICAS = 5
MAX_STANDBYS = 2


class Chaos:
    """Does things to a fleet, and undoes them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.clock = fleet.clock
        self.draw = fleet.clock.random
        self.lost_record = False
        self.stopping = False  # one was told to stop, and so all
        self.leaving = False  # some were told to end, and are brought back
        self._undo: list[Callable[[], None]] = []
        self._isolates_from = 0.0  # when the coordinator may be cut off again

    def rage(self, only: Sequence[str]) -> None:
        """A few faults, some at the same moment; of these kinds, if any is named."""
        kinds: list[Callable[[], None]] = [getattr(self, name) for name in only] or [
            *(self.kill, self.kill, self.kill, self.freeze, self.freeze, self.cut, self.cut),
            *(self.isolate, self.isolate, self.slow_down, self.part_peers, self.break_group),
            *(self.tear, self.tear, self.grow, self.grow, self.stand_by, self.stop, self.leave),
            *(self.kill_coordinator, self.kill_coordinator, self.freeze_coordinator),
            self.isolate_coordinator,
            *(self.fill_disk, self.die_writing),
        ]
        moments = [self.draw.uniform(0.0, FAULTS_S) for _ in range(self.draw.randint(1, 4))]
        for _ in range(self.draw.randint(1, 8)):
            moment = self.draw.choice(moments) + self.draw.choice((0.0, 0.0, 0.01, 0.1, 0.5, 2.0))
            self.clock.at(moment, self.draw.choice(kinds))
        self.clock.run(self.clock.now + FAULTS_S + 3.0)
        if not only and self.draw.random() < 0.15:
            self._lose_record()

    def mend(self) -> None:
        """All that is not dead runs and is reached, and there is a coordinator."""
        self.clock.note("--- peace ---")
        while self._undo:
            self._undo.pop(0)()
        self._restart_coordinator()

    # --- replicas -------------------------------------------------------------------------------

    def kill(self) -> None:
        for victim in self._some():
            self.fleet.end(victim, silently=self.draw.random() < 0.3)
            if self.draw.random() < 0.5:
                keeper = self.fleet.coordinator
                keeper.after(self.draw.uniform(0.0, 1.0), victim, keeper.hear_exit, victim)
            self._replace_later(victim, 0.7)

    def freeze(self) -> None:
        for victim in self._some():
            victim.freeze()
            self._later(self.draw.choice((0.3, 1.5, 3.0, 10.0)), victim.thaw)
            self._replace_later(victim, 0.3)

    def cut(self) -> None:
        for victim in self._some():
            self.clock.note("%s is cut off", victim.name)
            self.fleet.network.cut(victim)

    def isolate(self) -> None:
        """From the coordinator, in one direction or both."""
        lasts = self.draw.choice((0.3, 1.5, 3.0, 6.0, 10.0))
        for victim in self._some():
            there, back = (victim.name, "coordinator"), ("coordinator", victim.name)
            for way in self.draw.choice(([there], [back], [there, back], [there, back])):
                self.fleet.network.block(*way)
                self._later(lasts, self.fleet.network.heal, *way)
            self._replace_later(victim, 0.3)

    def slow_down(self) -> None:
        """What it says and hears takes long."""
        for victim in self._some():
            self.fleet.network.lags[victim.name] = self.draw.choice((0.2, 1.0))
            self._later(5.0, self.fleet.network.lags.pop, victim.name, None)

    def part_peers(self) -> None:
        living = self.fleet.living()
        if len(living) > 1:
            one, other = (victim.name for victim in self.draw.sample(living, 2))
            self.fleet.network.block(one, other)
            lasts = self.draw.choice((0.3, 2.0, 8.0, 60.0))
            self._later(lasts, self.fleet.network.heal, one, other)

    def break_group(self) -> None:
        for victim in self._some():
            self.clock.note("%s is cut off from its peers", victim.name)
            victim.break_group()

    def tear(self) -> None:
        """One loses the coordinator in the moment in which a sum fails at another."""
        members = [replica for replica in self.fleet.living() if replica.group is not None]
        if len(members) > 1:
            one, other = self.draw.sample(members, 2)
            self.clock.note("%s is torn from %s and from the coordinator", one.name, other.name)
            self.fleet.network.cut(one)
            other.break_group()

    def grow(self) -> None:
        number = max((replica.number for replica in self.fleet.replicas), default=0) + 1
        if number < MAX_REPLICAS and not self.stopping:
            self.fleet.start(number)

    def stand_by(self) -> None:
        """A spare, or one that takes over from a replica that is well."""
        living = self.fleet.living()
        if len([r for r in living if r.member.standby]) < MAX_STANDBYS and not self.stopping:
            number = self.draw.choice([replica.number for replica in living] or [0])
            self.fleet.start(number, standby=self.draw.choice(("spare", "migrate")))

    def stop(self) -> None:
        """The script of one ends the job."""
        members = [replica for replica in self.fleet.living() if replica.member.epoch]
        if members and not self.leaving and self.draw.random() < 0.3:
            self.stopping = True
            victim = self.draw.choice(members)
            self.clock.note("%s is to stop", victim.name)
            victim.wish_stop()

    def leave(self) -> None:
        """SIGTERM of some, or of all, of a job that goes on."""
        members = [replica for replica in self.fleet.living() if replica.member.epoch]
        if self.stopping:
            return
        self.leaving = True
        for victim in self.draw.sample(members, self.draw.randint(0, len(members))):
            self.clock.note("%s is to leave", victim.name)
            victim.wish_leave()

    # --- the coordinator ------------------------------------------------------------------------

    def kill_coordinator(self) -> None:
        self.fleet.end(self.fleet.coordinator)
        self._later(self.draw.choice((0.1, 1.0, 3.0, 15.0)), self._restart_coordinator)

    def freeze_coordinator(self) -> None:
        keeper = self.fleet.coordinator
        keeper.freeze()
        self._later(self.draw.choice((0.5, 1.5, 4.0, 9.0, 15.0)), keeper.thaw)

    def isolate_coordinator(self) -> None:
        """From all, in both directions; time enough between two such for all to come back."""
        if self.clock.now < self._isolates_from:
            return
        lasts = self.draw.choice((0.5, 1.5, 4.0, 9.0, 15.0))
        self._isolates_from = self.clock.now + lasts + 5.0
        self.clock.note("the coordinator is cut off for %s s", lasts)
        for replica in self.fleet.living():
            for way in ((replica.name, "coordinator"), ("coordinator", replica.name)):
                self.fleet.network.block(*way)
                self._later(lasts, self.fleet.network.heal, *way)

    def fill_disk(self) -> None:
        self.fleet.disk.full = True
        self._later(self.draw.choice((0.5, 4.0)), self._empty_disk)

    def die_writing(self) -> None:
        self.fleet.disk.dies = self.draw.choice(("before", "after"))
        self._later(5.0, self._restart_coordinator)

    def decide(self) -> None:
        """A person hears that members of an unknown epoch wait, and has their word taken."""
        if self.fleet.coordinator.coordinator.claims:
            self.fleet.end(self.fleet.coordinator)
            self.fleet.start_coordinator(any_claim=True)

    def _lose_record(self) -> None:
        """The coordinator's machine is gone, at times with members. No past member is about: one
        that wakes up after a record was lost may be taken for a member."""
        self.mend()
        self.clock.run(self.clock.now + self.draw.uniform(5.0, 15.0))
        acts = self.draw.sample((self.kill, self.cut, self.break_group), self.draw.randint(0, 2))
        for act in acts:
            act()
        self.fleet.end(self.fleet.coordinator)
        self.fleet.disk.lose()
        self.fleet.history.forget_record()
        self.lost_record = True
        self.clock.run(self.clock.now + self.draw.uniform(0.0, 3.0))

    def _restart_coordinator(self) -> None:
        self.fleet.disk.dies = ""
        if not self.fleet.coordinator.alive:
            self.fleet.start_coordinator()

    def _empty_disk(self) -> None:
        self.fleet.disk.full = False

    # --- helpers --------------------------------------------------------------------------------

    def _some(self) -> list[Replica]:
        """Mostly one of the living, at times several or all."""
        living = self.fleet.living()
        count = self.draw.choice((1, 1, 1, 1, 2, len(living)))
        return self.draw.sample(living, min(count, len(living)))

    def _later(self, delay: float, undo: Callable[..., Any], *given: Any) -> None:
        """Undo a fault after a while, or when all is mended."""
        done: list[bool] = []

        def once() -> None:
            if not done:
                done.append(True)
                undo(*given)

        self._undo.append(once)
        self.clock.at(delay, once)

    def _replace_later(self, victim: Replica, chance: float) -> None:
        """An agent may start another in its place."""
        if self.draw.random() < chance:
            self.clock.at(self.draw.uniform(0.2, 8.0), self._replace, victim)

    def _replace(self, victim: Replica) -> None:
        if victim.holds_its_number() and not victim.left and not self.stopping:
            self.fleet.start(victim.number)
