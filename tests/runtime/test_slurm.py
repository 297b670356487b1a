"""Jobs under a real Slurm, as docs/launchers.md starts them, on a cluster of their own.

Its two nodes are this machine twice. Nothing of it lies outside its folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.ports import free_ports
from tests.runtime.replicas import PATIENCE_S, ROOT, TOKEN, until
from tests.runtime.test_launchers import SCRIPT, LaunchedFleet
from tests.runtime.test_preemption import newest
from tests.runtime.test_replicas import assert_every_sample_once

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "squeue")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, NEEDED)),
    reason="only root runs a Slurm of its own, where it is installed (Debian: slurm-wlm, munge)",
)

#: The nodes have more processors than this machine, so that all tasks find one. No control group
#: is made, which a container may forbid.
SETTINGS = """\
ClusterName=drydock
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
MpiDefault=none
PlugStackConfig=/dev/null
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=8 RealMemory=8000
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=8000
PartitionName=all Nodes=ALL Default=YES
"""

#: One step for the job.
IN_ONE_STEP = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --mem=4000 --no-kill
DRYDOCK_RANKS=2 srun --kill-on-bad-exit=0 --no-kill --wait=0 --distribution=block \
    --ntasks-per-node=2 {python} {script}
"""

#: A step for each replica, both on one node.
IN_STEPS = """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks=2 --mem=4000 --no-kill
export DRYDOCK_RANKS=1 DRYDOCK_WORLD_REPLICAS=2
for r in 0 1; do
  until [ -e {ended}.$r ]; do
    DRYDOCK_REPLICA=$r srun --exact -N1 -n1 --mem=2000 {python} {script}
  done &
done
wait
echo over
"""


