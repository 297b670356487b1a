"""The folders of a job's checkpoints: which run they are of, and who keeps what where."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from runtime.checkpoint import Checkpointer, draft, store, tiers
from runtime.checkpoint.interval import FAILURES_PER_NODE_DAY as RATE
from runtime.checkpoint.tiers import (
    Folders,
    epochs_taken,
    known_run,
    next_epoch,
    note_epoch,
    run_of,
    tiers_of,
)
from runtime.client import Sender, Trouble
from runtime.job import Job
from tests.runtime.checkpoint.states import staged_at
from tests.runtime.replicas import PATIENCE_S, until
from tests.runtime.test_client import Door, make_sender


def job_at(folder: Path, *, replica: int = 0, rank: int = 0, own_disk: bool = True) -> Job:
    return Job(
        name="j", replica=replica, rank=rank, ranks=2, world_replicas=2, placement="p",
        coordinator="", token="t", state_dir=folder / "shared",
        local_dir=folder / "disk" if own_disk else None,
        sender=Sender("", "t", job="j", replica=replica, rank=rank, placement="p"),
        stop=threading.Event(),
    )  # fmt: skip


def test_a_job_without_a_folder_on_its_nodes_has_one_tier(tmp_path: Path) -> None:
    assert [*tiers_of(job_at(tmp_path, own_disk=False), 20.0, 3, RATE)] == ["shared"]


def test_each_tier_has_an_interval_of_its_own(tmp_path: Path) -> None:
    tiers = tiers_of(job_at(tmp_path), {"local": 5.0, "shared": 60.0}, 3, RATE)
    assert [tiers[name].pace.every_s for name in ("local", "shared")] == [5.0, 60.0]


def test_a_job_on_twice_the_nodes_is_expected_to_fail_twice_as_often(tmp_path: Path) -> None:
    job = replace(job_at(tmp_path), ranks=16)
    few, many = (
        tiers_of(one, "auto", 3, RATE)["shared"].pace for one in (job, replace(job, nodes=4))
    )

    assert few.mtbf_s == 2 * many.mtbf_s


def test_of_several_ranks_each_keeps_two_on_its_disk_whatever_is_asked(tmp_path: Path) -> None:
    """Else one may have the newest alone, and another only the one before, as a node dies."""
    assert tiers_of(job_at(tmp_path), 5.0, 1, RATE)["local"].keep == 2


@pytest.fixture
def door() -> Iterator[Door]:
    door = Door()
    yield door
    door.close()


def test_how_often_nodes_fail_as_the_control_plane_says_it_sets_the_interval(
    tmp_path: Path, door: Door
) -> None:
    sender = make_sender(door.url)
    saver = Checkpointer(replace(job_at(tmp_path), sender=sender))
    pace = saver.tiers["shared"].pace
    pace.note(stall_s=0.1, durable_s=0.1)
    published_s = pace.every_s
    door.reply["failures_per_node_day"] = 4 * RATE
    sender.start()
    sender.tell(Trouble(kind="straggler", text="", at=1.0))

    until(lambda: pace.every_s != published_s, "it hears of it")
    sender.close(PATIENCE_S)

    assert pace.every_s == pytest.approx(published_s / 2)


def test_a_rate_of_failures_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="failures_per_node_day is inf"):
        tiers_of(job_at(tmp_path), 5.0, 3, float("inf"))


@pytest.mark.parametrize("every_s", ["Auto", None, True, -1.0, {"shared": "5"}])
def test_an_interval_that_is_none_is_refused_with_the_remedy(tmp_path: Path, every_s: Any) -> None:
    with pytest.raises(ValueError, match=r"every_s is .* for shared; give a number of seconds"):
        tiers_of(job_at(tmp_path), every_s, 3, RATE)


@pytest.mark.parametrize("rate", ["0.1", -1.0, True])
def test_a_rate_that_is_none_is_refused_with_the_remedy(tmp_path: Path, rate: Any) -> None:
    with pytest.raises(ValueError, match=r"failures_per_node_day is .*give a number above 0"):
        tiers_of(job_at(tmp_path), 5.0, 3, rate)


def test_an_interval_of_no_tier_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"every_s names \['disk'\]; the tiers are peer, local, shared"
    ):
        tiers_of(job_at(tmp_path), {"disk": 5.0}, 3, RATE)


def test_each_rank_of_each_replica_writes_alone_on_its_node(tmp_path: Path) -> None:
    local = tiers_of(job_at(tmp_path), 1.0, 3, RATE)["local"]
    places = {
        Folders(job_at(tmp_path, rank=rank)).to_write(local, replica)["within"]
        for replica in (0, 1)
        for rank in (0, 1)
    }
    assert len(places) == 4


def kept_by(folder: Path, *, replica: int = 0, rank: int = 0) -> Path:
    """A checkpoint of this rank on the node's own disk; the folder that it is in."""
    job = job_at(folder, replica=replica, rank=rank)
    said = Folders(job).to_write(tiers_of(job, 1.0, 3, RATE)["local"], replica)
    place = Path(said["folder"]) / run_of(Path(said["shared"])) / said["within"]
    draft.write(place, staged_at(5))
    return place


