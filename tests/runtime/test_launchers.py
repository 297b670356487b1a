"""Which rank of which replica a process is, by what its launcher says; and fleets so started."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from runtime.launchers import Place, place_of
from tests.runtime.replicas import PATIENCE_S, ROOT, Fleet
from tests.runtime.test_replicas import assert_every_sample_once
from tests.runtime.whole.runs import TORCHRUN_SCRIPT, told

SCRIPT = Path(__file__).with_name("tiny.py")

OURS = {"DRYDOCK_REPLICA": "1", "DRYDOCK_WORLD_REPLICAS": "4"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "r", "RANK": "1", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "there", "MASTER_PORT": "29500",
}  # fmt: skip
TWO_NODES = {
    **TORCHRUN, "RANK": "3", "WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "1"
}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "812", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_GTIDS": "0"}
#: The fifth of eight tasks, four on each node.
SRUN = {
    **BATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5",
    "SLURM_GTIDS": "4,5,6,7",
}  # fmt: skip


def with_(*environments: dict[str, str], **said: str) -> dict[str, str]:
    merged = {name: value for one in environments for name, value in one.items()}
    return merged | {f"DRYDOCK_{name}": value for name, value in said.items()}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (OURS, (1, 0, 1, 4)),
        (with_(OURS, RANK="1", RANKS="4"), (1, 1, 4, 4)),
        (with_(OURS, TORCHRUN), (1, 1, 2, 4)),
        (with_(OURS, TORCHRUN, RANK="0"), (1, 1, 2, 4)),
        (with_(OURS, TORCHRUN, RANK="0", RANKS="3"), (1, 0, 3, 4)),  # a launcher under torchrun
        (with_(OURS, {"RANK": "5", "WORLD_SIZE": "8"}), (1, 0, 1, 4)),  # of something else
        (with_(OURS, BATCH), (1, 0, 1, 4)),  # started by a batch script, without srun
        (SRUN, (5, 0, 1, 8)),
        (with_(SRUN, RANKS="2"), (2, 1, 2, 4)),
        (with_(SRUN, RANKS="2", WORLD_REPLICAS="3"), (2, 1, 2, 3)),  # one more than it needs
        (with_(SRUN, OURS, RANKS="8"), (1, 5, 8, 4)),  # the step is one replica
        (with_(SRUN, OURS), (1, 0, 1, 4)),  # each task told its own
        (with_(SRUN, OURS, RANK="0"), (1, 0, 1, 4)),  # a launcher in a step
        (with_(SRUN, TORCHRUN), (5, 1, 2, 8)),
        (with_(SRUN, TWO_NODES), (2, 3, 4, 4)),
        (with_(SRUN, TWO_NODES, OURS), (1, 3, 4, 4)),
    ],
)
def test_a_process_s_place_in_its_job(
    environment: dict[str, str], place: tuple[int, int, int, int]
) -> None:
    environment = {"MASTER_ADDR": "there", **environment}

    found = place_of(environment)

    assert (found.replica, found.rank, found.ranks, found.world_replicas) == place


@pytest.mark.parametrize(
    ("environment", "nodes"),
    [
        (OURS, 1),
        (with_(OURS, RANK="1", RANKS="16", NODES="4"), 4),
        (with_(OURS, TORCHRUN), 1),
        (with_(OURS, TWO_NODES), 2),
        (with_(OURS, TWO_NODES, NODES="2"), 2),
        (with_(OURS, TWO_NODES, RANK="0", RANKS="4"), 1),  # a launcher under torchrun
    ],
)
def test_on_how_many_nodes_its_replica_is(environment: dict[str, str], nodes: int) -> None:
    assert place_of(environment).nodes == nodes


@pytest.mark.parametrize(
    ("environment", "speaks"),
    [
        (OURS, True),
        (with_(OURS, RANK="1", RANKS="4"), False),
        (with_(OURS, TWO_NODES, NODES="2"), False),
        (with_(OURS, TWO_NODES, {"RANK": "2", "LOCAL_RANK": "0"}, NODES="2"), True),
    ],
)
def test_the_first_rank_on_each_node_says_that_it_is_there(
    environment: dict[str, str], speaks: bool
) -> None:
    assert place_of(environment).speaks is speaks


def meeting_place(procid: int, **said: str) -> str:
    return place_of(with_(SRUN, {"SLURM_PROCID": str(procid)}, **said)).init_method


def test_the_ranks_of_a_replica_that_srun_started_meet_at_a_port_of_their_own() -> None:
    here = [meeting_place(procid, RANKS="2") for procid in (4, 5, 6, 7)]

    assert here[0] == here[1]
    assert here[2] == here[3]
    assert here[0] != here[2]
    assert all(one.startswith("tcp://127.0.0.1:2") for one in here)
    assert place_of(with_(SRUN, {"SLURM_STEP_ID": "9"}, RANKS="2")).init_method != here[0]


@pytest.mark.parametrize(
    "environment",
    [
        with_(OURS, TORCHRUN),
        with_(SRUN, TORCHRUN),
        with_(SRUN, OURS, {"MASTER_ADDR": "node7"}, RANKS="8"),
        SRUN,
    ],
)
def test_where_the_launcher_says_where_ranks_meet_torch_reads_it(
    environment: dict[str, str],
) -> None:
    assert place_of(environment).init_method == "env://"


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "DRYDOCK_REPLICA is not set; the launcher must give it"),
        ({"DRYDOCK_REPLICA": "1"}, "DRYDOCK_WORLD_REPLICAS is not set"),
        ({"DRYDOCK_REPLICA": "one"}, "DRYDOCK_REPLICA is 'one'; .* a whole number"),
        (OURS | {"DRYDOCK_REPLICA": "-1"}, "DRYDOCK_REPLICA is -1: replicas count from 0"),
        (with_(OURS, TORCHRUN, NODES="2"), "is on 2 nodes .* counts 1: leave out --standalone"),
        (TORCHRUN, "DRYDOCK_REPLICA is not set; .* start each replica by a torchrun of its own"),
        (with_(OURS, RANK="2", RANKS="2"), "DRYDOCK_RANK is 2 and DRYDOCK_RANKS is 2"),
        (with_(OURS, RANK="-1", RANKS="2"), "DRYDOCK_RANK is -1 and"),
        (with_(SRUN, RANKS="3"), r"has 8 tasks, which do not make up replicas of 3 \(DRYDOCK_RAN"),
        (with_(SRUN, RANKS="8"), "the ranks of replica 0 are on several nodes, .* MASTER_ADDR"),
        (with_(SRUN, OURS, RANKS="8"), "the ranks of replica 1 are on several nodes"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_remedy(
    environment: dict[str, str], told: str
) -> None:
    with pytest.raises(RuntimeError, match=told):
        place_of(environment)


def test_what_is_said_is_all_there_is_to_a_place() -> None:
    assert place_of(OURS) == Place(
        replica=1, rank=0, ranks=1, nodes=1, speaks=True, world_replicas=4, init_method="env://"
    )


def free_slurm_job() -> str:
    """One at whose ports, at which the ranks of its first steps' replicas meet, nobody listens."""
    jobs = map(str, random.sample(range(1, 1 << 20), 100))
    return next(job for job in jobs if all(map(is_free, meeting_ports(job))))


