"""Who is compared: how each one's environment, settings and helper processes come to be."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.rivals.environments import python_of
from benchmarks.rivals.task import ENV_BEAT

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_S = 20.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, eq=False)
class Contender:
    """One line of the tables."""

    name: str
    worker: str  # module of this package
    requirement: str = ""  # what its environment must have beside torch
    settings: dict[str, int] = field(default_factory=dict)  # of its lighthouse
    beat_ms: int = 0  # between two heartbeats of its managers; 0: as they come
    mode: str = "cover"  # ours only

    @property
    def python(self) -> str:
        return python_of(self.requirement) if self.requirement else sys.executable


#: torchft's lighthouse, in milliseconds. The first is as short as can be without calling a replica
#: dead that is only busy, with managers that beat so often. Where its steps begin more than that
#: join timeout apart it leaves somebody out of each quorum, hence a longer one for heavy gradients,
#: and one that is long enough for any state. What is left out stands at its default: 5000, 60000
#: and 100, and 100 between two beats.
QUICK = {"heartbeat_timeout_ms": 300, "join_timeout_ms": 100, "quorum_tick_ms": 10}
BEAT_MS = 20
BRISK = {**QUICK, "join_timeout_ms": 200}
PATIENT = {**QUICK, "join_timeout_ms": 1000}
STABLE, NIGHTLY = "torchft==0.2.0", "torchft-nightly==2026.10.26"

DDP = Contender("plain DDP", "train_ddp")
DDP_AGAIN = Contender("plain DDP again (A/A)", "train_ddp")
OURS = Contender("ours", "train_ours")
#: In the same processes; see train_both.py.
BOTH = Contender("ours and plain DDP in turns", "train_both")
OURS_REPRODUCIBLE = Contender("ours, reproducible", "train_ours", mode="reproducible")
TORCHFT = Contender("torchft 0.2.0", "train_torchft", STABLE, QUICK, BEAT_MS)
TORCHFT_BRISK = replace(TORCHFT, settings=BRISK)
TORCHFT_PATIENT = replace(TORCHFT, settings=PATIENT)
TORCHFT_DEFAULT = Contender("torchft 0.2.0, its defaults", "train_torchft", STABLE)
TORCHFT_NIGHTLY = Contender("torchft-nightly 2026.10.26", "train_torchft", NIGHTLY, QUICK, BEAT_MS)
NIGHTLY_BRISK = replace(TORCHFT_NIGHTLY, settings=BRISK)
NIGHTLY_PATIENT = replace(TORCHFT_NIGHTLY, settings=PATIENT)
NIGHTLY_DEFAULT = Contender("torchft-nightly, its defaults", "train_torchft", NIGHTLY)


def install_rivals() -> None:
    """On first use, and before anything is measured."""
    for requirement in (STABLE, NIGHTLY):
        python_of(requirement)


@dataclass
class Helpers:
    """What a job of this contender needs beside its replicas."""

    processes: list[subprocess.Popen[bytes]]
    environment: dict[str, str]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def start_helpers(contender: Contender, folder: Path, replicas: int) -> Helpers:
    """Start them and wait until they answer. Raises RuntimeError if they do not."""
    if contender.worker in ("train_ours", "train_both"):
        return _coordinator(contender, folder, replicas)
    if contender.worker == "train_torchft":
        return _lighthouse(contender, folder)
    return Helpers([], {})


def _coordinator(contender: Contender, folder: Path, replicas: int) -> Helpers:
    environment = {
        "DRYDOCK_JOB": "bench",
        "DRYDOCK_TOKEN": secrets.token_hex(8),
        "DRYDOCK_WORLD_REPLICAS": str(replicas),
        "DRYDOCK_STATE_DIR": str(folder / "state"),
        "DRYDOCK_MODE": contender.mode,
    }
    port_file = folder / "port"
    words = ["--job", "bench", "--state-dir", str(folder), "--port-file", str(port_file)]
    process = spawn(
        [sys.executable, "-m", "runtime.replica.coordinator", *words],
        folder / "helpers.log",
        environment,
    )
    _until(port_file.exists, process, "our coordinator")
    address = f"127.0.0.1:{port_file.read_text().strip()}"
    return Helpers([process], {**environment, "DRYDOCK_COORDINATOR": address})


def _lighthouse(contender: Contender, folder: Path) -> Helpers:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {"min_replicas": 1, **contender.settings}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    program = Path(contender.python).parent / "torchft_lighthouse"
    process = spawn(
        [str(program), "--bind", f"127.0.0.1:{port}", *words], folder / "helpers.log", {}
    )

    def answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    _until(answers, process, "torchft's lighthouse")
    environment = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    if contender.beat_ms:
        environment[ENV_BEAT] = str(contender.beat_ms)
    return Helpers([process], environment)


def spawn(
    words: list[str], log: Path, environment: dict[str, str], *, talks: bool = False
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one; `talks`: by its standard input and output."""
    path = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("DRYDOCK")}
    with log.open("ab") as errors:
        return subprocess.Popen(
            words,
            env={**inherited, **path, **environment},
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else errors,
            stderr=errors,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )


def _until(happened: Callable[[], bool], process: subprocess.Popen[bytes], name: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{name} does not answer; its words are in the run's helpers.log")
        threading.Event().wait(0.02)
