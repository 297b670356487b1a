"""A model that all ranks divide by tensor parallelism: a job that lives and dies as one.

Started by torchrun, which gives each process its rank, with DRYDOCK_* in the environment. It learns
to say the byte after the last few ones, of the Python files of this machine's standard library.
DRYDOCK_OPTIONS may change what OPTIONS names.
"""

from __future__ import annotations

import os
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import runtime

job = runtime.join()

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch  # noqa: E402 - the control plane hears of this rank while torch is imported
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: E402, N812 - its usual name

OPTIONS: dict[str, Any] = {
    "steps": 1_000_000,
    "width": 256,
    "context": 16,
    "rows": 32,
    "learning_rate": 1e-3,
    "checkpoint_s": {"local": 5.0, "shared": 20.0},
    "megabytes": 4,
    "nice": 0,
    **job.options,
}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group(
        "gloo", init_method=job.init_method, rank=job.rank, world_size=job.ranks
    )
    model = NextByte(OPTIONS["context"], OPTIONS["width"])
    plan = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (job.ranks,)), plan)
    optimizer = torch.optim.AdamW(model.parameters(), OPTIONS["learning_rate"])
    data = corpus(OPTIONS["megabytes"] << 20)
    places = len(data) - OPTIONS["context"]
    batches = runtime.Batches(samples=places, shards=1, shard_size=OPTIONS["rows"], seed=7)
    saver = runtime.Checkpointer(job, every_s=OPTIONS["checkpoint_s"])
    os.nice(OPTIONS["nice"])
    with runtime.WholeJob(job, model, optimizer, saver, batches=batches, data_part=(0, 1)) as whole:
        for _step in whole.steps(OPTIONS["steps"]):
            for shard in whole.shards():
                inputs, targets = rows_of(data, shard.ids)
                loss = F.cross_entropy(model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
                whole.tell(loss)
            optimizer.step()
            optimizer.zero_grad()


class NextByte(nn.Module):
    """Scores of the byte that follows: (rows, context) bytes to (rows, 256)."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, 16)
        self.inner = nn.Linear(16 * context, width)
        self.outer = nn.Linear(width, 256)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.outer(F.gelu(self.inner(self.bytes(rows).flatten(1))))
        return scores


def rows_of(data: torch.Tensor, starts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each place in the data the bytes from there on, and the one that follows them."""
    end = OPTIONS["context"] + 1
    rows = torch.stack([data[start : start + end] for start in starts]).long()
    return rows[:, :-1], rows[:, -1]


def corpus(limit: int) -> torch.Tensor:
    """Bytes of the standard library's modules, in a fixed order."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8)[:limit]


if __name__ == "__main__":
    main()
