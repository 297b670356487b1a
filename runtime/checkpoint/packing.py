"""What of a state is packed on its way to a slow tier: what is measured to pay, and nothing else.

Of each tensor a sample is packed first. Its chunks are, if that many bytes less are saved sooner,
by the speed that this tier had lately, than the processors need to pack them. Imports no torch.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

from runtime.checkpoint import compression
from runtime.checkpoint.compression import Stored
from runtime.checkpoint.interval import MEASURED
from runtime.checkpoint.manifest import ITEM_BYTES, DataFile, Packed, Part, chunks_in
from runtime.checkpoint.meter import Meter
from runtime.image import CHUNK_BYTES, Damaged, Table

#: Threads that pack for one rank, at most: the other ranks of its node have theirs.
THREADS = 4
#: Bytes a second. A tier that takes as many has nothing to gain, and not even a sample is taken.
QUICK = 400e6
#: A save of fewer bytes tells more of how long a request takes than of the speed.
MEASURED_BYTES = 16 << 20
#: What is packed to more of its bytes than this is not worth a second format of it.
GOOD = 0.95
#: Chunks for which one sample speaks, at most.
RUN_CHUNKS = 64
#: A sample: so much of the bytes, at so many places, and so many in all at most.
SAMPLED, PLACES, SAMPLE_BYTES = 1 / 16, 4, 256 << 10


@dataclass(frozen=True)
class Sample:
    """What packing came to."""

    bytes: int
    stored: int
    core_s: float  # of one core


def pays(sample: Sample, speed: float, threads: float) -> bool:
    """Whether to pack what this is a sample of, for a tier of so many bytes a second. It is packed
    and written at once, but counted as one after the other: a core's time is worth something."""
    if sample.stored > GOOD * sample.bytes:
        return False
    packed_s = sample.stored / speed + sample.core_s / threads
    return packed_s < sample.bytes / speed


class Packer:
    """Packs what goes to one tier, in the process that writes it."""

    def __init__(self, *speeds: float) -> None:
        """`speeds`: of the tier, in bytes a second, as far as they are known; see `note`."""
        self._speeds = deque(speeds, maxlen=MEASURED)
        self.threads = max(1, min(THREADS, len(os.sched_getaffinity(0)) - 1))
        self._pool = ThreadPoolExecutor(self.threads, "drydock-pack")  # none begins before it must
        self._counting = threading.Lock()
        self._core_s = self._wall_s = 0.0  # that packing took, of late

    @property
    def speed(self) -> float:
        """Of the tier, as its last saves show it; before one was measured it counts as quick."""
        return median(self._speeds) if self._speeds else QUICK

    def may_pay(self) -> bool:
        """Whether anything may be packed at all."""
        return self.speed < QUICK and compression.is_installed()

    def note(self, meter: Meter) -> None:
        """How quick the tier was in a save, which is over."""
        if meter.bytes >= MEASURED_BYTES:
            self._speeds.append(meter.speed)
        with self._counting:  # who else wants the cores changes too
            self._core_s, self._wall_s = self._core_s / 2, self._wall_s / 2

    def chunks(
        self, image: memoryview, table: Table, file: DataFile, ready: Callable[[int], object]
    ) -> Generator[tuple[Stored, Packed | None]]:
        """What is to be stored of each chunk of a file, in turn. `ready`: see `disk.write`, of the
        whole image."""
        ahead: deque[Future[tuple[Stored, Packed | None]]] = deque()
        try:
            for run, size in runs_of(table, file):
                end = min((run[-1] + 1) * CHUNK_BYTES, len(image))
                ready(end)
                sample = self._pool.submit(self._pays, image[run[0] * CHUNK_BYTES : end], size)
                packs = sample.result()  # there, for each thread that packs has memory for it
                for chunk in run:
                    data = image[chunk * CHUNK_BYTES : min((chunk + 1) * CHUNK_BYTES, end)]
                    ahead.append(self._pool.submit(self._stored, data, size if packs else 0))
                    if len(ahead) > self.threads:
                        yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for one in ahead:
                one.cancel()

    def _pays(self, data: memoryview, size: int) -> bool:
        """By what a sample comes to. Its first bytes, second ones and so on are packed each by
        themselves: in a chunk they fill zstd's blocks, in so short a one they would share them."""
        sample = sampled(data)
        alike = [self._pack(sample[first::size], 1) for first in range(size)]
        stored, core_s = sum(len(packed) for packed, _s in alike), sum(s for _packed, s in alike)
        return pays(Sample(len(sample), stored, core_s), self.speed, self.threads * self._free)

    def _pack(self, data: Stored, size: int) -> tuple[bytes, float]:
        """And the seconds of a core that it took."""
        core_s, wall_s = time.thread_time(), time.monotonic()
        packed = compression.pack(data, size)
        core_s, wall_s = time.thread_time() - core_s, time.monotonic() - wall_s
        with self._counting:
            self._core_s += core_s
            self._wall_s += wall_s
        return packed, core_s

    @property
    def _free(self) -> float:
        """How much of a core a thread that packs gets."""
        with self._counting:
            return min(1.0, self._core_s / self._wall_s) if self._core_s else 1.0

    def _stored(self, data: memoryview, size: int) -> tuple[Stored, Packed | None]:
        """`size` 0: as it is."""
        if not size:
            return data, None
        packed, _core_s = self._pack(data, size)
        return (packed, Packed(size, len(packed))) if len(packed) < len(data) else (data, None)


def sampled(data: memoryview) -> bytes:
    """Some of it, from several places."""
    each = int(min(len(data) * SAMPLED, SAMPLE_BYTES)) // PLACES
    each = max(each - each % 64, 64)  # elements stay whole
    apart = len(data) // PLACES // 64 * 64
    return b"".join(data[place * apart : place * apart + each] for place in range(PLACES))


def runs_of(table: Table, file: DataFile) -> Iterator[tuple[range, int]]:
    """The chunks of a file, so many together as hold one tensor mostly, and the size of its
    elements."""
    pieces = sorted((one for one in table.pieces if one.bytes), key=lambda one: one.offset)
    offsets = [one.offset for one in pieces]

    def main_piece(chunk: int) -> int:
        """Of which most lies in it; -1 if none does."""
        start, end = chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES
        most, found = 0, -1
        for number in range(max(0, bisect_right(offsets, start) - 1), bisect_right(offsets, end)):
            one = pieces[number]
            inside = min(end, one.offset + one.bytes) - max(start, one.offset)
            if inside > most:
                most, found = inside, number
        return found

    mains = [(chunk, main_piece(chunk)) for chunk in chunks_in(file)]
    for number, found in itertools.groupby(mains, lambda one: one[1]):
        size = ITEM_BYTES.get(pieces[number].dtype, 1) if number >= 0 else 1
        chunks = [chunk for chunk, _number in found]
        for first in range(chunks[0], chunks[-1] + 1, RUN_CHUNKS):
            yield range(first, min(first + RUN_CHUNKS, chunks[-1] + 1)), size


def packed_again(part: Part, file: DataFile, image: memoryview) -> Iterator[Stored]:
    """What was stored of each chunk of a file. Raises Damaged if it cannot be made once more."""
    for chunk in chunks_in(file):
        data, how = image[chunk * CHUNK_BYTES :][: part.length_of(chunk)], part.packing_of(chunk)
        if how is None:
            yield data
            continue
        packed = compression.pack(data, how.size)
        if len(packed) != how.bytes:
            raise Damaged(f"{file.name}: chunk {chunk} packs to {len(packed)} bytes by now")
        yield packed
