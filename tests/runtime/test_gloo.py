"""A collective whose epoch breaks ends, even where its sockets would let it wait for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
import torch

from runtime.replica.gloo import Gloo
from runtime.replica.membership import Severed
from tests.runtime.replicas import until


@pytest.fixture
def pair(collectives: Callable[[int], list[Gloo]]) -> tuple[Gloo, Gloo]:
    first, second = collectives(2)
    return first, second


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
    ours._peers, ours.address = set(), ""  # sever finds no socket to shut
    begun = threading.Event()
    ours.begun = begun.set
    waiting = in_thread(lambda: ours.all_reduce(torch.ones(5)))
    until(begun.is_set, "it waits for a peer that never comes")

    ours.sever(1)

    with pytest.raises(Severed, match="did not end"):
        waiting.result(30)
    assert ours.group is None