def meeting_ports(job: str) -> list[int]:
    """Of two replicas in each of its first two steps."""
    step = {"SLURM_JOB_ID": job, "SLURM_STEP_NUM_TASKS": "4", "SLURM_GTIDS": "0,1,2,3"}
    tasks = [
        with_(step, {"SLURM_STEP_ID": number, "SLURM_PROCID": task}, RANKS="2")
        for number in "01"
        for task in ("0", "2")
    ]
    return [int(place_of(task).init_method.rpartition(":")[2]) for task in tasks]


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


@dataclass
class LaunchedFleet(Fleet):
    """Replicas of two ranks, which are told who they are by a launcher."""

    divided: int = 2
    slurm_job: str = field(default_factory=lambda: free_slurm_job())

    def told(self) -> dict[str, str]:
        """What every rank of the job is given alike."""
        return {
            "DRYDOCK_JOB": "job_t",
            "DRYDOCK_COORDINATOR": f"127.0.0.1:{self.port}",
            "DRYDOCK_STATE_DIR": str(self.folder / "state"),
            "DRYDOCK_OPTIONS": json.dumps({"folder": str(self.folder), **self.options}),
        }

    def launch(self, name: str, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        return self._run(name, [*words, str(SCRIPT)], {**self.told(), **environment})

    def torchrun(self, replica: int, restarts: int = 0) -> None:
        self.ranks[replica] = self.launch(
            f"torchrun{replica}", TORCHRUN_SCRIPT, "--standalone",
            "--nproc-per-node=2", f"--max-restarts={restarts}", "--monitor-interval=0.1",
            DRYDOCK_REPLICA=str(replica),
            # Else ranks that torchrun starts anew may read where those before them listened.
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )  # fmt: skip

    def worker(self, replica: int, rank: int) -> psutil.Process:
        """A rank that torchrun started."""
        workers = psutil.Process(self.ranks[replica].pid).children()
        (found,) = [one for one in workers if one.environ().get("RANK") == str(rank)]
        return found

    def close(self) -> None:
        left = [one.pid for one in self.started if one.poll() is None]
        workers = [worker for pid in left for worker in psutil.Process(pid).children()]
        super().close()
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()

    def srun(self, step: int, tasks: int, **environment: str) -> list[subprocess.Popen[bytes]]:
        """The tasks of a step, with what srun tells each."""
        told = {
            "SLURM_JOB_ID": self.slurm_job, "SLURM_STEP_ID": str(step),
            "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_GTIDS": ",".join(map(str, range(tasks))),
            "DRYDOCK_RANKS": "2", **environment,
        }  # fmt: skip
        return [
            self.launch(f"step{step}.{task}", **told, SLURM_PROCID=str(task))
            for task in range(tasks)
        ]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LaunchedFleet]:
    made = LaunchedFleet(tmp_path, world=2)
    made.start_coordinator()
    yield made
    made.close()


