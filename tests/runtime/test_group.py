"""How a script makes a ReplicaGroup and loops over it; what it is told where it does so otherwise.
Nothing here trains: there is no coordinator."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runtime.checkpoint import Checkpointer
from runtime.data import Batches
from runtime.job import Job
from runtime.replica.group import ReplicaGroup
from tests.runtime.told import Told

Make = Callable[..., ReplicaGroup]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A group that has not joined its job."""
    handler = signal.getsignal(signal.SIGTERM)
    job = Job(
        name="j", replica=0, rank=0, world_replicas=1, placement="p", coordinator="127.0.0.1:1",
        token="t", state_dir=tmp_path, sender=Told(), stop=threading.Event(),
    )  # fmt: skip

    def made(trained: nn.Module | None = None, **given: Any) -> ReplicaGroup:
        model = nn.Linear(2, 1)
        parameters = [*model.parameters(), *(trained.parameters() if trained else ())]
        optimizer = torch.optim.SGD(parameters)
        return ReplicaGroup(job, model, optimizer, Batches(samples=24), Checkpointer(job), **given)

    yield made
    signal.signal(signal.SIGTERM, handler)


def test_an_optimizer_of_what_is_not_the_model_s_is_refused(make: Make) -> None:
    words = r"optimizer 0, SGD, trains a tensor of shape \(5, 1\) that is no parameter of the mod"

    with pytest.raises(ValueError, match=words):
        make(trained=nn.Linear(1, 5))
