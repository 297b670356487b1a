"""A slow tier is spared what packs well; a quick one, and what packs badly, is left as it is."""

from __future__ import annotations

import random
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint import compression
from runtime.checkpoint.manifest import DataFile, Part, layout_of
from runtime.checkpoint.meter import Meter
from runtime.checkpoint.packing import (
    MEASURED_BYTES,
    QUICK,
    RUN_CHUNKS,
    SAMPLE_BYTES,
    Packer,
    Sample,
    packed_again,
    pays,
    runs_of,
    sampled,
)
from runtime.image import CHUNK_BYTES, Damaged, Piece, Table, hash_of

SLOW = 1e3
MB = 1_000_000


def image_of(*tensors: tuple[str, bytes]) -> tuple[Table, memoryview]:
    """One tensor after another, as its dtype and bytes."""
    pieces, data = [], bytearray()
    for number, (dtype, content) in enumerate(tensors):
        data += bytes(-len(data) % 64)
        size = len(content)
        pieces.append(
            Piece(name=f".{number}", dtype=dtype, shape=[size], offset=len(data), bytes=size)
        )
        data += content
    return Table(None, tuple(pieces), len(data)), memoryview(data)


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)  # noqa: S311 - not secret


def alike(size: int) -> bytes:
    """As weights are: of each four bytes the last is nearly always the same."""
    data = bytearray(noise(size))
    data[3::4] = b"\x3c" * len(data[3::4])
    return bytes(data)


def stored_of(packer: Packer, table: Table, image: memoryview) -> list[int | None]:
    """To how many bytes each chunk is packed."""
    (file,) = layout_of(table, 0)
    found = packer.chunks(image, table, file, lambda _end: None)
    return [how.bytes if how else None for _data, how in found]


def test_only_what_packs_well_is_packed() -> None:
    chunk = CHUNK_BYTES
    table, image = image_of(
        ("float32", alike(2 * chunk)), ("uint8", noise(2 * chunk)), ("int64", bytes(2 * chunk))
    )

    weight, other, noise1, noise2, zeros, more = stored_of(Packer(SLOW), table, image)

    assert weight is not None
    assert weight < 0.8 * chunk
    assert other is not None
    assert (noise1, noise2) == (None, None)
    assert zeros is not None
    assert zeros < 1000
    assert zeros == more


