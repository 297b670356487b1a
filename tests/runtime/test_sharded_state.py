"""A divided model's state, and what an optimizer or an average keeps of it, is put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from runtime import sharded_state
from runtime.sharded_state import taken_apart
from tests.runtime.whole.runs import Alone


def divided() -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    return parallelize_module(torch.nn.Linear(2, 2), mesh, ColwiseParallel())


class Averaged:
    """An average of the weights, in a state that nests."""

    def __init__(self, model: Any) -> None:
        self.weights: list[Any] = [one.detach().clone() for one in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"averages": [{"weights": self.weights}], "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (average,) = state["averages"]
        for one, given in zip(self.weights, average["weights"], strict=True):
            one.copy_(given)


class FilledLater(Averaged):
    """One that has nothing before the first step."""

    def __init__(self) -> None:
        self.weights = []


class Wrapped:
    """A model or an optimizer whose state holds that of another."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def state_dict(self) -> dict[str, Any]:
        return {"base": [self.base.state_dict()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (given,) = state["base"]
        self.base.load_state_dict(given)


class WrappedOptimizer(Wrapped):
    """One that shows what it trains, as those of torch do."""

    @property
    def param_groups(self) -> Any:
        return self.base.param_groups


def step_of(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 3.0)
    optimizer.step()


def test_an_average_of_a_divided_model_goes_on_as_it_was(alone: Alone) -> None:
    alone.trainee = lambda: (model := divided(), torch.optim.SGD(model.parameters()))
    first, again = alone.start(), alone.start()
    before, after = (Averaged(whole.model) for whole in (first, again))
    first.extra["average"], again.extra["average"] = before, after
    with first:
        list(first.steps(1))
    with again:
        list(again.steps(1))

    assert [one.full_tensor().tolist() for one in after.weights] == [
        one.full_tensor().tolist() for one in before.weights
    ]
    assert alone.troubles() == []


def test_how_the_whole_is_divided_stands_beside_a_part(alone: Alone) -> None:
    alone.trainee = lambda: (model := divided(), torch.optim.SGD(model.parameters()))
    with alone.start() as whole:
        model: Any = whole.model
        state = taken_apart(model.weight)

    assert state["of"] == {"shape": [2, 2], "placements": [{"shard": 0}], "mesh": [0]}
    assert state["rank_s_part"].shape == (2, 2)


def test_a_job_goes_on_from_parts_that_an_earlier_version_described_in_words(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.trainee = lambda: (model := divided(), torch.optim.SGD(model.parameters()))
    described = sharded_state._described
    with monkeypatch.context() as earlier:
        earlier.setattr(
            sharded_state, "_described", lambda one: sharded_state._in_words(described(one))
        )
        with alone.start() as first:
            list(first.steps(1))
    with alone.start() as again:
        list(again.steps(2))

    weights = [one.model.weight.full_tensor().tolist() for one in (first, again)]  # type: ignore[union-attr, operator]
    assert weights[0] == weights[1]
    assert alone.troubles() == []


def test_what_is_divided_and_has_no_place_yet_is_refused_by_name_with_the_remedy(
    alone: Alone,
) -> None:
    alone.trainee = lambda: (model := divided(), torch.optim.SGD(model.parameters()))
    first, again = alone.start(), alone.start()
    first.extra["average"], again.extra["average"] = Averaged(first.model), FilledLater()
    with first:
        list(first.steps(1))

    with pytest.raises(
        ValueError,
        match=r"extra\.average\.averages\.0\.weights\.0 .* none yet: have it made before the Whole",
    ):
        again.__enter__()


@pytest.mark.parametrize(
    "wrap", [lambda optimizer: optimizer, WrappedOptimizer, Wrapped], ids=["own", "shown", "hidden"]
)
def test_what_an_optimizer_keeps_of_divided_weights_is_divided_again(
    alone: Alone, wrap: Callable[[Any], Any]
) -> None:
    bare = []

    def trainee() -> tuple[Any, Any]:
        model = divided()
        bare.append(torch.optim.AdamW(model.parameters()))
        return model, wrap(bare[-1])

    alone.trainee = trainee
    with alone.start() as first:
        for _step in first.steps(1):
            step_of(first.model, bare[0])
    with alone.start() as again:
        list(again.steps(1))

    kept, found = ([one["exp_avg"] for one in optimizer.state.values()] for optimizer in bare)
    assert [one.full_tensor().tolist() for one in found] == [
        one.full_tensor().tolist() for one in kept
    ]
    assert len(kept) == 2
    assert alone.troubles() == []


def test_a_divided_model_whose_state_nests_is_put_back(alone: Alone) -> None:
    alone.trainee = lambda: (
        Wrapped(model := divided()),
        torch.optim.SGD(model.parameters()),
    )
    with alone.start() as first:
        list(first.steps(1))
    with alone.start() as again:
        list(again.steps(1))

    assert again.digest() == first.digest()
    assert alone.troubles() == []
