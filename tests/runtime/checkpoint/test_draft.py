"""A checkpoint of several parts: complete or invisible, whoever finishes last, whoever dies."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from runtime.checkpoint import manifest, store
from runtime.checkpoint.draft import HOST, Draft, Written, sweep
from runtime.checkpoint.manifest import Part
from runtime.image import CHUNK_BYTES, Damaged, Staged, Table, pages
from runtime.snapshot import Copying
from tests.runtime.checkpoint.states import due, flip_a_bit, staged_at
from tests.runtime.replicas import PATIENCE_S


@contextmanager
def draft_at(
    folder: Path, step: int, save: str = "abc", ranks: int = 2, shares: int = 1
) -> Iterator[Draft]:
    draft = Draft(folder, step, save, ranks, {"job": "j"}, shares)
    yield draft
    draft.close()


def write(
    draft: Draft, rank: int, staged: Staged, before: Part | None = None, share: int = 0
) -> Written:
    image = memoryview(staged.buffer)
    return draft.write(rank, staged.table, image, before, share=share)


def test_the_folders_that_lead_to_it_survive_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable: list[Path] = []
    monkeypatch.setattr("runtime.checkpoint.draft.sync", durable.append)

    with draft_at(tmp_path / "job" / "run", 1):
        pass

    assert durable == [tmp_path / "job", tmp_path]


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
    together = threading.Barrier(4, timeout=PATIENCE_S)
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


@pytest.mark.parametrize("name", ["manifest.json", "rank-1.json"])
def test_who_comes_second_and_finds_the_disk_full_gives_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What it would write is there already."""
    with draft_at(tmp_path, 4, "a") as first, draft_at(tmp_path, 4, "a") as second:
        write(first, 0, staged_at(1))
        write(second, 1, staged_at(2))
        assert first.publish()

        def full(*_given: Any) -> NoReturn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("runtime.checkpoint.draft.write_small", full)
        second._describe(name, (second.folder / "step-00000004" / name).read_bytes())
        assert not second.publish()

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
        alive._lock("rank-0.json")
        sweep(tmp_path)
        while_it_lives = alive.path.exists()
    sweep(tmp_path)  # closed, as at its writer's death

    assert (while_it_lives, alive.path.exists()) == (True, False)


def test_what_is_written_on_this_host_stays_however_long_its_store_hangs(tmp_path: Path) -> None:
    with draft_at(tmp_path, 4) as hangs:
        hangs._lock("rank-0.json")
        for path in (*hangs.path.iterdir(), hangs.path):
            os.utime(path, (1.0, 1.0))
        sweep(tmp_path)
        while_it_lives = hangs.path.exists()
    sweep(tmp_path)

    assert (while_it_lives, hangs.path.exists()) == (True, False)


def test_on_another_host_it_is_as_old_as_the_store_says_and_not_our_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with draft_at(tmp_path, 4) as begun:
        begun._lock("rank-0.json")
        (begun.path / "rank-0.lock").write_text("another host")
        with monkeypatch.context() as ahead:
            ahead.setattr("time.time", lambda: 1e11)
            sweep(tmp_path)
        by_ours = begun.path.exists()
        for path in (*begun.path.iterdir(), begun.path):
            os.utime(path, (1.0, 1.0))
        sweep(tmp_path)

    assert (by_ours, begun.path.exists()) == (True, False)
    assert [*tmp_path.iterdir()] == []


def test_a_part_that_waits_for_another_is_not_swept_away(tmp_path: Path) -> None:
    with draft_at(tmp_path, 4) as draft:
        write(draft, 0, staged_at(1))
    sweep(tmp_path)

    assert draft.path.exists()


def test_on_a_node_s_own_disk_what_was_written_before_a_reboot_is_swept_away(
    tmp_path: Path,
) -> None:
    """In a folder of all nodes that may be another host's, which was given our name."""
    folders = [tmp_path / "replica-0-rank-1", tmp_path / "checkpoints"]
    drafts = []
    for folder in folders:
        with draft_at(folder, 4) as draft:
            draft._lock("rank-0.json")
            (draft.path / "rank-0.lock").write_text(f"{HOST.split(' ')[0]} 1f0c-of-before")
        sweep(folder)
        drafts.append(draft.path.exists())

    assert drafts == [False, True]


