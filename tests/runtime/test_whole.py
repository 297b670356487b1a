"""A job of a shape that cannot drop: what it is told at the start, and that it is recovered."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import runtime
from runtime.checkpoint import store
from runtime.checkpoint.__main__ import main
from runtime.whole import generators, set_generators
from tests.runtime.replicas import PATIENCE_S, ROOT, TOKEN

SCRIPT = Path(__file__).with_name("tensor_parallel.py")
STEPS = 30


@dataclass
class Whole:
    """A tensor parallel job of one torchrun, and what it left in its folder."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "state" / "checkpoints"

    def run(
        self, *, ranks: int = 2, restarts: int = 0, disk: str = "disk", **options: object
    ) -> tuple[int, str]:
        """Until it ends: its exit status, and all that it wrote."""
        environment = {
            "DRYDOCK_JOB": "job_t",
            "DRYDOCK_REPLICA": "0",
            "DRYDOCK_WORLD_REPLICAS": "1",
            "DRYDOCK_COORDINATOR": "none",
            "DRYDOCK_TOKEN": TOKEN,
            "DRYDOCK_STATE_DIR": str(self.folder / "state"),
            "DRYDOCK_LOCAL_DIR": str(self.folder / disk),
            "DRYDOCK_OPTIONS": json.dumps({"folder": str(self.folder), "steps": STEPS, **options}),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            # Else ranks that torchrun starts anew may read where those before them listened.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *(f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"),
                *("--monitor-interval=0.1", str(SCRIPT)),
            ],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        return done.returncode, done.stdout

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
    assert "checkpoints of this job can be loaded" in said
    assert not [*copied.folder.glob("digest.*")]


def test_another_number_of_ranks_is_refused_with_the_remedy(copied: Whole) -> None:
    status, said = copied.run(ranks=1)

    assert status != 0
    assert "the checkpoint is of 2 ranks, and this job has 1" in said


def test_its_checkpoints_are_verified_and_not_exported_in_part(
    copied: Whole, capsys: pytest.CaptureFixture[str]
) -> None:
    verified = main(["verify", str(copied.checkpoints)])
    exported = main(["export", "--to", "dcp", str(copied.checkpoints), str(copied.folder / "out")])

    assert (verified, exported == 0) == (0, False)
    assert "nothing but a runtime.WholeJob of 2 ranks can read it" in capsys.readouterr().err
    assert not (copied.folder / "out").exists()


def test_ranks_without_their_process_group_are_told_to_make_it(tmp_path: Path) -> None:
    environment = {
        "DRYDOCK_JOB": "job_t",
        "DRYDOCK_REPLICA": "0",
        "DRYDOCK_WORLD_REPLICAS": "1",
        "DRYDOCK_COORDINATOR": "none",
        "DRYDOCK_TOKEN": TOKEN,
        "DRYDOCK_STATE_DIR": str(tmp_path),
    }
    job = runtime.join(environment)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())

    with pytest.raises(RuntimeError, match=r"rank 0 of 1, .* call init_process_group"):
        runtime.WholeJob(job, model, optimizer, runtime.Checkpointer(job))


def test_generators_draw_again_what_they_drew() -> None:
    kept = generators()
    drawn = (random.getrandbits(64), torch.rand(3).tolist())

    set_generators(kept)

    assert (random.getrandbits(64), torch.rand(3).tolist()) == drawn
