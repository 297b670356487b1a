"""One job in simulation: its replicas, its coordinator, its network, and what it has in common.

Starts and ends processes; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.replica.record import Record
from tests.runtime.simulation.clock import Clock, Process
from tests.runtime.simulation.group import Group
from tests.runtime.simulation.history import BLANK, History, State
from tests.runtime.simulation.keeper import Disk, Keeper
from tests.runtime.simulation.network import Network
from tests.runtime.simulation.replica import Replica


class Fleet:
    """Everything of one schedule. Its size and pace follow from the clock's seed."""

    def __init__(self, clock: Clock, world: int = 0) -> None:
        """`world`: how many begin, and one suffices; 0: as the seed says."""
        draw = clock.random
        self.clock = clock
        self.network = Network(clock)
        self.network.slowest_s = draw.choice((0.003, 0.02, 0.06))
        self.world = world or draw.randint(1, 4)
        self.min_replicas = 1 if world else draw.randint(1, self.world)
        self.shards = draw.randint(5, 8)
        self.drops = draw.random() < 0.2
        self.lease_s = draw.choice((2.0, 4.0, 10.0))
        self.transfer_s = draw.choice((0.1, 3.0))
        self._shard_s = draw.choice((0.1, 0.2, 0.5))
        self.history = History(self.shards, self.min_replicas, drops=self.drops)
        self.disk = Disk("j", self._advanced)
        self.replicas: list[Replica] = []  # all that were ever started
        self.saved: State = BLANK  # the newest checkpoint
        self.held: dict[str, State] = {}  # by holders, each on a replica's node
        self._starts: dict[int, int] = {}
        self._groups: dict[tuple[object, ...], Group] = {}
        self.coordinator = Keeper(self)
        clock.note("%s", {k: v for k, v in vars(self).items() if isinstance(v, int | float)})

    # --- processes ------------------------------------------------------------------------------

    def living(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.alive]

    def start(self, number: int, standby: str = "") -> None:
        """Another start of this number; an older one may still run."""
        start = self._starts[number] = self._starts.get(number, 0) + 1
        replica = Replica(self, number, f"{standby[:1] or 'r'}{number}.{start}", standby)
        self.clock.note("%s is started", replica.name)
        self.replicas.append(replica)

    def replace(self, number: int) -> None:
        """What an agent does that sees a replica end."""
        if number not in [r.number for r in self.living() if not r.member.standby]:
            self.start(number)

    def start_coordinator(self, *, any_claim: bool = False) -> None:
        self.coordinator = Keeper(self, any_claim=any_claim)

    def end(self, process: Process, *, silently: bool = False) -> None:
        """A process ends; silently: its machine does."""
        if not process.alive:
            return
        self.clock.note("%s has ended%s", process.name, " silently" if silently else "")
        process.end()
        self.network.died(process, silently=silently)
        if isinstance(process, Replica) and not silently:
            process.break_group()

    # --- what replicas ask of each other --------------------------------------------------------

    def at(self, address: str) -> Replica:
        return next(replica for replica in self.replicas if replica.name == address)

    def reaches(self, replica: Replica, names: Sequence[str]) -> bool:
        others = [self.at(name) for name in names]
        return all(o.alive and self.network.both_ways(replica.name, o.name) for o in others)

    def group_of(self, epoch: int, names: Sequence[str]) -> Group:
        key = (epoch, *names)
        if key not in self._groups:
            self._groups[key] = Group(self.network, [self.at(name) for name in names])
        return self._groups[key]

    def shard_s(self) -> float:
        """How long one shard takes to compute."""
        return self._shard_s * self.clock.random.uniform(0.8, 1.2)

    # --- what may be said of the whole ----------------------------------------------------------

    def trains_together(self) -> bool:
        """All that live are members of the newest epoch, or spares, and have made steps in it."""
        newest = self.history.newest
        training = [r for r in self.living() if r.member.standby != "spare"]
        return (
            bool(training)
            and sorted(newest.members.values()) == sorted(r.name for r in training)
            and all(r.epoch_entered == newest.epoch for r in training)
            and all(r.state.step >= newest.step + 2 for r in training)
        )

    def has_ended(self) -> bool:
        return not self.living()

    def describe(self) -> str:
        """For whoever wonders why they do not."""
        keeper = self.coordinator.coordinator
        peers = {p.placement: p.phase for p in keeper.peers.values()}
        living = {r.name: (r.member.epoch, r.state.step) for r in self.living()}
        return (
            f"coordinator at epoch {keeper.record.epoch} with {peers}, {keeper.admission.staging}; "
            f"living {living}"
        )

    def _advanced(self, record: Record) -> None:
        """The record is durable, and nobody knows yet."""
        self.clock.note(
            "record: epoch %s of %s at step %s", record.epoch, record.members, record.step
        )
        if record.grant:
            self.history.granted(record, self.living())
        elif not record.members:
            self.history.ended(record)
