"""A fleet of real processes for each test that asks for one."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from runtime.replica.gloo import Gloo
from tests.runtime.replicas import Board, Fleet, until
from tests.runtime.scene import Play, Scene

if TYPE_CHECKING:
    from tests.runtime.pair import Pair
    from tests.runtime.whole.runs import Alone


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Fleets whose processes end with the test."""
    fleets: list[Fleet] = []

    def make(world: int, **settings: Any) -> Fleet:
        folder = tmp_path / f"fleet{len(fleets)}"
        folder.mkdir()
        fleets.append(Fleet(folder, world, **settings))
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


@pytest.fixture
def collectives() -> Callable[[int], list[Gloo]]:
    """Connected gloo groups of so many members, all in this process."""

    def connect(members: int) -> list[Gloo]:
        board = Board()
        made = [Gloo("127.0.0.1") for _ in range(members)]
        addresses = [one.address for one in made]
        with ThreadPoolExecutor(members) as pool:
            built = [pool.submit(one.build, board, 1, addresses, i) for i, one in enumerate(made)]
            for job in built:
                job.result(30)
        # One alone connects to nobody.
        until(lambda: members == 1 or all(one._built for one in made), "all peers came")
        return made

    return connect


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """A coordinator and a job of so many replicas, for which the test speaks."""
    return lambda world: Scene(tmp_path, world)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    from tests.runtime.pair import Pair  # the adapters' environment has not all it needs

    made = Pair(tmp_path)
    yield made
    made.other.connection.shutdown(socket.SHUT_RDWR)
    made.rank.close()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    from tests.runtime.whole.runs import Alone  # as above

    handler = signal.getsignal(signal.SIGTERM)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    made = Alone(tmp_path)
    yield made
    dist.destroy_process_group()
    signal.signal(signal.SIGTERM, handler)
    made.door.close()
