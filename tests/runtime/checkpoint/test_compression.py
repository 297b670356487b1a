"""What is packed comes back to the bit, and what is no such thing is refused, and costs nothing."""

from __future__ import annotations

import contextlib
import resource

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint import compression
from runtime.image import CHUNK_BYTES, Damaged

SIZES = st.sampled_from([1, 2, 3, 4, 8, 16])
#: Also such as zstd makes much smaller, and larger.
DATA = st.binary(max_size=300) | st.builds(bytes.__mul__, st.binary(max_size=9), st.integers(0, 99))


@given(data=DATA, size=SIZES)
def test_what_is_packed_comes_back(data: bytes, size: int) -> None:
    packed = compression.pack(memoryview(data), size)

    assert bytes(compression.unpack(memoryview(packed), size, len(data))) == data


@given(data=DATA, size=SIZES)
def test_what_is_sorted_comes_back(data: bytes, size: int) -> None:
    assert bytes(compression.by_element(compression.by_significance(data, size), size)) == data


def test_first_bytes_come_before_second_ones() -> None:
    assert compression.by_significance(b"abcABCx", 3) == b"aAbBcCx"


@given(data=DATA, where=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_raises_nothing_else(data: bytes, where: int, bit: int) -> None:
    packed = bytearray(compression.pack(data, 4))
    packed[where % len(packed)] ^= 1 << bit

    with contextlib.suppress(Damaged):
        found = compression.unpack(packed, 4, len(data))
        assert len(found) == len(data)  # then its hash is compared


@given(data=st.binary(max_size=200), length=st.integers(0, 300))
def test_rubbish_raises_nothing_else(data: bytes, length: int) -> None:
    with pytest.raises(Damaged, match="it "):
        compression.unpack(data, 2, length)


WHOLE = compression.pack(bytes(1000), 1)
NAMELESS = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))


@pytest.mark.parametrize(
    "packed", [WHOLE[:-1], WHOLE + b"x", WHOLE + WHOLE, WHOLE[:3], b"", NAMELESS]
)
def test_what_is_no_single_frame_of_that_length_is_refused(packed: bytes) -> None:
    with pytest.raises(Damaged, match="it "):
        compression.unpack(packed, 1, 1000)


def test_what_would_unpack_to_more_takes_no_memory() -> None:
    """Whether its head says so or not."""
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    head = zstandard.ZstdCompressor().compress(bytes(CHUNK_BYTES))[:9]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for packed in (bomb, head + bomb[9:]):
        with pytest.raises(Damaged, match="it "):
            compression.unpack(packed, 4, CHUNK_BYTES)

    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) << 10 < 64 << 20
