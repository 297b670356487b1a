"""How much memory is kept for copies of a state."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime.checkpoint import rooms
from runtime.checkpoint.rooms import Rooms
from tests.runtime.replicas import until

GIB = 1 << 30
OWN_BYTES = 64e6  # that may be kept beside two copies


class Untouched:
    """A room of which no memory is taken."""

    def __init__(self, number: int, size: int, _rest: Callable[[float], object]) -> None:
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
