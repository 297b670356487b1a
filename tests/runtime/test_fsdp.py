"""A divided model's state as each rank's own part of it: taken apart, copied, put back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from runtime import snapshot
from runtime.data import Batches
from runtime.replica.fsdp import ShardGroup, is_sharded, shard_of
from runtime.replica.gradients import Gradients, Wishes
from runtime.replica.nccl import EpochGroup
from runtime.replica.observing import Observer
from runtime.replica.state import TrainingState
from runtime.replica.step import StepEngine
from tests.runtime.fake_groups import Alone


@pytest.fixture(scope="module", autouse=True)
def _one_process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def divided() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def state_of(model: nn.Module) -> TrainingState:
    optimizer = torch.optim.AdamW(model.parameters())
    return TrainingState(model, [optimizer], Batches(samples=24, shards=2), ShardGroup(model, 0))


def trained() -> TrainingState:
    state = state_of(divided())
    state.model(torch.ones(2, 4)).sum().backward()
    state.optimizers[0].step()
    state.committed = 3
    return state


def test_a_copy_holds_parts_alone_and_is_put_back_as_what_it_was() -> None:
    first, second = trained(), state_of(divided())
    copy = first.copy()

    second.load(copy)

    assert {type(t) for t in tensors_of(snapshot.state_of(copy))} == {torch.Tensor}
    assert second.copy().digest == copy.digest
    assert all(is_sharded(p) for p in second.model.parameters())
    assert is_sharded(second.optimizers[0].state_dict()["state"][0]["exp_avg"])


def test_a_copy_aside_in_the_middle_of_forward_takes_nothing_apart() -> None:
    first, second = trained(), state_of(divided())
    second.load(first.copy())
    copies = []

    def aside(*_: object) -> None:
        copies.append(second.begin_copy_aside(None).finish())

    second.model[1].register_forward_pre_hook(aside)  # type: ignore[index]
    second.model(torch.ones(2, 4)).sum().backward()

    assert [copy.digest for copy in copies] == [first.copy().digest]


def test_a_whole_model_does_not_take_parts() -> None:
    whole = state_of(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))

    with pytest.raises(ValueError, match="a part of a divided model, this script's model is whole"):
        whole.load(trained().copy())


def test_what_each_rank_holds_of_a_gradient_is_summed_and_put_back() -> None:
    model = divided()
    gradients = Gradients(model.parameters(), shards=2)
    for shard in range(2):
        gradients.lend()
        model(torch.ones(2, 4)).sum().backward()
        gradients.take()
        gradients.add(shard, 1, 2, 0)
    reduced = gradients.reduce(Alone(), {0: [0, 1]}, 0, Wishes())

    gradients.put(
        torch.arange(1.0, gradients.size + 1),
        [True] * len(gradients.parameters),
        times=1.0,
        clipped=1.0,
    )

    assert reduced[gradients.size - 1] == 4.0  # the last bias
    parts = [shard_of(p.grad).flatten() for p in model.parameters() if p.grad is not None]
    assert torch.equal(torch.cat(parts), torch.arange(1.0, gradients.size + 1))
    assert all(is_sharded(parameter.grad) for parameter in model.parameters())


class Lone(Alone):
    """The group of a replica without peers, in an epoch that lasts."""

    address = ""

    def broken(self, _epoch: int) -> bool:
        return False


def evaluated(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.ones(2, 4))
    return found


def test_an_evaluation_right_before_the_sum_neither_ends_the_job_nor_hides_the_step() -> None:
    state, other = state_of(divided()), state_of(divided())
    group = cast(EpochGroup, Lone())
    engine = StepEngine(
        state,
        group,
        Observer(),
        state.shard_group,
        mode="cover",
        max_grad_norm=None,
    )
    next(engine.compute(0))
    engine.backward(state.model(torch.ones(2, 4)).mean(), 1)

    before = evaluated(state.model)
    reduced, tail = engine.reduce(Wishes())
    evaluated(state.model)
    engine.apply(reduced, tail)
    after = evaluated(state.model)

    other.load(state.copy())
    assert not torch.equal(before, after)
    assert torch.equal(evaluated(other.model), after)


def test_ranks_hear_the_first_one_s_address_and_each_other_s_numbers() -> None:
    shard_group = ShardGroup(divided(), 0)

    assert shard_group.agree("127.0.0.1:4000") == "127.0.0.1:4000"
    assert shard_group.gather([1.5, 2.0]) == [[1.5, 2.0]]


def test_a_whole_tensor_is_its_own_part() -> None:
    tensor = torch.ones(2)

    assert shard_of(tensor) is tensor


def tensors_of(value: object) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_of(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_of(item)]
    return [value] if isinstance(value, torch.Tensor) else []


def test_no_tensor_is_missed() -> None:
    """What the first test looks through is what a divided state holds."""
    found = tensors_of(trained().model.state_dict())

    assert {type(tensor) for tensor in found} == {DTensor}
