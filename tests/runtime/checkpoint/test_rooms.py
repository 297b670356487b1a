"""How much memory is kept for copies of a state."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint import rooms
from runtime.checkpoint.large_pages import mapped
from runtime.checkpoint.rooms import Rooms
from runtime.snapshot import pin
from tests.runtime.replicas import until

GIB = 1 << 30
OWN_BYTES = 64e6  # that may be kept beside two copies


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
def test_two_rooms_are_two_states_and_little_more(
    gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "Room", Untouched)
    made, size = Rooms(pytest.fail), int(gib * GIB)

    made.prepare(size)
    until(made.all_free, "both are made")
    found = [made.take() for _ in range(rooms.ROOMS)]

    sizes = [len(room.memory) for room in found if room is not None]
    assert len(sizes) == 2
    assert sum(sizes) > 2 * (size + rooms.SLACK_BYTES)
    assert sum(sizes) <= 2 * size + OWN_BYTES / 2


class CudaRuntime:
    """What torch offers of it; refuses what is larger than `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.pinned: dict[int, int] = {}
        self.still_mapped: list[bool] = []  # at each end of it

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:  # noqa: N802
        self.pinned |= {address: size} if size <= self.most else {}
        return 0 if size <= self.most else 2

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
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda card: card == 1, raising=False)
    return runtime


def test_rooms_are_pinned_where_a_card_is_in_use_for_as_long_as_they_are_mapped(
    card: CudaRuntime,
) -> None:
    made = Rooms(pytest.fail, pin=pin)
    made.prepare(1 << 20)
    until(made.all_free, "both are made")
    room = made.take()
    assert room is not None
    assert card.pinned[ctypes.addressof(ctypes.c_char.from_buffer(room.memory))] >= 1 << 20
    assert len(card.pinned) == rooms.ROOMS

    del room
    made.close()
    gc.collect()
    assert card.pinned == {}
    assert card.still_mapped == [True] * rooms.ROOMS


def test_what_the_driver_does_not_pin_is_used_all_the_same(card: CudaRuntime) -> None:
    made = Rooms(pytest.fail, pin=pin)
    made.prepare(1 << 25)
    until(made.all_free, "both are made")

    assert card.pinned == {}


def test_nothing_is_pinned_where_no_card_is_in_use() -> None:
    assert not pin(mapped(os.memfd_create("none"), 1 << 12, writable=True))


def test_a_room_that_could_not_be_had_is_made_later_and_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = [3]  # so many times there is no memory
    room = rooms.Room

    def scarce(number: int, *given: Any) -> Any:
        if number and short[0]:
            short[0] -= 1
            raise OSError(12, "Cannot allocate memory")
        return room(number, *given)

    monkeypatch.setattr(rooms, "Room", scarce)
    monkeypatch.setattr(rooms, "RETRY_S", 0.0)
    told: list[str] = []
    made = Rooms(told.append)
    made.prepare(1 << 20)
    taken = made.take(30)
    assert taken is not None
    until(made.lacks, "one is lacking")

    def asked() -> bool:
        made.complete()
        return len(made.descriptors()[1]) == rooms.ROOMS

    until(asked, "it is there")
    made.give_back(taken)

    assert made.all_free()
    assert not made.lacks()
    assert len(told) == 1
    made.close()