@dataclass
class Cluster:
    """Its daemons, and what is run on it."""

    folder: Path
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def settings(self) -> Path:
        return self.folder / "slurm.conf"

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (self.folder / "state").mkdir()
        ports = free_ports(3)
        self.settings.write_text(
            SETTINGS.format(
                host=socket.gethostname(), folder=self.folder, port=ports[0], ports=ports[1:]
            )
        )
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "seed-file": "seed"}
        paths = [f"--{option}={self.folder}/munge.{name}" for option, name in files.items()]
        self._daemon("munged", "--foreground", "--force", f"--log-file={self.folder}/munge.log",
                     *paths)  # fmt: skip
        until((self.folder / "munge.socket").exists, "munged listens")
        self._daemon("slurmctld", "-D", "-f", str(self.settings))
        for node in ("n0", "n1"):
            (self.folder / f"spool.{node}").mkdir()
            self._daemon("slurmd", "-D", "-N", node, "-f", str(self.settings))
        until(lambda: self.ask("sinfo", "-h", "-N", "-o", "%t") == "idle\nidle\n", "all are idle")

    def ask(self, *words: str) -> str:
        """What a command of Slurm says, or nothing if it fails."""
        return subprocess.run(
            words, env=self.environment(), capture_output=True, text=True, timeout=PATIENCE_S
        ).stdout

    def environment(self) -> dict[str, str]:
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("DRYDOCK", "SLURM"))}
        return {**outside, "SLURM_CONF": str(self.settings)}

    def stop(self) -> None:
        """Also where a test failed: first what runs on it, then the daemons, then what is left."""
        try:
            self.ask("scancel", "--full", "--signal=KILL", "--user=root")
            until(lambda: not self.ask("squeue", "-h"), "no job is left")
        finally:
            self._end()

    def _end(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if self._started(process):
                    process.kill()

    def _started(self, process: psutil.Process) -> bool:
        """Tasks know our settings, what looks after them writes to our log."""
        return process.environ().get("SLURM_CONF") == str(self.settings) or (
            process.name() == "slurmstepd"
            and any(file.path.startswith(str(self.folder)) for file in process.open_files())
        )

    def _daemon(self, *words: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            self.daemons.append(subprocess.Popen(words, stdout=log, stderr=log))


@dataclass
class SlurmFleet(LaunchedFleet):
    """Replicas that Slurm starts: all that is said to them is said to it."""

    cluster: Cluster = field(kw_only=True)

    def run(self, name: str, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        """A command of Slurm, and all that it starts."""
        told = {"PYTHONPATH": str(ROOT), "DRYDOCK_TOKEN": TOKEN, **self.told(), **environment}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                words, env={**self.cluster.environment(), **told}, stdout=log, stderr=log
            )
        self.started.append(process)
        return process

    def batch(self, script: str) -> str:
        """The number that Slurm gives the job."""
        path = self.folder / "batch"
        path.write_text(
            script.format(python=sys.executable, script=SCRIPT, ended=self.folder / "digest")
        )
        sbatch = self.run("sbatch", "sbatch", "--parsable", f"--output={self.out}", str(path))
        self.ranks = {0: sbatch, 1: sbatch}
        assert sbatch.wait(PATIENCE_S) == 0
        return (self.folder / "sbatch.log").read_text().strip()

    @property
    def out(self) -> Path:
        """What the batch script says."""
        return self.folder / "out"

    def wait_for_the_end(self, ranks: int) -> None:
        """Of so many of the job in all, in peace."""
        until(lambda: len([*self.folder.glob("weights.*")]) == ranks, "all have saved and ended")

    def task(self, **environment: str) -> psutil.Process:
        """The task of a step in whose environment this is said."""
        said = {"DRYDOCK_STATE_DIR": self.told()["DRYDOCK_STATE_DIR"], **environment}.items()
        return next(one for one in psutil.process_iter() if said <= environment_of(one).items())


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Of a task; none of any other process."""
    with contextlib.suppress(psutil.Error):
        if str(SCRIPT) in process.cmdline() and process.name() != "srun":
            said: dict[str, str] = process.environ()
            return said
    return {}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def fleet(tmp_path: Path, cluster: Cluster) -> Iterator[SlurmFleet]:
    made = SlurmFleet(tmp_path, world=2, cluster=cluster)
    made.start_coordinator()
    yield made
    made.close()


def test_a_job_in_one_step_loses_a_rank_and_gets_its_replica_anew(fleet: SlurmFleet) -> None:
    job = fleet.batch(IN_ONE_STEP)
    fleet.wait_for_members([0, 1])

    fleet.task(SLURM_PROCID="3").kill()
    fleet.wait_for_members([0])
    fleet.train_on()
    anew = fleet.run(
        "anew", "srun", f"--jobid={job}", "--overlap", "--exact", "--mem=0", "-N1", "-n2",
        "-w", "n1", sys.executable, str(SCRIPT),
        DRYDOCK_REPLICA="1", DRYDOCK_RANKS="2", DRYDOCK_WORLD_REPLICAS="2",
    )  # fmt: skip
    fleet.wait_for_members([0, 1])
    fleet.train_on()
    fleet.cluster.ask("scancel", job)
    fleet.wait_for_the_end(ranks=4)
    anew.wait(PATIENCE_S)

    assert newest(fleet) == fleet.newest()
    assert_every_sample_once(fleet.steps(0), 0)
    assert len(fleet.digests()) == len(fleet.digests_of_rank(1)) == 1


def test_a_step_for_each_replica_which_a_loop_starts_again(fleet: SlurmFleet) -> None:
    job = fleet.batch(IN_STEPS)
    fleet.wait_for_members([0, 1])

    fleet.task(DRYDOCK_REPLICA="1").kill()
    fleet.wait_for_members([0])
    fleet.wait_for_members([0, 1])
    fleet.train_on()
    fleet.cluster.ask("scancel", "--signal=TERM", job)
    fleet.wait_for_the_end(ranks=2)
    until(lambda: fleet.out.read_text().endswith("over\n"), "no replica is started again")

    assert newest(fleet) == fleet.newest()
    assert_every_sample_once(fleet.steps(0), 0)
    assert len(fleet.digests()) == 1
