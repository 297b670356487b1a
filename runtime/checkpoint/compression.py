"""One chunk, packed and unpacked: its bytes sorted by significance, then zstd.

Sorted, the exponents of a tensor's numbers lie together, which are alike; what else is in them is
mostly noise. zstandard is imported once something is to be packed or unpacked. Imports no torch.
"""

from __future__ import annotations

import functools
import logging
import threading

from runtime.checkpoint.manifest import Part
from runtime.image import Buffer, Damaged, hash_of

Stored = Buffer | bytes

log = logging.getLogger("drydock.checkpoint")

LEVEL = 1  # the quickest that is no mere copy
#: How a person gets what unpacks.
INSTALL = "pip install zstandard"

_own = threading.local()  # neither side of zstandard may be used by two threads at once


class NotInstalled(Damaged):
    """The data is packed, and zstandard, which would unpack it, is not installed here.

    Nothing is known to be wrong with the data.
    """


def demand(what: str) -> None:
    """Raises NotInstalled, which begins with `what`, where nothing can be unpacked."""
    if not is_installed():
        raise NotInstalled(f"{what} is packed with zstd, which is not installed here: {INSTALL}")


@functools.cache
def is_installed() -> bool:
    """Whether zstandard can pack and unpack here; found out once for each process.

    Versions before 0.19 do not count: their decompressor does not know `allow_extra_data`. The
    remedy is logged if the answer is no.
    """
    try:
        import zstandard  # few need it

        empty = zstandard.ZstdCompressor().compress(b"")
        zstandard.ZstdDecompressor().decompress(empty, allow_extra_data=False)
    except (ImportError, TypeError):  # versions before 0.19 do not know that
        log.info("zstandard_not_installed remedy=%s", INSTALL)
        return False
    return True


def pack(data: Stored, size: int) -> bytes:
    """`data`, of elements of so many bytes, as one zstd frame that says how long it is."""
    if not hasattr(_own, "packer"):
        import zstandard

        _own.packer = zstandard.ZstdCompressor(level=LEVEL)
    packed: bytes = _own.packer.compress(by_significance(bytes(data), size))
    return packed


def unpack(packed: Stored, size: int, length: int) -> Buffer:
    """Return the `length` bytes that were packed; `size` is the bytes of one element.

    Raises Damaged for anything else. Whatever the bytes are, no more memory than `length` is taken.
    """
    import zstandard

    if not hasattr(_own, "unpacker"):
        _own.unpacker = zstandard.ZstdDecompressor()
    try:
        if (found := zstandard.frame_content_size(packed)) != length:
            raise Damaged(f"it would unpack to {found} bytes, {length} expected")
        data: bytes = _own.unpacker.decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Damaged(f"it does not unpack: {error}") from error
    if len(data) != length:
        raise Damaged(f"it unpacks to {len(data)} bytes, {length} expected")
    return by_element(data, size)


def by_significance(data: bytes, size: int) -> bytes:
    """All first bytes of the elements, then all second ones; what is no whole element at the end
    stays there."""
    whole = len(data) - len(data) % size
    return b"".join([*(data[first:whole:size] for first in range(size)), data[whole:]])


def by_element(data: bytes, size: int) -> Buffer:
    """The reverse."""
    count = len(data) // size
    found = bytearray(data)
    for first in range(size):
        found[first : size * count : size] = data[first * count : (first + 1) * count]
    return found


def chunk_in(part: Part, chunk: int, stored: Buffer) -> Buffer | None:
    """A chunk, by what is stored of it; None if it is not what was saved."""
    how = part.packing_of(chunk)
    try:
        data = stored if how is None else unpack(stored, how.size, part.length_of(chunk))
    except Damaged:
        return None
    return data if hash_of(data) == part.hashes[chunk] else None
