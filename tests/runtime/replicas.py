"""Real coordinators and ranks for the tests: started, killed, and read back from their logs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from runtime.checkpoint import store
from runtime.checkpoint.manifest import Manifest
from runtime.replica.record import RecordFile
from tests.ports import free_port
from tests.runtime.forking import Forked

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token-of-this-test"
PATIENCE_S = 300.0  # whole workloads take no longer, also where all is slow


def until(condition: Callable[[], Any], what: str) -> Any:
    """Poll until the condition gives something true; fail with `what` otherwise."""
    deadline = time.monotonic() + PATIENCE_S
    pause = threading.Event()
    while time.monotonic() < deadline:
        if found := condition():
            return found
        pause.wait(0.02)
    raise AssertionError(f"never happened: {what}")


class Board:
    """The rendezvous of one epoch, in this process."""

    def __init__(self) -> None:
        self.values: dict[str, Future[str]] = {}
        self.lock = threading.Lock()

    def at(self, key: str) -> Future[str]:
        with self.lock:
            return self.values.setdefault(key, Future())

    def set(self, _epoch: int, key: str, value: str) -> None:
        self.at(key).set_result(value)

    def get(self, _epoch: int, key: str, timeout_s: float) -> str:
        return self.at(key).result(timeout_s)


class Cable:
    """All connections to a port pass through it; unplugged it swallows what is sent, both ways."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._plugged = threading.Event()
        self._plugged.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def unplug(self) -> None:
        self._plugged.clear()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            far = socket.create_connection(self._target)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._plugged.is_set():
                    sink.sendall(data)
            if self._plugged.is_set():
                sink.shutdown(socket.SHUT_RDWR)


