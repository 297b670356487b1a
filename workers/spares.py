"""Which node takes a replica: pure functions from the nodes there are to a choice with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True)
class Candidate:
    """A free node, and what speaks for it."""

    node_id: str
    name: str
    rack: str
    spare: bool
    #: It runs a job's coordinator: a rank beside it would die with it.
    coordinates: bool = False


@dataclass(frozen=True)
class Choice:
    node_id: str
    name: str
    reason: str


def choose_spare(candidates: Sequence[Candidate], peers_racks: Sequence[str]) -> Choice | None:
    """The node for a replica that lost its own; None if none is free.

    Never beside a coordinator while there is another. Spares first, for that is what they are
    for; among them the rack that holds the fewest of the job's other replicas, so that one rack's
    fault takes as few as possible; then by name, so that the same fleet gives the same answer.
    """
    if not candidates:
        return None
    crowd = Counter(peers_racks)
    best = min(candidates, key=lambda c: (c.coordinates, not c.spare, crowd[c.rack], c.name))
    kind = "spare" if best.spare else "free node"
    reason = (
        f"{best.name} is a {kind} in rack {best.rack or 'unknown'}, "
        f"which holds {crowd[best.rack]} of the job's other replicas"
    )
    return Choice(best.node_id, best.name, reason)


def choose_nodes(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Nodes for the `count` replicas of a starting job, spread over racks.

    A spare is taken only where the common nodes do not suffice. Fewer than `count` if there are
    not enough.
    """
    common = _spread([c for c in candidates if not c.spare])
    return (common + _spread([c for c in candidates if c.spare]))[:count]


def choose_coordinator_node(
    candidates: Sequence[Candidate], ranks: Sequence[Candidate]
) -> Candidate:
    """Where the job's coordinator runs: beside no rank if a common node is free, so that one
    machine's death never takes both; otherwise beside the first rank."""
    taken = {rank.node_id for rank in ranks}
    free = [c for c in candidates if c.node_id not in taken and not c.spare]
    return min(free, key=lambda c: c.name) if free else ranks[0]


def _spread(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The same nodes, one of each rack in turn, by name within a rack."""
    by_rack: dict[str, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda c: c.name):
        by_rack.setdefault(candidate.rack, []).append(candidate)
    rounds = zip_longest(*(by_rack[rack] for rack in sorted(by_rack)))
    return [candidate for turn in rounds for candidate in turn if candidate is not None]
