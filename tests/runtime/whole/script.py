"""A job whose ranks divide one model, as `runtime.WholeJob` runs it: by tensor parallelism, or as
the stages of a pipeline; or each step's samples.

Its options: `folder` for what it says, `steps`, `divided` (a name in MADE), `every_s` (of its
Checkpointer; it saves at each edge without it), `dies` (its last rank kills itself in the middle of
the step KILLED_IN, once), `evaluates` (of ranks the step in which each begins to evaluate, and
never ends) and `as_replica` (it asks for a ReplicaGroup, which refuses it).
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
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

#: Computes the gradients of these samples; what the loss is, on the last rank at least.
Backward = Callable[[torch.Tensor], float]

#: Of this step, once there is a checkpoint.
KILLED_IN = 20

SAMPLES = 100

#: For the room that the first edge has begun to make, seconds: a busy machine is long about it.
PATIENCE_S = 120.0


def main() -> None:
    folder = Path(job.options["folder"])
    (folder / f"pid.{job.rank}").write_text(f"{os.getpid()}\n")
    torch.set_num_threads(1)
    torch.manual_seed(3)
    random.seed(3)
    dist.init_process_group(
        "gloo", init_method=job.init_method, rank=job.rank, world_size=job.ranks
    )
    divided = job.options.get("divided", "weights")
    model, backward = MADE[divided]()
    data = torch.randn(SAMPLES, 16)
    batches = runtime.Batches(samples=SAMPLES, shards=4, shard_size=2, seed=5)
    part = (job.rank, job.ranks) if divided == "samples" else (0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    saver = runtime.Checkpointer(job, every_s=job.options.get("every_s", 0.0))
    if job.options.get("as_replica"):
        runtime.ReplicaGroup(job, model, optimizer, batches, saver)
    steps = (folder / f"steps.{job.rank}").open("a", buffering=1)
    with runtime.WholeJob(
        job, model, optimizer, saver, batches=batches, data_part=part, extra={"schedule": schedule}
    ) as whole:
        for step in whole.steps(job.options["steps"]):
            ids = [sample for shard in whole.shards() for sample in shard.ids]
            noise = torch.randn(len(ids), 16) * random.uniform(0.5, 1.5)  # noqa: S311
            rows = data[ids] + noise
            loss = backward(rows)
            if step == 1:
                saver.copy_buffers.await_free(PATIENCE_S)  # then this step's edge does save
            if step == KILLED_IN and job.rank == job.ranks - 1:
                wait_and_die(folder)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            whole.tell(loss)
            steps.write(f"{whole.epoch} {step}\n")
            if step == job.options.get("evaluates", {}).get(str(job.rank)):
                with whole.evaluating():
                    (folder / f"evaluates.{job.rank}").touch()
                    threading.Event().wait()
        (folder / f"digest.{job.rank}").write_text(whole.digest())


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.LayerNorm(16)
    )


def loss_of(made: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return (made - rows.flip(1)).square().mean()


def tensor_parallel() -> tuple[torch.nn.Module, Backward]:
    model = layers()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (job.ranks,)), plan)

    def backward(rows: torch.Tensor) -> float:
        loss = loss_of(model(rows), rows)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    return model, backward


def pipeline() -> tuple[torch.nn.Module, Backward]:
    """Each of two ranks has half of the layers, and two samples at a time go through them."""
    half = layers()[2 * job.rank : 2 * job.rank + 2]

    def first(rows: torch.Tensor) -> float:
        made = [half(few) for few in rows.chunk(4)]
        sent = [dist.isend(one.detach(), 1) for one in made]
        for one in made:
            gradient = torch.empty_like(one)
            dist.recv(gradient, 1)
            one.backward(gradient)
        await_all(sent)
        return 0.0

    def last(rows: torch.Tensor) -> float:
        losses, gradients = [], []
        for few in rows.chunk(4):
            given = torch.empty(2, 32)
            dist.recv(given, 0)
            loss = loss_of(half(given.requires_grad_()), few)
            loss.backward()  # type: ignore[no-untyped-call]
            assert given.grad is not None
            gradients.append(given.grad)
            losses.append(loss.item())
        await_all([dist.isend(one, 0) for one in gradients])
        return sum(losses) / len(losses)

    return half, (first, last)[job.rank]


def data_parallel() -> tuple[torch.nn.Module, Backward]:
    """Each rank has the whole model, and a part of the samples."""
    model = layers()

    def backward(rows: torch.Tensor) -> float:
        loss = loss_of(model(rows), rows)
        loss.backward()  # type: ignore[no-untyped-call]
        for weight in model.parameters():
            assert weight.grad is not None
            dist.all_reduce(weight.grad)
        return loss.item()

    return model, backward


#: By what the ranks divide among them.
MADE = {"weights": tensor_parallel, "layers": pipeline, "samples": data_parallel}


def await_all(sent: list[dist.Work | None]) -> None:
    for one in sent:
        assert one is not None
        one.wait()


def wait_and_die(folder: Path) -> None:
    if not job.options.get("dies") or (folder / "died").exists():
        return
    pause = threading.Event()
    while not [*(job.state_dir / "checkpoints").glob("step-*/manifest.json")]:
        pause.wait(0.01)
    (folder / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
