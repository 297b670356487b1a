"""What was saved again and did not change, although it is trained. Imports no torch."""

from __future__ import annotations

from runtime.checkpoint.manifest import Part
from runtime.checkpoint.store import Finding, shortened
from runtime.image import CHUNK_BYTES, Piece

_ALL = (
    "step {step} holds what step {before} held of all that is trained: either nothing is learnt, "
    "or what is saved is not what is trained"
)
_SOME = (
    "step {step} holds what step {before} held, and the rest of what is trained has changed: no "
    "gradient reaches them, or none is applied (is their learning rate 0?), or what is saved is "
    "not what is trained"
)
#: Where weights lie in a state. What an optimizer or a helper keeps may stay for good reasons.
_WEIGHTS = ".model."


class Staleness:
    """Tells each weight that stays as it is once, and once that a whole state does, until one of
    them changes: what is told with each save would bury all else."""

    def __init__(self) -> None:
        self._told: frozenset[str] = frozenset()
        self._all_told = False

    def news(self, part: Part, before: Part | None) -> Finding | None:
        """What is to be told of a part, beside the one that was saved before."""
        if before is None or part.step <= before.step:
            return None
        table, old = part.table, before.table
        first, end = table.frozen // CHUNK_BYTES, table.trained // CHUNK_BYTES
        alike = (old.frozen, old.trained) == (table.frozen, table.trained)
        if alike and first < end and part.hashes[first:end] == before.hashes[first:end]:
            trained = _trained(part)
            # What an optimizer keeps may stay, and where the weights are not known that is all.
            if any(piece.name.startswith(_WEIGHTS) for piece in trained):
                told, self._all_told = self._all_told, True
                return None if told else _finding(part, before, trained, _ALL)
        self._all_told = False
        stale = unchanged(part, before)
        new = [piece for piece in stale if piece.name not in self._told]
        names = frozenset(piece.name for piece in stale)
        self._told = self._told | names if names else names
        return _finding(part, before, new, _SOME) if new else None


def unchanged(part: Part, before: Part) -> list[Piece]:
    """The trained weights that are as they were, as far as the hashes of chunks can tell: those of
    which all the chunks that hold nothing else are the same, if that is most of them, or else every
    chunk. Small ones beside others that changed are not seen; nothing is where the two parts lay
    what is trained out otherwise."""
    ours = _trained(part)
    if ours != _trained(before):
        return []
    weights = [piece for piece in ours if piece.name.startswith(_WEIGHTS)]
    return [
        piece
        for piece in weights
        if all(part.hashes[chunk] == before.hashes[chunk] for chunk in _telling(piece))
    ]


def _trained(part: Part) -> list[Piece]:
    """In the order in which they lie."""
    table = part.table
    pieces = [p for p in table.pieces if p.bytes and table.frozen <= p.offset < table.trained]
    return sorted(pieces, key=lambda piece: piece.offset)


def _telling(piece: Piece) -> range:
    """The chunks that hold nothing else, or else all in which it lies."""
    end = piece.offset + piece.bytes
    own = range(-(-piece.offset // CHUNK_BYTES), end // CHUNK_BYTES)
    if len(own) * CHUNK_BYTES * 2 >= piece.bytes:
        return own
    return range(piece.offset // CHUNK_BYTES, -(-end // CHUNK_BYTES))


def _finding(part: Part, before: Part, pieces: list[Piece], what: str) -> Finding:
    files = dict.fromkeys(part.file_of(piece.offset // CHUNK_BYTES) for piece in pieces)
    return Finding(
        shortened(tuple(files)),
        part.rank,
        tuple(piece.name for piece in pieces),
        what.format(step=part.step, before=before.step),
    )
