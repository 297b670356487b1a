"""The JSON of a checkpoint says the same after reading, and nothing else passes for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint.manifest import Manifest, Part, layout_of, opened, sealed
from runtime.image import CHUNK_BYTES, Damaged, Piece, Table

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def part_of(size: int, frozen: int = 0) -> Part:
    piece = Piece(name=".w", dtype="uint8", shape=[size], offset=0, bytes=size)
    table = Table({"$tensor": 0}, (piece,), size, frozen, 0)
    hashes = tuple(f"{chunk:032x}" for chunk in range(table.chunks))
    return Part(step=3, save="s", rank=1, table=table, hashes=hashes, files=layout_of(table, 1))


@given(size=st.integers(0, 5 * CHUNK_BYTES), frozen=st.integers(0, 3))
def test_a_part_is_read_as_it_was_written(size: int, frozen: int) -> None:
    part = part_of(size, min(frozen * CHUNK_BYTES, size // CHUNK_BYTES * CHUNK_BYTES))

    assert Part.from_json(part.to_json(), "it") == part


@given(found=st.dictionaries(st.text(), JSON), where=st.integers(0), bit=st.integers(0, 7))
def test_no_flipped_bit_passes(found: dict[str, Any], where: int, bit: int) -> None:
    data = bytearray(sealed({**found, "format": "drydock-checkpoint", "version": 3}))
    data[where % len(data)] ^= 1 << bit

    with pytest.raises(Damaged, match=r"^it "):
        opened(bytes(data), "it")


@given(data=st.binary() | JSON.map(lambda one: json.dumps(one).encode()))
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(Damaged, match=r"^it is no checkpoint's JSON"):
        opened(data, "it")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"format": "other"}, "has the format 'other'"),
        ({"version": 2}, "is of format version 2, this Drydock reads 3"),
        ({"chunk_bytes": 4096}, "chunks of 4096 bytes"),
        ({"files": []}, "its files do not hold each of 3 chunks once"),
        ({"chunks": ["00"]}, "its files do not hold each of 3 chunks once"),
        ({"pieces": [{"name": "w"}]}, "is missing or wrong"),
        ({"step": None}, "is missing or wrong"),
    ],
)
def test_a_part_with_a_flaw_is_refused_for_it(changed: dict[str, Any], said: str) -> None:
    found = json.loads(part_of(3 * CHUNK_BYTES).to_json())
    del found["self"]

    with pytest.raises(Damaged, match=said):
        Part.from_json(sealed({**found, **changed}), "it")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"parts": [{"rank": 0}]}, "is missing or wrong"),
        ({"digest": "00"}, "its digest is not that of its parts"),
        ({"facts": 3}, "is missing or wrong"),
    ],
)
def test_a_manifest_with_a_flaw_is_refused_for_it(changed: dict[str, Any], said: str) -> None:
    found = json.loads(Manifest(step=3, save="s", parts=(), facts={}).to_json())
    del found["self"]

    with pytest.raises(Damaged, match=said):
        Manifest.from_json(sealed({**found, **changed}), "it")
