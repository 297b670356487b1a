"""A collective whose epoch breaks ends, even where its sockets would let it wait for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
import torch

from runtime.replica.gloo import Gloo, Severed
from tests.runtime.replicas import until


class Board:
    """The rendezvous of one epoch, in this process."""

    def __init__(self) -> None:
        self.values: dict[str, Future[str]] = {}
        self.lock = threading.Lock()

    def at(self, key: str) -> Future[str]:
        with self.lock:
            return self.values.setdefault(key, Future())

    def set(self, _epoch: int, key: str, value: str) -> None:
        self.at(key).set_result(value)

    def get(self, _epoch: int, key: str, timeout_s: float) -> str:
        return self.at(key).result(timeout_s)


@pytest.fixture
def pair() -> tuple[Gloo, Gloo]:
    board = Board()
    members = (Gloo("127.0.0.1"), Gloo("127.0.0.1"))
    ports = [m.port for m in members]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(m.build, board, 1, ports, rank) for rank, m in enumerate(members)]
        for job in jobs:
            job.result(30)
    return members


def in_thread(work: Callable[[], None]) -> Future[None]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def test_a_sum_over_the_group(pair: tuple[Gloo, Gloo]) -> None:
    buffers = [torch.ones(5), torch.full((5,), 2.0)]

    jobs = [
        in_thread(partial(member.all_reduce, buffer))
        for member, buffer in zip(pair, buffers, strict=True)
    ]
    for job in jobs:
        job.result(30)

    assert [b.tolist() for b in buffers] == [[3.0] * 5] * 2


def test_a_broken_epoch_ends_a_collective_that_the_sockets_would_not_end(
    pair: tuple[Gloo, Gloo],
) -> None:
    ours, _theirs = pair
    ours._peer_ports, port, ours.port = set(), ours.port, 0  # sever finds no socket to shut
    waiting = in_thread(lambda: ours.all_reduce(torch.ones(5)))
    until(waiting.running, "it waits for a peer that never comes")

    ours.sever(1)

    with pytest.raises(Severed, match="did not end"):
        waiting.result(30)
    assert ours.group is None
    assert port
