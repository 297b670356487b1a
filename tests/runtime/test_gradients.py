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


class Alone:
    """The collectives of a job of one member."""

    def all_reduce(self, _buffer: torch.Tensor) -> None: ...

    def exchange(self, given: list[torch.Tensor], _sizes: list[int]) -> list[torch.Tensor]:
        return given

    def gather(self, mine: torch.Tensor, _members: int) -> torch.Tensor:
        return mine


def compute(gradients: Gradients, model: torch.nn.Module, shard: int, times: float = 1.0) -> None:
    """A shard's backward, and the group's note of it."""
    (times * model(torch.ones(1, 3)).sum()).backward()
    gradients.add(shard, 5, 1, replica=3)


@pytest.mark.parametrize("kind", [Gradients, TreeGradients])
def test_shards_are_summed_behind_each_other_in_one_buffer(
    model: torch.nn.Module, kind: type[Gradients]
) -> None:
    model.unused = torch.nn.Parameter(torch.ones(2))
    gradients = kind(model.parameters(), shards=2, statistics=1)

    compute(gradients, model, 0)
    gradients.statistics.add_(7.0)
    compute(gradients, model, 1, times=2.0)
    reduced = gradients.reduce(Alone(), {3: [0, 1]}, 3, Wishes())

    tail = gradients.read(reduced)
    assert reduced[:2].tolist() == [0.0, 0.0]  # backward did not come by
    assert reduced[gradients.gradient_size - 1 : gradients.size].tolist() == [3.0, 7.0]
    assert (tail.coverage, tail.computed) == ([1, 1], [3, 3])


def test_what_was_reduced_is_each_parameter_s_gradient_and_stays_as_it_was(
    model: torch.nn.Module,
) -> None:
    gradients = Gradients(model.parameters(), shards=2, statistics=1)
    reduced = torch.arange(1.0, gradients.size + 1)

    gradients.put(reduced, times=2.0, clipped=0.25)

    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.equal(flat, reduced[:-1] / 2)
    assert gradients.statistics.tolist() == [2.0 * gradients.size]
    assert gradients.norm(reduced) == pytest.approx(reduced[:-1].norm().item())
    assert torch.equal(reduced, torch.arange(1.0, gradients.size + 1))


def test_a_gradient_of_any_layout_takes_what_was_reduced() -> None:
    table = torch.nn.Embedding(3, 2, sparse=True)
    picture = torch.nn.Conv2d(2, 2, 2)
    picture.weight.data = picture.weight.data.contiguous(memory_format=torch.channels_last)
    gradients = Gradients([*table.parameters(), *picture.parameters()], shards=1)
    seen = picture(torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last))
    (table(torch.tensor([1, 1])).sum() + seen.sum()).backward()
    gradients.add(0, 5, 1, replica=0)
    picture.weight.grad = torch.ones_like(picture.weight)  # laid out as the weight is

    reduced = gradients.reduce(Alone(), {0: [0]}, 0, Wishes())
    given = torch.arange(1.0, gradients.size + 1)
    gradients.put(given, times=3.0, clipped=1.0)

    assert reduced[:6].tolist() == [0.0, 0.0, 2.0, 2.0, 0.0, 0.0]
    assert not picture.weight.grad.is_contiguous()
    found = [p.grad.flatten() for p in gradients.parameters if p.grad is not None]
    assert torch.equal(torch.cat(found), 3.0 * given)


def test_between_two_steps_zero_grad_changes_nothing(model: torch.nn.Module) -> None:
    gradients = Gradients(model.parameters(), shards=2)
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()

    compute(gradients, model, 0)

    assert gradients.held == {0}


def test_zero_grad_within_a_step_is_answered_with_its_remedy(model: torch.nn.Module) -> None:
    gradients = Gradients(model.parameters(), shards=2)
    compute(gradients, model, 0)
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()

    with pytest.raises(RuntimeError, match=r"remove optimizer\.zero_grad"):
        compute(gradients, model, 1)


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
            flat = torch.randn(gradients.size, generator=noise) * 10.0**shard
            weight, bias = model.parameters()
            weight.grad, bias.grad = flat[:21].view(3, 7), flat[21:]
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