def test_a_part_of_the_save_under_way_is_not_swept_away(tmp_path: Path) -> None:
    """The job went back to before what is complete, and another writer was quick."""
    with draft_at(tmp_path, 5, "later", ranks=1) as later:
        write(later, 0, staged_at(1))
        later.publish()
    with draft_at(tmp_path, 4) as draft:
        write(draft, 0, staged_at(1))
    sweep(tmp_path, sparing="abc")
    spared = draft.path.exists()
    sweep(tmp_path, sparing="bc")

    assert (spared, draft.path.exists()) == (True, False)


def test_what_another_made_visible_meanwhile_is_set_aside_by_who_knows_that_it_is_bad(
    tmp_path: Path,
) -> None:
    with draft_at(tmp_path, 4) as bad, draft_at(tmp_path, 4) as well:
        write(bad, 0, staged_at(1))
        write(well, 1, staged_at(1))
        assert well.publish()
        bad.give_up()

    assert store.candidates(tmp_path) == []
    (aside,) = tmp_path.glob(".damaged-*")
    assert "step-00000004" in aside.name


def test_a_part_that_waited_in_vain_goes_once_a_newer_checkpoint_is_complete(
    tmp_path: Path,
) -> None:
    with draft_at(tmp_path, 4) as dead:
        write(dead, 0, staged_at(1))
    with draft_at(tmp_path, 5) as alive:
        write(alive, 0, staged_at(1))
        with draft_at(tmp_path, 6, ranks=1) as newer:
            write(newer, 0, staged_at(1))
            newer.publish()
        sweep(tmp_path)

        assert (dead.path.exists(), alive.path.exists()) == (False, True)


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("name", ["manifest.json", "rank-0.json"])
def test_json_that_is_not_on_the_disk_as_it_was_written_is_found_by_whoever_wrote_it(
    tmp_path: Path, name: str, shares: int
) -> None:
    drafts = [Draft(tmp_path, 4, "abc", 1, {}, shares) for _ in range(shares)]
    written = [write(draft, 0, staged_at(1), share=n) for n, draft in enumerate(drafts)]
    last, part = drafts[-1], written[-1].part
    assert last.publish()
    before = last.verify(part)
    flip_a_bit(last.path / name, 50)

    (finding,) = last.verify(part)

    assert before == []
    assert (finding.file, finding.what) == (name, "its bytes are not what was saved")
    for draft in drafts:
        draft.close()


@pytest.mark.parametrize(("name", "rank"), [("manifest.json", None), ("rank-1.json", 1)])
@pytest.mark.parametrize("damage", [partial(flip_a_bit, where=50), Path.unlink])
def test_json_that_is_not_as_it_was_written_says_whose_it_is(
    tmp_path: Path, damage: Callable[[Path], None], name: str, rank: int | None
) -> None:
    with draft_at(tmp_path, 4) as first, draft_at(tmp_path, 4) as second:
        write(first, 0, staged_at(1))
        part = write(second, 1, staged_at(1)).part
        assert second.publish()
        damage(second.path / name)

        (finding,) = second.verify(part)

    assert (finding.file, finding.rank) == (name, rank)


def test_a_manifest_that_another_made_of_the_same_parts_stays(tmp_path: Path) -> None:
    """They differ in who made them, and so in their length."""
    drafts = [Draft(tmp_path, 4, "abc", 2, {"replica": number}) for number in (9, 10)]
    parts = [write(draft, rank, staged_at(1)).part for rank, draft in enumerate(drafts)]
    published = [draft.publish() for draft in drafts]

    findings = [draft.verify(part) for draft, part in zip(drafts, parts, strict=True)]

    assert published == [True, False]
    assert store.manifest_of(tmp_path / "step-00000004").facts == {"replica": 9}
    assert findings == [[], []]
    for draft in drafts:
        draft.close()


def test_weights_that_are_not_trained_are_written_once(tmp_path: Path) -> None:
    first, second = staged_at(1), staged_at(2)
    with draft_at(tmp_path, 1, "first", ranks=1) as draft:
        before = write(draft, 0, first)
        draft.publish()
    with draft_at(tmp_path, 2, "second", ranks=1) as draft:
        after = write(draft, 0, second, before.part)
        draft.publish()

    assert (before.bytes, after.bytes) == (
        first.table.bytes,
        second.table.bytes - second.table.frozen,
    )
    assert store.read(tmp_path / "step-00000002").digest == second.digest


