"""What was done to a run, and what the runner itself saw of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.torture.faults import Fault

#: In which epoch something was trained, and its step: what is later counts.
State = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The whole job was killed, and began anew."""

    fault: int
    ended: frozenset[str]  # the placements before it
    reached: int  # the newest step they had committed
    sound: tuple[State, ...]  # of which a checkpoint was left that verifies
    least: State  # what any replica could go on from, whichever disk was damaged
    spoiled: State  # the newest of what was held in memory, if that was damaged
    began: int  # the step that the job went on from
    refused: tuple[str, ...]  # what was told of checkpoints that do not verify
    unsound: tuple[str, ...]  # what does not verify though nothing had damaged it


@dataclass(frozen=True)
class Death:
    """A replica's process ended and nobody had killed it."""

    replica: int
    placement: str
    code: int
    targeted: bool  # a fault had struck it, but not one that ends a process


@dataclass
class RunRecord:
    """A fault that was made, and what the runner itself knows of it."""

    fault: Fault
    step: int  # the newest committed when it was ordered
    struck: list[float] = field(default_factory=list)  # when each blow fell, monotonic
    hurt: set[str] = field(default_factory=set)  # placements harmed by it
    gone: set[str] = field(default_factory=set)  # those of them that the others must give up
    returning: set[str] = field(default_factory=set)  # placements that come in place of those
    back_at: float = 0.0  # monotonic: all trained together again; 0: never
    over_at: float = 0.0  # monotonic: what a fault of no replica struck was well again; 0: unknown
    restart: Restart | None = None  # of the whole job
