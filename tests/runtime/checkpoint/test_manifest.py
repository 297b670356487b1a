"""The JSON of a checkpoint says the same after reading, and nothing else passes for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint.manifest import (
    Manifest,
    OtherVersion,
    Part,
    PartHash,
    layout_of,
    opened,
    sealed,
)
from runtime.image import CHUNK_BYTES, Damaged, Piece, Table

WELL: dict[str, Any] = {
    "name": "rank-0.json", "rank": 0, "bytes": 3, "hash": "00", "digest": "0d",
}  # fmt: skip
OTHER = {**WELL, "name": "rank-1.json", "rank": 1}
FILE = {"name": "rank-1-0000.bin", "first": 0, "chunks": 3, "bytes": 3 * CHUNK_BYTES}
MORE = {"name": "x", "first": 9, "chunks": 0, "bytes": 0}
PIECE = {"name": ".w", "dtype": "float32", "shape": [6], "offset": 0, "bytes": 24}
ABSENT = object()
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


def test_a_flipped_bit_in_the_version_is_damage_and_no_other_version() -> None:
    data = sealed({"format": "drydock-checkpoint", "version": 3})

    with pytest.raises(Damaged, match=r"^it was changed after it was written") as error:
        opened(data.replace(b": 3", b": 7"), "it")

    assert not isinstance(error.value, OtherVersion)


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        (2, "it is older; take its weights out with the Drydock that wrote it"),
        (5, "read it with the Drydock that wrote it, or a later one"),
        ("3", "read it with the Drydock that wrote it, or a later one"),
    ],
)
def test_an_intact_file_of_another_version_is_said_with_what_reads_it(
    version: object, remedy: str
) -> None:
    with pytest.raises(OtherVersion, match=f"this Drydock reads 3 and 4: {remedy}"):
        opened(sealed({"format": "drydock-checkpoint", "version": version}), "it")


@given(data=st.binary() | JSON.map(lambda one: json.dumps(one).encode()))
def test_rubbish_is_refused(data: bytes) -> None:
    with pytest.raises(Damaged, match=r"^it is no checkpoint's JSON"):
        opened(data, "it")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"format": "other"}, "has the format 'other'"),
        ({"version": 2}, "is of format version 2, this Drydock reads 3 and 4"),
        ({"chunk_bytes": 4096}, "chunks of 4096 bytes"),
        ({"files": []}, "its files do not hold each of 3 chunks once"),
        ({"chunks": ["00"]}, "its files do not hold each of 3 chunks once"),
        ({"pieces": [{"name": "w"}]}, "is missing or wrong"),
        ({"step": None}, "is missing or wrong"),
        ({"files": [{**FILE, "name": "../x.bin"}]}, "names '../x.bin', which is no file in its"),
        ({"files": [{**FILE, "chunks": 2**60}]}, "its files do not hold each of 3 chunks once"),
        ({"files": [{**FILE, "chunks": 10**30}]}, "a number above 9223372036854775807 is missing"),
        ({"bytes": 10**4000}, "a number above 9223372036854775807 is missing or wrong"),
        ({"step": 10**4000}, "a number above 9223372036854775807 is missing or wrong"),
        ({"files": [{**FILE, "bytes": 2**60}]}, "its files do not hold each of 3 chunks once"),
        ({"files": [FILE, MORE]}, "its files do not hold each of 3 chunks once"),
        ({"files": [FILE, {**MORE, "first": 3, "name": "../x"}]}, "names '../x', which is no file"),
        ({"files": [{**FILE, "name": "\ud800"}]}, "names '.ud800', which is no file in its folder"),
        ({"files": [{**FILE, "first": None}]}, "None, a whole number expected, is missing"),
        ({"pieces": [{**PIECE, "bytes": 0}]}, "tensor w, float32 of .6., has 0 bytes, 24 expected"),
        (
            {"pieces": [{**PIECE, "dtype": "float8_e4m3fn"}]},
            "float8_e4m3fn of .6., has 24 bytes",
        ),
        ({"pieces": [{**PIECE, "dtype": None}]}, "tensor w: the dtype None, a text expected, is"),
        ({"pieces": [{**PIECE, "shape": [-6]}]}, "-6, below 0, is missing or wrong"),
        ({"pieces": [{**PIECE, "offset": 2**40}]}, "tensor w does not lie in the image's"),
        ({"skeleton": {"$tensor": 1}}, "no tensor 1 is among 1"),
        ({"skeleton": {"$dict": [["w", {"$tensor": -1}]]}}, "-1, below 0, is missing or wrong"),
        ({"skeleton": {"$list": [{"$tuple": [{"$tensor": 9}]}]}}, "no tensor 9 is among 1"),
        ({"skeleton": {"$dict": [["w"]]}}, "not enough values to unpack .* is missing or wrong"),
        ({"skeleton": {"$dict": [[[], 1]]}}, "unhashable type: 'list' is missing or wrong"),
        ({"skeleton": {"$float": "much"}}, "could not convert string .* is missing or wrong"),
        ({"skeleton": {"$set": [1]}}, "its state has '.set', which is no kind of value"),
        ({"skeleton": {"$list": 3}}, "is missing or wrong"),
        ({"skeleton": {}}, "is missing or wrong"),
        ({"skeleton": [1]}, "its state has a list that is not named as one"),
    ],
)
def test_a_part_with_a_flaw_is_refused_for_it(changed: dict[str, Any], said: str) -> None:
    found = json.loads(part_of(3 * CHUNK_BYTES).to_json())
    del found["self"]

    with pytest.raises(Damaged, match=said):
        Part.from_json(sealed({**found, **changed}), "it")


def nested(levels: int) -> dict[str, Any]:
    """So many lists in each other, in an object."""
    deep: list[Any] = []
    for _level in range(levels):
        deep = [deep]
    return {"deep": deep}


def test_facts_may_be_nested_a_little() -> None:
    manifest = Manifest(step=3, save="s", parts=(PartHash(**WELL),), facts=nested(30))
    assert Manifest.from_json(manifest.to_json(), "it") == manifest


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"parts": [{"rank": 0}]}, "is missing or wrong"),
        ({"digest": "00"}, "its digest is not that of its parts"),
        ({"digest": ABSENT}, "'digest' is missing or wrong"),
        ({"parts": [{**WELL, "digest": 3}, OTHER]}, "is missing or wrong"),
        ({"facts": 3}, "is missing or wrong"),
        ({"facts": nested(33)}, "its facts are nested in each other more than 32 times"),
        ({"parts": []}, "it has no parts"),
        ({"parts": [{**WELL, "name": "../rank-0.json"}]}, "the part of rank 0 is '../rank-0.json'"),
        ({"parts": [{**WELL, "bytes": None}]}, "None, a whole number expected, is missing"),
        ({"parts": [{**WELL, "bytes": 10**4000}]}, "a number above 9223372036854775807 is missing"),
        ({"step": "3"}, "'3', a whole number expected, is missing or wrong"),
        ({"version": "3"}, "format version '3', this Drydock reads 3 and 4"),
    ],
)
def test_a_manifest_with_a_flaw_is_refused_for_it(changed: dict[str, Any], said: str) -> None:
    found = json.loads(Manifest(step=3, save="s", parts=(PartHash(**WELL),), facts={}).to_json())
    del found["self"]

    changed = {key: one for key, one in {**found, **changed}.items() if one is not ABSENT}
    with pytest.raises(Damaged, match=said):
        Manifest.from_json(sealed(changed), "it")
