"""Who this rank is: `join` reads the environment that a launcher gave it.

Imports no torch, so that the control plane and the coordinator are told of the rank while torch is
still being imported.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime import client
from runtime.forking import take_signal
from runtime.launchers import (
    FROM_ENVIRONMENT,
    by_torchrun,
    need,
    patience_of_torchrun,
    place_of,
)
from runtime.replica.pacing import bytes_per_second
from runtime.replica.preemption import GRACE_S

log = logging.getLogger("drydock.job")

STANDBY = ("", "migrate", "spare")
PR_SET_PDEATHSIG = 1
CONNECT_S = 60  # how long a communicator of NCCL's may wait for its peers
#: The same for torch, which keeps it locked meanwhile: not even an abort gets at it any sooner.
PATIENCE = "TORCH_NCCL_NONBLOCKING_TIMEOUT"


@dataclass(frozen=True, kw_only=True)
class Job:
    """This rank's identity, and its way to the control plane."""

    name: str
    replica: int
    rank: int  # within the replica
    ranks: int = 1  # of the replica
    nodes: int = 1  # on which the replica is, as its launcher says
    world_replicas: int
    #: for `init_process_group` of a replica of several ranks
    init_method: str = FROM_ENVIRONMENT
    placement: str
    #: "" for one that trains; "migrate": it takes its replica's place from the process that has it,
    #: as soon as it holds the state; "spare": it takes the place of whichever replica dies
    standby: str = ""
    coordinator: str  # host:port
    token: str
    state_dir: Path
    local_dir: Path | None = None  # on this node's own disk
    holder_dir: Path | None = None  # of this node's holder of peers' checkpoints
    object_store: str = ""  # URL of a place for checkpoints: s3://bucket/prefix
    domain: str = ""  # what fails together with this node, from the largest to it, by slashes
    network: str = ""  # at which peers reach us; "" for that which leads to the coordinator
    grace_s: float = GRACE_S  # from SIGTERM to SIGKILL, unless the notice says otherwise
    notice_file: Path | None = None
    #: so long after SIGTERM its launcher kills this process, whatever the notice says
    at_most_s: float = math.inf
    rate_cap: int | None = None  # bytes per second of state for newcomers
    options: dict[str, Any] = field(default_factory=dict)
    sender: client.Sender
    #: the whole job is to end at the next edge; a script may set it, on any rank
    stop: threading.Event = field(default_factory=threading.Event)
    #: set by SIGTERM: this process is to end
    told: Told = field(default_factory=lambda: Told())

    def kill_in_s(self) -> float:
        """At SIGTERM: seconds until SIGKILL, as its sender says, else as usual."""
        try:
            noticed = self.notice_file.read_text().strip() if self.notice_file else ""
            grace_s = seconds_of(noticed) if noticed else self.grace_s
        except (OSError, ValueError, RuntimeError):  # none was written, or what is there is no time
            grace_s = self.grace_s
        return min(grace_s, self.at_most_s)

    def left_s(self) -> float:
        """Seconds until SIGKILL, endless as long as nobody told us to end."""
        at = self.told.at
        return math.inf if at is None else max(0.0, self.kill_in_s() - (time.monotonic() - at))

    def trouble(self, kind: str, text: str, subject: str = "") -> None:
        """Tell an engineer, in this process's own output too: there may be no control plane.
        `subject`: what it is about, of several of a kind."""
        log.warning("trouble kind=%s subject=%s text=%s", kind, subject, text)
        self.sender.tell(client.Trouble(kind=kind, text=text, subject=subject, at=time.time()))


