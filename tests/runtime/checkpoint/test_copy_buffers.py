"""How much memory is kept for copies of a state."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from runtime.checkpoint import copy_buffers, memory_left
from runtime.checkpoint.copy_buffers import CopyBuffers
from runtime.checkpoint.large_pages import mapped
from runtime.priority import NICE
from runtime.snapshot import pin
from tests.runtime.replicas import until

GIB = 1 << 30
OWN_BYTES = 64e6  # that may be kept beside two copies
PATIENCE_S = 30.0


class Untouched:
    """A room of which no memory is taken."""

    def __init__(
        self,
        number: int,
        size: int,
        _rest: Callable[[float], object],
        _pin: Callable[[memoryview], object],
    ) -> None:
        self.number, self.fd, self.memory = number, -1, range(size)


@pytest.mark.parametrize("gib", [0.01, 0.25, 1, 4, 16, 512])
def test_two_buffers_are_two_states_and_little_more(
    gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_buffers, "CopyBuffer", Untouched)
    made, size = CopyBuffers(pytest.fail), int(gib * GIB)

    made.prepare(size)
    until(made.all_free, "both are made")
    found = [made.take() for _ in range(copy_buffers.COPY_BUFFERS)]

    sizes = [len(room.memory) for room in found if room is not None]
    assert len(sizes) == 2
    assert sum(sizes) > 2 * (size + copy_buffers.SLACK_BYTES)
    assert sum(sizes) <= 2 * size + OWN_BYTES / 2


def test_who_makes_a_room_gives_way_to_the_training() -> None:
    priorities: list[int] = []

    def pin(_memory: memoryview) -> None:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    made = CopyBuffers(pytest.fail, pin=pin)
    made.prepare(1 << 20)
    until(made.all_free, "both are made")

    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert priorities == [min(19, own + NICE)] * copy_buffers.COPY_BUFFERS


@pytest.fixture
def taken_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of memory that all buffers took, each time before another was made."""
    made: list[int] = []
    taken: list[int] = []
    room = copy_buffers.CopyBuffer

    def noted(*given: Any) -> copy_buffers.CopyBuffer:
        taken.append(sum(os.fstat(fd).st_blocks * 512 for fd in made))
        one = room(*given)
        made.append(os.dup(one.fd))
        return one

    monkeypatch.setattr(copy_buffers, "CopyBuffer", noted)
    yield taken
    for fd in made:
        os.close(fd)


def test_a_room_that_is_not_given_back_keeps_no_other_from_growing(
    taken_before: list[int],
) -> None:
    made = CopyBuffers(pytest.fail)
    made.prepare(1 << 20)
    until(made.all_free, "both are made")
    first = made.take()
    assert first is not None
    small = len(first.memory)

    made.prepare(1 << 23)
    second = made.take(PATIENCE_S)
    assert second is not None
    large = len(second.memory)
    none_left = made.take(PATIENCE_S / 100)
    made.give_back(first)
    third = made.take(PATIENCE_S)

    assert large > 1 << 23
    assert none_left is None
    assert third is not None
    assert len(third.memory) == large
    assert taken_before == [0, small, small, large]


def test_buffers_that_are_on_their_way_to_a_writer_stay_open_though_larger_ones_are_made() -> None:
    made = CopyBuffers(pytest.fail)
    made.prepare(1 << 20)
    until(made.all_free, "both are made")
    _generation, given = made.there()

    made.prepare(1 << 23)
    until(made.all_free, "larger ones are made")

    names = [Path(f"/proc/self/fd/{room.fd}").readlink().name for room in given]
    assert sorted(name.split()[0] for name in names) == [
        "memfd:drydock-copy-0",
        "memfd:drydock-copy-1",
    ]
    assert [os.fstat(room.fd).st_blocks for room in given] == [0, 0]


class CudaRuntime:
    """What torch offers of it; refuses what is larger than `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.pinned: dict[int, int] = {}
        self.streams = 0
        self.still_mapped: list[bool] = []  # at each end of it

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:  # noqa: N802
        self.pinned |= {address: size} if size <= self.most else {}
        return 0 if size <= self.most else 2

    def stream(self) -> None:
        self.streams += 1

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        self.still_mapped.append(is_mapped(address))
        return 0


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    limits = [line.split()[0].split("-") for line in lines]
    return any(int(start, 16) <= address < int(end, 16) for start, end in limits)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    runtime = CudaRuntime(most=1 << 24)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "Stream", runtime.stream)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda card: card == 1, raising=False)
    return runtime


def test_buffers_are_pinned_where_a_card_is_in_use_for_as_long_as_they_are_mapped(
    card: CudaRuntime,
) -> None:
    made = CopyBuffers(pytest.fail, pin=pin)
    made.prepare(1 << 20)
    until(made.all_free, "both are made")
    room = made.take()
    assert room is not None
    assert card.pinned[ctypes.addressof(ctypes.c_char.from_buffer(room.memory))] >= 1 << 20
    assert len(card.pinned) == copy_buffers.COPY_BUFFERS
    assert card.streams  # the first takes a pool of them, and no save waits for that

    del room
    made.close()
    gc.collect()
    assert card.pinned == {}
    assert card.still_mapped == [True] * copy_buffers.COPY_BUFFERS


def test_a_room_for_which_the_card_had_too_little_memory_does_not_stay_pinned(
    card: CudaRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver would refuse another one at that place."""

    def full() -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "Stream", full)
    told: list[str] = []
    made = CopyBuffers(told.append, pin=pin)

    made.prepare(1 << 20)
    until(lambda: told, "it could not be made")
    made.close()
    gc.collect()

    assert card.pinned == {}
    assert card.still_mapped == [True]


