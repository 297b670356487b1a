"""Jobs that restart as a whole, of one rank in this process or under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import runtime
from node_agent import wire
from node_agent.launch import together
from runtime.checkpoint import store
from runtime.checkpoint.draft import write
from runtime.checkpoint.tiers import TierName
from runtime.job import Job
from runtime.ledger.__main__ import read
from runtime.ledger.check import Report, check
from runtime.snapshot import stage
from tests.ports import free_port
from tests.runtime.forking import Forked
from tests.runtime.replicas import PATIENCE_S, ROOT, TOKEN, until
from tests.runtime.test_client import Door

SCRIPT = Path(__file__).with_name("script.py")
TORCHRUN_SCRIPT = str(ROOT / "tests" / "runtime" / "torchrun.py")
STEPS = 30
NEVER_S = 1e9
NEVER = 1 << 40  # steps


def all_of(process: subprocess.Popen[bytes]) -> str:
    """What it writes until it ends; if it does not, it and what it started are killed."""
    assert process.stdout is not None
    limit = threading.Timer(PATIENCE_S, kill, [process])
    limit.start()
    with process.stdout as output:
        said = output.read().decode()
    process.wait(PATIENCE_S)
    in_time = limit.is_alive()
    limit.cancel()
    assert in_time, f"not within {PATIENCE_S} s: {said}"
    return said


def kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it started; nothing, if it has ended."""
    if process.poll() is None:
        for one in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.kill()


def told(state: Path, **others: str) -> dict[str, str]:
    """What a launcher says to every rank of such a job."""
    return {
        "DRYDOCK_JOB": "job_t",
        "DRYDOCK_REPLICA": "0",
        "DRYDOCK_WORLD_REPLICAS": "1",
        "DRYDOCK_COORDINATOR": "none",
        "DRYDOCK_TOKEN": TOKEN,
        "DRYDOCK_STATE_DIR": str(state),
        **others,
    }


@dataclass
class Whole:
    """A job of one torchrun whose ranks divide a model, and what it left in its folder."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "state" / "checkpoints"

    def run(
        self,
        *,
        ranks: int = 2,
        restarts: int = 0,
        disk: str = "disk",
        url: str = "",
        **options: object,
    ) -> tuple[int, str]:
        """Until it ends: its exit status, and all that it wrote."""
        # Else ranks that torchrun starts anew may read where those before them listened.
        also = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DRYDOCK_URL": url}
        arguments = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
        process = self.start(arguments, disk, also, **options)
        said = all_of(process)
        return process.returncode, said

    def run_on_two_nodes(
        self,
        *disks: str,
        states: tuple[str, str] = ("state", "state"),
        memories: tuple[str, str] = ("", ""),
        url: str = "",
        **options: object,
    ) -> tuple[list[int], str]:
        """A rank on each, with the environment that the nodes' agents give: both exit statuses.
        `disks`: their folders. `states`: what each has mounted as the folder of all. `memories`:
        where each node's holder is found; "" for one that has none, as of the disks."""
        meet = {"address": "127.0.0.1", "port": free_port(), "start": "plc_1"}
        processes = [
            self.start(
                ["--nproc-per-node=1"],
                disk,
                {
                    **together(wire.Together(nodes=2, node_rank=node, **meet)),  # type: ignore[arg-type]
                    "DRYDOCK_STATE_DIR": str(self.folder / states[node]),
                    "DRYDOCK_HOLDER_DIR": memories[node] and str(self.folder / memories[node]),
                    "DRYDOCK_DOMAIN": f"rack/node-{node}",
                    "DRYDOCK_URL": url,
                },
                **options,
            )
            for node, disk in enumerate(disks)
        ]
        with contextlib.ExitStack() as stack:
            for one in processes:
                stack.callback(kill, one)
            said = [all_of(one) for one in processes]
        return [one.returncode for one in processes], "\n".join(said)

    def start(
        self, arguments: list[str], disk: str, also: dict[str, str], **options: object
    ) -> subprocess.Popen[bytes]:
        """One torchrun; its ranks are processes of their own from the first."""
        environment = {
            **told(self.folder / "state"),
            "DRYDOCK_LOCAL_DIR": disk and str(self.folder / disk),
            "DRYDOCK_OPTIONS": json.dumps({"folder": str(self.folder), "steps": STEPS, **options}),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **also,
        }
        words = ["--monitor-interval=0.1", *arguments, str(SCRIPT)]
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb") as log:
            process = Forked(TORCHRUN_SCRIPT, {**os.environ, **environment}, log, *words)
        process.stdout = os.fdopen(reading, "rb")
        return process

    def lose(self, memory: str) -> None:
        """That node's holder, and all that it kept."""
        there = self.folder / memory / "job_t"
        os.kill(json.loads((there / "holder.json").read_bytes())["pid"], signal.SIGKILL)
        shutil.rmtree(there)

    def parts(self, step: int, *, disk: str = "disk") -> list[Path]:
        """Of its ranks, in their order, on that node's disk."""
        folders = (self.folder / disk / "job_t").glob("*/replica-0-rank-*")
        found = (path for folder in sorted(folders) for path in store.candidates(folder))
        return [path for path in found if store.number_of(path)[0] == step]

    def digests(self) -> list[str]:
        return [(self.folder / f"digest.{rank}").read_text() for rank in range(2)]

    def steps(self, rank: int) -> list[tuple[int, int]]:
        """Of each step the epoch in which it was made, and its number."""
        lines = (self.folder / f"steps.{rank}").read_text().splitlines()
        return [(int(epoch), int(step)) for epoch, step in map(str.split, lines)]

    def ledger(self) -> Report:
        """What its newest checkpoint proves of the samples."""
        return check(*read([self.folder / "state"]))

    def begins(self, epoch: int) -> int:
        """With which step the ranks began when they were started anew."""
        (first,) = {min(s for e, s in self.steps(rank) if e == epoch) for rank in range(2)}
        return first


