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


def test_a_plain_model_can() -> None:
    assert cannot_drop(model(), 0) == ""


def test_a_second_process_of_a_replica_cannot() -> None:
    assert "this is rank 1 of its replica" in cannot_drop(model(), 1)


@pytest.mark.usefixtures("_one_process_group")
def test_a_wrapped_model_is_to_be_given_bare() -> None:
    wrapped = nn.parallel.DistributedDataParallel(model())

    assert "give ReplicaGroup the bare model" in cannot_drop(wrapped, 0)


@pytest.mark.usefixtures("_one_process_group")
def test_sharded_parameters_are_named() -> None:
    sharded = model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))

    told = cannot_drop(sharded, 0)

    assert "the parameter 0.weight is divided among processes, S(0), " in told
    assert "a restart from its checkpoint" in told


@pytest.mark.usefixtures("_one_process_group")
def test_tensor_parallel_parameters_are_named() -> None:
    parallel = parallelize_module(model(), init_device_mesh("cpu", (1,)), {"1": ColwiseParallel()})

    assert "the parameter 1.weight is divided among processes" in cannot_drop(parallel, 0)


def test_parameters_elsewhere_are_named() -> None:
    assert "the parameter 0.weight is on meta" in cannot_drop(model().to("meta"), 0)