def test_what_the_driver_does_not_pin_is_used_all_the_same(card: CudaRuntime) -> None:
    made = CopyBuffers(pytest.fail, pin=pin)
    made.prepare(1 << 25)
    until(made.all_free, "both are made")

    assert card.pinned == {}


def test_nothing_is_pinned_where_no_card_is_in_use() -> None:
    assert not pin(mapped(os.memfd_create("none"), 1 << 12, writable=True))


def test_a_room_that_could_not_be_had_is_made_later_and_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = [3]  # so many times there is no memory
    room = copy_buffers.CopyBuffer

    def scarce(number: int, *given: Any) -> Any:
        if number and short[0]:
            short[0] -= 1
            raise OSError(12, "Cannot allocate memory")
        return room(number, *given)

    monkeypatch.setattr(copy_buffers, "CopyBuffer", scarce)
    monkeypatch.setattr(copy_buffers, "RETRY_S", 0.0)
    told: list[str] = []
    made = CopyBuffers(told.append)
    made.prepare(1 << 20)
    taken = made.take(PATIENCE_S)
    assert taken is not None
    until(made.lacks, "one is lacking")

    def asked() -> bool:
        made.complete()
        return len(made.there()[1]) == copy_buffers.COPY_BUFFERS

    until(asked, "it is there")
    made.give_back(taken)

    assert made.all_free()
    assert not made.lacks()
    assert len(told) == 1
    made.close()


def test_buffers_for_which_no_thread_can_be_started_are_made_later_and_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copy_buffers, "RETRY_S", 0.0)
    told: list[str] = []
    made = CopyBuffers(told.append)
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", fails)
        had = [made.prepare(1 << 20) for _ in range(2)]
    made.prepare(1 << 20)
    until(made.all_free, "they are made")
    made.close()

    assert had == [False, False]
    (text,) = told
    assert text.endswith("can't start new thread")


def test_buffers_that_a_card_refuses_are_made_later_and_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[int] = []

    def pin(memory: memoryview) -> None:
        tries.append(len(memory))
        if len(tries) == 1:
            raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(copy_buffers, "RETRY_S", 0.0)
    told: list[str] = []
    made = CopyBuffers(told.append, pin=pin)
    made.prepare(1 << 20)
    until(lambda: told, "it is told")

    def asked() -> bool:
        made.prepare(1 << 20)
        return made.all_free()

    until(asked, "they are made")
    made.close()

    (text,) = told
    assert text.endswith("CUDA error: out of memory")


def test_no_room_is_begun_for_which_there_cannot_be_memory(
    monkeypatch: pytest.MonkeyPatch, taken_before: list[int]
) -> None:
    monkeypatch.setattr(memory_left, "left_bytes", lambda: 1 << 20)
    told: list[str] = []
    made = CopyBuffers(told.append)

    made.prepare(1 << 20)
    room = made.take(PATIENCE_S)
    made.close()

    assert room is None
    assert taken_before == [0]
    (text,) = told
    assert text.endswith("are needed, and at most 1048576 are left")


def test_where_the_rest_of_a_room_cannot_be_had_any_more_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other ranks have made theirs meanwhile."""
    left = iter([1 << 30, 1 << 20])
    monkeypatch.setattr(memory_left, "left_bytes", lambda: next(left))
    monkeypatch.setattr(copy_buffers, "LOOK_BYTES", 2 * copy_buffers.SLICE_BYTES)
    told: list[str] = []
    made = CopyBuffers(told.append)

    made.prepare(4 * copy_buffers.SLICE_BYTES)
    room = made.take(PATIENCE_S)
    made.close()

    assert room is None
    assert len(told) == 1


def test_buffers_that_are_being_made_at_the_end_are_given_up() -> None:
    begun, over = threading.Event(), threading.Event()

    def pin(_memory: memoryview) -> None:
        begun.set()
        assert over.wait(PATIENCE_S)

    made = CopyBuffers(pytest.fail, pin=pin)
    made.prepare(1 << 20)
    assert begun.wait(PATIENCE_S)
    made.close()
    over.set()
    until(lambda: not made._making, "it is over")

    assert made.there()[1] == []
    assert made.take() is None
    made.prepare(1 << 20)
    until(made.all_free, "they are prepared for again")
    made.close()
