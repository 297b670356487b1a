"""Plain DistributedDataParallel: what a step costs with nothing done for the day it fails."""

from __future__ import annotations

from torch import distributed, nn

from benchmarks.rivals.task import GLOBAL_BATCH, Task
from benchmarks.rivals.training import Driver, backward, prepare


def train(task: Task, driver: Driver) -> None:
    """Train until a peer dies, which ends this replica too."""
    network, optimizer, rows = prepare(task.model)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{task.folder}/ddp",
        rank=task.replica,
        world_size=task.replicas,
    )
    wrapped = nn.parallel.DistributedDataParallel(network)
    step = 0
    while True:
        driver.wait_for(step)
        shards = backward(wrapped, rows, task, step)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        driver.tell("commit", step=step, samples=GLOBAL_BATCH, shards=shards)
        step += 1