def test_a_sample_of_one_chunk_shows_what_the_chunk_comes_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of numbers as weights are: the last byte of each has an exponent, and that varies."""
    monkeypatch.setattr("runtime.checkpoint.packing.GOOD", 0.86)
    chance = random.Random(1)  # noqa: S311 - not secret
    numbers = [chance.gauss(0, 0.02) for _ in range(CHUNK_BYTES // 4)]
    table, image = image_of(("float32", struct.pack(f"<{len(numbers)}f", *numbers)))

    (stored,) = stored_of(Packer(SLOW), table, image)

    assert stored is not None
    assert stored < 0.86 * CHUNK_BYTES


@pytest.mark.parametrize("speeds", [(), (QUICK,), (SLOW, QUICK, QUICK)])
def test_a_tier_that_is_quick_or_not_known_yet_packs_nothing(speeds: tuple[float, ...]) -> None:
    assert not Packer(*speeds).may_pay()


def test_nothing_is_imported_before_something_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    compression.is_installed.cache_clear()

    assert not Packer(QUICK).may_pay()
    assert not compression.is_installed.cache_info().currsize
    assert not Packer(SLOW).may_pay()  # it is not installed
    compression.is_installed.cache_clear()


@pytest.mark.parametrize(
    ("stored", "core_s", "speed", "threads", "expected"),
    [
        (800_000, 0.003, 50e6, 1, True),  # 16 and 3 ms, not 20
        (800_000, 0.005, 50e6, 1, False),  # 16 and 5 ms
        (800_000, 0.005, 50e6, 2, True),  # on two cores
        (800_000, 0.003, 100e6, 1, False),  # 8 and 3 ms, not 10
        (960_000, 0.0, 1e3, 1, False),  # for so little nothing is packed
    ],
)
def test_it_pays_where_less_time_passes(
    stored: int, core_s: float, speed: float, threads: float, expected: bool
) -> None:
    assert pays(Sample(MB, stored, core_s), speed, threads) is expected


@given(
    stored=st.integers(0, MB), core_s=st.floats(0, 1), speed=st.floats(1e3, 1e9),
    slower=st.floats(0.01, 1), threads=st.floats(0.1, 8),
)  # fmt: skip
def test_what_pays_pays_also_on_a_slower_tier(
    stored: int, core_s: float, speed: float, slower: float, threads: float
) -> None:
    sample = Sample(MB, stored, core_s)
    assert pays(sample, speed * slower, threads) or not pays(sample, speed, threads)


@given(size=st.integers(1, 8 << 20))
def test_a_sample_is_small(size: int) -> None:
    assert len(sampled(memoryview(bytes(size)))) <= max(min(size // 16, SAMPLE_BYTES), 256)


def test_the_speed_is_that_of_the_last_saves_and_not_of_one_that_hung() -> None:
    packer = Packer()
    for seconds in (1.0, 1.0, 30.0, 1.0):
        packer.note(took(MEASURED_BYTES, seconds))

    assert packer.speed == pytest.approx(MEASURED_BYTES)


def test_a_small_save_says_nothing_of_the_speed() -> None:
    packer = Packer(SLOW)
    packer.note(took(MEASURED_BYTES - 1, 1e-3))

    assert packer.speed == SLOW


def took(size: int, seconds: float) -> Meter:
    meter = Meter()
    meter.bytes, meter.seconds = size, seconds
    return meter


def test_time_without_a_request_is_none_of_the_tier_s() -> None:
    meter = Meter()
    with meter.request(3), meter.request(4):
        pass
    before = meter.seconds
    with meter.request(5):
        during = meter.seconds

    assert meter.bytes == 12
    assert during == before < meter.seconds


@given(sizes=st.lists(st.integers(0, 5 * CHUNK_BYTES), min_size=1, max_size=6))
def test_each_chunk_is_in_one_run_with_the_tensor_of_which_it_has_most(sizes: list[int]) -> None:
    dtypes = ["float32", "bfloat16", "int64", "uint8", "float8_e4m3fn", "bool"]
    pieces, end = [], 0
    for dtype, size in zip(dtypes, sizes, strict=False):
        pieces.append(Piece(name=dtype, dtype=dtype, shape=[], offset=end, bytes=size))
        end += -(-size // 64) * 64
    table = Table(None, tuple(pieces), end)
    files = layout_of(table, 0)

    found = {chunk: size for file in files for run, size in runs_of(table, file) for chunk in run}

    assert [*found] == [*range(table.chunks)]
    items = dict(zip(dtypes, (4, 2, 8, 1, 1, 1), strict=True))
    for chunk, size in found.items():
        inside = {
            one.name: min((chunk + 1) * CHUNK_BYTES, one.offset + one.bytes)
            - max(chunk * CHUNK_BYTES, one.offset)
            for one in pieces
        }
        assert size in {items[name] for name in inside if inside[name] == max(inside.values())}


def test_no_sample_speaks_for_more_than_so_many_chunks() -> None:
    chunks = 2 * RUN_CHUNKS + 3
    piece = Piece(name="w", dtype="float32", shape=[], offset=0, bytes=chunks * CHUNK_BYTES)
    table = Table(None, (piece,), piece.bytes)
    (file,) = layout_of(table, 0)

    assert [len(run) for run, _size in runs_of(table, file)] == [RUN_CHUNKS, RUN_CHUNKS, 3]


def test_what_is_not_copied_yet_is_waited_for() -> None:
    table, image = image_of(("float32", alike(3 * CHUNK_BYTES)), ("int32", bytes(CHUNK_BYTES)))
    (file,) = layout_of(table, 0)
    there: list[int] = []

    for _one in Packer(SLOW).chunks(image, table, file, there.append):
        assert there

    assert there == [3 * CHUNK_BYTES, 4 * CHUNK_BYTES]


def test_what_was_packed_is_packed_again_to_the_same() -> None:
    table, image = image_of(("float32", alike(2 * CHUNK_BYTES)), ("uint8", noise(CHUNK_BYTES)))
    (file,) = layout_of(table, 0)
    found = [*Packer(SLOW).chunks(image, table, file, lambda _end: None)]
    part = part_of(table, image, file, *(how for _data, how in found))

    again = [*packed_again(part, file, image)]

    assert again == [data for data, _how in found]
    image[:40] = bytes(40)
    with pytest.raises(Damaged, match="chunk 0 packs to"):
        next(packed_again(part, file, image))


def part_of(table: Table, image: memoryview, file: DataFile, *packed: object) -> Part:
    chunks = range(0, len(image), CHUNK_BYTES)
    hashes = tuple(hash_of(image[at : at + CHUNK_BYTES]) for at in chunks)
    return Part(
        step=1, save="s", rank=0, table=table, hashes=hashes, files=(file,),
        packed=packed,  # type: ignore[arg-type]
    )  # fmt: skip


def test_it_is_given_up_in_the_middle_without_harm() -> None:
    table, image = image_of(("float32", alike(9 * CHUNK_BYTES)))
    (file,) = layout_of(table, 0)
    found = Packer(SLOW).chunks(image, table, file, lambda _end: None)
    next(found)
    found.close()

    assert [*found] == []
