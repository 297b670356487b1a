"""Plain DistributedDataParallel: what a step costs with nothing done for the day it fails."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from torch import distributed, nn

from benchmarks.rivals.task import GLOBAL_BATCH, Task
from benchmarks.rivals.training import Driver, backward, prepare


def train(task: Task, driver: Driver) -> None:
    """Train until a peer dies, which ends this replica too."""
    trained = steps(task)
    for step in count():
        driver.wait_for(step)
        driver.tell("commit", step=step, samples=GLOBAL_BATCH, shards=next(trained))


def steps(task: Task) -> Iterator[list[int]]:
    """Each `next` trains one step, of which it gives the shards."""
    network, optimizer, rows = prepare(task.model)
    distributed.init_process_group(
        "gloo" if task.model.device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{task.folder}/ddp",
        rank=task.replica,
        world_size=task.replicas,
    )
    wrapped = nn.parallel.DistributedDataParallel(network)
    for step in count():
        shards = backward(wrapped, rows, task, step)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield shards