def join(environment: dict[str, str] | None = None) -> Job:
    """Find out which rank of which job this process is, and start reporting to the control plane.

    It reads DRYDOCK_*, and what torchrun or srun say. Call it before anything that uses NCCL.

    - A rank that torchrun started ends with its torchrun from now on.
    - In the main thread it takes SIGTERM, which then sets `Job.told` and ends nothing by itself.
    - In a job of several replicas it sets TORCH_NCCL_NONBLOCKING_TIMEOUT, unless that is set.

    Args:
        environment: instead of `os.environ`.

    Raises:
        RuntimeError: naming the variable that is missing, or has no valid value.
    """
    env = dict(os.environ) if environment is None else environment
    told = Told()
    # A loader's worker runs the script's top again: it is no rank, and tells nobody. It does so
    # while multiprocessing prepares it, and a rank that multiprocessing started joins after that.
    worker = getattr(multiprocessing.current_process(), "_inheriting", False)
    if by_torchrun(env) and not worker:
        end_with_launcher()
    if threading.current_thread() is threading.main_thread() and not worker:
        # A rank that is still importing notes the wish; the training loop obeys it at its edge.
        take_signal(signal.SIGTERM, lambda _number, _frame: told.set())
    place = place_of(env)
    if place.world_replicas > 1:
        # Torch looks once, at the first that the process does with NCCL, and the ranks of a replica
        # may do that before their ReplicaGroup is made. A job of one replica may wait as it likes.
        os.environ.setdefault(PATIENCE, str(CONNECT_S))
    placement = env.get(client.ENV_PLACEMENT) or f"pid-{os.getpid()}-{time.time_ns()}"
    token = need(env, client.ENV_TOKEN)
    sender = client.Sender(
        "" if worker else env.get(client.ENV_URL, ""),
        token,
        job=need(env, client.ENV_JOB),
        replica=place.replica,
        rank=place.rank,
        placement=placement,
    )
    sender.start()
    if place.speaks:
        sender.tell(client.Hello(pid=os.getpid(), at=time.time()))
    return Job(
        name=sender.job,
        replica=place.replica,
        rank=place.rank,
        ranks=place.ranks,
        nodes=place.nodes,
        world_replicas=place.world_replicas,
        init_method=place.init_method,
        placement=placement,
        standby=standby_of(env.get(client.ENV_STANDBY, "")),
        coordinator=need(env, client.ENV_COORDINATOR),
        token=token,
        state_dir=Path(need(env, client.ENV_STATE_DIR)),
        local_dir=Path(env[client.ENV_LOCAL_DIR]) if env.get(client.ENV_LOCAL_DIR) else None,
        holder_dir=Path(env[client.ENV_HOLDER_DIR]) if env.get(client.ENV_HOLDER_DIR) else None,
        object_store=env.get(client.ENV_OBJECT_STORE, ""),
        domain=env.get(client.ENV_DOMAIN) or socket.gethostname(),
        network=env.get(client.ENV_NETWORK, ""),
        grace_s=seconds_of(env.get(client.ENV_GRACE_S, "")),
        notice_file=Path(env[client.ENV_NOTICE_FILE]) if env.get(client.ENV_NOTICE_FILE) else None,
        at_most_s=patience_of_torchrun(env) if by_torchrun(env) else math.inf,
        rate_cap=bytes_per_second(env.get(client.ENV_RATE_CAP, "")),
        options=options_of(env.get(client.ENV_OPTIONS, "")),
        sender=sender,
        told=told,
    )


class Told(threading.Event):
    """That this process is to end, and since when."""

    def __init__(self) -> None:
        super().__init__()
        self.at: float | None = None  # monotonic
        #: called each time it is said, which a signal's handler may do in the middle of anything
        self.heard: Callable[[], None] = lambda: None

    def set(self) -> None:
        if self.at is None:
            self.at = time.monotonic()
        self.heard()  # first: who sees that it is set may ask how much time is left
        super().set()


def end_with_launcher() -> None:
    """Have this process killed when its launcher dies, in whatever way: torchrun gives each rank a
    session of its own, so whoever kills torchrun does not reach them, and none may train on beside
    those that are started anew."""
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it died meanwhile, so nothing kills us
        os._exit(1)


def options_of(value: str) -> dict[str, Any]:
    """Raises RuntimeError."""
    try:
        found = json.loads(value or "{}")
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RuntimeError(f"{client.ENV_OPTIONS} is {value!r}; give an object in JSON, or nothing")
    return found


def seconds_of(value: str) -> float:
    """Raises RuntimeError."""
    try:
        seconds = float(value) if value else GRACE_S
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= threading.TIMEOUT_MAX:
        raise RuntimeError(f"{client.ENV_GRACE_S} is {value!r}; give seconds")
    return seconds


def standby_of(value: str) -> str:
    """Return the checked value of DRYDOCK_STANDBY: "", "migrate" or "spare".

    Raises RuntimeError, with the remedy, for any other value.
    """
    if value not in STANDBY:
        raise RuntimeError(
            f"{client.ENV_STANDBY} is {value!r}; leave it empty, or give migrate or spare"
        )
    return value
