"""A buffer is used again once nobody can read or write it, and not before."""

from __future__ import annotations

import torch

from runtime.replica.buffers import MOST, BufferPool
from runtime.replica.peers import Reduced, ReducedLog

CPU = torch.device("cpu")


def test_one_that_was_given_back_is_taken_again() -> None:
    pool = BufferPool(CPU)
    first = pool.take(5)
    pool.give(first)

    assert pool.take(6) is not first
    assert pool.take(5) is first
    assert pool.take(5) is not first


def test_a_step_s_buffer_comes_back_when_nobody_keeps_or_sends_the_step() -> None:
    pool, kept = BufferPool(CPU), ReducedLog()
    buffers = []
    for step in range(3):  # two are kept
        buffers.append(pool.take(5))
        reduced = Reduced(step, 1, buffers[-1])
        pool.lend(buffers[-1], reduced)
        kept.add(reduced)
    sent = kept.get(1, 0.0, settled=False)
    del reduced
    kept.clear()

    back = {id(pool.take(5)), id(pool.take(5))}
    assert back == {id(buffers[0]), id(buffers[2])}
    assert id(pool.take(5)) != id(buffers[1])
    assert sent is not None


def test_only_a_few_are_kept() -> None:
    pool = BufferPool(CPU)
    buffers = [pool.take(5) for _ in range(MOST + 1)]
    for buffer in buffers:
        pool.give(buffer)

    taken = [pool.take(5) for _ in range(MOST + 1)]

    assert sum(any(one is buffer for buffer in buffers) for one in taken) == MOST
