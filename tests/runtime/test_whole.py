"""A job of a shape that cannot drop: what it is told at the start, and that it is recovered."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import runtime
from node_agent import wire
from node_agent.launch import together
from runtime import stalls
from runtime import whole as whole_module
from runtime.checkpoint import facts, store
from runtime.checkpoint.__main__ import main
from runtime.checkpoint.draft import write
from runtime.checkpoint.manifest import digest_of_all
from runtime.checkpoint.tiers import TierName
from runtime.client import CheckpointSaved, Directive
from runtime.generators import generators, set_generators
from runtime.image import Damaged, Staged
from runtime.job import Job
from runtime.replica.division import Division
from runtime.replica.gloo import Gloo
from runtime.replica.observing import Observer
from runtime.replica.rank import Rank
from runtime.replica.state import TrainingState
from runtime.replica.step import StepEngine
from runtime.replica.together import MAX_TRIES
from runtime.snapshot import stage
from runtime.whole import Found
from tests.ports import free_port
from tests.runtime.checkpoint.states import hanging
from tests.runtime.replicas import PATIENCE_S, ROOT, TOKEN, until
from tests.runtime.test_client import Door

SCRIPT = Path(__file__).with_name("whole_job.py")
STEPS = 30
NEVER_S = 1e9
NEVER = 1 << 40  # steps


def all_of(process: subprocess.Popen[str]) -> str:
    """What it writes until it ends; if it does not, it and what it started are killed."""
    try:
        return process.communicate(timeout=PATIENCE_S)[0]
    except subprocess.TimeoutExpired:
        kill(process)
        raise


def kill(process: subprocess.Popen[str]) -> None:
    """With all that it started; nothing, if it has ended."""
    if process.poll() is None:
        for one in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.kill()


def told(state: Path, **others: str) -> dict[str, str]:
    """What a launcher says to every rank of such a job."""
    return {
        "DRYDOCK_JOB": "job_t",
        "DRYDOCK_REPLICA": "0",
        "DRYDOCK_WORLD_REPLICAS": "1",
        "DRYDOCK_COORDINATOR": "none",
        "DRYDOCK_TOKEN": TOKEN,
        "DRYDOCK_STATE_DIR": str(state),
        **others,
    }


@dataclass
class Whole:
    """A job of one torchrun whose ranks divide a model, and what it left in its folder."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "state" / "checkpoints"

    def run(
        self,
        *,
        ranks: int = 2,
        restarts: int = 0,
        disk: str = "disk",
        url: str = "",
        **options: object,
    ) -> tuple[int, str]:
        """Until it ends: its exit status, and all that it wrote."""
        # Else ranks that torchrun starts anew may read where those before them listened.
        also = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DRYDOCK_URL": url}
        arguments = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
        process = self.start(arguments, disk, also, **options)
        said = all_of(process)
        return process.returncode, said

    def run_on_two_nodes(
        self,
        *disks: str,
        states: tuple[str, str] = ("state", "state"),
        memories: tuple[str, str] = ("", ""),
        url: str = "",
        **options: object,
    ) -> tuple[list[int], str]:
        """A rank on each, with the environment that the nodes' agents give: both exit statuses.
        `states`: what each has mounted as the folder of all. `memories`: where each node's holder
        is found; "" for one that has none."""
        meet = {"address": "127.0.0.1", "port": free_port(), "start": "plc_1"}
        processes = [
            self.start(
                ["--nproc-per-node=1"],
                disk,
                {
                    **together(wire.Together(nodes=2, node_rank=node, **meet)),  # type: ignore[arg-type]
                    "DRYDOCK_STATE_DIR": str(self.folder / states[node]),
                    "DRYDOCK_HOLDER_DIR": memories[node] and str(self.folder / memories[node]),
                    "DRYDOCK_DOMAIN": f"rack/node-{node}",
                    "DRYDOCK_URL": url,
                },
                **options,
            )
            for node, disk in enumerate(disks)
        ]
        with contextlib.ExitStack() as stack:
            for one in processes:
                stack.callback(kill, one)
            said = [all_of(one) for one in processes]
        return [one.returncode for one in processes], "\n".join(said)

    def start(
        self, arguments: list[str], disk: str, also: dict[str, str], **options: object
    ) -> subprocess.Popen[str]:
        """One torchrun."""
        environment = {
            **told(self.folder / "state"),
            "DRYDOCK_LOCAL_DIR": str(self.folder / disk),
            "DRYDOCK_OPTIONS": json.dumps({"folder": str(self.folder), "steps": STEPS, **options}),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            **also,
        }
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--monitor-interval=0.1"),
                *(*arguments, str(SCRIPT)),
            ],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def lose(self, memory: str) -> None:
        """That node's holder, and all that it kept."""
        there = self.folder / memory / "job_t"
        os.kill(json.loads((there / "holder.json").read_bytes())["pid"], signal.SIGKILL)
        shutil.rmtree(there)

    def parts(self, step: int, *, disk: str = "disk") -> list[Path]:
        """Of its ranks, in their order, on that node's disk."""
        folders = (self.folder / disk / "job_t").glob("*/replica-0-rank-*")
        found = (path for folder in sorted(folders) for path in store.candidates(folder))
        return [path for path in found if store.number_of(path)[0] == step]

    def digests(self) -> list[str]:
        return [(self.folder / f"digest.{rank}").read_text() for rank in range(2)]

    def steps(self, rank: int) -> list[tuple[int, int]]:
        """Of each step the epoch in which it was made, and its number."""
        lines = (self.folder / f"steps.{rank}").read_text().splitlines()
        return [(int(epoch), int(step)) for epoch, step in map(str.split, lines)]

    def begins(self, epoch: int) -> int:
        """With which step the ranks began when they were started anew."""
        (first,) = {min(s for e, s in self.steps(rank) if e == epoch) for rank in range(2)}
        return first


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    whole = Whole(tmp_path_factory.mktemp("undisturbed"))
    status, said = whole.run()
    assert status == 0, said
    return whole


