"""A checkpoint named complete restores bit for bit; a damaged one is never chosen."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch

from runtime.checkpoint import Checkpointer, store
from runtime.client import Sender
from runtime.job import Job
from runtime.snapshot import Damaged, Staged, stage


def some_state(step: int) -> Staged:
    generator = torch.Generator().manual_seed(step)
    state = {
        "model": {"weight": torch.randn(300, 7, generator=generator), "empty": torch.empty(0, 3)},
        "optimizer": {0: (torch.randn(5, generator=generator).bfloat16(), 0.25), 1: None},
        "text": "kept as it is",
        "scalar": torch.tensor(step),
    }
    return stage(state, step)


def flip_a_bit(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where % len(data)] ^= 1 << (where % 8)
    path.write_bytes(data)


def newest_step(folder: Path) -> int:
    found = store.newest(folder)
    assert found is not None
    return found[1].step


def test_what_is_read_equals_what_was_staged(tmp_path: Path) -> None:
    staged = some_state(7)

    path = store.write(tmp_path, staged)
    state = store.read(path).state()

    assert stage(state, 7).digest == staged.digest
    assert state["optimizer"][0][1] == 0.25
    assert state["model"]["empty"].shape == (0, 3)
    assert state["scalar"].shape == ()


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        store.write(tmp_path, some_state(step), keep=3)

    assert [p.name for p in store.candidates(tmp_path)] == [
        "step-00000004",
        "step-00000003",
        "step-00000002",
    ]


@pytest.mark.parametrize("name", ["tensors.bin", "manifest.json"])
def test_any_flipped_bit_makes_the_next_older_one_chosen(tmp_path: Path, name: str) -> None:
    store.write(tmp_path, some_state(1))
    newer = store.write(tmp_path, some_state(2))
    whole = (newer / name).read_bytes()
    places = random.Random(4)  # noqa: S311 - which bits, not secrecy

    chosen = set()
    for _ in range(100):
        flip_a_bit(newer / name, places.randrange(1 << 30))
        chosen.add(newest_step(tmp_path))
        (newer / name).write_bytes(whole)

    assert chosen == {1}


@pytest.mark.parametrize("name", ["tensors.bin", "manifest.json"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_torn_file_is_never_chosen(tmp_path: Path, name: str, share: float) -> None:
    store.write(tmp_path, some_state(1))
    newer = store.write(tmp_path, some_state(2))

    os.truncate(newer / name, int((newer / name).stat().st_size * share))

    assert newest_step(tmp_path) == 1


def test_a_missing_file_is_never_chosen(tmp_path: Path) -> None:
    newer = store.write(tmp_path, some_state(2))

    (newer / "tensors.bin").unlink()

    assert store.newest(tmp_path) is None


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    path = store.write(tmp_path, some_state(2))

    flip_a_bit(path / "tensors.bin", 80)

    with pytest.raises(Damaged, match=r"model\.weight"):
        store.read(path)


def test_a_draft_left_by_a_dead_writer_is_not_seen_and_goes(tmp_path: Path) -> None:
    draft = tmp_path / f".writing-00000009-{store.HOST}-999999999"
    draft.mkdir(parents=True)

    store.write(tmp_path, some_state(1))

    assert not draft.exists()
    assert newest_step(tmp_path) == 1


def test_a_draft_of_another_host_goes_by_its_age_only(tmp_path: Path) -> None:
    fresh = tmp_path / ".writing-00000009-elsewhere-999999999"
    stale = tmp_path / ".writing-00000008-elsewhere-999999999"
    fresh.mkdir()
    stale.mkdir()
    os.utime(stale, (1.0, 1.0))

    store.write(tmp_path, some_state(1))

    assert fresh.exists()
    assert not stale.exists()


def test_the_one_just_written_and_whole_ones_are_kept(tmp_path: Path) -> None:
    for step in (7, 8, 9):
        store.write(tmp_path, some_state(step))
    (tmp_path / "step-00000009" / "manifest.json").unlink()

    store.write(tmp_path, some_state(2), keep=2)

    assert [p.name for p in store.candidates(tmp_path)] == ["step-00000008", "step-00000002"]


def test_what_cannot_be_kept_without_pickle_is_refused() -> None:
    with pytest.raises(TypeError, match="state_dict"):
        stage({"thing": object()}, 0)


def part(folder: Path, rank: int, ranks: int) -> Checkpointer:
    sender = Sender("", "t", job="j", replica=0, rank=rank, placement="p")
    return Checkpointer(
        Job(
            name="j", replica=0, rank=rank, ranks=ranks, world_replicas=1, placement="p",
            coordinator="", token="t", state_dir=folder, sender=sender, stop=threading.Event(),
        )
    )  # fmt: skip


def save(saver: Checkpointer, *steps: int) -> None:
    for step in steps:
        saver.save(some_state(step), time.monotonic())
        saver.finish()


def test_no_rank_removes_its_part_of_the_last_whole_one(tmp_path: Path) -> None:
    first, second = part(tmp_path, 0, 2), part(tmp_path, 1, 2)
    save(second, 1, 2)
    save(first, 1, 2, 3, 4, 5, 6)  # while the other cannot write

    assert 2 in first.steps()
    assert second.steps() == [2, 1]


def test_parts_of_replicas_with_other_ranks_are_not_taken_for_none(tmp_path: Path) -> None:
    save(part(tmp_path, 0, 2), 7)

    for saver in (part(tmp_path, 0, 1), part(tmp_path, 1, 4)):
        with pytest.raises(ValueError, match="another number of ranks"):
            saver.steps()


def test_what_has_not_a_checkpoint_s_name_is_none(tmp_path: Path) -> None:
    saver = part(tmp_path, 0, 1)
    save(saver, 7)
    (saver.folder / "step-00000009.bad").mkdir()

    assert saver.steps() == [7]