def test_frozen_weights_that_did_change_are_written(tmp_path: Path) -> None:
    first, second = staged_at(1), staged_at(2)
    second.buffer[5] ^= 1
    with draft_at(tmp_path, 1, "first", ranks=1) as draft:
        before = write(draft, 0, first)
        draft.publish()
    with draft_at(tmp_path, 2, "second", ranks=1) as draft:
        after = write(draft, 0, second, before.part)
        draft.publish()

    assert after.bytes == second.table.bytes
    assert store.read(tmp_path / "step-00000002").digest == second.digest


SIZES = (5, CHUNK_BYTES, 3 * CHUNK_BYTES + 11)


def image_of(size: int, frozen: int = 0) -> Staged:
    """Bytes that no two chunks share, the first ones of weights that are not trained."""
    numbers = torch.arange(size, dtype=torch.float32)
    base = torch.arange(frozen, dtype=torch.float32)
    state = {"base": base, "model": {"weight": numbers}}
    return Copying(state, 4, due=due).finish()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_what_several_share_out_is_one_checkpoint(
    tmp_path: Path, order: tuple[int, ...], size: int
) -> None:
    staged = image_of(size, frozen=300_000)
    seen, written = [], []

    for share in order:
        with draft_at(tmp_path, 4, ranks=1, shares=3) as draft:
            ours = write(draft, 0, staged, share=share)
            seen.append((draft.publish(), len(store.candidates(tmp_path))))
            written.append(ours.bytes)
            assert store.verify_part(ours.part, draft.handle) == []

    (path,) = store.candidates(tmp_path)
    assert seen == [(False, 0), (False, 0), (True, 1)]
    assert sum(written) == staged.table.bytes
    assert store.verify(path) == []
    assert store.read(path).digest == store.manifest_of(path).digest == staged.digest


def test_each_of_several_writes_as_much(tmp_path: Path) -> None:
    staged = image_of(6 * CHUNK_BYTES)
    written = []
    for share in range(3):
        with draft_at(tmp_path, 4, ranks=1, shares=3) as draft:
            written.append(write(draft, 0, staged, share=share).bytes)
            draft.publish()

    assert max(written) - min(written) <= CHUNK_BYTES


@pytest.mark.parametrize(("files", "shares"), [(5, 4), (9, 8), (3, 2), (1, 7)])
def test_no_share_is_much_larger_than_another(
    files: int, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "FILE_BYTES", 8 * CHUNK_BYTES)
    table = Table(None, (), files * 8 * CHUNK_BYTES, 0, 0)

    layout = manifest.layout_of(table, 0, shares)

    sizes = [sum(one.bytes for one in layout[share::shares]) for share in range(shares)]
    assert sum(sizes) == table.bytes
    assert max(sizes) <= table.bytes / shares + 2 * CHUNK_BYTES


def test_the_last_of_all_to_verify_speaks_for_all_and_tidies_up(tmp_path: Path) -> None:
    staged = image_of(SIZES[-1])
    drafts = [
        (Draft(tmp_path, 4, "abc", 2, {}, shares=2), rank, share)
        for rank in range(2)
        for share in range(2)
    ]
    for draft, rank, share in drafts:
        write(draft, rank, staged, share=share)
        draft.publish()
    told = [draft.note_verified(rank, share) for draft, rank, share in drafts]
    for draft, _rank, _share in drafts:
        draft.close()

    (path,) = store.candidates(tmp_path)
    assert told == [None, None, None, store.manifest_of(path)]
    left = {one.name for one in path.iterdir() if one.suffix != ".bin"}
    assert left == {"manifest.json", "rank-0.json", "rank-1.json", "verified"}


def test_shares_of_two_states_become_no_checkpoint(tmp_path: Path) -> None:
    with draft_at(tmp_path, 4, ranks=1, shares=2) as draft:
        write(draft, 0, image_of(SIZES[-1]), share=0)
        with pytest.raises(Damaged, match="the replicas differ"):
            write(draft, 0, image_of(SIZES[-1], frozen=5), share=1)
        draft.publish()

    assert store.candidates(tmp_path) == []


def test_what_is_not_copied_yet_is_waited_for(tmp_path: Path) -> None:
    staged = image_of(SIZES[-1])
    image = pages(staged.table.bytes)

    def copy(end: int) -> None:
        image[:end] = memoryview(staged.buffer)[:end]

    with draft_at(tmp_path, 4, ranks=1) as draft:
        written = draft.write(0, staged.table, image, ready=copy)
        draft.publish()

    assert written.part.digest == staged.digest
    assert store.read(tmp_path / "step-00000004").digest == staged.digest
