"""Our replicas, as docs/runtime.md shows them."""

from __future__ import annotations

from typing import Any, Protocol

import runtime
from benchmarks.rivals.task import SAMPLES, SHARD_SIZE, SHARDS, Task
from benchmarks.rivals.training import prepare
from runtime.replica.reporting import Committed


class Line(Protocol):
    """What ours needs of a driver."""

    def tell(self, what: str, **data: Any) -> None: ...

    def wait_for(self, step: int) -> None: ...


def train(task: Task, driver: Line) -> None:
    """Train until killed."""
    job = runtime.join()
    network, optimizer, rows = prepare(task.model)
    computed: list[int] = []  # shards, since the last commit

    def tell(step: Committed) -> None:
        driver.tell("commit", step=step.step, samples=step.samples, shards=list(computed))
        computed.clear()

    batches = runtime.Batches(samples=SAMPLES, shards=SHARDS, shard_size=SHARD_SIZE)
    saver = runtime.Checkpointer(job, every_s=3600)
    with runtime.ReplicaGroup(job, network, optimizer, batches, saver, on_step=tell) as replica:
        for shard in replica:
            driver.wait_for(shard.step)
            replica.backward(network(rows[list(shard.ids)]))
            computed.append(shard.index)