@pytest.fixture
def copied(undisturbed: Whole, tmp_path: Path) -> Whole:
    """The job that has ended, as its shared folder has it on a node of another disk."""
    shutil.copytree(undisturbed.folder / "state", tmp_path / "state")
    return Whole(tmp_path)


def test_a_replica_group_refuses_it_and_says_what_to_do(tmp_path: Path) -> None:
    status, said = Whole(tmp_path).run(as_replica=True)

    assert status != 0
    assert "ValueError: the parameter 2.bias is divided among processes" in said
    assert "such a job is recovered by a restart from its checkpoint, in a runtime.WholeJob" in said


def test_torchrun_starts_it_anew_and_it_ends_as_if_nothing_had_happened(
    undisturbed: Whole, tmp_path: Path
) -> None:
    whole = Whole(tmp_path)
    status, said = whole.run(dies=True, restarts=1)

    assert status == 0, said
    assert (tmp_path / "died").exists()
    assert 0 < whole.begins(epoch=2) <= whole.steps(1)[-1][1]
    assert whole.digests() == undisturbed.digests()


def test_so_does_a_pipeline(tmp_path: Path) -> None:
    calm, whole = (Whole(tmp_path / name) for name in ("calm", "killed"))
    for one in (calm, whole):
        one.folder.mkdir()
    ended, words = calm.run(pipeline=True)
    status, said = whole.run(pipeline=True, dies=True, restarts=1)

    assert (ended, status) == (0, 0), words + said
    assert (whole.folder / "died").exists()
    assert whole.begins(epoch=2) > 0
    assert whole.digests() == calm.digests()
    assert len({*calm.digests()}) == 2


def local_saves(door: Door) -> list[dict[str, Any]]:
    """On the nodes' disks, of which the control plane was told."""
    return [one for one in door.messages("checkpoint") if one["tier"] == "local"]


def test_what_each_rank_keeps_for_itself_is_told_once_and_as_a_whole(tmp_path: Path) -> None:
    door, whole = Door(), Whole(tmp_path)
    status, said = whole.run(url=door.url)
    door.close()
    told = local_saves(door)
    parts = [store.manifest_of(path) for path in whole.parts(STEPS - 1)]

    assert status == 0, said
    assert len({one["step"] for one in told}) == len(told)
    assert (told[-1]["step"], len(parts)) == (STEPS - 1, 2)
    assert told[-1]["bytes"] == sum(part.size for part in parts)
    assert told[-1]["digest"] == digest_of_all([part.digest for part in parts])


def test_of_what_one_rank_could_not_keep_no_other_tells_as_of_a_checkpoint(tmp_path: Path) -> None:
    door, whole = Door(), Whole(tmp_path)
    (tmp_path / "no-folder").touch()
    ended, said = whole.run_on_two_nodes("disk-of-0", "no-folder", url=door.url)
    door.close()

    assert ended == [0, 0], said
    assert len(whole.parts(STEPS - 1, disk="disk-of-0")) == 1
    assert door.messages("checkpoint")
    assert local_saves(door) == []


def test_each_rank_tells_of_its_own_stores_that_are_late(tmp_path: Path) -> None:
    door = Door()
    status, said = Whole(tmp_path).run(url=door.url)  # it is to save at each edge
    door.close()

    assert status == 0, said
    late = [one for one in door.batches if '"checkpoint_late"' in json.dumps(one["messages"])]
    assert {one["rank"] for one in late} == {0, 1}


def test_a_stage_of_a_pipeline_is_no_replica(tmp_path: Path) -> None:
    status, said = Whole(tmp_path).run(pipeline=True, as_replica=True)

    assert status != 0
    assert "a stage of a pipeline is not the whole model: such a job is recovered by" in said


def test_moved_to_another_node_it_goes_on_from_the_shared_folder(
    undisturbed: Whole, tmp_path: Path
) -> None:
    whole = Whole(tmp_path)
    died, _ = whole.run(dies=True, disk="disk-of-one")
    ended, said = whole.run(dies=True, disk="disk-of-another")

    assert died != 0
    assert ended == 0, said
    assert whole.begins(epoch=2) > 0
    assert whole.digests() == undisturbed.digests()


def test_over_two_nodes_all_go_on_from_what_all_have(undisturbed: Whole, tmp_path: Path) -> None:
    whole = Whole(tmp_path)
    died, _ = whole.run_on_two_nodes("disk-of-0", "disk-of-1", dies=True)
    ended, said = whole.run_on_two_nodes("disk-of-0", "disk-of-another", dies=True)

    assert 0 not in died
    assert ended == [0, 0], said
    assert whole.begins(epoch=2) > 0
    assert "is gone" not in said
    assert whole.digests() == undisturbed.digests()


MEMORIES = ("memory-of-0", "memory-of-1")


