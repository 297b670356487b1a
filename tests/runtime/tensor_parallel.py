"""A job whose ranks divide one model by tensor parallelism, as `runtime.WholeJob` runs it.

Its options: `folder` for what it says, `steps`, `every_s` (of its Checkpointer; it saves at each
edge without it), `dies` (its last rank kills itself in the middle of the step KILLED_IN, once) and
`as_replica` (it asks for a ReplicaGroup, which refuses it).
"""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import runtime

job = runtime.join()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

#: Its last rank goes on with this step only once there is a checkpoint.
KILLED_IN = 20


def main() -> None:
    folder = Path(job.options["folder"])
    (folder / f"pid.{job.rank}").write_text(f"{os.getpid()}\n")
    torch.set_num_threads(1)
    torch.manual_seed(3)
    random.seed(3)
    dist.init_process_group(
        "gloo", init_method=job.init_method, rank=job.rank, world_size=job.ranks
    )
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.LayerNorm(16)
    )
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (job.ranks,)), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    saver = runtime.Checkpointer(job, every_s=job.options.get("every_s", 0.0))
    if job.options.get("as_replica"):
        runtime.ReplicaGroup(job, model, optimizer, runtime.Batches(samples=960), saver)
    steps = (folder / f"steps.{job.rank}").open("a", buffering=1)
    with runtime.WholeJob(job, model, optimizer, saver, extra={"schedule": schedule}) as whole:
        for step in whole.steps(job.options["steps"]):
            rows = torch.randn(8, 16) * random.uniform(0.5, 1.5)  # noqa: S311
            loss = (model(rows) - rows.flip(1)).square().mean()
            loss.backward()
            if step == KILLED_IN and job.rank == job.ranks - 1:
                wait_and_die(folder)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            whole.tell(loss.item(), len(rows))
            steps.write(f"{whole.epoch} {step}\n")
        (folder / f"digest.{job.rank}").write_text(whole.digest())


def wait_and_die(folder: Path) -> None:
    pause = threading.Event()
    while not [*(job.state_dir / "checkpoints").glob("step-*/manifest.json")]:
        pause.wait(0.01)
    if job.options.get("dies") and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
