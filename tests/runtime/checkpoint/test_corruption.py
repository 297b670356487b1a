"""Of a thousand random corruptions each is found, and named by its file, rank and tensors."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.checkpoint import store
from runtime.checkpoint.draft import Draft
from runtime.image import CHUNK_BYTES, Damaged
from tests.runtime.checkpoint.states import staged_at

Corrupt = Callable[[bytearray, bytearray, random.Random], bytearray | None]


def flip(data: bytearray, _other: bytearray, chance: random.Random) -> bytearray:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return data


def truncate(data: bytearray, _other: bytearray, chance: random.Random) -> bytearray:
    return data[: chance.randrange(len(data))]


def extend(data: bytearray, _other: bytearray, chance: random.Random) -> bytearray:
    return data + bytes(chance.randrange(1, 5000))


def zero_a_page(data: bytearray, _other: bytearray, chance: random.Random) -> bytearray:
    place = chance.randrange(len(data)) // 512 * 512
    data[place : place + 512] = bytes(b ^ 0x5A for b in data[place : place + 512])
    return data


def swap(_data: bytearray, other: bytearray, _chance: random.Random) -> bytearray:
    """With the same file of another rank, or of an older step: stale bytes."""
    return other


def delete(_data: bytearray, _other: bytearray, _chance: random.Random) -> None:
    return None


KINDS: list[Corrupt] = [flip, truncate, extend, zero_a_page, swap, delete]


def save(folder: Path, step: int) -> Path:
    """A checkpoint of two ranks, of which nothing is the same in two places."""
    draft = Draft(folder, step, f"save{step}", 2, {})
    for rank in (0, 1):
        staged = staged_at(10 * step + rank)
        staged.buffer[:8] = f"{step:04d}{rank:04d}".encode()
        draft.write(rank, staged.table, memoryview(staged.buffer))
    assert draft.publish()
    draft.close()
    return draft.path


def harmed(path: Path, before: bytes, after: bytes) -> set[str]:
    """Whose bytes of this file are not what they were."""
    _, rank, number = path.stem.split("-")
    part = store.part_of(path.parent, store.manifest_of(path.parent), int(rank))
    start = part.files[int(number)].first * CHUNK_BYTES
    longest = before.ljust(len(after), b"\0"), after.ljust(len(before), b"\0")
    changed = [start + at for at, (a, b) in enumerate(zip(*longest, strict=True)) if a != b]
    ends = sorted({*changed[:1], *changed[-1:]})
    return {
        piece.name
        for piece in part.table.pieces
        if any(piece.offset <= at < piece.offset + piece.bytes for at in ends)
    }


def is_named(found: store.Finding, path: Path, tensors: set[str]) -> bool:
    """Whether it says of whom this file is, and who in it is harmed."""
    whose = re.search(r"rank-(\d)", path.name)
    rank = int(whose[1]) if whose else None
    return found.file == path.name and found.rank == rank and tensors <= {*found.tensors}


@pytest.mark.parametrize("times", [20, pytest.param(170, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_corruption_is_found_and_its_file_rank_and_tensors_named(
    tmp_path: Path, kind: Corrupt, times: int
) -> None:
    chance = random.Random(kind.__name__)  # noqa: S311 - which bytes, not secrecy
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    files = sorted(p for p in newer.iterdir() if p.suffix in (".bin", ".json"))
    whole = {path: path.read_bytes() for path in files}
    missed = []

    for _ in range(times):
        path = chance.choice(files)
        other = chance.choice([older / path.name, newer / path.name.replace("0", "1", 1)])
        other = other if other.exists() and other != path else older / path.name
        corrupted = kind(bytearray(whole[path]), bytearray(other.read_bytes()), chance)
        after = corrupted or b""
        tensors = harmed(path, bytes(whole[path]), bytes(after)) if path.suffix == ".bin" else set()
        path.unlink()
        if corrupted is not None:
            path.write_bytes(corrupted)
        findings = store.verify(newer)
        named = [f for f in findings if is_named(f, path, tensors)]
        refused = [rank for rank in (0, 1) if store.verified(newer, rank) is None]
        missed += [] if named and refused else [(path.name, findings)]
        path.unlink(missing_ok=True)
        path.write_bytes(whole[path])

    assert missed == []
    assert store.verify(newer) == []


def test_a_folder_swapped_for_another_step_s_is_found(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    shutil.rmtree(newer)
    shutil.copytree(older, newer)

    with pytest.raises(Damaged, match="holds step 1: it was renamed"):
        store.read(newer)