@dataclass
class Fleet:
    """One job's processes on this machine."""

    folder: Path
    world: int
    min_replicas: int = 1
    divided: int = 1  # among so many ranks a replica's model is
    options: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    shared_disk: bool = True  # one state folder for all replicas, or one for each
    own_disks: bool = False  # each replica has one besides
    grace_s: float = 30.0  # from SIGTERM to SIGKILL
    object_store: str = ""  # the URL of one
    holders: bool = False  # each replica's node keeps what another saves
    writer: str = "runtime.checkpoint.writer"  # the module that writes its checkpoints
    lease_s: float = 10.0  # how long members may train without a word from the coordinator
    network: str = ""  # where peers reach the replicas
    rate_cap: str = ""  # of what each sends to a newcomer
    forks: bool = True  # its ranks, from a process that has torch
    agents: bool = True  # its nodes', who tell what has ended when all is started anew
    port: int = 0
    coordinator: subprocess.Popen[bytes] | None = None
    #: the first rank of each replica, and the others by replica and rank
    ranks: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    others: dict[tuple[int, int], subprocess.Popen[bytes]] = field(default_factory=dict)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start_coordinator(self) -> None:
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        self.port = self.port or free_port()  # where one that is started anew listens, too
        options = {
            "--job": "job_t",
            "--min-replicas": str(self.min_replicas),
            "--state-dir": str(self.folder / "c"),
            "--listen": f"127.0.0.1:{self.port}",
            "--port-file": str(port_file),
            "--lease": str(self.lease_s),
        }
        words = [word for pair in options.items() for word in pair]
        self.coordinator = self._run(
            "coordinator", ["-m", "runtime.replica.coordinator", *words], {}
        )
        until(port_file.exists, "the coordinator listens")
        self.port = int(port_file.read_text())

    def start_rank(
        self,
        replica: int,
        kill_at: str = "",
        part_at: str = "",
        port: int = 0,
        standby: str = "",
        kill_rank: int = 0,
        token: str = TOKEN,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a replica, all its ranks, with `options` of its own; `kill_at` a phase it kills
        itself; `part_at` see `tests.runtime.parting`; `port` where it finds the coordinator if not
        where that listens; `standby` see `runtime.job.Job`. A standby is not yet one of the
        ranks."""
        environment = {
            "DRYDOCK_JOB": "job_t",
            "DRYDOCK_TOKEN": token,
            "DRYDOCK_REPLICA": str(replica),
            "DRYDOCK_RANKS": str(self.divided),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "DRYDOCK_PLACEMENT": f"plc_{len(self.started)}",
            "DRYDOCK_STANDBY": standby,
            "DRYDOCK_COORDINATOR": f"127.0.0.1:{port or self.port}",
            "DRYDOCK_URL": self.url,
            "DRYDOCK_STATE_DIR": str(
                self.folder / ("state" if self.shared_disk else f"state{replica}")
            ),
            "DRYDOCK_LOCAL_DIR": str(self.folder / f"disk{replica}") if self.own_disks else "",
            "DRYDOCK_HOLDER_DIR": str(self.folder / f"memory{replica}") if self.holders else "",
            "DRYDOCK_OBJECT_STORE": self.object_store,
            "DRYDOCK_CHECKPOINT_WRITER": self.writer,
            "DRYDOCK_NETWORK": self.network,
            "DRYDOCK_RATE_CAP": self.rate_cap,
            "DRYDOCK_GRACE_S": str(self.grace_s),
            "DRYDOCK_NOTICE_FILE": str(self.notice(replica)),
            "DRYDOCK_DOMAIN": f"node-{replica}",
            "DRYDOCK_OPTIONS": json.dumps({"folder": str(self.folder), **self.options, **options}),
        }
        fatal = {"DRYDOCK_OBSERVER": "tests.runtime.killer:make", "KILL_AT": kill_at}
        parting = {"DRYDOCK_OBSERVER": "tests.runtime.parting:make", "PART_AT": part_at}
        ranks = [{**environment, "DRYDOCK_RANK": str(rank)} for rank in range(self.divided)]
        ranks[kill_rank].update(fatal if kill_at else parting if part_at else {})
        script = str(Path(__file__).with_name("tiny.py"))
        names = [f"rank{replica}", *(f"rank{replica}.{k}" for k in range(1, self.divided))]
        first, *others = [self._run(n, [script], e) for n, e in zip(names, ranks, strict=True)]
        self.others |= {(replica, k): one for k, one in enumerate(others, start=1)}
        if not standby:
            self.ranks[replica] = first
        return first

    def start(self) -> None:
        """All of it; anew, if all its processes are dead."""
        self.start_coordinator()
        if self.agents:
            self.tell_ended()
        for replica in range(self.world):
            self.start_rank(replica)

    def tell_ended(self) -> None:
        """As their nodes' agents would: the last members' processes have ended. Untold of it, who
        is started anew waits a lease, for they may train on out of the coordinator's reach."""
        for replica, placement in RecordFile(self.folder / "c", "job_t").read().members.items():
            self.ask(op="exit", replica=replica, placement=placement, code=-signal.SIGKILL)

    def notice(self, replica: int) -> Path:
        """Where this replica reads how long after SIGTERM it is killed."""
        return self.folder / f"notice{replica}"

    def kill(self, *replicas: int) -> None:
        for replica in replicas:
            self.ranks[replica].kill()
        for replica in replicas:
            self.ranks.pop(replica).wait()

    def part_with(self, replica: int) -> list[subprocess.Popen[bytes]]:
        """The processes of a replica, by rank; it counts as one of ours no more."""
        others = [self.others.pop((replica, rank)) for rank in range(1, self.divided)]
        return [self.ranks.pop(replica), *others]

    def kill_rank(self, replica: int, rank: int) -> list[int]:
        """Kill one rank of a replica; how its ranks ended, which all do."""
        processes = self.part_with(replica)
        processes[rank].kill()
        return [process.wait(PATIENCE_S) for process in processes]

    def ask(self, **message: Any) -> dict[str, Any]:
        """One line to the coordinator, one line back."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as connection:
            connection.sendall(json.dumps({"token": TOKEN, **message}).encode() + b"\n")
            answer: dict[str, Any] = json.loads(connection.makefile().readline())
            return answer

    def steps(self, replica: int) -> list[dict[str, Any]]:
        """What the replica committed, over all its incarnations."""
        return [json.loads(line) for line in self._committed(replica)]

    def saved(self) -> int:
        """The last step of the latest training of which a checkpoint on these disks is whole, read
        to its last byte; -1 if there is none. Of a job whose processes are dead, or whose writers
        alone live: they add later training, and never remove the latest that is whole."""
        kinds = ("state*/checkpoints", "disk*/*/*/replica-*")
        folders = [folder for kind in kinds for folder in self.folder.glob(kind)]
        listed = [one for folder in folders for one in store.listed(folder)]
        named = [(store.epoch_of(m), m.step, p) for p, m in listed if isinstance(m, Manifest)]
        latest_first = sorted(named, reverse=True)
        whole = (step for _epoch, step, path in latest_first if not store.verify(path))
        return next(whole, -1)

    def last(self, replica: int) -> dict[str, Any]:
        step: dict[str, Any] = {"step": -1, "members": [], "epoch": 0}
        for line in self._committed(replica)[-1:]:
            step = json.loads(line)
        return step

    def wait_for_step(self, step: int) -> None:
        until(lambda: self.newest() >= step, f"step {step}")

    def newest(self) -> int:
        newest: int = max(self.last(replica)["step"] for replica in self.ranks)
        return newest

    def wait_for_members(self, members: list[int]) -> None:
        until(
            lambda: all(self.last(r)["members"] == members for r in members),
            f"members are {members}",
        )

    def wait_for_epoch(self, epoch: int) -> None:
        until(lambda: all(self.last(r)["epoch"] >= epoch for r in self.ranks), f"epoch {epoch}")

    def train_on(self, steps: int = 20) -> None:
        """Wait for more steps than there are now."""
        self.wait_for_step(self.newest() + steps)

    def stop(self) -> None:
        """SIGTERM to all ranks; they end at one edge."""
        for process in self.ranks.values():
            process.send_signal(signal.SIGTERM)
        for process in [*self.ranks.values(), *self.others.values()]:
            assert process.wait(PATIENCE_S) == 0

    def digests(self) -> set[str]:
        """Of the whole state at the end."""
        return {(self.folder / f"digest.{r}").read_text() for r in self.ranks}

    def digests_of_rank(self, rank: int) -> set[str]:
        """Of what this rank of each replica held at the end."""
        return {(self.folder / f"digest.{r}.{rank}").read_text() for r in self.ranks}

    def weights(self) -> set[str]:
        """Of all but the ledger, whose epochs tell of deaths."""
        return {(self.folder / f"weights.{r}").read_text() for r in self.ranks}

    def holder(self, replica: int) -> tuple[str, int]:
        """The address and process of the holder on this replica's node."""
        found = json.loads(
            (self.folder / f"memory{replica}" / "job_t" / "holder.json").read_bytes()
        )
        return found["address"], found["pid"]

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
        for path in self.folder.glob("memory*/job_t/holder.json"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(path.read_bytes())["pid"], signal.SIGKILL)

    def _committed(self, replica: int) -> list[str]:
        path = self.folder / f"steps.{replica}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [line for line in lines if line.endswith("\n")]

    def _run(
        self, name: str, arguments: list[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DRYDOCK")}
        common = {
            "PYTHONPATH": str(ROOT),
            "DRYDOCK_TOKEN": TOKEN,
            "DRYDOCK_WORLD_REPLICAS": str(self.world),
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            everything = {**inherited, **common, **environment}
            process = self._start(arguments, everything, log)
        self.started.append(process)
        return process

    def _start(
        self, arguments: list[str], environment: dict[str, str], log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        if self.forks and arguments[0].endswith(".py"):
            return Forked(arguments[0], environment, log, *arguments[1:])
        words = [sys.executable, *arguments]
        return subprocess.Popen(words, env=environment, stdout=log, stderr=log)


@dataclass
class Lives:
    """Those of a job all of whose replicas die again and again: where each began. One that begins
    anew ends with the same bits as one that goes on from what was saved."""

    fleet: Fleet
    made: list[int] = field(default_factory=lambda: [0])  # before each: so many steps of replica 0
    saved: list[int] = field(default_factory=lambda: [-1])  # and the last that was saved

    def ended(self) -> None:
        """The next one is still to be started. It is owed what is saved by now, or later training:
        a writer that outlives its trainer may add that."""
        self.made.append(len(self.fleet.steps(0)))
        self.saved.append(self.fleet.saved())

    def began_too_early(self) -> list[tuple[int, int]]:
        """With which step, where which was saved. Of one without a step the next tells."""
        steps = self.fleet.steps(0)
        began = [steps[made]["step"] for made in self.made]
        owed = zip(began, self.saved, strict=True)
        return [(step, saved) for step, saved in owed if step <= saved]

    def wait_for_workers(self) -> None:
        """Until this one trains on what several workers of replica 0 have loaded. How many steps it
        makes before they are up is the machine's affair."""
        until(lambda: has_workers(self.fleet.steps(0)[self.made[-1] :]), "workers load")

    def loaded_by_workers(self) -> int:
        """How many of them did so; their rows have to be signed."""
        steps = self.fleet.steps(0)
        of_each = itertools.pairwise([*self.made, len(steps)])
        return sum(has_workers(steps[begin:end]) for begin, end in of_each)


def has_workers(steps: list[dict[str, Any]]) -> bool:
    return len({pid for step in steps for pid in step["workers"]}) > 1
