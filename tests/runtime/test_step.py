"""How a script may compute a shard, and what it is told where it does so otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from runtime.data import Batches
from runtime.replica.fsdp import ShardGroup
from runtime.replica.gloo import Gloo
from runtime.replica.gradients import Wishes
from runtime.replica.membership import Severed
from runtime.replica.observing import Observer, Phase
from runtime.replica.state import TrainingState
from runtime.replica.step import StepEngine

SHARDS = 2


class Failing(torch.autograd.Function):
    """Runs out of memory on the way back."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("of this test")


def fails(loss: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Failing.apply(loss)  # type: ignore[no-untyped-call]
    return found


class Watching(Observer):
    """Notes the phases that it is told of."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def at(self, phase: Phase, step: int) -> None:
        self.seen.append(phase)


class Bench:
    """A replica of its own, with a shard that its script is to compute."""

    def __init__(
        self, gloo: Gloo, observer: Observer | None = None, more: Sequence[nn.Module] = ()
    ) -> None:
        self.first, self.last = nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)
        self.model = nn.Sequential(self.first, *more, self.last)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        state = TrainingState(self.model, [optimizer], Batches(samples=24, shards=SHARDS))
        shard_group = ShardGroup(self.model, 0)
        self.engine = StepEngine(
            state, gloo, observer or Observer(), shard_group, mode="cover", max_grad_norm=1
        )
        self.shards = self.engine.compute(0)
        next(self.shards)

    def loss(self, of: float = 1.0) -> torch.Tensor:
        found: torch.Tensor = self.model(torch.full((4, 3), of)).mean()
        return found

    def gradient(self, of: float = 1.0) -> torch.Tensor:
        """Of the first layer, as it is to be summed."""
        (found,) = torch.autograd.grad(self.loss(of) / SHARDS, [self.first.weight])
        return found.flatten()

    def summed(self) -> torch.Tensor:
        parts = [one for one in self.engine.gradients._taken if one is not None]
        return torch.cat([part.flatten() for part in parts])


@pytest.fixture
def bench() -> Iterator[Bench]:
    gloo = Gloo("127.0.0.1")
    yield Bench(gloo)
    gloo.close()


def test_a_shard_in_parts_is_what_it_is_as_a_whole(bench: Bench) -> None:
    whole = bench.gradient(1.5)

    bench.engine.backward(bench.loss(1.0), parts=2)
    bench.engine.backward(bench.loss(2.0), parts=2)

    assert torch.allclose(bench.summed()[:6], whole)
    assert next(bench.shards, None) is None


@pytest.mark.parametrize("between", [nn.Module.zero_grad, lambda model: model.zero_grad(False)])
def test_zero_grad_between_parts_changes_nothing(
    bench: Bench, between: Callable[[nn.Module], None]
) -> None:
    bench.engine.backward(bench.loss(), parts=2)
    before = bench.summed().clone()

    between(bench.model)
    bench.engine.backward(bench.loss(), parts=2)

    assert torch.allclose(bench.summed(), 2 * before)


def test_who_watches_hears_of_backward_within_it() -> None:
    gloo, watching = Gloo("127.0.0.1"), Watching()
    bench = Bench(gloo, watching)
    seen: list[list[str]] = []
    bench.first.weight.register_hook(  # type: ignore[no-untyped-call]
        lambda _given: seen.append([*watching.seen])
    )

    bench.engine.backward(bench.loss(), 1)
    gloo.close()

    assert seen == [["forward", "backward"]]


def test_an_observer_may_be_given_its_ear_later(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, observer, seen = Gloo("127.0.0.1"), Observer(), list[str]()
    monkeypatch.setattr(observer, "at", lambda phase, _step: seen.append(phase))
    bench = Bench(gloo, observer)

    bench.engine.backward(bench.loss(), 1)
    gloo.close()

    assert seen == ["forward", "backward"]


def test_a_loss_that_nobody_watches_has_no_hook(bench: Bench) -> None:
    loss = bench.loss()

    bench.engine.backward(loss, 1)

    assert not loss._backward_hooks


def test_a_scaled_loss_is_one_gradient_as_many_times_as_large(bench: Bench) -> None:
    plain = bench.gradient()
    bench.engine.state.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    bench.engine.backward(bench.loss(), 1)

    assert torch.equal(bench.summed()[:6], 1024 * plain)


def test_an_evaluation_between_shards_changes_nothing(bench: Bench) -> None:
    with torch.no_grad():
        bench.loss()
    bench.engine.backward(bench.loss(), 1)

    summed = bench.summed()[:6]
    assert torch.allclose(summed, bench.gradient())


def test_a_job_goes_on_from_the_statistics_of_the_edge_where_a_step_was_given_up() -> None:
    """All were cut off, and each holds what the shards that it computed made of them."""
    gloo = Gloo("127.0.0.1")
    norm = nn.BatchNorm1d(2)
    bench = Bench(gloo, more=[norm])
    bench.engine.backward(bench.loss(), 1)
    changed = int(norm.get_buffer("num_batches_tracked"))

    bench.engine.forget()
    bench.engine.statistics.reload()

    assert (changed, int(norm.get_buffer("num_batches_tracked"))) == (1, 0)
    assert norm.get_buffer("running_mean").tolist() == [0.0, 0.0]
    gloo.close()


def test_a_hook_changes_what_is_summed(bench: Bench) -> None:
    plain = bench.gradient()
    bench.first.weight.register_hook(lambda given: 3 * given)  # type: ignore[no-untyped-call]

    bench.engine.backward(bench.loss(), 1)

    assert torch.allclose(bench.summed()[:6], 3 * plain)


def in_place(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(3.0)


def by_another(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad = 3.0 * weight.grad


@pytest.mark.parametrize("hook", [in_place, by_another])
def test_a_hook_behind_backward_sees_each_gradient_alone(
    bench: Bench, hook: Callable[[torch.Tensor], None]
) -> None:
    plain = bench.gradient()
    bench.first.weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    bench.engine.backward(bench.loss(), 2)
    bench.engine.backward(bench.loss(), 2)

    assert torch.allclose(bench.summed()[:6], 3 * plain)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda bench: bench.loss().detach(), "shard 0 depends on nothing that is trained"),
        (lambda bench: bench.model(torch.ones(4, 3)), r"was given \(4, 1\): give it the mean loss"),
        (lambda bench: bench.loss() * 1j, r"was given complex \(\): give it the mean loss"),
        (lambda bench: bench.loss().item(), "was given float: give it the mean loss"),
        (lambda _bench: None, "was given NoneType: give it the mean loss"),
    ],
)
def test_what_is_no_loss_is_refused(
    bench: Bench, given: Callable[[Bench], Any], words: str
) -> None:
    with pytest.raises((TypeError, RuntimeError), match=words):
        bench.engine.backward(given(bench), 1)


def test_a_loss_under_no_grad_is_refused(bench: Bench) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"gradients \(torch.no_grad\)"):
        bench.engine.backward(bench.loss(), 1)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (1, 1, "call backward once for each shard that the loop gave you"),
        (2, 3, "parts=3, and the shard was begun with 2: give all parts"),
        (2, 1, "parts=1, and the shard was begun with 2: give all parts"),
        (2, 0, "parts=0, and the shard was begun with 2: give all parts"),
    ],
)
def test_the_parts_of_a_shard_are_alike(bench: Bench, first: int, second: int, words: str) -> None:
    bench.engine.backward(bench.loss(), first)

    with pytest.raises((RuntimeError, ValueError), match=words):
        bench.engine.backward(bench.loss(), second)


@pytest.mark.parametrize("parts", [0, -2])
def test_a_shard_has_one_part_at_least(bench: Bench, parts: int) -> None:
    with pytest.raises(ValueError, match=f"parts={parts}: give all parts of a shard one number"):
        bench.engine.backward(bench.loss(), parts)


def test_another_gradient_than_backward_gives_is_refused(bench: Bench) -> None:
    bench.loss().backward()  # type: ignore[no-untyped-call]

    with pytest.raises(RuntimeError, match=r"0\.weight has a gradient that backward did not give"):
        bench.engine.backward(bench.loss(), 1)
    bench.model.zero_grad()
    bench.engine.backward(bench.loss(), 1)

    assert next(bench.shards, None) is None


def test_another_gradient_after_the_last_backward_is_refused_too(bench: Bench) -> None:
    bench.engine.backward(bench.loss(), 1)
    bench.loss().backward()  # type: ignore[no-untyped-call]

    with pytest.raises(RuntimeError, match=r"0\.weight has a gradient that backward did not give"):
        bench.engine.reduce(Wishes())


def left_by_nobody(bench: Bench) -> None:
    """The last backward was the step's own."""


def left_by_an_evaluation(bench: Bench) -> None:
    bench.loss().backward()  # type: ignore[no-untyped-call]
    bench.model.zero_grad()


def left_as_zeros(bench: Bench) -> None:
    bench.loss().backward()  # type: ignore[no-untyped-call]
    bench.model.zero_grad(set_to_none=False)


def frozen_since(bench: Bench) -> None:
    bench.first.requires_grad_(False)


@pytest.mark.parametrize(
    "then", [left_by_nobody, left_by_an_evaluation, left_as_zeros, frozen_since]
)
def test_a_step_whose_gradients_backward_gave_is_summed(
    bench: Bench, then: Callable[[Bench], None]
) -> None:
    bench.first.weight.register_post_accumulate_grad_hook(by_another)  # type: ignore[no-untyped-call]
    bench.engine.backward(bench.loss(), 1)
    bench.engine.gloo.sever(0)

    then(bench)

    with pytest.raises(Severed, match="a member is gone"):  # which is looked for behind that
        bench.engine.reduce(Wishes())


def test_a_gradient_of_zeros_is_none(bench: Bench) -> None:
    bench.loss().backward()  # type: ignore[no-untyped-call]  # as of what an input's is taken from
    bench.model.zero_grad(set_to_none=False)
    plain = bench.gradient()

    bench.engine.backward(bench.loss(), 1)

    assert torch.allclose(bench.summed()[:6], plain)


def test_a_shard_that_is_passed_over_ends_the_replica(bench: Bench) -> None:
    bench.engine.backward(bench.loss(), 3)

    with pytest.raises(RuntimeError, match="not given to backward but for 1 of its 3 parts: a"):
        next(bench.shards)


def test_what_a_backward_that_failed_has_added_is_never_summed(bench: Bench) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        bench.engine.backward(fails(bench.loss()), 1)

    with pytest.raises(RuntimeError, match="backward of shard 0 failed, and what it had added"):
        bench.engine.backward(bench.loss(), 2)
    with pytest.raises(RuntimeError, match="shard 0 was not given to backward: a step is the sum"):
        next(bench.shards)


def test_what_is_not_summed_is_named_before_a_gradient_that_it_has(bench: Bench) -> None:
    bench.last.late = nn.Parameter(torch.ones(1))
    bench.first.weight.grad = torch.ones(2, 3)

    with pytest.raises(RuntimeError, match=r"1\.late came to the model after"):
        bench.engine.backward(bench.loss(), 1)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({}, ""),
        ({"coverage": [1, 2], "who": [1, 3]}, "shard 1: it was summed 2 times, and replica 1 was"),
        ({"who": [1, 1]}, "shard 1: it was summed 1 times by replica 0, and replica 1 was"),
        ({"coverage": [1, 0], "who": [1, 0]}, "it was summed 0 times, and replica 1 was to do"),
        ({"checksums": (1, -1)}, "shard 1: replica 1 computed it of other samples than replica 0"),
    ],
)
def test_a_step_that_is_not_whole_says_which_shard_and_whose(
    bench: Bench, said: dict[str, Any], words: str
) -> None:
    bench.engine.shares = {0: [0], 1: [1]}
    checksums = [*bench.engine.batches.checksums(0)]
    shard, other = said.get("checksums", (0, checksums[0]))
    checksums[shard] = other
    told = {"coverage": [1, 1], "who": [1, 2], **said, "checksums": checksums}

    found = bench.engine.flaw(SimpleNamespace(**told))  # type: ignore[arg-type]

    assert words in found
    assert bool(words) == bool(found)
