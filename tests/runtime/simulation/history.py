"""What the job has come to, as one who sees everything knows it, and what must never happen to it.

Every commit and every durable grant passes through here. Raises Violation; changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.replica.record import Record


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Gradient:
    """One shard's gradient: of which step, computed by whom from which state."""

    shard: int
    step: int
    state: str  # digest before the step
    placement: str


@dataclass(frozen=True)
class RunRecord:
    """A step's reduced gradient."""

    step: int
    epoch: int
    parts: tuple[Gradient, ...]
    marked: bool = False  # whoever follows is to show what it holds after it


@dataclass(frozen=True, eq=False)
class State:
    """All that was trained: the last step, on top of a state before it."""

    step: int
    digest: str
    made: RunRecord | None
    before: State | None

    def after(self, made: RunRecord) -> State:
        told = [self.digest, *(f"{part.shard} {part.placement}" for part in made.parts)]
        digest = hashlib.blake2b("\n".join(told).encode(), digest_size=6).hexdigest()
        return State(made.step, digest, made, self)

    def path(self) -> list[State]:
        """From the first step on."""
        found: list[State] = []
        state: State | None = self
        while state is not None and state.made is not None:
            found.append(state)
            state = state.before
        return found[::-1]


BLANK = State(-1, "blank", None, None)


class Holder(Protocol):
    """A living replica, as the invariants see it."""

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> State: ...

    def counts(self, *, as_member: bool) -> bool:
        """The coordinator hears it, and if that is asked for holds it for a member."""


