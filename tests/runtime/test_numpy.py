"""NumPy's generator, where a script has it: drawn anew after a resume as after no death."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.data import Batches
from runtime.loading import random_numbers
from runtime.replica.state import TrainingState
from runtime.snapshot import stage, state_of
from runtime.whole import generators, set_generators

numpy: Any = pytest.importorskip("numpy")


def test_what_a_checkpoint_keeps_of_it_draws_the_same_numbers() -> None:
    numpy.random.standard_normal()  # of each two that it makes it keeps one
    kept = state_of(stage(generators(), 0))
    drawn = [numpy.random.standard_normal() for _ in range(5)]

    set_generators(kept)
    assert [numpy.random.standard_normal() for _ in range(5)] == drawn


def test_step_and_shard_alone_decide_on_what_is_drawn() -> None:
    def drawn(step: int, shard: int) -> float:
        model = torch.nn.Linear(2, 2)
        state = TrainingState(model, [], Batches(samples=24, shards=2))
        state.committed = step
        state.seed(shard)
        return float(numpy.random.random())

    first = drawn(4, 1)
    assert drawn(4, 1) == first
    assert len({first, drawn(4, 0), drawn(5, 1)}) == 3


def test_a_loader_s_numbers_leave_no_trace() -> None:
    numpy.random.seed(7)
    expected = numpy.random.random(3).tolist()

    numpy.random.seed(7)
    with random_numbers(11):
        one = numpy.random.random()
    with random_numbers(11):
        assert numpy.random.random() == one
    assert numpy.random.random(3).tolist() == expected
