"""A state saved by so many ranks, taken up by another number of them: every row once, in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint.resharding import resharded, span
from runtime.image import Damaged, Staged
from runtime.snapshot import stage

ranks_ = st.integers(1, 9)


def part(tensor: torch.Tensor, rank: int, ranks: int, dim: int = 0) -> dict[str, Any]:
    """As `taken_apart` gives it; cut by torch itself."""
    chunks = torch.chunk(tensor, ranks, dim)
    empty = tensor.narrow(dim, 0, 0)
    mine = chunks[rank] if rank < len(chunks) else empty
    of = {"shape": [*tensor.shape], "stride": [*tensor.stride()], "dim": dim}
    return {"part_of": of, "part": mine.clone()}


def saved(tensor: torch.Tensor, rank: int, ranks: int, dim: int = 0) -> Staged:
    """What one rank saved of a model that has this tensor."""
    weight = part(tensor, rank, ranks, dim) if ranks > 1 else tensor
    state = {"step": 7, "model": {"weight": weight}, "moments": [(weight, 3)], "rate": 0.1}
    return stage(state, 7)


@given(rows=st.integers(0, 40), before=ranks_, after=ranks_, dim=st.sampled_from([0, 1]))
def test_each_rank_gets_what_torch_would_cut(rows: int, before: int, after: int, dim: int) -> None:
    shape = (rows, 3) if dim == 0 else (3, rows)
    tensor = torch.arange(rows * 3, dtype=torch.float32).reshape(shape)

    for rank in range(after):
        state = resharded(lambda source: saved(tensor, source, before, dim), before, rank, after)
        cut = part(tensor, rank, after, dim)
        expected = tensor if before == 1 else cut["part"] if after > 1 else tensor
        found = state["model"]["weight"]
        found = found["part"] if isinstance(found, dict) else found
        assert torch.equal(found, expected)
        assert (state["rate"], state["moments"][0][1]) == (0.1, 3)


@given(size=st.integers(0, 100), ranks=ranks_)
def test_spans_are_torch_s_chunks(size: int, ranks: int) -> None:
    chunks = [len(chunk) for chunk in torch.chunk(torch.empty(size), ranks)]
    spans = [span(size, rank, ranks) for rank in range(ranks)]
    assert [high - low for low, high in spans][: len(chunks)] == chunks
    assert sum(high - low for low, high in spans) == size


def test_parts_of_different_tensors_are_told() -> None:
    def read(source: int) -> Staged:
        return saved(torch.zeros(4 + source, 3), source, 2)

    with pytest.raises(Damaged, match="parts of different tensors"):
        resharded(read, 2, 0, 1)


def test_a_part_too_few_is_told() -> None:
    with pytest.raises(Damaged, match=r"of model.weight, \[9, 3\], only 6 were saved"):
        resharded(lambda source: saved(torch.zeros(9, 3), source, 3), 2, 0, 1)


A = torch.arange(8.0).reshape(4, 2)


def of_two(*states: dict[str, Any]) -> Any:
    return resharded(lambda source: stage(states[source], 3), 2, 0, 1)


def test_parts_are_put_together_by_their_names_and_not_by_their_order() -> None:
    first = {"a": part(A, 0, 2), "b": part(A + 100, 0, 2)}
    second = {"b": part(A + 100, 1, 2), "a": part(A, 1, 2)}

    state = of_two(first, second)

    assert torch.equal(state["a"], A)
    assert torch.equal(state["b"], A + 100)


def test_a_part_that_one_rank_alone_has_is_told() -> None:
    with pytest.raises(Damaged, match="of ranks 0 and 1 only one saved a part of a"):
        of_two({"a": part(A, 0, 2)}, {"c": part(A, 1, 2)})


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(2, 1),
        torch.ones(2),
        torch.ones(2, 5),
        torch.ones(2, 2, dtype=torch.float64),
        torch.ones(2, 2, dtype=torch.int8),
        torch.tensor(1.0),
    ],
)
def test_a_part_is_neither_stretched_nor_rounded(other: torch.Tensor) -> None:
    with pytest.raises(Damaged, match="a is said to be a part of"):
        of_two({"a": part(A, 0, 2)}, {"a": part(A, 1, 2) | {"part": other}})


@pytest.mark.parametrize(
    "said",
    [
        {"dim": 9},
        {"dim": -1},
        {"dim": "x"},
        {"dim": None},
        {"dim": True},
        {"dim": 1.9},
        {"shape": [-4, 2]},
        {"shape": "ab"},
        {"shape": None},
        {"shape": [4.0, 2]},
        {"shape": []},
        {"shape": [4, 2, 3]},
    ],
)
def test_what_is_no_description_of_a_part_is_told(said: dict[str, Any]) -> None:
    of = part(A, 0, 2)["part_of"] | said
    states = [{"a": part(A, rank, 2) | {"part_of": of}} for rank in (0, 1)]

    with pytest.raises(Damaged, match="a is said to be a part of"):
        of_two(*states)


def test_who_has_nothing_of_a_tensor_may_have_it_in_no_shape() -> None:
    nothing = part(A, 1, 2) | {"part": torch.empty(0)}
    of = nothing["part_of"]

    assert torch.equal(of_two({"a": {"part_of": of, "part": A}}, {"a": nothing})["a"], A)
