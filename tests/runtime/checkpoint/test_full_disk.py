"""A disk that is full, or read-only, or gone: one alarm, nothing lost, well again by itself.

With real file systems, which only root may mount.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.checkpoint import store
from runtime.checkpoint.draft import write
from runtime.checkpoint.tiers import known_run, run_of
from tests.runtime.checkpoint.one_rank import OneRank
from tests.runtime.checkpoint.states import staged_at

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for some four states."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={4 * staged_at(0).table.bytes}", "none", folder)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def trainer(tmp_path: Path, disk: Path) -> Iterator[OneRank]:
    one = OneRank(tmp_path, own_disk=True)
    one.save_all(1)
    yield one
    one.saver.finish()


def on_disk(trainer: OneRank) -> list[int]:
    return [step for step, _name, tier in trainer.saver.sources.saves() if tier == "local"]


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    room = os.statvfs(disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
    return filler


def test_a_full_disk_keeps_what_it_has_and_takes_more_once_there_is_room(
    trainer: OneRank, disk: Path
) -> None:
    filler = fill(disk)
    trainer.save_all(2, 3)
    meanwhile = on_disk(trainer)
    filler.unlink()
    trainer.save_all(4)

    assert meanwhile == [1]
    assert on_disk(trainer) == [4, 1]
    assert trainer.saver.sources.read("save4", "local", 0).digest == staged_at(4).digest
    assert trainer.told.troubles() == ["checkpoint_failed", "checkpoint_recovered"]
    assert not [*disk.rglob(".writing-*")]


def test_what_was_set_aside_makes_way_where_the_disk_is_full(trainer: OneRank, disk: Path) -> None:
    trainer.save_all(2)
    (saved,) = disk.rglob("step-00000002")
    aside = saved.parent / ".damaged-step-00000009-1"
    aside.mkdir()
    fill(aside)

    trainer.save_all(3, 4)

    assert on_disk(trainer) == [4, 2]
    assert trainer.told.troubles() == ["checkpoint_failed", "checkpoint_recovered"]


def fill_with_files(folder: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        list(map(Path.touch, (folder / str(number) for number in range(200))))


def test_it_makes_way_too_where_there_is_no_room_for_a_folder(trainer: OneRank, disk: Path) -> None:
    trainer.save_all(2)
    (saved,) = disk.rglob("step-00000002")
    aside = saved.parent / ".damaged-step-00000009-1"
    aside.mkdir()
    mount("-o", "remount,nr_inodes=200", disk)
    fill_with_files(aside)

    trainer.save_all(3, 4)

    assert on_disk(trainer) == [4, 2]
    assert trainer.told.troubles() == ["checkpoint_failed", "checkpoint_recovered"]


def test_what_writers_that_died_left_to_be_removed_makes_way_too(
    trainer: OneRank, disk: Path
) -> None:
    """They made it visible, and did not come to verify it and to remove what it replaces."""
    (saved,) = disk.rglob("step-00000001")
    for step in (2, 3):
        write(saved.parent, staged_at(step), keep=9)
    fill(disk)

    trainer.save_all(5, 6)

    assert on_disk(trainer)[0] == 6
    assert trainer.told.troubles() == ["checkpoint_failed", "checkpoint_recovered"]


def test_a_disk_that_became_read_only_is_told_and_mended(trainer: OneRank, disk: Path) -> None:
    mount("-o", "remount,ro", disk)
    trainer.save_all(2, 3)
    meanwhile = on_disk(trainer)
    mount("-o", "remount,rw", disk)
    trainer.save_all(4)

    assert meanwhile == [1]
    assert on_disk(trainer) == [4, 1]
    assert trainer.told.troubles() == ["checkpoint_failed", "checkpoint_recovered"]


def test_a_disk_that_is_gone_costs_the_shared_folder_nothing(trainer: OneRank, disk: Path) -> None:
    subprocess.run(["umount", "--lazy", disk], check=True)
    trainer.save_all(2)
    beneath = [*disk.iterdir()]
    mount("-t", "tmpfs", "none", disk)  # another one, empty
    trainer.save_all(3)

    assert beneath == []
    assert store.number_of(store.candidates(trainer.saver.folders.shared)[0]) == (3, 0)
    assert on_disk(trainer)[0] == 3
    assert trainer.told.troubles() == ["checkpoint_failed", "checkpoint_recovered"]


def test_nothing_is_saved_beneath_a_shared_folder_that_is_gone(disk: Path) -> None:
    trainer = OneRank(disk)
    trainer.save_all(1)
    subprocess.run(["umount", "--lazy", disk], check=True)
    trainer.save(2)
    trainer.told.until(lambda: "checkpoint_failed" in trainer.told.troubles())
    beneath = [*disk.iterdir()]
    mount("-t", "tmpfs", "none", disk)
    trainer.save_all(3)
    trainer.saver.finish()

    assert beneath == []
    assert f"nothing is mounted at {disk} any more" in trainer.told.messages[1].text
    assert trainer.told.saved() == [1, 3]
    assert trainer.told.troubles() == ["checkpoint_failed", "checkpoint_recovered"]


def test_a_shared_folder_that_is_mounted_after_the_first_save_is_saved_to(tmp_path: Path) -> None:
    trainer, folder = OneRank(tmp_path / "state", own_disk=True), tmp_path / "state"
    trainer.save_all(1)
    before = known_run(trainer.saver.folders.shared)
    mount("-t", "tmpfs", "none", folder)
    try:
        trainer.save_all(2)
        trainer.saver.finish()
        saved = [path.name for path in store.candidates(trainer.saver.folders.shared)]
        run = known_run(trainer.saver.folders.shared)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)

    assert saved == ["step-00000002"]
    assert run == before != ""  # what the node's own disk has is of the same
    assert trainer.told.troubles() == []


def test_one_that_was_full_when_it_was_mounted_has_the_run_s_name_once_it_is_not(
    tmp_path: Path,
) -> None:
    trainer, folder = OneRank(tmp_path / "state"), tmp_path / "state"
    trainer.save_all(1)
    before = known_run(trainer.saver.folders.shared)
    mount("-t", "tmpfs", "-o", "nr_inodes=2", "none", folder)
    try:
        trainer.save(2)
        trainer.told.until(lambda: "checkpoint_failed" in trainer.told.troubles())
        mount("-o", "remount,nr_inodes=500", folder)
        trainer.save_all(3)
        trainer.saver.finish()
        run = known_run(trainer.saver.folders.shared)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)

    assert run == before != ""
    assert trainer.told.troubles() == ["checkpoint_failed", "checkpoint_recovered"]


def test_nothing_is_saved_to_a_folder_of_another_run_that_is_mounted_later(tmp_path: Path) -> None:
    trainer, folder = OneRank(tmp_path / "state"), tmp_path / "state"
    trainer.save_all(1)
    shared = trainer.saver.folders.shared
    mount("-t", "tmpfs", "none", folder)
    try:
        theirs = run_of(shared)
        trainer.save(2)
        trainer.told.until(lambda: "checkpoint_failed" in trainer.told.troubles())
        trainer.save(3)
        trainer.saver.finish()
        saved = store.candidates(shared)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)

    assert saved == []
    assert trainer.told.troubles() == ["checkpoint_failed"]
    assert f"has its run {theirs}: end the job" in trainer.told.messages[1].text
