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
from tests.runtime.fake_groups import Alone

SHARDS = 12


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def compute(gradients: Gradients, model: torch.nn.Module, shard: int, times: float = 1.0) -> None:
    """A shard's backward, and the group's note of it."""
    gradients.lend()
    (times * model(torch.ones(1, 3)).sum()).backward()
    gradients.take()
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

    gradients.put(reduced, [True] * 4, times=2.0, clipped=0.25)

    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.equal(flat, reduced[:-1] / 2)
    assert gradients.statistics.tolist() == [2.0 * gradients.size]
    assert gradients.norm(reduced) == pytest.approx(reduced[:-1].norm().item())
    assert torch.equal(reduced, torch.arange(1.0, gradients.size + 1))


@pytest.mark.parametrize("shards", [1, 2])
def test_gradients_of_any_layout_are_summed_and_put_back(shards: int) -> None:
    table = torch.nn.Embedding(3, 2, sparse=True)
    picture = torch.nn.Conv2d(2, 2, 2)
    picture.weight.data = picture.weight.data.contiguous(memory_format=torch.channels_last)
    gradients = Gradients([*table.parameters(), *picture.parameters()], shards=shards)
    seen = torch.ones(1, 2, 3, 3).contiguous(memory_format=torch.channels_last)
    for shard in range(shards):
        gradients.lend()
        (table(torch.tensor([1, 1])).sum() + picture(seen).sum()).backward()
        gradients.take()
        gradients.add(shard, 5, 1, replica=0)

    reduced = gradients.reduce(Alone(), {0: [0]}, 0, Wishes())
    given = torch.arange(1.0, gradients.size + 1)
    gradients.put(given, [True] * 3, times=3.0, clipped=1.0)

    assert reduced[:6].tolist() == [0.0, 0.0, 2.0 * shards, 2.0 * shards, 0.0, 0.0]
    found = [p.grad.flatten() for p in gradients.parameters if p.grad is not None]
    assert torch.equal(torch.cat(found), 3.0 * given)


@pytest.mark.parametrize("kind", [Gradients, TreeGradients])
def test_parameters_of_which_autograd_makes_one_gradient_have_each_their_own(
    kind: type[Gradients],
) -> None:
    first, second = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    gradients = kind([first, second], shards=2)
    for shard in range(2):
        gradients.lend()
        torch.autograd.backward((first.view(-1) + second.view(-1)).sum())
        gradients.take()
        gradients.add(shard, 5, 1, replica=0)

    reduced = gradients.reduce(Alone(), {0: [0, 1]}, 0, Wishes())
    gradients.put(torch.arange(8.0), [True] * 2, times=1.0, clipped=1.0)

    assert reduced[:8].tolist() == [2.0] * 8
    assert first.grad is not None
    assert first.grad.flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("kind", [Gradients, TreeGradients])
def test_zero_grad_changes_nothing_wherever_it_stands(
    model: torch.nn.Module, kind: type[Gradients]
) -> None:
    sums = []
    ways: list[Callable[[], None]] = [lambda: None, model.zero_grad]
    for zero_grad in ways:
        gradients = kind(model.parameters(), shards=2)
        for shard in range(2):
            zero_grad()
            gradients.lend()
            model(torch.ones(1, 3)).sum().backward()
            gradients.take()  # of a part
            zero_grad()
            compute(gradients, model, shard)
            zero_grad()
        sums.append(gradients.reduce(Alone(), {3: [0, 1]}, 3, Wishes())[: gradients.size])

    assert torch.equal(*sums)
    assert sums[0][-1] == 4.0


@pytest.mark.parametrize("kind", [Gradients, TreeGradients])
def test_what_backward_came_by_in_no_shard_has_no_gradient(
    model: torch.nn.Module, kind: type[Gradients]
) -> None:
    gradients = kind(model.parameters(), shards=2)
    compute(gradients, model, 0)
    model[0].requires_grad_(requires_grad=False)  # type: ignore[index]
    compute(gradients, model, 1)
    both = gradients.read(gradients.reduce(Alone(), {3: [0, 1]}, 3, Wishes()))
    gradients.clear()
    for shard in range(2):
        compute(gradients, model, shard)
    reduced = gradients.reduce(Alone(), {3: [0, 1]}, 3, Wishes())
    later = gradients.read(reduced)

    gradients.put(reduced, later.touched, times=1.0, clipped=1.0)

    assert both.touched == [True] * 4  # of one shard is enough
    assert later.touched == [False, False, True, True]
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False]


def test_squares_that_are_too_large_have_a_norm(model: torch.nn.Module) -> None:
    gradients = Gradients(model.parameters(), shards=1)
    reduced = torch.full((gradients.size,), 1e30)

    assert gradients.norm(reduced) == pytest.approx(1e30 * gradients.size**0.5)
    reduced[0] = float("inf")
    assert gradients.norm(reduced) == float("inf")


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
            gradients.take()
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