@pytest.fixture
def with_memories(tmp_path: Path) -> Iterator[Whole]:
    """Of its nodes each has a holder."""
    whole = Whole(tmp_path)
    yield whole
    for memory in MEMORIES:
        with contextlib.suppress(FileNotFoundError):  # it was never started
            whole.lose(memory)


@pytest.mark.parametrize("lost", MEMORIES)
def test_what_one_node_takes_with_it_the_other_s_memory_has_of_both(
    undisturbed: Whole, with_memories: Whole, lost: str
) -> None:
    whole = with_memories
    died, _ = whole.run_on_two_nodes("disk-of-0", "disk-of-1", memories=MEMORIES, dies=True)
    whole.lose(lost)
    for step in whole.checkpoints.glob("step-*"):
        shutil.rmtree(step)
    ended, said = whole.run_on_two_nodes("another-disk", "and-another", memories=MEMORIES)

    assert 0 not in died
    assert ended == [0, 0], said
    assert whole.begins(epoch=2) > 0
    assert whole.digests() == undisturbed.digests()


def test_what_is_in_memory_is_told_of_as_of_one_checkpoint(with_memories: Whole) -> None:
    door = Door()
    ended, said = with_memories.run_on_two_nodes("0", "1", memories=MEMORIES, url=door.url)
    door.close()
    told = [one for one in door.messages("checkpoint") if one["tier"] == "peer"]
    parts = [store.manifest_of(with_memories.parts(STEPS - 1, disk=disk)[0]) for disk in "01"]

    assert ended == [0, 0], said
    assert told[-1]["step"] == STEPS - 1
    assert told[-1]["digest"] == digest_of_all([part.digest for part in parts])
    assert "checkpoint_not_apart" not in said


def test_if_one_node_has_no_holder_none_keeps_anything_and_that_is_told(
    with_memories: Whole,
) -> None:
    """Else each start would look for what was kept before, which one of them cannot."""
    door = Door()
    with_memories.run_on_two_nodes("0", "1", memories=MEMORIES)
    ended, said = with_memories.run_on_two_nodes(
        "0", "1", memories=(MEMORIES[0], ""), url=door.url, steps=STEPS + 1
    )
    door.close()

    assert ended == [0, 0], said
    assert with_memories.begins(epoch=2) == STEPS
    assert {one["tier"] for one in door.messages("checkpoint")} == {"local", "shared"}
    (told,) = [one["text"] for one in door.messages("trouble") if one["kind"] == "no_holder"]
    assert told.endswith("the node of rank 1 has no holder")


@pytest.mark.parametrize(
    "disks", [("disk-of-another", "disk-of-1"), ("disk-of-0", "disk-of-another")]
)
def test_what_the_disks_of_some_nodes_have_alone_is_no_start_for_all(
    disks: tuple[str, str], tmp_path: Path
) -> None:
    whole = Whole(tmp_path)
    whole.run_on_two_nodes("disk-of-0", "disk-of-1")
    for step in whole.checkpoints.glob("step-*"):
        shutil.rmtree(step)
    ended, said = whole.run_on_two_nodes(*disks)

    assert ended == [0, 0], said
    assert whole.begins(epoch=2) == 0


def test_where_the_first_rank_alone_lacks_the_folder_of_all_nobody_begins_anew(
    copied: Whole,
) -> None:
    status, said = copied.run_on_two_nodes(
        "disk-of-0", "disk-of-1", states=("state-of-another", "state")
    )

    assert 0 not in status
    assert "the first rank sees no checkpoint of this job in" in said
    assert not [*copied.folder.glob("digest.*")]


def part_of_rank(step: int) -> CheckpointSaved:
    return CheckpointSaved(
        step=step, tier="local", path="here", bytes=10, digest=f"{step:032x}", stall_s=0.0,
        seconds=1.0, at=1.0,
    )  # fmt: skip


