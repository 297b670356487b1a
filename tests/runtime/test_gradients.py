"""Gradients that are not where the group put them are never trained on; sums do not depend on who
sums."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from runtime.replica.gradients import Collectives, Gradients, TreeGradients, Wishes
from runtime.replica.plan import divide

SHARDS = 12


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def test_gradients_are_summed_in_the_flat_buffer(model: torch.nn.Module) -> None:
    gradients = Gradients(model.parameters(), shards=2)

    model(torch.ones(1, 3)).sum().backward()
    gradients.add(0, 5, 1, replica=3)

    assert gradients.local.abs().sum() > 0
    assert gradients.coverage.tolist() == [1.0, 0.0]
    assert gradients.who.tolist() == [4.0, 0.0]


def test_zero_grad_is_answered_with_its_remedy(model: torch.nn.Module) -> None:
    gradients = Gradients(model.parameters(), shards=2)
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()

    model(torch.ones(1, 3)).sum().backward()

    with pytest.raises(RuntimeError, match=r"remove optimizer\.zero_grad"):
        gradients.add(0, 5, 1, replica=3)


def summed_by(
    shares: dict[int, list[int]], collectives: Callable[[int], list[Collectives]]
) -> list[torch.Tensor]:
    """What each member holds after a step in which these members summed these shards."""
    groups = collectives(len(shares))

    def member(rank: int, me: int) -> torch.Tensor:
        model = torch.nn.Linear(7, 3)
        gradients = TreeGradients(model.parameters(), SHARDS)
        for shard in shares[me]:
            noise = torch.Generator().manual_seed(shard)
            gradients.local.add_(torch.randn(gradients.size, generator=noise) * 10.0**shard)
            gradients.losses[shard] = 0.1 * shard
            gradients.add(shard, shard + 1, 2, replica=me)
        return gradients.reduce(groups[rank], shares, me, Wishes(checkpoint=me == 0))

    with ThreadPoolExecutor(len(shares)) as pool:
        return list(pool.map(member, range(len(shares)), sorted(shares)))


def test_the_sum_along_the_tree_is_the_same_bits_whoever_sums(
    collectives: Callable[[int], list[Collectives]],
) -> None:
    after_a_loss = {0: [0, 1, 2, 3], 2: [6, 7, 8, 4], 3: [9, 10, 11, 5]}
    scattered = {0: [11, 0, 5], 1: [1, 3, 7, 9], 4: [2, 4, 6, 8, 10]}
    divisions = [divide(range(SHARDS), list(range(n))) for n in (1, 2, 4)]

    results = [
        (shares, buffer)
        for shares in (*divisions, after_a_loss, scattered)
        for buffer in summed_by(shares, collectives)
    ]

    reader = TreeGradients(torch.nn.Linear(7, 3).parameters(), SHARDS)
    sums = [buffer[: reader.size] for _, buffer in results]
    tails = [reader.read(buffer) for _, buffer in results]
    assert all(torch.equal(a, b) for a, b in pairwise(sums))
    assert all(replace(a, who=[]) == replace(b, who=[]) for a, b in pairwise(tails))
    assert (tails[0].coverage, tails[0].samples) == ([1] * SHARDS, 2 * SHARDS)
    assert tails[0].wishes == Wishes(checkpoint=True)
    assert [tail.computed for tail in tails] == [
        [next(m for m in shares if k in shares[m]) for k in range(SHARDS)] for shares, _ in results
    ]
