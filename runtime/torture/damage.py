"""Checkpoints damaged on purpose: each way, in one folder of checkpoints.

What is damaged is put in the place of what was there: files that are shared with other checkpoints
stay whole in those. Each function's docstring says what becomes of the checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

from runtime.checkpoint import store
from runtime.checkpoint.draft import Draft
from runtime.checkpoint.manifest import MANIFEST

#: Damages a checkpoint; is given an older one, and returns those that are damaged.
Damage = Callable[[Path, Path, random.Random], list[Path]]


def flip(newest: Path, _older: Path, chance: random.Random) -> list[Path]:
    """a bit of a data file is another"""
    path = chance.choice(data_files(newest))
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    put(path, data)
    return [newest]


def truncate(newest: Path, _older: Path, chance: random.Random) -> list[Path]:
    """a data file is cut short"""
    path = chance.choice(data_files(newest))
    data = path.read_bytes()
    put(path, data[: chance.randrange(len(data))])
    return [newest]


def swap(newest: Path, older: Path, chance: random.Random) -> list[Path]:
    """two data files are swapped"""
    pairs = list(combinations(data_files(newest), 2))
    pairs = [(one, other) for one, other in pairs if one.read_bytes() != other.read_bytes()]
    damaged = [newest]
    if not pairs:  # it has one alone: with that of the older checkpoint
        pairs = [(one, older / one.name) for one in changed(newest, older)]
        damaged.append(older)
    one, other = chance.choice(pairs)
    first, second = one.read_bytes(), other.read_bytes()
    put(one, second)
    put(other, first)
    return damaged


def stale(newest: Path, older: Path, chance: random.Random) -> list[Path]:
    """a data file holds what it held in the one before"""
    path = chance.choice(changed(newest, older))
    put(path, (older / path.name).read_bytes())
    return [newest]


def delete(newest: Path, _older: Path, chance: random.Random) -> list[Path]:
    """a file is missing"""
    chance.choice([*data_files(newest), *sorted(newest.glob("*.json"))]).unlink()
    return [newest]


def half(newest: Path, _older: Path, _chance: random.Random) -> list[Path]:
    """the manifest is half"""
    data = (newest / MANIFEST).read_bytes()
    put(newest / MANIFEST, data[: len(data) // 2])
    return [newest]


DAMAGES: dict[str, Damage] = {
    one.__name__: one for one in (flip, truncate, swap, stale, delete, half)
}


def poison(checkpoint: Path) -> Path:
    """Put one in its place that verifies, and of which each weight is NaN; where it is."""
    manifest = store.manifest_of(checkpoint)
    parts = {part.rank: store.read(checkpoint, part.rank) for part in manifest.parts}
    store.remove(checkpoint)
    draft = Draft(checkpoint.parent, manifest.step, manifest.save, len(parts), {**manifest.facts})
    try:
        for rank, staged in parts.items():
            for piece in staged.table.pieces:
                if piece.name.startswith(".model") and "float" in piece.dtype:
                    ones = b"\xff" * piece.bytes  # of any width: no number
                    staged.buffer[piece.offset : piece.offset + piece.bytes] = ones
            draft.write(rank, staged.table, memoryview(staged.buffer))
        draft.publish()
    finally:
        draft.close()
    return draft.path


def data_files(checkpoint: Path) -> list[Path]:
    """Those with bytes in them."""
    return sorted(path for path in checkpoint.glob("*.bin") if path.stat().st_size)


def changed(newest: Path, older: Path) -> list[Path]:
    """The files that hold something else than in the older one: what is trained."""
    return [
        path
        for path in data_files(newest)
        if (older / path.name).exists() and (older / path.name).read_bytes() != path.read_bytes()
    ]


def put(path: Path, data: bytes | bytearray) -> None:
    """Replace a file by these bytes with an atomic rename.

    Another checkpoint that shares the old file by a hard link keeps it.
    """
    draft = path.with_suffix(".new")
    draft.write_bytes(data)
    draft.replace(path)
