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
    """As `Division.taken_apart` gives it; cut by torch itself."""
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
    with pytest.raises(Damaged, match=r"of a tensor of \[9, 3\] only 6 were saved"):
        resharded(lambda source: saved(torch.zeros(9, 3), source, 3), 2, 0, 1)
