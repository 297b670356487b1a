"""Starting the processes of jobs: command line, environment, log file. Watches nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from node_agent import procfs, wire
from node_agent.config import Config

#: Log files kept per node; the oldest go when a new process starts.
MAX_LOGS = 100


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
    return {
        "DRYDOCK_JOB": placement.job,
        "DRYDOCK_PLACEMENT": placement.placement,
        "DRYDOCK_TOKEN": placement.token,
    }


def coordinator_argv(config: Config, placement: Placement) -> list[str]:
    return [
        *(sys.executable, "-m", "runtime.replica.coordinator"),
        *("--job", placement.job),
        *("--min-replicas", str(placement.min_replicas)),
        *("--state-dir", str(config.shared_dir / placement.job / "coordinator")),
        *("--listen", f"{config.address}:{placement.port}"),
        *("--port-file", str(port_file(config, placement.placement))),
    ]


def port_file(config: Config, placement: str) -> Path:
    return config.state_dir / "ports" / placement


def notice_file(config: Config, placement: str) -> Path:
    """Where a rank that gets SIGTERM reads in how many seconds SIGKILL follows."""
    return config.state_dir / "notices" / placement


def spawn(
    config: Config, placement: str, argv: list[str], environment: dict[str, str]
) -> tuple[subprocess.Popen[bytes], float, int]:
    """Start a process in a session of its own: (process, Unix time, start ticks). OSError if not.

    It outlives the agent. What it prints goes to state_dir/logs/PLACEMENT.log.
    """
    paths = [str(config.workdir), *filter(None, [os.environ.get("PYTHONPATH")])]
    inherited = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with _fresh_log(config.state_dir / "logs", placement).open("wb") as output:
        process = subprocess.Popen(
            argv,
            cwd=config.workdir,
            env={**inherited, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    # It cannot have been reaped yet, so its entry in /proc is there even if it has died already.
    stat = procfs.read(process.pid)
    return process, time.time(), stat.start_ticks if stat is not None else 0


def _fresh_log(folder: Path, placement: str) -> Path:
    """An empty log; the one before it is kept as .1, and the oldest of all are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{placement}.log"
    if path.exists():
        path.replace(path.with_suffix(".log.1"))
    old = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in old[MAX_LOGS:]:
        file.unlink()
    return path
