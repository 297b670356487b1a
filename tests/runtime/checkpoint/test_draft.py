"""A checkpoint of several parts: complete or invisible, whoever finishes last, whoever dies."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtime.checkpoint import store
from runtime.checkpoint.draft import Draft, sweep
from runtime.checkpoint.manifest import Part
from runtime.image import Damaged, Staged
from tests.runtime.checkpoint.states import staged_at


@contextmanager
def draft_at(folder: Path, step: int, save: str = "abc", ranks: int = 2) -> Iterator[Draft]:
    draft = Draft(folder, step, save, ranks, {"job": "j"})
    yield draft
    draft.close()


def write(draft: Draft, rank: int, staged: Staged, before: Part | None = None) -> tuple[Part, int]:
    return draft.write(rank, staged.table, memoryview(staged.buffer), before)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_it_is_visible_once_its_last_part_is_there(tmp_path: Path, order: tuple[int, ...]) -> None:
    images = [staged_at(10 + rank) for rank in range(3)]
    seen = []

    for rank in order:
        with draft_at(tmp_path, 4, ranks=3) as draft:
            write(draft, rank, images[rank])
            seen.append((draft.publish(), len(store.candidates(tmp_path))))

    (path,) = store.candidates(tmp_path)
    assert seen == [(False, 0), (False, 0), (True, 1)]
    assert store.verify(path) == []
    assert [store.read(path, rank).digest for rank in range(3)] == [i.digest for i in images]
    assert store.manifest_of(path).facts == {"job": "j"}


def test_writers_that_finish_at_once_make_it_visible_once(tmp_path: Path) -> None:
    staged = staged_at(1)
    drafts = [Draft(tmp_path, 4, "abc", 4, {}) for _ in range(4)]
    together = threading.Barrier(4)
    published: list[bool] = []

    def finish(rank: int) -> None:
        write(drafts[rank], rank, staged)
        together.wait()
        published.append(drafts[rank].publish())

    threads = [threading.Thread(target=finish, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for draft in drafts:
        draft.close()

    assert sorted(published) == [False, False, False, True]
    assert store.verify(tmp_path / "step-00000004") == []


def test_parts_of_two_saves_of_a_step_are_never_mixed(tmp_path: Path) -> None:
    with draft_at(tmp_path, 4, "first") as first, draft_at(tmp_path, 4, "second") as second:
        write(first, 0, staged_at(1))
        write(second, 1, staged_at(2))
        published = (first.publish(), second.publish())

    assert published == (False, False)
    assert store.candidates(tmp_path) == []


def test_a_part_of_another_save_is_refused_by_name(tmp_path: Path) -> None:
    for save, step in (("first", 4), ("second", 5)):
        with draft_at(tmp_path, step, save, ranks=1) as draft:
            write(draft, 0, staged_at(1))
            draft.publish()
    older, newer = tmp_path / "step-00000004", tmp_path / "step-00000005"
    (newer / "rank-0.json").write_bytes((older / "rank-0.json").read_bytes())

    with pytest.raises(Damaged, match="save first at step 4, not of this checkpoint: save second"):
        store.read(newer)


def test_what_nobody_finishes_is_swept_away(tmp_path: Path) -> None:
    with draft_at(tmp_path, 4) as alive:
        alive._lock(0)
        sweep(tmp_path)
        while_it_lives = alive.path.exists()
    sweep(tmp_path)  # closed, as at its writer's death

    assert (while_it_lives, alive.path.exists()) == (True, False)


def test_a_part_that_waits_for_another_is_not_swept_away(tmp_path: Path) -> None:
    with draft_at(tmp_path, 4) as draft:
        write(draft, 0, staged_at(1))
    sweep(tmp_path)

    assert draft.path.exists()


def test_weights_that_are_not_trained_are_written_once(tmp_path: Path) -> None:
    first, second = staged_at(1), staged_at(2)
    with draft_at(tmp_path, 1, "first", ranks=1) as draft:
        before, whole = write(draft, 0, first)
        draft.publish()
    with draft_at(tmp_path, 2, "second", ranks=1) as draft:
        _part, rest = write(draft, 0, second, before)
        draft.publish()

    assert (whole, rest) == (first.table.bytes, second.table.bytes - second.table.frozen)
    assert store.read(tmp_path / "step-00000002").digest == second.digest


def test_frozen_weights_that_did_change_are_written(tmp_path: Path) -> None:
    first, second = staged_at(1), staged_at(2)
    second.buffer[5] ^= 1
    with draft_at(tmp_path, 1, "first", ranks=1) as draft:
        before, _ = write(draft, 0, first)
        draft.publish()
    with draft_at(tmp_path, 2, "second", ranks=1) as draft:
        _part, written = write(draft, 0, second, before)
        draft.publish()

    assert written == second.table.bytes
    assert store.read(tmp_path / "step-00000002").digest == second.digest
