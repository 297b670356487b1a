"""A library inside training jobs: replicas that drop and rejoin, checkpoints, a sample ledger.

    job = runtime.join()
    batches = runtime.Batches(samples=len(data), shards=12, shard_size=4)
    saver = runtime.Checkpointer(job, every_s=20)
    with runtime.ReplicaGroup(job, model, optimizer, batches, saver) as replica:
        for shard in replica:
            replica.backward(loss_of(model, shard.ids))

A model of which no replica can be dropped goes in a `runtime.WholeJob` instead of a ReplicaGroup.

Nothing is imported before it is asked for: `runtime.client` and `runtime.join` need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.checkpoint import Checkpointer
    from runtime.data import Batches
    from runtime.job import join
    from runtime.replica.group import ReplicaGroup
    from runtime.whole import WholeJob

__all__ = ["Batches", "Checkpointer", "ReplicaGroup", "WholeJob", "join"]

_HOMES = {
    "Batches": "runtime.data",
    "Checkpointer": "runtime.checkpoint",
    "ReplicaGroup": "runtime.replica.group",
    "WholeJob": "runtime.whole",
    "join": "runtime.job",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