def test_each_replica_by_a_torchrun_of_its_own(fleet: LaunchedFleet) -> None:
    fleet.torchrun(0)
    fleet.torchrun(1, restarts=1)
    fleet.wait_for_members([0, 1])

    fleet.worker(1, 1).kill()
    fleet.wait_for_members([0])
    fleet.wait_for_members([0, 1])  # torchrun started both of its ranks anew
    fleet.worker(1, 0).kill()
    status = fleet.ranks.pop(1).wait(PATIENCE_S)
    fleet.wait_for_members([0])
    fleet.torchrun(1)
    fleet.wait_for_members([0, 1])
    fleet.train_on()
    for replica in (0, 1):
        fleet.worker(replica, 1).terminate()
    ended = [torchrun.wait(PATIENCE_S) for torchrun in fleet.ranks.values()]

    assert status != 0
    assert ended == [0, 0]
    assert_every_sample_once(fleet.steps(0), 0)
    assert len(fleet.digests()) == len(fleet.digests_of_rank(1)) == 1


def test_a_job_in_one_step_of_srun_and_a_replica_anew_in_another(fleet: LaunchedFleet) -> None:
    tasks = fleet.srun(0, 4)
    fleet.ranks = {0: tasks[0], 1: tasks[2]}
    fleet.wait_for_members([0, 1])

    tasks[3].kill()
    status = fleet.ranks.pop(1).wait(PATIENCE_S)
    fleet.wait_for_members([0])
    anew = fleet.srun(1, 2, DRYDOCK_REPLICA="1")
    fleet.ranks[1] = anew[0]
    fleet.wait_for_members([0, 1])
    fleet.train_on()
    for one in (tasks[1], anew[1]):
        one.terminate()
    ended = [task.wait(PATIENCE_S) for task in [*tasks[:2], *anew]]

    assert status != 0
    assert ended == [0, 0, 0, 0]
    assert_every_sample_once(fleet.steps(0), 0)
    assert len(fleet.digests()) == len(fleet.digests_of_rank(1)) == 1


#: A launcher of one rank, and a rank that tells when it has joined, and that its launcher is gone.
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


RANK = """
import os, threading
import runtime
launcher = os.getppid()
runtime.join()
print("joined", flush=True)
while os.getppid() == launcher:
    threading.Event().wait(0.01)
print("trains on", flush=True)
"""


ORPHAN = """
import os
import runtime
parents = iter([7, 1])
os.getppid = lambda: next(parents)
runtime.join()
print("trains on")
"""


UNDER_TORCHRUN = {"TORCHELASTIC_RUN_ID": "r", "RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (UNDER_TORCHRUN, ""),
        ({}, "trains on\n"),
        ({**UNDER_TORCHRUN, "DRYDOCK_RANK": "0", "DRYDOCK_RANKS": "1"}, "trains on\n"),
    ],
)
def test_from_join_on_a_rank_dies_with_torchrun_and_with_no_other_launcher(
    environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK],
        env={**os.environ, **told(tmp_path), **environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    joined = launcher.stdout.readline()

    launcher.kill()
    after, _ = launcher.communicate(timeout=PATIENCE_S)  # until the rank has ended too

    assert (joined, after) == ("joined\n", said)


def test_a_rank_whose_torchrun_died_while_it_joined_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN],
        env={**os.environ, **told(tmp_path), **UNDER_TORCHRUN, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
    )

    assert (done.returncode, done.stdout) == (1, b"")
