"""One job's coordinator and ranks as real processes of this machine: started, replaced, ended.

Every process ends with the runner, however the runner ends. Knows nothing of faults.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import runtime
from runtime import client
from runtime.checkpoint.holder import ADDRESS
from runtime.checkpoint.objects import ObjectStore
from runtime.checkpoint.peer import HOLDER_MODULE, running
from runtime.checkpoint.writer_handle import WRITER_MODULE
from runtime.replica.observing import ENV_OBSERVER
from runtime.torture import holder
from runtime.torture.injector import ENV_FOLDER, ENV_OF_RANK
from runtime.torture.network import ENV_SOCKET, Network
from runtime.torture.observer import ENV_PACE, ENV_SAVES, end_file
from runtime.torture.writer import MODULE, all_ended, end_fault, writers

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None, use_errno=True)
JOB = "job_torture"
ENV_MODE = "DRYDOCK_MODE"
STATE = "state"  # the folder that all replicas share
WRITERS_S = 10.0  # how long writers may take to finish what a job that is over gave them


@dataclass(frozen=True)
class Script:
    """What is trained, and how."""

    path: Path
    arguments: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # for DRYDOCK_OPTIONS
    mode: str = "reproducible"


@dataclass(eq=False)
class Rank:
    """One start of one replica: its first rank, and the others if it has any."""

    replica: int
    placement: str
    process: subprocess.Popen[bytes]
    started: float  # monotonic
    others: tuple[subprocess.Popen[bytes], ...] = ()

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """Of its ranks, in their order."""
        return [self.process, *self.others]

    @property
    def ended(self) -> bool:
        """All of its ranks have."""
        return all(process.poll() is not None for process in self.processes)

    @property
    def codes(self) -> list[int]:
        """How its ranks ended, as far as they have."""
        return [one.returncode for one in self.processes if one.returncode is not None]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def end(self) -> None:
        """Kill what is left of it, and whatever it started."""
        for process in self.processes:
            end(process)


class Fleet:
    """The processes of one run, in a folder of their own."""

    def __init__(
        self,
        folder: Path,
        script: Script,
        replicas: int,
        pace_s: float = 0.0,
        ranks: int = 1,
        saves_s: float = 0.0,
        disk: Path | None = None,
        objects: str = "",
        *,
        networked: bool = False,
    ) -> None:
        """`pace_s`: what each shard takes besides, as if an accelerator computed it. `ranks`: of
        each replica. `saves_s`: each replica has a node of its own, with a disk and a holder, and
        saves to all tiers that often; 0: none has, and it saves as the script does. `disk`: where
        the shared folder is, if elsewhere. `objects`: the URL of the object store, if there is one.
        `networked`: each replica has a machine of its own in a network of the run's own."""
        self.folder = folder
        self.script = script
        self.pace_s = pace_s
        self.replicas = replicas
        self.divided = ranks
        self.saves_s = saves_s
        self.state = (disk or folder) / STATE
        self.objects = objects
        self.networked = networked
        self.network: Network | None = None
        self.token = secrets.token_hex(8)
        self.port = 0
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.ranks: dict[int, Rank] = {}  # the present ones
        self.started: list[Rank] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.folder.mkdir()
        if self.networked:
            self.network = Network(self.folder / "network", self.replicas)
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for process in reversed(self._processes):  # a rank starts a holder anew that is gone
            kill(process)
        for process in self._processes:
            process.wait()
        self.end_holders()  # those that ranks started
        end_fault(self.folder)
        late = time.monotonic() + WRITERS_S
        while not all_ended(self.folder) and time.monotonic() < late:
            time.sleep(0.01)
        for writer in writers(self.folder):
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.kill(writer, signal.SIGKILL)
        if self.network is not None:
            self.network.close()

    @property
    def host(self) -> str:
        """Where the coordinator is."""
        return self.network.host if self.network else "127.0.0.1"

    def disk(self, replica: int) -> Path:
        """On the node of this replica."""
        return self.folder / f"disk{replica}"

    def shared_folder(self) -> Path:
        """Of the job's checkpoints."""
        return self.state / "checkpoints"

    def own_folders(self, replica: int) -> list[Path]:
        """Of checkpoints on the node of this replica: of each of its ranks one."""
        found = self.disk(replica).glob(f"{JOB}/*/replica-*-rank-*")
        return sorted(path for path in found if path.is_dir())

    def object_store(self) -> ObjectStore | None:
        return ObjectStore(self.objects, JOB) if self.objects else None

    def start_holders(self) -> None:
        """On each node one; a rank of that node starts it anew if it dies."""
        for replica in range(self.replicas) if self.saves_s else []:
            memory = str(self.folder / f"memory{replica}")
            words = ["-m", holder.MODULE, "--job", JOB, "--folder", memory]
            if self.network:
                words += ["--host", self.network.address(replica)]
            environment = {**self._hand(), client.ENV_REPLICA: str(replica)}
            self._run(holder.name_of(replica), words, environment, replica)

    def hold(self) -> bool:
        """Whether all holders are up, so that no rank starts another."""
        return all(self.holding())

    def holding(self) -> list[str]:
        """The holders' addresses, "" for one that is not up."""
        return [running(memory) for memory in self._memories()]

    def holders(self) -> list[int]:
        """Of those that are up the process ids."""
        up = [memory for memory in self._memories() if running(memory)]
        return [int(json.loads((memory / ADDRESS).read_bytes())["pid"]) for memory in up]

    def end_holders(self) -> None:
        """With all that was in the nodes' memory."""
        gone = []
        for process in self.holders():
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                gone.append(os.pidfd_open(process))
                signal.pidfd_send_signal(gone[-1], signal.SIGKILL)
        for one in gone:
            select.select([one], [], [])
            os.close(one)

    def _memories(self) -> list[Path]:
        """The folders in which the holders are found."""
        replicas = range(self.replicas) if self.saves_s else []
        return [self.folder / f"memory{replica}" / JOB for replica in replicas]

    def start_coordinator(self) -> None:
        """Start it, on the port it had before if any; `listening` tells when it is up."""
        self.port_file.unlink(missing_ok=True)
        options = {
            "--job": JOB,
            "--state-dir": str(self.folder / "coordinator"),
            "--listen": f"{self.host}:{self.port}",
            "--port-file": str(self.port_file),
        }
        words = [word for pair in options.items() for word in pair]
        self.coordinator = self._run(
            "coordinator", ["-m", "runtime.replica.coordinator", *words], {}
        )

    @property
    def port_file(self) -> Path:
        return self.folder / "port"

    def listening(self) -> bool:
        """Whether the coordinator is up; notes its port."""
        if self.port_file.exists():
            self.port = int(self.port_file.read_text())
            return True
        return False

    def start(
        self, replica: int, prepare: Callable[[Rank], None] | None = None, standby: str = ""
    ) -> Rank:
        """Start a replica anew. `prepare` is called before its script can have got anywhere.

        `standby`: see `runtime.job.Job`; it counts as the present one of its number at once.
        """
        placement = f"plc_{len(self.started)}"
        environment = {
            client.ENV_JOB: JOB,
            client.ENV_REPLICA: str(replica),
            client.ENV_RANKS: str(self.divided),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            client.ENV_PLACEMENT: placement,
            client.ENV_STANDBY: standby,
            client.ENV_COORDINATOR: f"{self.host}:{self.port}",
            client.ENV_STATE_DIR: str(self.state),
            client.ENV_OPTIONS: json.dumps(self.script.options),
            ENV_MODE: self.script.mode,
            ENV_OBSERVER: "runtime.torture.observer:from_environment",
            **self._hand(),
            ENV_PACE: str(self.pace_s),
            ENV_SAVES: str(self.saves_s),
            WRITER_MODULE: MODULE,
            HOLDER_MODULE: holder.MODULE,
            **(self._node_of(replica) if self.saves_s else {}),
        }
        words = [str(self.script.path), *self.script.arguments]
        first, *others = [
            self._run(name, words, {**environment, **_which(number)}, replica)
            for number, name in enumerate(self._log_names(replica))
        ]
        rank = Rank(replica, placement, first, time.monotonic(), tuple(others))
        self.ranks[replica] = rank
        self.started.append(rank)
        if prepare is not None:
            prepare(rank)
        return rank

    def ended(self) -> list[Rank]:
        """The present replicas whose processes have ended."""
        return [rank for rank in self.ranks.values() if rank.ended]

    def settle(self, steps: int) -> None:
        """Tell all ranks at which number of steps the run ends."""
        draft = self.folder / "end.new"
        draft.write_text(str(steps))
        draft.replace(end_file(self.folder))

    def tell_exit(self, rank: Rank) -> None:
        """As its node agent would: that this replica's processes have ended."""
        self._ask(op="exit", replica=rank.replica, placement=rank.placement, code=-signal.SIGKILL)

    def status(self) -> dict[str, Any]:
        """What the coordinator says of itself. Raises OSError if it does not answer."""
        return self._ask(op="status")

    def _ask(self, **asked: Any) -> dict[str, Any]:
        with socket.create_connection((self.host, self.port), timeout=2) as connection:
            connection.sendall(json.dumps({"token": self.token, **asked}).encode() + b"\n")
            answer: dict[str, Any] = json.loads(connection.makefile().readline() or "{}")
            return answer

    def dump_stacks(self) -> None:
        """Ask all ranks to write the stacks of their threads into their logs."""
        for process in [one for rank in self.ranks.values() for one in rank.processes]:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGUSR1)

    def _node_of(self, replica: int) -> dict[str, str]:
        return {
            client.ENV_LOCAL_DIR: str(self.disk(replica)),
            client.ENV_HOLDER_DIR: str(self.folder / f"memory{replica}"),
            client.ENV_DOMAIN: f"node{replica}",
            **({client.ENV_OBJECT_STORE: self.objects} if self.objects else {}),
        }

    def _hand(self) -> dict[str, str]:
        """What the runner's injector in a process is to know, and what ends with the runner."""
        return {ENV_FOLDER: str(self.folder), holder.ENV_RUNNER: str(os.getpid())}

    def _log_names(self, replica: int) -> list[str]:
        return [f"replica{replica}", *(f"replica{replica}.{k}" for k in range(1, self.divided))]

    def _run(
        self,
        name: str,
        words: list[str],
        environment: dict[str, str],
        replica: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """`replica`: on whose machine, if each has its own."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DRYDOCK")}
        inherited.setdefault("OMP_NUM_THREADS", "1")
        root = str(Path(runtime.__file__).resolve().parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        common = {
            "PYTHONPATH": path,
            client.ENV_TOKEN: self.token,
            client.ENV_WORLD_REPLICAS: str(self.replicas),
        }
        before: list[str] = []
        if self.network is not None:
            common[ENV_SOCKET] = str(self.network.socket_path)
            before = [] if replica is None else self.network.within(replica)
        runner = os.getpid()
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*before, sys.executable, *words],
                env={**inherited, **common, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: _die_with(runner),  # safe: the runner has one thread
            )
        self._processes.append(process)
        return process


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now.

    Another process may take it before the caller does. Raises OSError if no port is free.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and whatever it started, and wait for its end."""
    kill(process)
    process.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    """It and whatever it started."""
    with contextlib.suppress(ProcessLookupError):  # nothing is left of it
        os.killpg(process.pid, signal.SIGKILL)


def _die_with(runner: int) -> None:
    """In the child: be killed when the runner ends, even if that is killed itself."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != runner:
        os._exit(1)


def _which(rank: int) -> dict[str, str]:
    return {client.ENV_RANK: str(rank), ENV_OF_RANK: str(rank)}