class History:
    """The one line of states that all who train are on."""

    def __init__(self, shards: int, min_replicas: int, *, drops: bool) -> None:
        self.line: list[State] = []  # by step
        self.grants: dict[int, Record] = {}
        self.newest = Record(job="")
        self.strays = 0  # steps that one made alone, when the others had gone on without it
        self._all = set(range(shards))
        self._min_replicas = min_replicas
        self._drops = drops
        self._superseded: set[str] = set()  # placements whose place another has taken
        self._former: dict[int, Record] = {}  # granted before a record was lost
        self._renumbered = False

    def granted(self, record: Record, living: Collection[Holder]) -> None:
        """An epoch is durable, and nobody was told yet."""
        if self._renumbered:
            self._former |= self.grants
            self.grants.clear()
            self._superseded.clear()
        self._require(
            record.epoch > max(self.grants, default=0),
            f"epoch {record.epoch} of {record.members} comes after {list(self.grants)}",
        )
        self._require(
            len(record.members) >= self._min_replicas,
            f"epoch {record.epoch} has {record.members}, fewer than {self._min_replicas}",
        )
        returned = self._superseded.intersection(record.members.values())
        self._require(not returned, f"epoch {record.epoch} is granted to {returned}, long replaced")
        self._superseded.update(record.superseded)
        self._check_plan(record.grant)
        self.grants[record.epoch] = self.newest = record
        self._renumbered = False
        states = [holder.state for holder in living if holder.name in record.members.values()]
        self._require(
            all(state.step <= record.step for state in states),
            f"epoch {record.epoch} begins at {record.step}, members hold {sorted_steps(states)}",
        )
        holding = [state for state in states if state.step == record.step]
        if holding:
            self._go_on_from(holding[0], record, living)

    def entered(self, who: Holder, epoch: int) -> None:
        """A replica is about to train in this epoch."""
        grant = self.grants.get(epoch) or self._former.get(epoch)
        members = grant.members if grant else {}
        self._require(who.name in members.values(), f"{who.name} enters epoch {epoch} of {members}")
        known = [BLANK, *self.line][who.state.step + 1 : who.state.step + 2]
        self._require(
            epoch < self.newest.epoch or [who.state.digest] == [state.digest for state in known],
            f"{who.name} enters epoch {epoch} with another state of step {who.state.step}",
        )

    def took_over(self, who: Holder, made: RunRecord) -> State:
        """A replica is about to apply a step that a peer made; returns the state that follows.

        Who was cut off may take over what the others have given up: it is seen when it enters.
        """
        self._check_whole(who, made)
        return self._known(who.state.after(made))

    def committed(self, who: Holder, made: RunRecord) -> State:
        """A member is about to apply a step that it made; returns the state that follows."""
        self._check_whole(who, made)
        state = self._known(who.state.after(made))
        if state.step < len(self.line) and state is self.line[state.step]:
            return state
        on_top = who.state.digest == (self.line[-1].digest if self.line else BLANK.digest)
        if on_top and made.epoch == self.newest.epoch:
            self.line.append(state)
        else:
            self._check_stray(who, made)
        return state

    def forget_record(self) -> None:
        """The coordinator's memory is lost: what it grants from now on may bear old numbers."""
        self._renumbered = True

    def ended(self, record: Record) -> None:
        """All members were let go."""
        self.newest = record

    def _go_on_from(self, state: State, record: Record, living: Collection[Holder]) -> None:
        """All after this state is given up: only what nobody within reach holds."""
        path = state.path()
        kept = common(path, self.line)
        given_up = self.line[kept:]
        if given_up:
            as_member = not record.grant["begins"]
            left = [h for h in living if h.state in given_up and h.counts(as_member=as_member)]
            self._require(
                not left,
                f"epoch {record.epoch} gives up steps from {kept} on, which "
                f"{[h.name for h in left]} hold",
            )
        if not record.grant["begins"]:
            self._require(len(path) == kept, f"steps from {kept} on are another history's")
        self.line = path

    def _known(self, state: State) -> State:
        at_line = self.line[state.step] if state.step < len(self.line) else None
        return at_line if at_line is not None and at_line.digest == state.digest else state

    def _check_stray(self, who: Holder, made: RunRecord) -> None:
        """A member that the others had already to go on without may have got its last sum: that
        step is its own, and it can make no second one."""
        before = self.line[made.step - 1] if 0 < made.step <= len(self.line) else None
        told = f"{who.name} made step {made.step} of epoch {made.epoch} of its own"
        self._require(
            (before.digest if before else BLANK.digest) == who.state.digest,
            f"{told} upon a history that is not the job's",
        )
        self._require(
            who.name not in self.newest.members.values(),
            f"{told}, and is a member of epoch {self.newest.epoch}",
        )
        since = [grant for epoch, grant in self.grants.items() if epoch > made.epoch]
        self._require(bool(since), f"{told} in the newest epoch")
        self._require(
            not any(grant.grant["begins"] for grant in since), f"{told}; the job had begun anew"
        )
        self.strays += 1

    def _check_whole(self, who: Holder, made: RunRecord) -> None:
        summed = [part.shard for part in made.parts]
        missing = self._all - set(summed)
        self._require(
            len(summed) == len(set(summed)) and (self._drops or not missing),
            f"step {made.step} summed shards {summed}",
        )
        origins = {(part.step, part.state) for part in made.parts}
        self._require(
            origins == {(made.step, who.state.digest)},
            f"step {made.step} upon {who.state.digest} sums gradients of {origins}",
        )

    def _check_plan(self, grant: Mapping[str, Any]) -> None:
        parts = [*grant["held"].values(), *grant["assign"].values()]
        given = [shard for part in parts for shard in part]
        self._require(
            sorted([*given, *grant["dropped"]]) == sorted(self._all),
            f"epoch {grant['epoch']} gives out shards {sorted(given)}, drops {grant['dropped']}",
        )
        self._require(self._drops or not grant["dropped"], f"drops {grant['dropped']}")

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Violation(otherwise)


def common(one: Sequence[State], other: Sequence[State]) -> int:
    """How many steps two histories share."""
    shared = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine.digest != theirs.digest:
            break
        shared += 1
    return shared


def sorted_steps(states: Collection[State]) -> list[int]:
    return sorted(state.step for state in states)
