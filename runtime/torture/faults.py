"""Which fault, when, to whom: a pure function of the seed, so that a run can be broken again the
same way. Never looks at the clock or at the run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from runtime.torture.kinds import (
    ANY,
    AWAY,
    COPY,
    DISKS,
    DONOR,
    KINDS,
    LOADING,
    MOMENTS,
    RECEIVE,
    SAVING,
    STORING,
    TO_OBJECTS,
    WRITING,
    Ending,
    Kind,
)

T = TypeVar("T")

#: How far into a phase a strike may fall, in seconds.
REACH_S = {
    "forward": 0.003,
    "backward": 0.003,
    "reduce": 0.003,
    "apply": 0.0005,
    "optimizer": 0.001,
    "regroup": 0.01,
    "sync": 0.15,
    DONOR: 0.1,
    AWAY: 0.3,
    COPY: 0.002,
    **dict.fromkeys(LOADING, 0.02),
    **dict.fromkeys(WRITING, 0.002),
    RECEIVE: 0.0,  # a small state would have come whole by then
    **dict.fromkeys(DISKS, 0.1),
    ANY: 0.1,
}
#: Phases that only the death of a replica brings about, and that strike others: one must survive.
AFTER_A_DEATH = ("regroup", DONOR)
HASTE = 0.5  # how often a fault does not wait for the victims of the one before, if it need not
CALM_STEPS = (4, 12)  # commits of all replicas before the next fault


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of the plan."""

    number: int
    kind: str
    phase: str
    #: the replica that is killed to bring about the phase: regroup, sync, donor; of an outage the
    #: one that comes to it, or on whose node the holder does
    first: int | None
    targets: tuple[int, ...]  # who reads the order; for the coordinator: who strikes it
    ending: Ending
    delay_s: float
    seconds: float
    calm_steps: int
    hasty: bool  # made while the victims of the fault before it are still away
    rank: int = 0  # of each replica that is struck
    other: int | None = None  # whom the target is parted from

    @property
    def restarts(self) -> bool:
        """Whether the whole job is killed, and started again."""
        return KINDS[self.kind].target == "job" or self.phase in LOADING

    @property
    def victims(self) -> tuple[int, ...]:
        """The replicas that are harmed."""
        target = KINDS[self.kind].target
        struck = self.targets if target in ("replica", "job") else ()
        others = {one for one in (self.first, self.other) if one is not None}
        return tuple(sorted({*struck, *others}))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the plan is made from."""

    seed: int
    replicas: int
    kinds: tuple[str, ...] = tuple(KINDS)
    phases: tuple[str, ...] = MOMENTS
    at_once: int = 2
    ranks: int = 1  # of each replica
    network: bool = False  # the run has one of its own

    def __post_init__(self) -> None:
        if self.replicas < 2:
            raise ValueError("one replica alone has no survivors; give at least 2")
        if self.ranks > 1 and "cut" in self.kinds:
            raise ValueError(
                "cut: a rank that is cut off from the others of its replica ends, and so do "
                "they; give other kinds for replicas of several ranks"
            )
        for kind in self.kinds:
            if KINDS[kind].networked and not self.network:
                raise ValueError(f"{kind}: needs a network of the run's own, and there is none")
            if not self.phases_of(kind):
                more = phases_of(KINDS[kind], self.replicas + 1, self.phases)
                raise ValueError(
                    f"{kind} in {', '.join(self.phases)} is impossible with {self.replicas} "
                    f"replicas: give other phases, of {', '.join(KINDS[kind].phases)}"
                    + (", or one replica more, for one must survive" if more else "")
                )

    def phases_of(self, kind: str) -> tuple[str, ...]:
        return phases_of(KINDS[kind], self.replicas, self.phases)

    @property
    def stores(self) -> bool:
        """Whether the job must save, for one of these faults."""
        phases = {phase for kind in self.kinds for phase in self.phases_of(kind)}
        return any(KINDS[kind].stores for kind in self.kinds) or not phases.isdisjoint(STORING)


def phases_of(kind: Kind, replicas: int, phases: Sequence[str]) -> tuple[str, ...]:
    """Those of the phases in which this kind can strike and leave a survivor, if it leaves any."""
    possible = set(kind.phases)
    unharmed = replicas - kind.pairs
    if unharmed < 3:
        possible -= set(AFTER_A_DEATH)
    if unharmed < 2:
        possible.clear()
    return tuple(phase for phase in phases if phase in possible)


def plan(settings: Settings) -> Iterator[Fault]:
    """Faults without end. At least one replica is left alone by each of them, but for those that
    kill the whole job."""
    chance = random.Random(settings.seed)  # noqa: S311 - a plan, not a secret
    kinds = _deck(chance, [k for k in settings.kinds for _ in range(KINDS[k].share)])
    phases = {kind: _deck(chance, settings.phases_of(kind)) for kind in settings.kinds}
    before: Fault | None = None
    for number in itertools.count(1):
        kind = next(kinds)
        before = _fault(chance, settings, number, kind, next(phases[kind]), before)
        yield before


def each(settings: Settings) -> list[Fault]:
    """Every kind in each of its phases, once, none before the victims of the last are back."""
    chance = random.Random(settings.seed)  # noqa: S311 - a plan, not a secret
    pairs = [(kind, phase) for kind in settings.kinds for phase in settings.phases_of(kind)]
    return [
        _fault(chance, settings, number, kind, phase, None)
        for number, (kind, phase) in enumerate(pairs, 1)
    ]


def _fault(
    chance: random.Random,
    settings: Settings,
    number: int,
    name: str,
    phase: str,
    before: Fault | None,
) -> Fault:
    kind = KINDS[name]
    hasty = chance.random() < HASTE and _may_be_hasty(settings, kind, phase, before)
    away = before.victims if before is not None and hasty else ()
    order = [replica for replica in range(settings.replicas) if replica not in away]
    chance.shuffle(order)
    if phase in TO_OBJECTS:  # the first of all members alone saves there
        order.sort(key=lambda replica: replica != 0)
    most = min(settings.at_once, len(order) - 1) if kind.several else 1
    count = chance.choice((1, chance.randint(1, most)))
    first: int | None = None
    targets = tuple(order[:count])
    if phase == "sync":
        first, targets = order[0], tuple(order[:1])
    elif phase in AFTER_A_DEATH:
        first, targets = order[0], tuple(order[1 : 1 + min(count, settings.replicas - 2)])
    elif kind.target == "job":
        first = order[0] if phase in (COPY, *SAVING) else None
        targets = tuple(order)
    elif phase in LOADING:
        targets = tuple(order[:1])
    return Fault(
        number=number,
        kind=name,
        phase=phase,
        first=first,
        targets=tuple(sorted(targets)),
        ending=chance.choice(kind.endings),
        delay_s=0.0 if kind.blocks else round(chance.uniform(0, _reach_s(kind, phase)), 6),
        seconds=round(chance.uniform(*kind.seconds), 3),
        calm_steps=chance.randint(*CALM_STEPS),
        hasty=hasty,
        rank=chance.randrange(settings.ranks) if settings.ranks > 1 else 0,
        other=next(r for r in order if r not in (*targets, first)) if kind.pairs else None,
    )


def _reach_s(kind: Kind, phase: str) -> float:
    """A holder gives a state in as short a time as it was given it."""
    return REACH_S[RECEIVE if kind.target == "holder" else phase]


def _may_be_hasty(settings: Settings, kind: Kind, phase: str, before: Fault | None) -> bool:
    """Only behind a fault whose victims take a while, and if a survivor of both is left."""
    return (
        before is not None
        and not before.hasty
        and not before.restarts
        and not kind.stores
        and not kind.pairs
        and before.ending != "stays"
        and 0 < len(before.victims) < settings.replicas - 1
        and phase not in ("sync", *LOADING, *AFTER_A_DEATH)
    )


def _deck(chance: random.Random, cards: Sequence[T]) -> Iterator[T]:
    """Every card once, in random order, then all of them again."""
    while True:
        yield from chance.sample(cards, len(cards))