def local_saves(door: Door) -> list[dict[str, Any]]:
    """On the nodes' disks, of which the control plane was told."""
    return [one for one in door.messages("checkpoint") if one["tier"] == "local"]


def imported_into(checkpoints: Path) -> None:
    """As the command does with what another tool wrote."""
    facts = {"imported": "theirs.pt", "epoch": 0, "ranks": 1}
    write(checkpoints, stage({"model": trainee()[0].state_dict()}, 0), facts=facts)


class Kept:
    """What a script wants saved besides, and may grow."""

    def __init__(self) -> None:
        self.held = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


class Alone:
    """A job of one rank, in this process, as often as it is started."""

    def __init__(self, folder: Path) -> None:
        self.door = Door()
        self.kept: Any = Kept()
        self.trainee: Callable[[], tuple[Any, Any]] = trainee
        self.folder = folder
        self._environment = told(
            folder / "state",
            DRYDOCK_URL=self.door.url,
            DRYDOCK_LOCAL_DIR=str(folder / "disk"),
        )

    def join(self, **others: str) -> Job:
        return runtime.join({**self._environment, **others})

    def start(
        self,
        *,
        local: float = NEVER_S,
        shared: float = NEVER_S,
        disk: str = "disk",
        stalled_after_s: float = NEVER_S,
        grace_s: float = 30.0,
        notice_file: Path | None = None,
        batches: runtime.Batches | None = None,
    ) -> runtime.WholeJob:
        """`local`, `shared`: seconds between two saves. `disk`: of which node it is."""
        place = str(self.folder / disk)
        job = self.join(
            DRYDOCK_LOCAL_DIR=place,
            DRYDOCK_GRACE_S=str(grace_s),
            DRYDOCK_NOTICE_FILE=str(notice_file or ""),
        )
        model, optimizer = self.trainee()
        saver = runtime.Checkpointer(job, every_s={"local": local, "shared": shared})
        return runtime.WholeJob(
            job, model, optimizer, saver, batches=batches,
            extra={"kept": self.kept}, stalled_after_s=stalled_after_s,
        )  # fmt: skip

    def trained(self, steps: int, *, disk: str = "disk") -> tuple[int, int]:
        """So many, and at their end a save to all tiers; the epoch and the first of the steps."""
        with self.start(disk=disk) as whole:
            begins = whole.committed + 1
            list(whole.steps(begins + steps))
        return whole.epoch, begins

    def lost(self, *, disk: str = "disk") -> tuple[int, int]:
        """The same, with saves to the own disk alone, until it is left in the middle of a step."""
        with self.start(local=0.0, disk=disk) as whole:
            begins = whole.committed + 1
            steps = whole.steps(NEVER)
            until(
                lambda: next(steps) >= 0 and max(self.saved(whole, "local"), default=-1) >= begins,
                "its disk has a step of this start",
            )
        return whole.epoch, begins

    def saved(self, whole: runtime.WholeJob, tier: TierName) -> list[int]:
        """The steps of which there is a checkpoint."""
        folders = whole.saver.folders.to_read(tier)
        return [store.number_of(one)[0] for path in folders for one in store.candidates(path)]

    def troubles(self) -> list[str]:
        return [message["kind"] for message in self.door.messages("trouble")]


def trainee() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters())
