"""Which rank of which replica this process is, by what its launcher says: ours, torchrun or srun.

Pure functions of the environment, which they never change. Imports no torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from runtime import client

#: What torch reads of MASTER_ADDR and MASTER_PORT.
FROM_ENVIRONMENT = "env://"
#: Replicas that srun started meet at ports from here on, below those that systems give out freely.
FIRST_PORT, PORTS, PORTS_OF_STEP = 20_000, 12_000, 1_000

SHUTDOWN_S = 30.0  # torchrun's, unless it is told otherwise

Environment = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process stands in its job."""

    replica: int
    rank: int  # within the replica
    ranks: int  # of the replica
    nodes: int  # on which the replica is; 1 if nothing says more
    speaks: bool  # of the replica's ranks on this node it is the first
    world_replicas: int  # with which the job starts
    init_method: str  # where `init_process_group` finds the ranks of this replica


def place_of(env: Environment) -> Place:
    """What the launcher says, else torchrun, of which each replica has one of its own, else srun.

    A step of srun is the whole job, unless DRYDOCK_REPLICA says which replica it is: its tasks are
    divided, in their order, among replicas of DRYDOCK_RANKS ranks or of one torchrun each.

    Raises RuntimeError naming the variable that is missing or does not fit.
    """
    torchrun = by_torchrun(env)
    _check_nodes(env, torchrun)
    by_srun = "SLURM_STEP_ID" in env and client.ENV_RANK not in env  # a batch script has no step
    if torchrun:
        rank, ranks = _rank(env, "RANK", "WORLD_SIZE")
        tasks = _number(env, "GROUP_WORLD_SIZE", 1)  # each torchrun of a replica is a task
    elif by_srun:
        ranks = tasks = _number(env, client.ENV_RANKS, 1)
        rank = _number(env, "SLURM_PROCID") % ranks
    else:
        rank, ranks = _rank(env, client.ENV_RANK, client.ENV_RANKS)
    if by_srun and not env.get(client.ENV_REPLICA):
        replica, world = _within_step(env, tasks)
    else:
        replica, world = _number(env, client.ENV_REPLICA), _number(env, client.ENV_WORLD_REPLICAS)
    if replica < 0:
        raise RuntimeError(f"{client.ENV_REPLICA} is {replica}: replicas count from 0")
    meets = by_srun and not torchrun and ranks > 1
    return Place(
        replica=replica,
        rank=rank,
        ranks=ranks,
        nodes=max(
            _number(env, client.ENV_NODES, 1), _number(env, "GROUP_WORLD_SIZE", 1) * torchrun
        ),
        speaks=_number(env, "LOCAL_RANK", rank) == 0 if torchrun else rank == 0,
        world_replicas=world,
        init_method=_meeting_place(env, replica, rank, ranks) if meets else FROM_ENVIRONMENT,
    )


def by_torchrun(env: Environment) -> bool:
    """Whether torchrun itself started this process, and not a launcher that torchrun started."""
    said = client.ENV_RANK in env and client.ENV_RANKS in env
    return "TORCHELASTIC_RUN_ID" in env and not said


def patience_of_torchrun(env: Environment) -> float:
    """How many seconds after a SIGTERM, which it passes on, torchrun kills its ranks: 30, or what
    this variable says (torch/distributed/launcher/api.py). What its command line says instead no
    rank hears."""
    try:
        return float(env.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or SHUTDOWN_S)
    except ValueError:  # then it has not started us
        return SHUTDOWN_S


def need(env: Environment, name: str) -> str:
    """Raises RuntimeError if the variable is not set."""
    value = env.get(name, "")
    if not value:
        own = "TORCHELASTIC_RUN_ID" in env and name == client.ENV_REPLICA
        each = "; start each replica by a torchrun of its own, which has it" if own else ""
        raise RuntimeError(f"{name} is not set; the launcher must give it to every rank{each}")
    return value


def _rank(env: Environment, name: str, of: str) -> tuple[int, int]:
    rank, ranks = _number(env, name, 0), _number(env, of, 1)
    if not 0 <= rank < ranks:
        raise RuntimeError(
            f"{name} is {rank} and {of} is {ranks}: ranks count from 0 within a replica"
        )
    return rank, ranks


def _check_nodes(env: Environment, torchrun: bool) -> None:
    """That the torchruns of a replica's nodes have found each other: each alone would be a job."""
    nodes, found = _number(env, client.ENV_NODES, 1), _number(env, "GROUP_WORLD_SIZE", 1)
    if torchrun and nodes > 1 and found != nodes:
        raise RuntimeError(
            f"this replica is on {nodes} nodes ({client.ENV_NODES}), and its torchrun counts "
            f"{found}: leave out --standalone, --nnodes and --rdzv-endpoint, which it takes from "
            "the environment"
        )


def _within_step(env: Environment, tasks: int) -> tuple[int, int]:
    """Which replica we are of how many, where each has so many of the step's tasks."""
    task, all_tasks = _number(env, "SLURM_PROCID"), _number(env, "SLURM_STEP_NUM_TASKS")
    if all_tasks % tasks:
        raise RuntimeError(
            f"this step of srun has {all_tasks} tasks, which do not make up replicas of {tasks} "
            f"({client.ENV_RANKS}); start as many as do, or set {client.ENV_REPLICA} and "
            f"{client.ENV_WORLD_REPLICAS} if the step is a part of one replica"
        )
    return task // tasks, _number(env, client.ENV_WORLD_REPLICAS, all_tasks // tasks)


def _meeting_place(env: Environment, replica: int, rank: int, ranks: int) -> str:
    """For the ranks of one replica that srun started."""
    if env.get(client.ENV_REPLICA) and env.get("MASTER_ADDR"):
        return FROM_ENVIRONMENT  # said for this replica alone
    first = _number(env, "SLURM_PROCID") - rank
    here = {int(task) for task in need(env, "SLURM_GTIDS").split(",")}
    if not here.issuperset(range(first, first + ranks)):
        raise RuntimeError(
            f"the ranks of replica {replica} are on several nodes, and where they meet is not "
            f"known: start each replica by an srun of its own, with {client.ENV_REPLICA}, "
            f"{client.ENV_WORLD_REPLICAS}, MASTER_ADDR (the first rank's node) and MASTER_PORT, or "
            "keep the tasks of a replica on one node (--ntasks-per-node, --distribution=block)"
        )
    step = f"{need(env, 'SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    offset = zlib.crc32(step.encode()) % (PORTS - PORTS_OF_STEP) + replica % PORTS_OF_STEP
    return f"tcp://127.0.0.1:{FIRST_PORT + offset}"


def _number(env: Environment, name: str, default: int | None = None) -> int:
    value = str(default) if default is not None and not env.get(name) else need(env, name)
    if not value.lstrip("-").isdigit():
        raise RuntimeError(f"{name} is {value!r}; the launcher must give a whole number")
    return int(value)
