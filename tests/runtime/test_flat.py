"""Gradients that are not where the group put them are never trained on."""

from __future__ import annotations

import pytest
import torch

from runtime.replica.flat import FlatGradients


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def test_gradients_are_summed_in_the_flat_buffer(model: torch.nn.Module) -> None:
    flat = FlatGradients(model.parameters(), shards=2)

    model(torch.ones(1, 3)).sum().backward()
    flat.add(0, 5, 1.0, 1)

    assert flat.local.abs().sum() > 0
    assert flat.coverage.tolist() == [1.0, 0.0]


def test_zero_grad_is_answered_with_its_remedy(model: torch.nn.Module) -> None:
    flat = FlatGradients(model.parameters(), shards=2)
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()

    model(torch.ones(1, 3)).sum().backward()

    with pytest.raises(RuntimeError, match=r"remove optimizer\.zero_grad"):
        flat.add(0, 5, 1.0, 1)
