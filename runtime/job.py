"""Who this rank is: `join` reads the environment that a launcher gave it.

Imports no torch, so that the control plane and the coordinator are told of the rank while torch is
still being imported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime import client

STANDBY = ("", "migrate", "spare")


@dataclass(frozen=True, kw_only=True)
class Job:
    """This rank's identity, and its way to the control plane."""

    name: str
    replica: int
    rank: int  # within the replica
    ranks: int = 1  # of the replica
    world_replicas: int
    placement: str
    #: "" for one that trains; "migrate": it takes its replica's place from the process that has it,
    #: as soon as it holds the state; "spare": it takes the place of whichever replica dies
    standby: str = ""
    coordinator: str  # host:port
    token: str
    state_dir: Path
    options: dict[str, Any] = field(default_factory=dict)
    sender: client.Sender
    stop: threading.Event  # set by SIGTERM

    def trouble(self, kind: str, text: str) -> None:
        """Tell an engineer."""
        self.sender.tell(client.Trouble(kind=kind, text=text, at=time.time()))


def join(environment: dict[str, str] | None = None) -> Job:
    """Read DRYDOCK_* and start telling the control plane, if there is one.

    Raises RuntimeError naming the variable that is missing.
    """
    env = dict(os.environ) if environment is None else environment
    stop = threading.Event()
    # A loader's worker runs the script's top again: it is no rank, and tells nobody.
    worker = multiprocessing.parent_process() is not None
    if threading.current_thread() is threading.main_thread() and not worker:
        # A rank that is still importing notes the wish; the training loop obeys it at its edge.
        signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    placement = env.get(client.ENV_PLACEMENT) or f"pid-{os.getpid()}-{time.time_ns()}"
    token = need(env, client.ENV_TOKEN)
    replica, (rank, ranks) = int(need(env, client.ENV_REPLICA)), place_of(env)
    sender = client.Sender(
        "" if worker else env.get(client.ENV_URL, ""),
        token,
        job=need(env, client.ENV_JOB),
        replica=replica,
        rank=rank,
        placement=placement,
    )
    sender.start()
    if not rank:  # which speaks for its replica
        sender.tell(client.Hello(pid=os.getpid(), at=time.time()))
    return Job(
        name=sender.job,
        replica=replica,
        rank=rank,
        ranks=ranks,
        world_replicas=int(need(env, client.ENV_WORLD_REPLICAS)),
        placement=placement,
        standby=standby_of(env.get(client.ENV_STANDBY, "")),
        coordinator=need(env, client.ENV_COORDINATOR),
        token=token,
        state_dir=Path(need(env, client.ENV_STATE_DIR)),
        options=json.loads(env.get(client.ENV_OPTIONS) or "{}"),
        sender=sender,
        stop=stop,
    )


def place_of(env: dict[str, str]) -> tuple[int, int]:
    """This process's rank within its replica, and how many ranks that has: what the launcher says,
    else torchrun, of which each replica has one of its own."""
    torchrun = "TORCHELASTIC_RUN_ID" in env and client.ENV_RANKS not in env
    names = ("RANK", "WORLD_SIZE") if torchrun else (client.ENV_RANK, client.ENV_RANKS)
    rank, ranks = int(env.get(names[0], "0")), int(env.get(names[1], "1"))
    if not 0 <= rank < ranks:
        raise RuntimeError(
            f"{names[0]} is {rank} and {names[1]} is {ranks}: ranks count from 0 within a replica"
        )
    return rank, ranks


def standby_of(value: str) -> str:
    if value not in STANDBY:
        raise RuntimeError(
            f"{client.ENV_STANDBY} is {value!r}; leave it empty, or give migrate or spare"
        )
    return value


def need(env: dict[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise RuntimeError(f"{name} is not set; the launcher must give it to every rank")
    return value
