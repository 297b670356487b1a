"""The simulated fleet of one machine: which nodes there are, and what each needs on disk.

Files and addresses only: the chassis of a node runs it, `demo` tells the control plane of it.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from controlplane.local import runfile
from controlplane.local.processes import Program, plain_environment
from controlplane.local.services import free_port

#: The demo job takes four nodes, its coordinator one, and each cluster keeps one spare.
MIN_NODES = 6
MAX_NODES = 64
MAIN_CLUSTER = "harbor"
SIDE_CLUSTER = "quay"

#: What jobs may run. The second is one whose ranks restart together: torchrun ends them together.
PROGRAMS = {
    "train-gpt": ["python", "examples/train_gpt.py"],
    "train-tensor-parallel": [
        *("python", "-m", "torch.distributed.run", "--nproc-per-node=2"),
        "examples/train_tensor_parallel.py",
    ],
}


class FleetError(Exception):
    """The fleet cannot be made as asked; the message names the remedy."""


@dataclass(frozen=True)
class NodePlan:
    """One simulated node: its place in the fleet and its folder."""

    name: str
    cluster: str
    rack: str
    spare: bool
    folder: Path

    @property
    def chassis(self) -> Path:
        return self.folder / "chassis"

    @property
    def join_token(self) -> Path:
        return self.folder / "join-token"

    @property
    def bmc_password(self) -> str:
        return (self.chassis / "bmc-password").read_text().strip()

    @property
    def bmc_port(self) -> int:
        return int((self.folder / "bmc-port").read_text())


def plan(home: Path, nodes: int) -> list[NodePlan]:
    """Spread `nodes` over the two clusters, two racks each, the last node of each a spare.

    Raises FleetError for a number that cannot hold the demo job.
    """
    if not MIN_NODES <= nodes <= MAX_NODES:
        raise FleetError(
            f"The demo fleet needs {MIN_NODES} to {MAX_NODES} nodes (four for the job, one spare "
            f"in each cluster): try `make up NODES=8`, not {nodes}."
        )
    side = max(1, nodes // 4)
    return [
        *_cluster(home, MAIN_CLUSTER, nodes - side),
        *_cluster(home, SIDE_CLUSTER, side),
    ]


def made(home: Path) -> list[NodePlan]:
    """The nodes that runs of this home, of whatever size, have simulated."""
    return [node for node in plan(home, MAX_NODES) if node.chassis.is_dir()]


def prepare(node: NodePlan, ingest_url: str, shared: Path, taken: Collection[int] = ()) -> None:
    """Write the node's folder: what its chassis and its agent read. Keeps what is there.

    `taken`: the ports of other nodes, whose chassis may not listen yet. Raises ServiceError when no
    port is free.
    """
    node.chassis.mkdir(mode=0o700, parents=True, exist_ok=True)
    password = node.chassis / "bmc-password"
    if not password.exists():
        runfile.write_private(password, secrets.token_urlsafe(24))
    port = node.folder / "bmc-port"
    earlier = int(port.read_text()) if port.exists() else None
    runfile.write_private(port, str(free_port(earlier, taken)))
    runfile.write_private(node.folder / "agent.toml", _agent_settings(node, ingest_url, shared))


def chassis_program(node: NodePlan) -> Program:
    """The process that plays the node: its BMC, and all that runs on it."""
    return Program(
        name=f"chassis-{node.name}",
        argv=(
            *(sys.executable, "-m", "node_agent.chassis", "--dir", str(node.chassis)),
            *("--listen", f"127.0.0.1:{node.bmc_port}", "--name", node.name),
            *("--agent-config", str(node.folder / "agent.toml")),
        ),
        cwd=runfile.REPOSITORY,
        env=plain_environment(),
        stop_s=20.0,
        stop_order=1,
    )


def sweep(folder: Path) -> None:
    """End what a killed chassis has left running, by that chassis's own records."""
    chassis = folder / "chassis"
    subprocess.run(
        [sys.executable, "-m", "node_agent.chassis", "--dir", str(chassis), "--sweep"],
        cwd=runfile.REPOSITORY,
        env=plain_environment(),
        check=False,
        stdout=subprocess.DEVNULL,
    )


def _cluster(home: Path, cluster: str, count: int) -> list[NodePlan]:
    names = [f"{cluster}-{number:02d}" for number in range(1, count + 1)]
    return [
        NodePlan(
            name=name,
            cluster=cluster,
            rack=f"{cluster}-r{1 + position * 2 // count}",
            spare=position == count - 1,
            folder=home / "nodes" / name,
        )
        for position, name in enumerate(names)
    ]


def _agent_settings(node: NodePlan, ingest_url: str, shared: Path) -> str:
    values: dict[str, str | int | list[str]] = {
        "name": node.name,
        "rack": node.rack,
        "switch": f"{node.rack}-leaf",
        "address": "127.0.0.1",
        "ingest_url": ingest_url,
        "join_token_file": str(node.join_token),
        "state_dir": str(node.folder / "state"),
        "shared_dir": str(shared),
        "local_dir": "checkpoints",
        "holder_dir": "memory",
        "hardware": "simulated",
        "hardware_dir": str(node.chassis),
        "kernel_log": str(node.chassis / "kernel.log"),
        "boot_id_file": str(node.chassis / "boot_id"),
        "workdir": str(runfile.REPOSITORY),
        "field_diagnostic": [
            *("python", "-m", "node_agent.simulated_diagnostic"),
            *("--hardware", str(node.chassis), "--card", "{uuid}"),
        ],
    }
    # A JSON string or number is also a TOML one.
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    lines += ["", "[programs]"]
    lines += [f"{name} = {json.dumps(argv)}" for name, argv in PROGRAMS.items()] + [""]
    return "\n".join(lines)
