"""What was saved again and did not change, although it is trained. Imports no torch."""

from __future__ import annotations

from itertools import groupby

from runtime.checkpoint.manifest import Part
from runtime.checkpoint.store import Finding
from runtime.image import CHUNK_BYTES, Piece, Table

_ALL = (
    "step {step} holds what step {before} held of all that is trained: either nothing is learnt, "
    "or what is saved is not what is trained"
)
_SOME = (
    "step {step} holds what step {before} held, and the rest of what is trained has changed: no "
    "gradient reaches them, or none is applied, or what is saved is not what is trained"
)


def unchanged(part: Part, before: Part) -> frozenset[str]:
    """The trained tensors that are in `part` as they were in one of an earlier step, as far as the
    hashes of chunks can tell: those of which all the chunks that hold nothing else are the same, or
    else every chunk. Small ones beside others that changed are not seen.

    Nothing where the two cannot be compared: of one step, or with another table.
    """
    table, old = part.table, before.table
    if part.step <= before.step or (table.pieces, table.frozen, table.trained) != (
        old.pieces, old.frozen, old.trained,
    ):  # fmt: skip
        return frozenset()
    same = [new == old for new, old in zip(part.hashes, before.hashes, strict=True)]
    return frozenset(
        piece.name for piece in _trained(table) if all(same[chunk] for chunk in _telling(piece))
    )


def findings(part: Part, before: Part, names: frozenset[str]) -> list[Finding]:
    """One for each file in which such tensors begin."""
    trained = _trained(part.table)
    what = _ALL if len(names) == len(trained) else _SOME
    stale = sorted((p for p in trained if p.name in names), key=lambda piece: piece.offset)
    return [
        Finding(
            file,
            part.rank,
            tuple(piece.name for piece in pieces),
            what.format(step=part.step, before=before.step),
        )
        for file, pieces in groupby(stale, lambda p: part.file_of(p.offset // CHUNK_BYTES))
    ]


def _trained(table: Table) -> list[Piece]:
    """Weights and what optimizers keep of them. A helper may hold what never changes."""
    return [
        piece
        for piece in table.pieces
        if piece.bytes
        and table.frozen <= piece.offset < table.trained
        and not piece.name.startswith(".helpers.")
    ]


def _telling(piece: Piece) -> range:
    """The chunks that hold nothing else, or else all in which it lies."""
    end = piece.offset + piece.bytes
    own = range(-(-piece.offset // CHUNK_BYTES), end // CHUNK_BYTES)
    return own or range(piece.offset // CHUNK_BYTES, -(-end // CHUNK_BYTES))
