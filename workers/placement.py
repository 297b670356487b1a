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
    #: The model of its cards and how many answer; "" and 0 where its report has not come yet.
    gpu_model: str = ""
    gpus: int = 0

    def has(self, gpus: int) -> bool:
        """Whether it has so many cards; one whose report has not come is not known to lack any."""
        return not self.gpus or self.gpus >= gpus


@dataclass(frozen=True)
class Wanted:
    """What the node that was lost had, and what the replica needs of the next."""

    gpu_model: str = ""
    gpus: int = 0
    rack: str = ""


@dataclass(frozen=True)
class Choice:
    """The node that was chosen, and why."""

    node_id: str
    name: str
    reason: str


#: Nothing is asked of the node.
_ANY = Wanted()


def choose_spare(
    candidates: Sequence[Candidate], peers_racks: Sequence[str], wanted: Wanted = _ANY
) -> Choice | None:
    """The node for a replica that lost its own; None if none that it fits on is free.

    Cards of the same model first: a job's replicas go at the pace of the slowest. Never beside a
    coordinator while there is another. Spares first, for that is what they are for. By failure
    domain, the rack that holds the fewest of the job's other replicas, so that one rack's fault
    takes as few as possible; by locality, the rack that it comes from; then by name, so that the
    same fleet gives the same answer.
    """
    fitting = [c for c in candidates if c.has(wanted.gpus)]
    if not fitting:
        return None
    crowd = Counter(peers_racks)
    best = min(
        fitting,
        key=lambda c: (
            bool(wanted.gpu_model and c.gpu_model and c.gpu_model != wanted.gpu_model),
            c.coordinates,
            not c.spare,
            crowd[c.rack],
            c.rack != wanted.rack,
            c.name,
        ),
    )
    kind = "spare" if best.spare else "free node"
    reason = (
        f"{best.name} is a {kind} in rack {best.rack or 'unknown'}, "
        f"which holds {crowd[best.rack]} of the job's other replicas"
    )
    if wanted.gpu_model and best.gpu_model == wanted.gpu_model:
        reason += f"; its cards are of the same model, {best.gpu_model}"
    elif wanted.gpu_model and best.gpu_model:
        reason += f"; none has cards of the same model: these are {best.gpu_model}"
    return Choice(best.node_id, best.name, reason)


def choose_nodes(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Nodes for the `count` replicas of a starting job, spread over racks.

    A spare is taken only where the common nodes do not suffice. Fewer than `count` if there are
    not enough.
    """
    common = _spread([c for c in candidates if not c.spare])
    return (common + _spread([c for c in candidates if c.spare]))[:count]


def choose_near(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Nodes for one replica on `count` of them, in as few racks as possible: each step goes over
    all of them, and any one that fails takes the others along.

    A spare is taken only where the common nodes do not suffice. Fewer than `count` if there are
    not enough.
    """
    crowd = Counter(c.rack for c in candidates if not c.spare)
    near = sorted(candidates, key=lambda c: (c.spare, -crowd[c.rack], c.rack, c.name))
    return near[:count]


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
