"""A job of DeepSpeed's engine, as a `WholeJob` runs it.

Its options: `folder` for what it says, `steps`, `config` (more of DeepSpeed's), and the step in
which its last rank kills itself, once (`killed_in`), when there is a checkpoint.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import runtime

job = runtime.join()

import deepspeed  # noqa: E402
import numpy  # type: ignore[import-not-found]  # noqa: E402 - DeepSpeed has it
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from runtime.adapters.deepspeed import EngineState  # noqa: E402

MICRO_BATCHES = 2

#: For the room that the first edge has begun to make, seconds: a busy machine is long about it.
PATIENCE_S = 120.0


class Counted(nn.Module):
    """What it divides by follows from how often it, and who shares its buffer, was asked."""

    asked: torch.Tensor

    def __init__(self, asked: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("asked", asked)
        self.turns = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        self.turns += 1
        return rows / (self.asked.sqrt() + self.turns)

    def get_extra_state(self) -> int:
        return self.turns

    def set_extra_state(self, state: int) -> None:
        self.turns = state


def main() -> None:
    folder = Path(job.options["folder"])
    config: dict[str, Any] = job.options["config"]
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(3)
    dist.init_process_group(
        "gloo", init_method=job.init_method, rank=job.rank, world_size=job.ranks
    )
    deepspeed.init_distributed("gloo")
    asked = torch.zeros(())
    model = nn.Sequential(
        nn.Linear(16, 64),
        Counted(asked),
        nn.LayerNorm(64),
        nn.Tanh(),
        nn.Dropout(0.1),
        nn.Linear(64, 16),
        Counted(asked),
    )
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config={
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **config,
        },
    )
    kind = torch.bfloat16 if "bf16" in config else torch.float32
    saver = runtime.Checkpointer(job, every_s=0.0)
    steps = (folder / f"steps.{job.rank}").open("a", buffering=1)
    batches = runtime.Batches(samples=1000, shards=MICRO_BATCHES * job.ranks, shard_size=8)
    part = (job.rank, job.ranks)
    state = EngineState(engine)
    with runtime.WholeJob(job, state, [], saver, batches=batches, data_part=part) as whole:
        for step in whole.steps(job.options["steps"]):
            if step == 1:
                saver.copy_buffers.await_free(PATIENCE_S)  # then this step's edge does save
            for shard in whole.shards():
                rows = torch.randn(len(shard.ids), 16, dtype=kind)
                loss = (engine(rows) - rows.flip(1)).float().square().mean()
                engine.backward(loss)
                if step == job.options.get("killed_in") and job.rank == job.ranks - 1:
                    wait_and_die(folder)
                engine.step()
            whole.tell(loss.item())
            steps.write(f"{whole.epoch} {step}\n")
        (folder / f"digest.{job.rank}").write_text(whole.digest())
    (folder / f"engine.{job.rank}").write_text(f"{engine.global_steps} {engine.get_lr()}")


def wait_and_die(folder: Path) -> None:
    """Once, with a checkpoint to go on from."""
    died = folder / "died"
    if died.exists():
        return
    while not list((folder / "state" / "checkpoints").glob("step-*")):
        threading.Event().wait(0.05)
    died.touch()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
