"""NumPy, where a script has it: its generator is drawn anew after a resume as after no death, and
what its arrays hold tells datasets apart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.content import content_of
from runtime.data import Batches
from runtime.generators import generators, set_generators
from runtime.loading import random_numbers
from runtime.replica.state import TrainingState
from runtime.snapshot import stage, state_of

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


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data


def test_what_an_array_holds_tells_datasets_apart(tmp_path: Path) -> None:
    def told(changed: int, kind: str) -> list[str]:
        made = numpy.arange(96).astype(kind).reshape(24, 4)
        made[changed, 2] = made[changed, 3]
        path = tmp_path / f"{kind}{changed}"
        made.tofile(path)
        mapped = numpy.memmap(path, kind, "r", shape=(24, 4))
        lying = [made, numpy.asfortranarray(made), mapped, mapped[::1], made.view(numpy.recarray)]
        return [content_of(Rows(data)) for data in lying]

    for kind in ("int16", "float64", "datetime64[s]", "complex64"):
        one, other = told(3, kind), told(20, kind)
        assert len({*one}) == len({*other}) == 1
        assert one != other


def test_arrays_of_objects_and_single_numbers_tell_nobody_apart() -> None:
    for data in (numpy.array(["a", 1], object), numpy.int64(3), numpy.array(3)):
        assert content_of(Rows(data)) == ""


def test_terabytes_of_a_memmap_are_not_read(tmp_path: Path) -> None:
    tokens = numpy.memmap(tmp_path / "tokens", "uint16", "w+", shape=(1 << 39,))
    began = time.process_time()

    told = content_of(Rows(tokens))

    assert time.process_time() - began < 5.0  # the whole takes minutes
    assert told.startswith(f"{1 << 40:,} bytes (")