def test_what_is_whole_on_all_ranks_is_known_from_what_each_has(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = iter([5, 5, 9])  # what another rank has verified last

    def most(told: torch.Tensor, _op: Any, group: Any) -> None:
        other = next(others)
        of_local = told[-3::2]  # that of peers' memory comes before each
        of_local[:] = torch.maximum(of_local, torch.tensor([other, -other]))

    known = []
    with alone.start() as whole:
        monkeypatch.setattr(dist, "all_reduce", most)
        for ours in (5, 7, 9):
            whole._on_saved(part_of_rank(ours))
            whole._at_edge()
            known.append(whole.saver.delivery.common["local"])
        monkeypatch.undo()

    assert known == [5, 5, 9]
    assert [one["step"] for one in local_saves(alone.door)] == [5, 9]


def test_torchruns_that_do_not_find_each_other_are_told_why(tmp_path: Path) -> None:
    start = wire.Together(nodes=2, node_rank=1, address="127.0.0.1", port=1, start="plc_1")
    alone = ["--standalone", "--nnodes=1"]
    process = Whole(tmp_path).start(alone, "disk", together(start))
    said = all_of(process)

    assert process.returncode != 0
    assert "leave out --standalone, --nnodes and --rdzv-endpoint" in said


def test_of_a_checkpoint_that_is_damaged_on_one_rank_all_take_the_one_before(
    undisturbed: Whole, copied: Whole
) -> None:
    newest, before, *_ = store.candidates(copied.checkpoints)
    (data,) = newest.glob("rank-1-*.bin")
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    status, said = copied.run()

    assert status == 0, said
    assert copied.begins(epoch=2) == store.number_of(before)[0] + 1
    assert copied.digests() == undisturbed.digests()


def test_where_none_can_be_loaded_nobody_begins_anew_unasked(copied: Whole) -> None:
    for data in copied.checkpoints.glob("step-*/rank-0-*.bin"):
        data.write_bytes(b"?")
    status, said = copied.run()

    assert status != 0
    assert re.search(r"checkpoints of this job can be loaded \(rank 0: shared: .*rank-0-", said)
    assert f"python -m runtime.checkpoint verify {copied.checkpoints}" in said
    assert not [*copied.folder.glob("digest.*")]


def refusing(whole: runtime.WholeJob, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of those that it tries to read, and cannot, from now on."""
    tried: list[str] = []

    def read(name: str, *_where: object, **_also: object) -> Staged:
        tried.append(name)
        raise Damaged("a bit")

    monkeypatch.setattr(whole.saver.sources, "ranks", lambda *_asked, **_also: 1)
    monkeypatch.setattr(whole.saver.sources, "read", read)
    return tried


def test_a_tier_of_which_two_checkpoints_fail_comes_after_the_others(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[Found] = [
        (9, "d", "local"), (8, "c", "local"), (7, "b", "local"), (5, "a", "shared"),
    ]  # fmt: skip
    with alone.start() as whole:
        tried = refusing(whole, monkeypatch)
        with pytest.raises(ValueError, match="none of the 4 checkpoints of this job can be loaded"):
            whole._load(there, there)

    assert tried == ["d", "c", "a", "b"]


def test_what_another_rank_refuses_is_not_read_to_its_end(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_module, "LOOK_S", 0.0)

    def endless(*_where: object, progress: Callable[[int], object]) -> Staged:
        until(lambda: progress(1), "the block comes after which it is given up")
        raise AssertionError("nothing was there to be read")

    with alone.start() as whole:
        refusing(whole, monkeypatch)
        refused = whole._read("d", "shared")
        monkeypatch.setattr(whole, "job", replace(whole.job, ranks=2))
        monkeypatch.setattr(whole.saver.sources, "ranks", lambda *_asked, **_also: 2)
        monkeypatch.setattr(whole.saver.sources, "read", endless)
        given_up = whole._read("d", "shared")
        monkeypatch.undo()

    assert refused is given_up is None
    assert alone.troubles() == ["checkpoint_refused"]  # by the one whose part it is


def test_a_bounded_number_of_checkpoints_is_tried_before_a_person_has_to_look(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[Found] = [(step, f"save{step}", "shared") for step in range(MAX_TRIES + 3, 0, -1)]
    with alone.start() as whole:
        tried = refusing(whole, monkeypatch)
        with pytest.raises(ValueError, match="none of the 11 checkpoints of this job can be"):
            whole._load(there, there)

    assert len(tried) == MAX_TRIES


def test_another_number_of_ranks_is_refused_with_the_remedy(copied: Whole) -> None:
    status, said = copied.run(ranks=1)

    assert status != 0
    assert "the checkpoint is of 2 ranks, and this job has 1" in said


def imported_into(checkpoints: Path) -> None:
    """As the command does with what another tool wrote."""
    facts = {"imported": "theirs.pt", "epoch": 0, "ranks": 1}
    write(checkpoints, stage({"model": trainee()[0].state_dict()}, 0), facts=facts)


def test_weights_that_another_tool_made_are_refused_with_the_remedy(tmp_path: Path) -> None:
    whole = Whole(tmp_path)
    imported_into(whole.checkpoints)
    status, said = whole.run()

    assert status != 0
    assert "was imported from another tool and has weights alone" in said
    assert "is of 1 ranks" not in said


def test_its_checkpoints_are_verified_and_not_exported_in_part(
    copied: Whole, capsys: pytest.CaptureFixture[str]
) -> None:
    verified = main(["verify", str(copied.checkpoints)])
    exported = main(["export", "--to", "dcp", str(copied.checkpoints), str(copied.folder / "out")])

    assert (verified, exported == 0) == (0, False)
    assert "nothing but a runtime.WholeJob of 2 ranks can read it" in capsys.readouterr().err
    assert not (copied.folder / "out").exists()


class Kept:
    """What a script wants saved besides, and may grow."""

    def __init__(self) -> None:
        self.held = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


class Alone:
    """A job of one rank, in this process, as often as it is started."""

    def __init__(self, folder: Path) -> None:
        self.door = Door()
        self.kept = Kept()
        self.trainee: Callable[[], tuple[Any, Any]] = trainee
        self._folder = folder
        self._environment = told(
            folder / "state",
            DRYDOCK_URL=self.door.url,
            DRYDOCK_LOCAL_DIR=str(folder / "disk"),
        )

    def join(self, **others: str) -> Job:
        return runtime.join({**self._environment, **others})

    def start(
        self,
        *,
        local: float = NEVER_S,
        shared: float = NEVER_S,
        disk: str = "disk",
        stalled_after_s: float = NEVER_S,
    ) -> runtime.WholeJob:
        """`local`, `shared`: seconds between two saves. `disk`: of which node it is."""
        job = self.join(DRYDOCK_LOCAL_DIR=str(self._folder / disk))
        model, optimizer = self.trainee()
        saver = runtime.Checkpointer(job, every_s={"local": local, "shared": shared})
        return runtime.WholeJob(
            job, model, optimizer, saver,
            extra={"kept": self.kept}, stalled_after_s=stalled_after_s,
        )  # fmt: skip

    def trained(self, steps: int, *, disk: str = "disk") -> tuple[int, int]:
        """So many, and at their end a save to all tiers; the epoch and the first of the steps."""
        with self.start(disk=disk) as whole:
            begins = whole.committed + 1
            list(whole.steps(begins + steps))
        return whole.epoch, begins

    def lost(self, *, disk: str = "disk") -> tuple[int, int]:
        """The same, with saves to the own disk alone, until it is left in the middle of a step."""
        with self.start(local=0.0, disk=disk) as whole:
            begins = whole.committed + 1
            steps = whole.steps(NEVER)
            until(
                lambda: next(steps) >= 0 and max(self.saved(whole, "local"), default=-1) >= begins,
                "its disk has a step of this start",
            )
        return whole.epoch, begins

    def saved(self, whole: runtime.WholeJob, tier: TierName) -> list[int]:
        """The steps of which there is a checkpoint."""
        folders = whole.saver.folders.to_read(tier)
        return [store.number_of(one)[0] for path in folders for one in store.candidates(path)]

    def troubles(self) -> list[str]:
        return [message["kind"] for message in self.door.messages("trouble")]


def trainee() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters())


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    handler = signal.getsignal(signal.SIGTERM)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    made = Alone(tmp_path)
    yield made
    dist.destroy_process_group()
    signal.signal(signal.SIGTERM, handler)
    made.door.close()


def test_told_to_stop_it_saves_its_last_step_to_every_tier(alone: Alone) -> None:
    with alone.start(local=0.0) as whole:
        steps = whole.steps(10)
        made = [next(steps), next(steps)]  # at the edge between them it begins to make room
        until(lambda: whole.saver.is_free("local"), "there is room")
        whole.job.stop.set()
        made += [*steps, *whole.steps(20)]

    assert made == [0, 1]
    assert alone.saved(whole, "local") == alone.saved(whole, "shared") == [1]


@pytest.mark.parametrize(("wish", "because"), [("stop", "over"), ("told", "told")])
def test_it_says_whether_its_job_is_over_or_it_alone_was_told_to_end(
    alone: Alone, wish: str, because: str
) -> None:
    with alone.start() as whole:
        for _step in whole.steps(NEVER):
            getattr(whole.job, wish).set()

    assert [said["because"] for said in alone.door.messages("stopped")] == [because]


def test_a_job_is_over_once_all_its_steps_are_made_and_not_when_a_loop_is_left(
    alone: Alone,
) -> None:
    with alone.start() as left:
        list(left.steps(1))
        next(left.steps(3))
    with alone.start() as done:
        list(done.steps(3))

    assert [said["because"] for said in alone.door.messages("stopped")] == ["", "over"]


def test_a_checkpoint_that_is_asked_for_is_made_in_a_busy_tier_too(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone.start() as whole:
        steps = whole.steps(NEVER)
        until(lambda: next(steps) >= 0 and whole.saver.is_free("local"), "there is room")
        free = whole.saver.is_free
        monkeypatch.setattr(whole.saver, "is_free", lambda tier: tier != "shared" and free(tier))
        whole._on_directive(Directive(id="dir_1", verb="checkpoint"))
        until(lambda: next(steps) >= 0 and alone.saved(whole, "local"), "one tier is free")
        busy = alone.saved(whole, "shared")
        monkeypatch.undo()
        until(lambda: next(steps) >= 0 and alone.saved(whole, "shared"), "the other one is")

    assert busy == []


def test_where_there_is_no_room_for_what_is_due_that_is_told(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone.start() as whole:
        steps = whole.steps(NEVER)
        until(lambda: next(steps) >= 0 and whole.saver.is_free("local"), "there is room")
        monkeypatch.setattr(whole.saver.rooms, "any_free", lambda: False)
        whole._on_directive(Directive(id="dir_1", verb="checkpoint"))
        next(steps)
        monkeypatch.undo()
        whole.job.stop.set()
        list(steps)

    assert alone.troubles() == ["checkpoint_late"]
    assert alone.door.messages("trouble")[0]["text"].endswith(": local, shared")


def test_on_one_node_memory_is_no_tier(alone: Alone, tmp_path: Path) -> None:
    """It would be lost with the node, whose disk is not."""
    job = alone.join(DRYDOCK_HOLDER_DIR=str(tmp_path / "memory"))
    saver = runtime.Checkpointer(job, every_s=NEVER_S)

    with runtime.WholeJob(job, *trainee(), saver) as whole:
        list(whole.steps(1))

    assert sorted(saver.tiers) == ["local", "shared"]
    assert alone.saved(whole, "local") == alone.saved(whole, "shared") == [0]
    assert not (tmp_path / "memory").exists()
    assert alone.troubles() == []


def test_what_could_not_be_copied_at_the_last_edge_is_saved_at_the_end(alone: Alone) -> None:
    with alone.start(shared=0.0) as whole:
        steps = whole.steps(2)
        made = [next(steps), next(steps)]
        until(lambda: whole.saver.is_free("shared"), "there is room")
        alone.kept.held = torch.zeros(4 << 20)  # more than there is room for
        made += steps

    assert made == [0, 1]
    assert alone.saved(whole, "local") == alone.saved(whole, "shared") == [1]


def test_what_failed_at_the_last_edge_is_saved_at_the_end(alone: Alone) -> None:
    with alone.start(local=0.0) as whole:
        steps = whole.steps(2)
        made = [next(steps), next(steps)]
        until(lambda: whole.saver.is_free("local"), "there is room")
        (alone._folder / "disk").write_text("in the way")
        made += steps
        until(lambda: whole.saver.delivery.unwell() == {"local"}, "it has failed")
        until(lambda: whole.saver.is_free("local"), "its writer is done")
        (alone._folder / "disk").unlink()

    assert made == [0, 1]
    assert alone.saved(whole, "local") == alone.saved(whole, "shared") == [1]


def test_what_a_tier_has_is_not_saved_to_it_again(alone: Alone) -> None:
    with alone.start() as first:
        list(first.steps(2))
    with alone.start() as again:
        left = list(again.steps(2))

    assert left == []
    assert alone.saved(again, "local") == alone.saved(again, "shared") == [1]


def test_what_a_start_made_that_was_lost_is_no_later_than_what_was_made_since(
    alone: Alone,
) -> None:
    """Its node was down meanwhile, and nobody else has seen of its later starts."""
    first, *others = (alone.trained(2, disk="a"), alone.lost(disk="a"), alone.lost(disk="a"))
    elsewhere, begins = alone.trained(3, disk="b")
    again = alone.trained(1, disk="a")

    assert [epoch for epoch, _ in (first, *others)] == [1, 2, 3]
    assert (elsewhere, begins) == (4, 2)
    assert again == (5, 5)


def test_the_log_says_that_another_torch_made_what_it_goes_on_from(
    alone: Alone, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as then:
        then.setattr(facts, "version_of", lambda module: "1.0")
        alone.trained(1)
    alone.trained(1)
    alone.trained(1)

    assert caplog.text.count("torch was '1.0', is '2.") == 1


def test_a_start_is_later_than_all_that_is_there_though_it_cannot_be_loaded(alone: Alone) -> None:
    alone.trained(1)
    alone.lost()
    for data in (alone._folder / "disk").glob("**/step-*/rank-0-*.bin"):
        data.write_bytes(b"?")
    for number in (alone._folder / "state" / "checkpoints").glob("epoch-*"):
        number.unlink()

    assert alone.trained(1) == (3, 1)


def test_while_the_shared_folder_hangs_it_goes_on_from_its_own_disk(alone: Alone) -> None:
    alone.trained(1)
    _, lost_from = alone.lost()

    with hanging(alone._folder / "state" / "checkpoints" / "run"), alone.start() as whole:
        step = next(whole.steps(NEVER))

    assert (whole.epoch, step > lost_from) == (3, True)
    assert alone.troubles().count("checkpoints_out_of_reach") == 1


def test_where_starts_cannot_be_counted_the_checkpoints_tell_which_it_is(alone: Alone) -> None:
    alone.trained(1)
    alone.lost()
    shared = alone._folder / "state" / "checkpoints"
    shared.rename(shared.with_name("away"))
    shared.write_text("in the way")

    with alone.start() as whole:
        epoch = whole.epoch

    assert epoch == 3


def test_a_step_that_the_loop_was_left_in_is_not_saved_and_that_is_told(
    alone: Alone, caplog: pytest.LogCaptureFixture
) -> None:
    with alone.start() as first:
        list(first.steps(2))
    with alone.start() as left:
        for _step in left.steps(10):
            break
    with alone.start() as again:
        step = next(again.steps(10))

    assert alone.saved(again, "shared") == [1]
    assert step == 2
    assert alone.troubles() == ["left_in_a_step", "left_in_a_step"]
    assert "set job.stop" in alone.door.messages("trouble")[0]["text"]
    assert "the loop of step 2 was left in the middle" in caplog.text


def test_a_rank_that_hangs_in_a_step_says_where(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "LOOK_S", 0.05)
    with alone.start(stalled_after_s=0.5) as whole:
        steps = whole.steps(NEVER)
        for _ in range(stalls.FIRST_STEPS + 1):
            next(steps)
        until(lambda: "stalled" in alone.troubles(), "an engineer is told")

    (told,) = [one for one in alone.door.messages("trouble") if one["kind"] == "stalled"]
    assert "test_whole.py" in told["text"]


def test_who_has_left_a_step_in_the_middle_makes_no_other(alone: Alone) -> None:
    with alone.start() as left:
        next(left.steps(10))
        with pytest.raises(RuntimeError, match=r"step 0 was left in the middle"):
            next(left.steps(10))

    assert alone.saved(left, "shared") == []


def test_a_loss_may_be_told_as_the_tensor_that_it_is(alone: Alone) -> None:
    weight = torch.ones(1, requires_grad=True)

    with alone.start() as whole:
        for _step in whole.steps(2):
            whole.tell(2 * weight.mean(), 8)

    assert {one["loss"] for one in alone.door.messages("progress")} == {2.0}


def test_samples_count_for_the_step_of_which_they_were_told(alone: Alone) -> None:
    with alone.start() as whole:
        steps = whole.steps(6)
        made = [next(steps)]
        whole.tell(0.5, 8)
        made += steps

    progress = alone.door.messages("progress")
    assert sum(one["steps"] for one in progress) == len(made) == 6
    assert {one["whole"] for one in progress} == {True}
    assert sum(one["samples"] for one in progress) == 8
    assert {one["loss"] for one in progress} == {0.5}


def test_why_it_cannot_start_is_told_before_the_process_goes(alone: Alone) -> None:
    with alone.start() as whole:
        list(whole.steps(1))
    folders = [*whole.saver.folders.to_read("local"), whole.saver.folders.shared]
    for data in (data for folder in folders for data in folder.glob("step-*/rank-0-*.bin")):
        data.write_bytes(b"?")

    with pytest.raises(ValueError, match=r"none of the 2 .* \(rank 0: local: .*; rank 0: shared: "):
        alone.start().__enter__()

    assert alone.troubles() == ["checkpoint_refused", "checkpoint_refused", "exception"]
    refused = [one["subject"] for one in alone.door.messages("trouble")[:2]]
    assert refused == ["local", "shared"]
    assert not any(one.name == "drydock-sender" for one in threading.enumerate())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda whole: setattr(whole, "model", torch.nn.Linear(2, 3)), "of another model than"),
        (lambda whole: whole.optimizers.clear(), "the state has 1 optimizers and the extras"),
        (lambda whole: whole.extra.clear(), "extras ['kept'], this script 1 and []"),
        (
            lambda whole: whole.optimizers.__setitem__(
                0, torch.optim.AdamW(whole.model.parameters())
            ),
            "the state's optimizer 0 is SGD with groups of [2] tensors, this script's is AdamW",
        ),
    ],
)
def test_what_is_no_state_of_this_script_is_refused_in_a_sentence(
    alone: Alone, change: Callable[[runtime.WholeJob], None], words: str
) -> None:
    with alone.start() as whole:
        list(whole.steps(1))
    other = alone.start()
    change(other)

    with pytest.raises(ValueError, match=f"{re.escape(words)}.*or start a new job"):
        other.__enter__()


def divided() -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    return parallelize_module(torch.nn.Linear(2, 2), mesh, ColwiseParallel())


class Averaged:
    """An average of the weights, in a state that nests."""

    def __init__(self, model: Any) -> None:
        self.weights: list[Any] = [one.detach().clone() for one in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"averages": [{"weights": self.weights}], "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (average,) = state["averages"]
        for one, given in zip(self.weights, average["weights"], strict=True):
            one.copy_(given)


class FilledLater(Averaged):
    """One that has nothing before the first step."""

    def __init__(self) -> None:
        self.weights = []


class Wrapped:
    """A model or an optimizer whose state holds that of another."""

    def __init__(self, base: Any) -> None:
        self.base = base

    def state_dict(self) -> dict[str, Any]:
        return {"base": [self.base.state_dict()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (given,) = state["base"]
        self.base.load_state_dict(given)


class WrappedOptimizer(Wrapped):
    """One that shows what it trains, as those of torch do."""

    @property
    def param_groups(self) -> Any:
        return self.base.param_groups


def step_of(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 3.0)
    optimizer.step()


def test_an_average_of_a_divided_model_goes_on_as_it_was(alone: Alone) -> None:
    alone.trainee = lambda: (model := divided(), torch.optim.SGD(model.parameters()))
    first, again = alone.start(), alone.start()
    before, after = (Averaged(whole.model) for whole in (first, again))
    first.extra["average"], again.extra["average"] = before, after
    with first:
        list(first.steps(1))
    with again:
        list(again.steps(1))

    assert [one.full_tensor().tolist() for one in after.weights] == [
        one.full_tensor().tolist() for one in before.weights
    ]
    assert alone.troubles() == []


def test_what_is_divided_and_has_no_place_yet_is_refused_by_name_with_the_remedy(
    alone: Alone,
) -> None:
    alone.trainee = lambda: (model := divided(), torch.optim.SGD(model.parameters()))
    first, again = alone.start(), alone.start()
    first.extra["average"], again.extra["average"] = Averaged(first.model), FilledLater()
    with first:
        list(first.steps(1))

    with pytest.raises(
        ValueError,
        match=r"extra\.average\.averages\.0\.weights\.0 .* none yet: have it made before the Whole",
    ):
        again.__enter__()


@pytest.mark.parametrize(
    "wrap", [lambda optimizer: optimizer, WrappedOptimizer, Wrapped], ids=["own", "shown", "hidden"]
)
def test_what_an_optimizer_keeps_of_divided_weights_is_divided_again(
    alone: Alone, wrap: Callable[[Any], Any]
) -> None:
    bare = []

    def trainee() -> tuple[Any, Any]:
        model = divided()
        bare.append(torch.optim.AdamW(model.parameters()))
        return model, wrap(bare[-1])

    alone.trainee = trainee
    with alone.start() as first:
        for _step in first.steps(1):
            step_of(first.model, bare[0])
    with alone.start() as again:
        list(again.steps(1))

    kept, found = ([one["exp_avg"] for one in optimizer.state.values()] for optimizer in bare)
    assert [one.full_tensor().tolist() for one in found] == [
        one.full_tensor().tolist() for one in kept
    ]
    assert len(kept) == 2
    assert alone.troubles() == []


def test_a_divided_model_whose_state_nests_is_put_back(alone: Alone) -> None:
    alone.trainee = lambda: (
        Wrapped(model := divided()),
        torch.optim.SGD(model.parameters()),
    )
    with alone.start() as first:
        list(first.steps(1))
    with alone.start() as again:
        list(again.steps(1))

    assert again.digest() == first.digest()
    assert alone.troubles() == []


def test_a_replica_group_does_not_take_its_checkpoint_for_weights_alone(alone: Alone) -> None:
    with alone.start() as whole:
        list(whole.steps(1))
    job, (model, optimizer) = alone.join(), trainee()
    state = TrainingState(model, [optimizer], runtime.Batches(samples=24, shards=2))
    gloo, saver = Gloo("127.0.0.1"), runtime.Checkpointer(job)
    engine = StepEngine(
        state, gloo, Observer(), Division(model, 0), mode="cover", max_grad_norm=None
    )
    rank = Rank(job, state, engine, gloo, saver, Observer(), host="127.0.0.1", on_step=None)
    (_, name, tier), *_ = rank.checkpoints([])

    given = rank.obey("read", {"name": name, "tier": tier, "number": 1})
    rank.close()
    job.sender.close(PATIENCE_S)

    assert given["failed"] == "unloadable"
    assert alone.troubles() == ["checkpoint_refused"]
    (told,) = alone.door.messages("trouble")
    assert "a runtime.WholeJob" in told["text"]
    assert told["subject"] == tier


def test_it_takes_weights_alone_for_no_checkpoint_of_its_own(alone: Alone) -> None:
    imported_into(alone._folder / "state" / "checkpoints")

    with pytest.raises(
        ValueError, match=r"weights alone, .*: load them in the script.* other than"
    ):
        alone.start().__enter__()


def test_it_takes_a_replica_group_s_checkpoint_for_none_of_its_own(alone: Alone) -> None:
    model, optimizer = trainee()
    state = TrainingState(model, [optimizer], runtime.Batches(samples=24, shards=2))
    state.committed = 3
    write(alone._folder / "state" / "checkpoints", state.copy(), facts={"epoch": 1, "ranks": 1})

    with pytest.raises(ValueError, match=r"is of a runtime\.ReplicaGroup, .*: start the job with"):
        alone.start().__enter__()


def test_several_replicas_are_refused(alone: Alone) -> None:
    job = alone.join(DRYDOCK_WORLD_REPLICAS="2")

    with pytest.raises(ValueError, match=r"2 replicas \(DRYDOCK_WORLD_REPLICAS\)"):
        runtime.WholeJob(job, *trainee(), runtime.Checkpointer(job))


def test_a_process_that_is_to_stand_by_is_refused_before_it_trains_beside_the_other(
    alone: Alone,
) -> None:
    job = alone.join(DRYDOCK_STANDBY="migrate")

    with pytest.raises(ValueError, match=r"DRYDOCK_STANDBY is 'migrate', and nobody can follow"):
        runtime.WholeJob(job, *trainee(), runtime.Checkpointer(job))


def test_ranks_without_their_process_group_are_told_to_make_it(tmp_path: Path) -> None:
    job = runtime.join(told(tmp_path))

    with pytest.raises(RuntimeError, match=r"rank 0 of 1, .* call init_process_group"):
        runtime.WholeJob(job, *trainee(), runtime.Checkpointer(job))


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
TORCHRUN = {"TORCHELASTIC_RUN_ID": "r", "RANK": "0", "WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (TORCHRUN, ""),
        ({}, "trains on\n"),
        ({**TORCHRUN, "DRYDOCK_RANK": "0", "DRYDOCK_RANKS": "1"}, "trains on\n"),
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
        env={**os.environ, **told(tmp_path), **TORCHRUN, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
    )

    assert (done.returncode, done.stdout) == (1, b"")


def test_generators_draw_again_what_they_drew() -> None:
    kept = generators()
    drawn = (random.getrandbits(64), torch.rand(3).tolist())

    set_generators(kept)

    assert (random.getrandbits(64), torch.rand(3).tolist()) == drawn


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """What two cards draw from, of which the first is the current one."""
    made = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.random, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", made)
    return made


def on_cards(*numbers: int) -> torch.nn.ParameterList:
    """A model whose weights say that they are there."""
    with FakeTensorMode():
        return torch.nn.ParameterList(torch.empty(2, device=f"cuda:{one}") for one in numbers)


@pytest.mark.parametrize(("where", "kept"), [((1,), [1]), ((1, 0), [0, 1]), ((), [0])])
def test_what_is_kept_of_cards_is_what_the_model_s_will_draw(
    where: tuple[int, ...], kept: list[int], cards: list[torch.Generator]
) -> None:
    model = on_cards(*where)
    state = generators(model)
    drawn = [torch.rand(3, generator=one).tolist() for one in cards]

    set_generators(state, model)

    again = [torch.rand(3, generator=one).tolist() for one in cards]
    assert [place for place in range(2) if again[place] == drawn[place]] == kept


def test_a_job_keeps_what_its_model_s_card_will_draw(
    alone: Alone, cards: list[torch.Generator]
) -> None:
    whole = alone.start()  # it makes no step, and saves nothing
    whole.model = on_cards(1)

    kept = whole._state()["random"]["cuda"]

    whole.job.sender.close(0.0)
    assert torch.equal(kept, cards[1].get_state())


def test_a_save_says_which_state_its_start_began_from(alone: Alone, tmp_path: Path) -> None:
    """What that start passed over is told by it from what it keeps."""
    (first, _), (second, _) = alone.trained(3), alone.trained(2)

    newest = store.manifest_of(store.candidates(tmp_path / "state" / "checkpoints")[0])
    assert newest.facts["began"] == {"epoch": first, "step": 2, "first": second}
