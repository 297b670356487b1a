"""The folders of a job's checkpoints: which run they are of, and who keeps what where."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from runtime.checkpoint import draft, store
from runtime.checkpoint.tiers import Folders, run_of, tiers_of
from runtime.client import Sender
from runtime.job import Job
from tests.runtime.checkpoint.states import staged_at


def job_at(folder: Path, *, replica: int = 0, rank: int = 0, own_disk: bool = True) -> Job:
    return Job(
        name="j", replica=replica, rank=rank, ranks=2, world_replicas=2, placement="p",
        coordinator="", token="t", state_dir=folder / "shared",
        local_dir=folder / "disk" if own_disk else None,
        sender=Sender("", "t", job="j", replica=replica, rank=rank, placement="p"),
        stop=threading.Event(),
    )  # fmt: skip


def test_a_job_without_a_folder_on_its_nodes_has_one_tier(tmp_path: Path) -> None:
    assert [*tiers_of(job_at(tmp_path, own_disk=False), 20.0, 3)] == ["shared"]


def test_each_tier_has_an_interval_of_its_own(tmp_path: Path) -> None:
    tiers = tiers_of(job_at(tmp_path), {"local": 5.0, "shared": 60.0}, 3)
    assert {name: tier.every_s for name, tier in tiers.items()} == {"local": 5.0, "shared": 60.0}


def test_an_interval_of_no_tier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"every_s names \['disk'\]; the tiers are local, shared"):
        tiers_of(job_at(tmp_path), {"disk": 5.0}, 3)


def test_each_rank_of_each_replica_writes_alone_on_its_node(tmp_path: Path) -> None:
    local = tiers_of(job_at(tmp_path), 1.0, 3)["local"]
    places = {
        Folders(job_at(tmp_path, rank=rank)).to_write(local, replica)
        for replica in (0, 1)
        for rank in (0, 1)
    }
    assert len(places) == 4


def test_what_another_replica_kept_on_this_node_is_found(tmp_path: Path) -> None:
    local = tiers_of(job_at(tmp_path), 1.0, 3)["local"]
    theirs = Folders(job_at(tmp_path, replica=1)).to_write(local, 1)
    theirs.mkdir()
    other_rank = Folders(job_at(tmp_path, rank=1)).to_write(local, 1)
    other_rank.mkdir()

    assert Folders(job_at(tmp_path)).to_read("local") == [theirs]


def test_a_job_that_begins_anew_takes_nothing_of_the_run_before(tmp_path: Path) -> None:
    local = tiers_of(job_at(tmp_path), 1.0, 3)["local"]
    before = Folders(job_at(tmp_path)).to_write(local, 0)
    draft.write(before, staged_at(5))
    shutil.rmtree(tmp_path / "shared")

    assert Folders(job_at(tmp_path)).to_read("local") == []
    assert store.candidates(before) == []  # the disk is not filled with what nobody loads


def test_without_the_shared_folder_the_last_run_is_believed(tmp_path: Path) -> None:
    local = tiers_of(job_at(tmp_path), 1.0, 3)["local"]
    before = Folders(job_at(tmp_path)).to_write(local, 0)
    draft.write(before, staged_at(5))
    shutil.rmtree(tmp_path / "shared")
    (tmp_path / "shared").write_text("no folder")

    assert Folders(job_at(tmp_path)).to_read("local") == [before]


def test_all_ranks_find_the_same_run(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(run_of(tmp_path / "shared"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(found)) == 1
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["run"]
