"""Starting the processes of jobs: command line, environment, log file. Watches nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

import msgspec

from node_agent import procfs, wire
from node_agent.config import Config
from node_agent.log import log

#: Log files kept per node; the oldest go when a new process starts.
MAX_LOGS = 100
#: A log that has grown beyond this is cut, and of what it held its end is kept beside it.
MAX_LOG_BYTES, LOG_TAIL_BYTES = 64 * 2**20, 2**20
#: Beside them; in it stands the card's UUID.
DIAGNOSTIC_LOG = "field-diagnostic-{}.log"
#: A start that takes longer counts as one: its folder may hang.
LAUNCH_S = 3.0
#: With this status ends who could not become the program: no verdict of the program's.
NOT_LAUNCHED = 127
#: What a process begins as. It tells that it runs, then the error's number, and of which name.
_LAUNCHER = f"""
import os, signal, sys
tells, folder, *argv = sys.argv[1:]
tells = int(tells)
os.set_inheritable(tells, False)
def tell(words):
    try:
        os.write(tells, os.fsencode(words))
    except OSError:
        pass  # nobody waits any more
tell("r")
wanted = folder
try:
    os.chdir(folder)
    wanted = argv[0]
    for number in signal.SIGPIPE, signal.SIGXFSZ:  # Python ignores them, and programs inherit that
        signal.signal(number, signal.SIG_DFL)
    os.execvp(wanted, argv)
except OSError as error:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    print(wanted, error.strerror, sep=": ", file=sys.stderr, flush=True)
    tell(str(error.errno) + " " + wanted)
    os._exit({NOT_LAUNCHED})
"""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """One start of one process, as the supervisor's journal keeps it. `pid` 0: about to start."""

    kind: str  # rank, coordinator
    job: str
    placement: str
    token: str
    boot_id: str
    pid: int = 0
    start_ticks: int = 0
    started_at: float = 0.0
    replica: int | None = None
    rank: int | None = None
    coordinator: str = ""  # host:port that a rank's exit is told to
    port: int = 0  # a coordinator's own
    up: bool = False  # a coordinator has opened its port once: from then on it is kept alive
    min_replicas: int = 1


def rank_environment(config: Config, action: wire.StartRank) -> dict[str, str]:
    """The variables of `runtime.client`'s ENV_*, by name: this package must not import runtime."""
    return {
        **together(action.together),
        "DRYDOCK_JOB": action.job,
        "DRYDOCK_REPLICA": str(action.replica),
        "DRYDOCK_RANK": str(action.rank),
        "DRYDOCK_WORLD_REPLICAS": str(action.world_replicas),
        "DRYDOCK_PLACEMENT": action.placement,
        "DRYDOCK_STANDBY": action.standby,
        "DRYDOCK_COORDINATOR": action.coordinator,
        "DRYDOCK_TOKEN": action.token,
        "DRYDOCK_URL": action.ingest_url,
        "DRYDOCK_OPTIONS": json.dumps(action.options),
        "DRYDOCK_STATE_DIR": str(config.shared_dir / action.job),
        "DRYDOCK_LOCAL_DIR": str(config.local_dir or ""),
        "DRYDOCK_HOLDER_DIR": str(config.holder_dir or ""),
        "DRYDOCK_GRACE_S": str(wire.GRACE_S),
        "DRYDOCK_NOTICE_FILE": str(notice_file(config, action.placement)),
        "DRYDOCK_DOMAIN": "/".join(filter(None, [config.rack, config.name])),
    }


def together(start: wire.Together | None) -> dict[str, str]:
    """Where the launcher of each node finds the others: torchrun reads PET_* in place of options,
    others know the usual names."""
    if start is None:
        return {}
    return {
        "DRYDOCK_NODES": str(start.nodes),
        "DRYDOCK_NODE_RANK": str(start.node_rank),
        "MASTER_ADDR": start.address,
        "MASTER_PORT": str(start.port),
        "PET_NNODES": str(start.nodes),
        "PET_NODE_RANK": str(start.node_rank),
        "PET_MASTER_ADDR": start.address,
        "PET_MASTER_PORT": str(start.port),
        "PET_RDZV_ID": start.start,
    }


def coordinator_environment(placement: Placement) -> dict[str, str]:
    """Return the environment variables of a job's coordinator, by name.

    The token is here and not in the command line, which any user of the node can read (proc(5)).
    """
    return {
        "DRYDOCK_JOB": placement.job,
        "DRYDOCK_PLACEMENT": placement.placement,
        "DRYDOCK_TOKEN": placement.token,
    }


