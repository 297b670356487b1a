"""What makes a model one whose replicas cannot be dropped, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from runtime.replica.shape import cannot_drop


@pytest.fixture(scope="module")
def _one_process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def divided() -> nn.Module:
    made = model()
    fully_shard(made, mesh=init_device_mesh("cpu", (1,)))
    return made


def test_a_plain_model_can() -> None:
    assert cannot_drop(model()) == ""


@pytest.mark.usefixtures("_one_process_group")
def test_a_model_divided_among_the_replica_s_ranks_can() -> None:
    assert cannot_drop(divided(), 0, 1) == ""


def test_ranks_with_a_whole_model_each_are_no_replica() -> None:
    assert "this is rank 1 of 2 of its replica, and each has the whole" in cannot_drop(
        model(), 1, 2
    )


@pytest.mark.usefixtures("_one_process_group")
def test_a_wrapped_model_is_to_be_given_bare() -> None:
    wrapped = nn.parallel.DistributedDataParallel(model())

    assert "give ReplicaGroup the bare model" in cannot_drop(wrapped)


@pytest.mark.usefixtures("_one_process_group")
def test_a_model_divided_among_others_than_the_replica_s_ranks_is_refused() -> None:
    told = cannot_drop(divided(), 0, 2)

    assert "the parameter 0.weight is divided among 1 processes, S(0), and the launcher" in told
    assert "a replica has 2" in told


@pytest.mark.usefixtures("_one_process_group")
def test_a_model_divided_in_part_is_to_be_divided_whole() -> None:
    partly = model()
    fully_shard(partly[0], mesh=init_device_mesh("cpu", (1,)))
    ignoring = model()
    ignored = set(ignoring[0].parameters())
    fully_shard(ignoring, mesh=init_device_mesh("cpu", (1,)), ignored_params=ignored)

    assert "not by fully_shard called on the model" in cannot_drop(partly)
    assert "the parameter 0.weight is whole on each rank and 1.weight" in cannot_drop(ignoring)


@pytest.mark.usefixtures("_one_process_group")
def test_a_model_replicated_beside_is_refused() -> None:
    both = model()
    fully_shard(both, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("r", "s")))

    told = cannot_drop(both)

    assert "the parameter 0.weight is divided among processes in more than one way, R, S(0)" in told
    assert "a restart from its checkpoint" in told


@pytest.mark.usefixtures("_one_process_group")
def test_tensor_parallel_parameters_are_named() -> None:
    parallel = parallelize_module(model(), init_device_mesh("cpu", (1,)), {"1": ColwiseParallel()})

    assert "the parameter 1.weight is divided among processes" in cannot_drop(parallel)


def test_parameters_elsewhere_are_named() -> None:
    assert "the parameter 0.weight is on meta" in cannot_drop(model().to("meta"))
