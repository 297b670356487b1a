"""What a script trains and the replicas do not sum is told before any step is made with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runtime.data import Batches
from runtime.replica.fsdp import ShardGroup
from runtime.replica.gloo import Gloo
from runtime.replica.gradients import Wishes
from runtime.replica.observing import Observer
from runtime.replica.state import TrainingState
from runtime.replica.step import StepEngine
from runtime.replica.trained import Trained, stranger

Change = Callable[[nn.Sequential], object]
WAS_FROZEN = "was frozen as ReplicaGroup was made, and is trained now: only what required grad"
CAME = "came to the model after ReplicaGroup was made, or is another object than it was then: only"


@pytest.fixture
def model() -> nn.Sequential:
    """Its first layer is frozen."""
    layers = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 1))
    layers[0].requires_grad_(False)
    return layers


@pytest.fixture
def optimizer(model: nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def trained(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Trained:
    return Trained(model, [optimizer])


def train_for_a_moment(model: nn.Sequential) -> None:
    model[0].requires_grad_(True)
    model(torch.ones(1, 3)).sum().backward()
    model[0].requires_grad_(False)


def replace_a_weight(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.zeros(2, 2))


def assign(model: nn.Sequential) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def insert_adapters(model: nn.Sequential) -> None:
    model[2].lora = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2))


def replace_a_layer(model: nn.Sequential) -> None:
    model[2] = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model[0].bias.requires_grad_(True), f"parameter 0.bias {WAS_FROZEN}"),
        (lambda model: model.requires_grad_(True), f"0.weight (like 1 more) {WAS_FROZEN}"),
        (train_for_a_moment, f"0.weight (like 1 more) {WAS_FROZEN}"),
        (replace_a_weight, f"2.weight {CAME}"),
        (assign, f"2.weight (like 3 more) {CAME}"),
        (insert_adapters, f"2.lora.0.weight (like 3 more) {CAME}"),
        (replace_a_layer, f"2.weight (like 1 more) {CAME}"),
    ],
)
def test_what_is_trained_and_not_summed_is_named(
    model: nn.Sequential, trained: Trained, change: Change, words: str
) -> None:
    assert trained.flaw() == ""

    change(model)

    assert words in trained.flaw()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[2].requires_grad_(False),
        lambda model: model.append(nn.Linear(1, 1).requires_grad_(False)),
        lambda model: setattr(model, "1", nn.Dropout()),
        lambda model: model.register_parameter("none", None),
        lambda model: model.load_state_dict(model.state_dict()),
    ],
)
def test_what_trains_nothing_may_come_and_go(
    model: nn.Sequential, trained: Trained, change: Change
) -> None:
    change(model)
    allowed = trained.flaw()
    model[-1].late = nn.Parameter(torch.ones(1))

    assert allowed == ""
    assert f".late {CAME}" in trained.flaw()


def test_what_came_frozen_is_looked_at_as_what_was_there(
    model: nn.Sequential, trained: Trained
) -> None:
    model.append(nn.Linear(1, 1).requires_grad_(False))
    assert trained.flaw() == ""

    model[-1].bias.requires_grad_(True)

    assert f"4.bias {CAME}" in trained.flaw()


def test_an_optimizer_s_groups_stay_as_they_were(
    model: nn.Sequential, optimizer: torch.optim.Optimizer, trained: Trained
) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    assert trained.flaw() == ""

    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    assert "optimizer 0 has groups of [6, 1] tensors, and had [6] as Rep" in trained.flaw()


def test_an_optimizer_whose_groups_are_not_as_torch_s_is_taken_as_it_is(
    model: nn.Sequential,
) -> None:
    other = SimpleNamespace(param_groups=[{"weights": [*model.parameters()]}])

    assert stranger(model, [other]) == Trained(model, [other]).flaw() == ""


@pytest.fixture
def engine(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> Iterator[StepEngine]:
    model[0].weight.grad = torch.ones(2, 3)  # of something that the script did before
    state = TrainingState(model, [optimizer], Batches(samples=24, shards=2))
    gloo, shard_group = Gloo("127.0.0.1"), ShardGroup(model, 0)
    yield StepEngine(state, gloo, Observer(), shard_group, mode="cover", max_grad_norm=None)
    gloo.close()


def test_a_step_with_what_is_not_summed_is_not_made(
    model: nn.Sequential, engine: StepEngine
) -> None:
    model[0].requires_grad_(True)

    with pytest.raises(RuntimeError, match=r"0\.weight .* learning rate is 0"):
        engine.reduce(Wishes())


def test_what_frozen_weights_had_for_a_gradient_before_is_never_applied(
    model: nn.Sequential, engine: StepEngine
) -> None:
    assert engine.trained.flaw() == ""
    assert model[0].weight.grad is None


def step_in_backward(model: nn.Sequential) -> None:
    """As torch's tutorial on optimizers fused into backward has it."""
    for weight in (*model[2].parameters(), *model[3].parameters()):
        own = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _weight, own=own: own.step()
        )


def keep_small_in_forward(model: nn.Sequential) -> None:
    def clamp(layer: nn.Linear, _inputs: object) -> None:
        with torch.no_grad():
            layer.weight.clamp_(-1, 1)

    model[3].register_forward_pre_hook(clamp)


def average_in_forward(model: nn.Sequential) -> None:
    def follow(layer: nn.Linear, _inputs: object) -> None:
        with torch.no_grad():
            layer.weight.lerp_(torch.ones(2, 3), 0.1)

    model[0].register_forward_pre_hook(follow)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (step_in_backward, "2.weight (like 3 more) was changed while a step's shards"),
        (keep_small_in_forward, "3.weight was changed while a step's shards"),
        (average_in_forward, "0.weight was changed while a step's shards"),
    ],
)
def test_weights_that_change_while_shards_are_computed_are_named(
    model: nn.Sequential, engine: StepEngine, change: Change, words: str
) -> None:
    engine.shares = {0: [0, 1]}
    change(model)
    for _shard in engine.shards():
        engine.backward(model(torch.ones(1, 3)).sum(), 1)

    assert words in engine.trained.flaw()


def test_words_that_are_kept_short_are_named() -> None:
    words = nn.Embedding(4, 2, max_norm=0.1)
    trained = Trained(words, [])
    trained.begin()
    words(torch.tensor([1]))

    assert "parameter weight was changed while a step's shards" in trained.flaw()


def test_what_is_written_between_two_steps_is_told_once(
    model: nn.Sequential, trained: Trained
) -> None:
    told = []
    for _ in range(3):
        trained.at_edge()
        with torch.no_grad():
            model.get_parameter("0.weight").clamp_(-0.1, 0.1)
        told.append(trained.begin())
        trained.end()

    assert "parameter 0.weight was written between two steps" in told[0]
    assert "after_step" in told[0]
    assert told[1:] == ["", ""]


def test_weights_may_change_between_steps(model: nn.Sequential, trained: Trained) -> None:
    trained.begin()
    model(torch.ones(1, 3)).sum().backward()
    computed = trained.flaw()
    trained.end()
    model.load_state_dict(model.state_dict())
    trained.begin()

    assert computed == ""
    assert trained.flaw() == ""
