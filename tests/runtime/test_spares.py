"""A buffer is used again once nobody can read or write it, and not before."""

from __future__ import annotations

import torch

from runtime.replica.peers import Reduced, ReducedLog
from runtime.replica.spares import MOST, Spares

CPU = torch.device("cpu")


def test_one_that_was_given_back_is_taken_again() -> None:
    spares = Spares(CPU)
    first = spares.take(5)
    spares.give(first)

    assert spares.take(6) is not first
    assert spares.take(5) is first
    assert spares.take(5) is not first


def test_a_step_s_buffer_comes_back_when_nobody_keeps_or_sends_the_step() -> None:
    spares, kept = Spares(CPU), ReducedLog()
    buffers = []
    for step in range(3):  # two are kept
        buffers.append(spares.take(5))
        reduced = Reduced(step, 1, buffers[-1])
        spares.lend(buffers[-1], reduced)
        kept.add(reduced)
    sent = kept.get(1, 0.0, settled=False)
    del reduced
    kept.clear()

    back = {id(spares.take(5)), id(spares.take(5))}
    assert back == {id(buffers[0]), id(buffers[2])}
    assert id(spares.take(5)) != id(buffers[1])
    assert sent is not None


def test_only_a_few_are_kept() -> None:
    spares = Spares(CPU)
    buffers = [spares.take(5) for _ in range(MOST + 1)]
    for buffer in buffers:
        spares.give(buffer)

    taken = [spares.take(5) for _ in range(MOST + 1)]

    assert sum(any(one is buffer for buffer in buffers) for one in taken) == MOST