def coordinator_argv(config: Config, placement: Placement) -> list[str]:
    """Return the command line that starts a job's coordinator on this node.

    With port 0 the coordinator chooses a free port and writes it into its port file.
    """
    return [
        *(sys.executable, "-m", "runtime.replica.coordinator"),
        *("--job", placement.job),
        *("--min-replicas", str(placement.min_replicas)),
        *("--state-dir", str(config.shared_dir / placement.job / "coordinator")),
        *("--listen", f"{config.address}:{placement.port}"),
        *("--port-file", str(port_file(config, placement.placement))),
    ]


def port_file(config: Config, placement: str) -> Path:
    """Return the file into which this placement's coordinator writes its TCP port."""
    return config.state_dir / "ports" / placement


def notice_file(config: Config, placement: str) -> Path:
    """Where a rank that gets SIGTERM reads in how many seconds SIGKILL follows."""
    return config.state_dir / "notices" / placement


def spawn(
    config: Config,
    placement: str,
    argv: list[str],
    environment: dict[str, str],
    running: Collection[str],
) -> tuple[subprocess.Popen[bytes], float, int]:
    """Start a process in a session of its own: (process, Unix time, start ticks). OSError if not.

    It outlives the agent. What it prints goes to state_dir/logs/PLACEMENT.log, as it does for the
    `running` placements.
    """
    paths = [str(config.workdir), *filter(None, [os.environ.get("PYTHONPATH")])]
    inherited = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    # To be appended to: who writes to one that was cut goes on at its new end.
    with _fresh_log(config.state_dir / "logs", placement, running).open("ab") as output:
        process = launch(
            argv, config.workdir, {**inherited, **environment}, output, start_new_session=True
        )
    # It cannot have been reaped yet, so its entry in /proc is there even if it has died already.
    stat = procfs.read(process.pid)
    return process, time.time(), stat.start_ticks if stat is not None else 0


def launch(
    argv: list[str],
    workdir: Path,
    environment: dict[str, str],
    output: BinaryIO,
    start_new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program in its working folder. OSError, naming the folder or the program, if not.

    The process itself goes to the folder and becomes the program. It is not waited for beyond
    LAUNCH_S; what keeps it from that later is in its output. Popen alone would hold all of our
    threads meanwhile, and a shared folder may hang.
    """
    hears, tells = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(tells), str(workdir), *argv],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=start_new_session,
                pass_fds=[tells],
            )
        finally:
            os.close(tells)
        told, ended = _told(hears)
    finally:
        os.close(hears)
    if ended and not told:
        process.wait()
        raise OSError(errno.ENOEXEC, "the agent's own Python did not start", sys.executable)
    if trouble := told.removeprefix(b"r"):
        process.wait()
        number, _, name = os.fsdecode(trouble).partition(" ")
        raise OSError(int(number), os.strerror(int(number)), name)
    return process


def cut_logs(folder: Path) -> None:
    """Cut the logs that have grown too long. Who writes to one waits for nobody: what it
    writes meanwhile may be lost."""
    try:
        for path in _placements_logs(folder):
            _cut_if_long(path)
    except OSError as error:  # one may have made way for another just now
        log("logs_not_cut", "warning", path=folder, error=str(error))


def _cut_if_long(path: Path) -> None:
    status = path.stat()
    # Who does not append goes on where it was: where the log was cut, it has a hole.
    held = min(status.st_size, 512 * status.st_blocks)
    if held <= MAX_LOG_BYTES:
        return
    log("log_cut", "warning", path=path, bytes=held)
    with path.open("r+b") as file:
        file.seek(-LOG_TAIL_BYTES, os.SEEK_END)
        tail = file.read(LOG_TAIL_BYTES)
        file.truncate(0)
    with contextlib.suppress(OSError):  # what filled the disk may be another
        path.with_suffix(".log.1").write_bytes(tail)


def _told(hears: int) -> tuple[bytes, bool]:
    """What the launcher says within LAUNCH_S, and whether that is all."""
    told, until = b"", time.monotonic() + LAUNCH_S
    while select.select([hears], [], [], max(0.0, until - time.monotonic()))[0]:
        more = os.read(hears, 8192)
        if not more:
            return told, True
        told += more
    return told, False


def _placements_logs(folder: Path, pattern: str = "*.log") -> list[Path]:
    """Not what a field diagnostic said."""
    diagnostics = DIAGNOSTIC_LOG.format("*")
    return [file for file in folder.glob(pattern) if not file.match(diagnostics)]


def _fresh_log(folder: Path, placement: str, running: Collection[str]) -> Path:
    """An empty log; the one before it is kept as .1, and the oldest of all are removed.

    Never one that is still written to, nor what a field diagnostic said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{placement}.log"
    if path.exists():
        path.replace(path.with_suffix(".log.1"))
    kept = {f"{name}.log" for name in running}
    old = [file for file in _placements_logs(folder, "*") if file.name not in kept]
    old.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    for file in old[MAX_LOGS:]:
        file.unlink()
    return path