def test_what_another_replica_kept_on_this_node_is_found(tmp_path: Path) -> None:
    theirs = kept_by(tmp_path, replica=1)
    kept_by(tmp_path, replica=1, rank=1)

    assert Folders(job_at(tmp_path)).to_read("local") == [theirs]


def test_of_another_run_nothing_is_loaded_and_nothing_removed(tmp_path: Path) -> None:
    before = kept_by(tmp_path)
    shutil.rmtree(tmp_path / "shared")
    run_of(tmp_path / "shared" / "checkpoints")

    assert Folders(job_at(tmp_path)).to_read("local") == []
    assert store.candidates(before) != []


def test_a_job_does_not_begin_anew_because_a_folder_is_not_mounted(tmp_path: Path) -> None:
    kept_by(tmp_path)
    shutil.rmtree(tmp_path / "shared")

    with pytest.raises(ValueError, match="if it is not mounted, mount it; to begin anew remove"):
        Folders(job_at(tmp_path)).to_read("local")
    assert not (tmp_path / "shared").exists()


def test_a_new_job_finds_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    assert Folders(job_at(tmp_path)).to_read("local") == []
    assert [*tmp_path.iterdir()] == []


def test_where_the_shared_folder_cannot_be_asked_the_last_run_is_believed(tmp_path: Path) -> None:
    before = kept_by(tmp_path)
    run = tmp_path / "shared" / "checkpoints" / "run"
    found = []

    for damage in ("../..", ""):
        run.write_text(damage)
        found.append(Folders(job_at(tmp_path)).to_read("local"))
    shutil.rmtree(run.parent)
    run.parent.write_text("a file")
    found.append(Folders(job_at(tmp_path)).to_read("local"))

    assert found == [[before]] * 3


@pytest.mark.parametrize("bit", [0, 1, 7])
def test_a_run_whose_name_has_a_flipped_bit_is_said_to_be_damaged(tmp_path: Path, bit: int) -> None:
    run = tmp_path / "run"
    run.write_bytes(bytes([ord("'") ^ 1 << bit]) + b"1c0ffee1234")

    with pytest.raises(OSError, match=f"{run} is damaged: it holds "):
        known_run(tmp_path)


def test_two_jobs_on_one_disk_do_not_meet(tmp_path: Path) -> None:
    ours = kept_by(tmp_path)
    assert ours.relative_to(tmp_path / "disk").parts[0] == "j"


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


def test_so_do_they_where_the_file_system_has_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename
    found: list[str] = []
    quicker = iter([tmp_path])

    def no_link(*_paths: Path) -> NoReturn:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def renamed_late(path: Path, to: Path) -> Path:
        found.extend(map(run_of, quicker))
        return rename(path, to)

    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(Path, "rename", renamed_late)

    assert [run_of(tmp_path), known_run(tmp_path)] == found * 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_each_start_has_a_number_of_its_own(tmp_path: Path) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(next_epoch(tmp_path / "shared", 0)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(found)) == 8
    assert max(epochs_taken(tmp_path / "shared")) == max(found)


def test_it_is_above_those_of_all_checkpoints(tmp_path: Path) -> None:
    assert [next_epoch(tmp_path, above) for above in (0, 5, 3)] == [1, 6, 7]


def test_the_last_epoch_that_was_noted_stays(tmp_path: Path) -> None:
    for epoch in (3, 8, 5):  # the last one's word came late
        note_epoch(tmp_path, epoch)

    assert max(epochs_taken(tmp_path)) == 8
    assert next_epoch(tmp_path, 0) == 9


def test_no_folder_is_made_for_an_epoch(tmp_path: Path) -> None:
    """It may be the place of a disk that is not there."""
    with pytest.raises(FileNotFoundError):
        note_epoch(tmp_path / "checkpoints", 3)

    assert not (tmp_path / "checkpoints").exists()


def test_who_sees_the_folder_as_it_was_takes_no_number_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    views: list[list[int]] = [[1]]  # before others took 2, 3 and 4
    monkeypatch.setattr(
        tiers, "epochs_taken", lambda folder: (views or [epochs_taken(folder)]).pop()
    )
    (tmp_path / "epoch-4").touch()

    assert next_epoch(tmp_path, 0) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-5"]
