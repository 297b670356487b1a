"""A job small enough for tests: a linear model, a line per committed step, a digest at the end.

Its options: `steps`, `mode`, `checkpoint_s`, `local_s`, `peer_s` and `object_s`, `pace_s` (what a
shard takes, as if an accelerator computed it), `dropout`, `compare_every`, `straggler_after_s`,
`stalled_after_s`, `flips_at` (with so many steps applied, a bit of its weights turns over in the
next), and what a misfit of a replica has otherwise: `width`, `samples`, `content` (of which its
data is drawn), `seed`, `rate`. It `clamps` its weights after each step, and counts these. `rich`
trains with all that a loop may have besides, with or without `averages`; if it is `calm`, no last
bit of a sum decides on anything. If it `measures` it says after each step what memory it has. At
the step `evaluate_at` it does something else for a minute, at `forks_at` it forks a child that does
nothing, from `freezes_at` on its first layer is trained no more. If it `tells` it logs what
happens, not only what goes wrong. `data` is "ids", "dataset", "loader", "stateful" or "streams":
what Batches is given; `workers` load it, `drop_last` ends it.
If rows are `signed` by the process that loaded them it says after each step which workers had.
The model is divided among the ranks of a replica.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import runtime

job = runtime.join()

import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402


def main() -> None:
    options = {
        "steps": None, "mode": "cover", "checkpoint_s": 3600, "local_s": 3600, "peer_s": 3600,
        "object_s": 3600,
        "width": 32, "samples": 960, "content": 3, "seed": 5, "rate": 1e-3, "rich": False,
        "averages": True, "evaluate_at": -1, "pace_s": 0.003, "data": "ids", "workers": 0,
        "drop_last": False, "dropout": 0.5, "compare_every": 1000, "flips_at": -1,
        "straggler_after_s": 600, "stalled_after_s": 120, "calm": False, "clamps": False,
        "forks_at": -1, "freezes_at": 1 << 60, "measures": False, "signed": False,
        "tells": False,
        **job.options,
    }  # fmt: skip
    if options["tells"]:
        logging.basicConfig(level=logging.INFO)
    folder = Path(options["folder"])
    name = f"{job.replica}.{job.rank}" if job.rank else f"{job.replica}"
    steps_log = (folder / f"steps.{name}").open("a", buffering=1)
    evaluating = folder / f"evaluating.{name}"
    torch.set_num_threads(1)
    torch.manual_seed(options["content"])
    data = torch.randn(options["samples"], 16)
    width = options["width"]
    model = torch.nn.Sequential(
        torch.nn.Linear(16, width), torch.nn.Dropout(options["dropout"]), torch.nn.Linear(width, 1)
    )
    if options["rich"] and not options["calm"]:
        model.append(torch.nn.BatchNorm1d(1))
    if job.ranks > 1:
        divide(model)
    shard_size = 4 if options["rich"] else 2
    batches = batches_of(options, data, shard_size)
    intervals = {
        "peer": options["peer_s"],
        "local": options["local_s"],
        "shared": options["checkpoint_s"],
        "object": options["object_s"],
    }
    saver = runtime.Checkpointer(job, every_s=intervals)
    parts: dict[str, Any] = (
        rich(model, averages=options["averages"], calm=options["calm"])
        if options["rich"]
        else {"optimizer": Momentum(model, options["rate"], options["flips_at"])}
    )

    if options["clamps"]:
        kept = Kept(model)
        parts |= {"extra": {"steps": kept}, "after_step": kept.clamp}

    loaders: set[int] = set()  # by their pids, of what was trained on since the last step

    def report(step: Any) -> None:
        also: dict[str, Any] = {"anonymous": anonymous()} if options["measures"] else {}
        if options["signed"]:
            also["workers"] = sorted(loaders - {os.getpid()})
            loaders.clear()
        steps_log.write(json.dumps({**vars(step), **also}) + "\n")

    with runtime.ReplicaGroup(
        job, model, batches=batches, saver=saver, mode=options["mode"], steps=options["steps"],
        on_step=report, compare_every=options["compare_every"],
        straggler_after_s=options["straggler_after_s"],
        stalled_after_s=options["stalled_after_s"], **parts,
    ) as replica:  # fmt: skip
        for shard in replica:
            time.sleep(options["pace_s"])
            model[0].requires_grad_(shard.step < options["freezes_at"])
            if replica.pending == options["forks_at"]:
                options["forks_at"] = -1
                fork()
            if replica.pending == options["evaluate_at"] and not evaluating.exists():
                evaluating.touch()
                time.sleep(60)  # as an evaluation takes long, and no step is made
            rows = data[list(shard.ids)] if options["data"] == "ids" else shard.data
            if options["signed"]:
                rows, pids = rows
                loaders.update(pids.tolist())
            pieces = torch.split(rows, 2) if options["rich"] else [rows]
            for piece in pieces:
                loss = (model(piece).squeeze(1) - piece.sum(1)).square().mean()
                replica.backward(loss, parts=len(pieces))
    (folder / f"digest.{name}").write_text(replica.state.copy().digest)
    (folder / f"weights.{name}").write_text(replica.state.digest())
    (folder / f"speaks.{name}").write_text(f"{job.sender.speaks}")
    if average := parts.get("ema"):
        flat = torch.nn.utils.parameters_to_vector(average.parameters())
        (folder / f"average.{name}").write_text(json.dumps(flat.tolist()))


class Kept:
    """What a script keeps beside its model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.steps = 0

    def clamp(self) -> None:
        self.steps += 1
        for weight in self.model.parameters():
            weight.clamp_(-0.2, 0.2)

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def anonymous() -> int:
    """Bytes that this process has and no file."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def fork() -> None:
    """Leave a child behind that outlives us, as a forked worker of a loader may for a while."""
    if os.fork() == 0:
        signal.alarm(60)
        signal.pause()


def flip(weights: torch.Tensor) -> None:
    """One bit of the first: as a fault of memory does it."""
    part = weights.to_local() if hasattr(weights, "to_local") else weights
    part.data.view(torch.int32).view(-1)[0] ^= 1 << 12


def divide(model: torch.nn.Sequential) -> None:
    """Among the ranks of this replica."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "gloo", init_method=job.init_method, rank=job.rank, world_size=job.ranks
    )
    mesh = init_device_mesh("cpu", (job.ranks,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)


def batches_of(options: dict[str, Any], data: torch.Tensor, shard_size: int) -> runtime.Batches:
    seed, workers, drop_last = options["seed"], options["workers"], options["drop_last"]
    rows = SignedRows(data) if options["signed"] else Rows(data)
    if options["data"] == "ids":
        return runtime.Batches(
            samples=len(data), shard_size=shard_size, seed=seed, drop_last=drop_last
        )
    if options["data"] == "dataset":
        return runtime.Batches(
            rows, shard_size=shard_size, seed=seed, workers=workers, drop_last=drop_last
        )
    if options["data"] == "streams":
        return runtime.Batches(factory=streams_of(data), shard_size=shard_size, seed=seed)
    loader = LOADERS[options["data"]]()(
        rows, batch_size=shard_size, shuffle=True, num_workers=workers, drop_last=drop_last
    )
    return runtime.Batches(loader, seed=seed)


def stateful() -> type[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader  # type: ignore[no-any-return]


#: Imported by those who want it: it takes a while.
LOADERS: dict[str, Callable[[], type[Any]]] = {"loader": lambda: DataLoader, "stateful": stateful}


def streams_of(data: torch.Tensor) -> Callable[[int, int], Iterator[torch.Tensor]]:
    """Each shard's rows, some more and some fewer, in another order and with other noise each time
    that they come round."""

    def rows(shard: int, _epoch: int) -> Iterator[torch.Tensor]:
        mine = data[shard :: 12 + shard % 5]
        for row in torch.randperm(len(mine)):
            yield mine[row] + torch.randn(16) / 10

    return rows


class Rows(Dataset[Any]):
    """The data with noise, as augmentation adds it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, sample: int) -> Any:
        return self.data[sample] + torch.randn(16) / 10


class SignedRows(Rows):
    """Each with the process that loaded it."""

    def __getitem__(self, sample: int) -> Any:
        return super().__getitem__(sample), os.getpid()


class Momentum:
    """Plain stochastic gradient descent with momentum."""

    def __init__(self, model: torch.nn.Module, rate: float, flips_at: int) -> None:
        self._flips_in = flips_at
        self.parameters = [*model.parameters()]
        self.momentum = [torch.zeros_like(p) for p in self.parameters]
        self.defaults = {"rate": rate}

    @torch.no_grad()
    def step(self) -> None:
        for parameter, momentum in zip(self.parameters, self.momentum, strict=True):
            assert parameter.grad is not None
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.sub_(momentum, alpha=self.defaults["rate"])
        if self._flips_in == 0:
            flip(self.parameters[0])
        self._flips_in -= 1

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, given in zip(self.momentum, state["momentum"], strict=True):
            mine.copy_(given)


class Counter:
    """Something of the script's own that has to be kept."""

    def __init__(self) -> None:
        self.seen = 0

    def step(self) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def rich(model: torch.nn.Sequential, *, averages: bool, calm: bool) -> dict[str, Any]:
    """Two optimizers with a schedule each, a loss scaler that grows and overflows, averages."""
    scale = 2.0**10 if calm else 2.0**120
    first = torch.optim.AdamW(model[0].parameters(), lr=1e-3)
    second = torch.optim.SGD(model[2:].parameters(), lr=1e-3, momentum=0.9)
    return {
        "optimizer": [first, second],
        "schedule": [
            torch.optim.lr_scheduler.CosineAnnealingLR(first, 500),
            torch.optim.lr_scheduler.StepLR(second, 20, 0.9),
            Counter(),
        ],
        "scaler": torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3),
        # A divided model cannot be copied.
        "ema": None
        if job.ranks > 1 or not averages
        else torch.optim.swa_utils.AveragedModel(model),
        "extra": {"mine": Counter()},
        "max_grad_norm": 0.5,
    }


if __name__ == "__main__":
    main()
