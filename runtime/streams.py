"""Samples of data that only iterates: each shard has a stream of its own, read in order.

Where a step stands in a stream follows from the step alone, so whoever takes a shard over makes its
stream anew and comes to the same samples. It must never guess where a stream ends.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from contextlib import AbstractContextManager
from typing import Any

from runtime.loading import random_numbers, seed_of

log = logging.getLogger("drydock.streams")

#: `factory(shard, epoch)`, or `factory(shard, epoch, start=0)`: the samples of one shard in one
#: pass over the data, from the one numbered `start` on.
Factory = Callable[..., Iterable[Any]]
START = "start"


class Streams:
    """Gives the data of any shard; keeps the streams of this replica's shards open."""

    def __init__(
        self,
        factory: Factory,
        collate: Callable[[list[Any]], Any],
        seed: int,
        shard_size: int,
        rank: int,
        part: slice,
    ) -> None:
        """`rank`: of those that divide each shard, which we are. `part`: what of each is ours."""
        self._factory = factory
        self._collate = collate
        self._seed = seed
        self._shard_size = shard_size
        self._rank = rank
        self._part = part
        self._streams: dict[int, _Stream] = {}
        #: which are ours, once a step later than this one is asked for
        self._ours: Collection[int] = ()
        self._step = math.inf

    def expect(self, step: int, shards: Collection[int], now: Collection[int] = ()) -> None:
        """From this step on these shards are ours, and in it those of `now`: let go of other
        streams, with what they hold."""
        self._step, self._ours = step, shards
        self._keep({*shards, *now})

    def fetch(self, step: int, index: int, _ids: tuple[int, ...]) -> Any:
        """Our part of a shard, collated."""
        if step > self._step:
            self._step = math.inf
            self._keep(self._ours)
        if index not in self._streams:
            self._streams[index] = _Stream(self._factory, index, self._seed, self._shard_size)
        samples = self._streams[index].samples(step)[self._part]
        with random_numbers(seed_of(self._seed, self._rank, step, index)):
            return self._collate(samples)

    def close(self) -> None:
        self._streams.clear()

    def _keep(self, shards: Collection[int]) -> None:
        self._streams = {k: one for k, one in self._streams.items() if k in shards}


class _Stream:
    """One shard's samples, pass after pass without a seam, numbered from 0 by their position.

    What is drawn at random while a stream is read hangs on seed, shard, pass and step alone, so
    reading to a place anew draws the same as the first reader did.
    """

    def __init__(self, factory: Factory, shard: int, seed: int, size: int) -> None:
        self._factory = factory
        self._shard = shard
        self._seed = seed
        self._size = size  # samples in a step
        self._may_start_anywhere = START in inspect.signature(factory).parameters
        self._begins = [0]  # position of the first sample of each pass that we know of
        self._last: tuple[int, list[Any]] = (-1, [])  # a step and its samples
        self._begin(0)

    def samples(self, step: int) -> list[Any]:
        """Those of a step. Asked for the same step again, the same objects."""
        if self._last[0] != step:
            self._go_to(step * self._size)
            self._last = step, self._read(self._size)
        return self._last[1]

    def _go_to(self, position: int) -> None:
        if position == self._next:
            return
        self._learn_lengths(position)
        epoch = bisect_right(self._begins, position) - 1
        start = position - self._begins[epoch]
        if self._may_start_anywhere:
            self._begin(epoch, start)
        elif not self._begins[epoch] <= self._next <= position:
            self._begin(epoch)
        self._pass_over(position)

    def _learn_lengths(self, position: int) -> None:
        """Where passes begin, up to this position, as far as their streams tell their length."""
        while self._begins[-1] <= position:
            epoch = len(self._begins) - 1
            with self._drawing(epoch, self._begins[epoch]):
                length = _length_of(self._factory(self._shard, epoch))
            if length is None:
                return
            self._note_length(epoch, length)

    def _begin(self, epoch: int, start: int = 0) -> None:
        """Make a pass's stream at the next read, from its sample `start` on."""
        self._iterator: Iterator[Any] | None = None
        self._epoch, self._start = epoch, start
        self._next = self._begins[epoch] + start  # position of the next sample

    def _pass_over(self, position: int) -> None:
        """Read up to this position, as the first reader did: step by step."""
        if position > self._next:
            log.info("stream_read_again shard=%s samples=%s", self._shard, position - self._next)
        while self._next < position:
            self._read(
                min(position, self._next + self._size - self._next % self._size) - self._next
            )

    def _read(self, count: int) -> list[Any]:
        """The next samples, of one step; where a pass ends the next begins."""
        samples = self._read_within(count)
        while len(samples) < count:
            self._end_pass()
            samples += self._read_within(count - len(samples))
        return samples

    def _read_within(self, count: int) -> list[Any]:
        """The next samples of this pass; fewer at its end."""
        with self._drawing(self._epoch, self._next):
            try:
                if self._iterator is None:
                    self._iterator = iter(self._made())
                samples = list(itertools.islice(self._iterator, count))
            except Exception:
                self._begin(self._epoch)  # a generator that raised would seem to be at its end
                raise
        self._next += len(samples)
        return samples

    def _drawing(self, epoch: int, position: int) -> AbstractContextManager[None]:
        """As whoever reads this pass from this position draws."""
        drawn = (self._seed, self._shard, epoch, position // self._size, 2)
        return random_numbers(hash(drawn))

    def _made(self) -> Iterable[Any]:
        if self._start:
            return self._factory(self._shard, self._epoch, start=self._start)
        stream = self._factory(self._shard, self._epoch)
        if (length := _length_of(stream)) is not None:
            self._note_length(self._epoch, length)
        return stream

    def _end_pass(self) -> None:
        first = self._begins[self._epoch]
        if self._start and self._next == first + self._start:
            # Nothing came from there on: the pass ended there or before, we cannot know where.
            wanted = self._next
            self._begin(self._epoch)
            self._pass_over(wanted)
            return
        self._note_length(self._epoch, self._next - first)
        self._begin(self._epoch + 1)

    def _note_length(self, epoch: int, length: int) -> None:
        first = self._begins[epoch]
        if length < 1:
            raise ValueError(
                f"the factory's stream of shard {self._shard} in epoch {epoch} has no sample: give "
                "each shard at least one, or use fewer shards"
            )
        if len(self._begins) == epoch + 1:
            self._begins.append(first + length)
        known = self._begins[epoch + 1] - first
        if known != length:
            raise ValueError(
                f"the factory's stream of shard {self._shard} in epoch {epoch} ended after "
                f"{length} samples, and its length was {known}: let the factory give the same "
                "samples each time, and a stream its true length or none"
            )


def _length_of(stream: Iterable[Any]) -> int | None:
    """None if it does not tell: a DataLoader always has `__len__`, which raises TypeError where its
    dataset only iterates."""
    try:
        return len(stream) if isinstance(stream, Sized) else None
    except TypeError:
        return None
