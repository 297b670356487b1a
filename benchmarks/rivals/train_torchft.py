"""torchft's replicas, by its public interface and as its README shows them.

Kinder to it than its example in one thing: which samples a step trains on follows from the step
that its manager counts, so a step that it throws away is computed again and not lost.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torchft  # type: ignore[import-not-found]  # only in the rivals' own environments
from torch import distributed, nn

from benchmarks.rivals.task import ENV_BEAT, GLOBAL_BATCH, Task
from benchmarks.rivals.training import Driver, backward, prepare


def train(task: Task, driver: Driver) -> None:
    """Train until killed."""
    network, optimizer, rows = prepare(task.model)

    def state_dict() -> dict[str, Any]:
        return {"model": network.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = distributed.TCPStore(  # type: ignore[attr-defined]  # in its documentation
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    beat = os.environ.get(ENV_BEAT)
    manager = torchft.Manager(
        **({"heartbeat_interval": timedelta(milliseconds=int(beat))} if beat else {}),
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"replica_{task.replica}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
    )
    wrapped = torchft.DistributedDataParallel(manager, network)
    share = GLOBAL_BATCH // task.replicas
    while True:
        step = manager.current_step()
        driver.wait_for(step)
        manager.start_quorum()
        optimizer.zero_grad()
        shards = backward(wrapped, rows, task, step)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        counts = manager.is_participating()  # else it heals, and its gradient is taken for zero
        if manager.should_commit():
            optimizer.step()
            samples = manager.num_participants() * share
            committed = manager.current_step() - 1
            used = shards if counts else []
            driver.tell("commit", step=committed, samples=samples, shards=used)
            if not counts:
                driver.tell("discard", step=committed, shards=shards)
        else:
            driver.tell("discard", step=step, shards=shards)
