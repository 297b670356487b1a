"""Of complete checkpoints the newest stay, by number and by age, and none goes before them."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.checkpoint import Checkpointer, store
from runtime.checkpoint.draft import write
from runtime.checkpoint.manifest import Manifest, PartHash, sealed
from runtime.checkpoint.objects import Found, ObjectStore
from runtime.checkpoint.writer import siblings
from tests.runtime.checkpoint.one_rank import OneRank
from tests.runtime.checkpoint.states import staged_at

DAY_S = 86_400.0


@dataclass(frozen=True, order=True)
class Saved:
    """Later training is larger."""

    epoch: int
    step: int
    at: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}"


def laid_out(folder: Path, saves: list[Saved]) -> None:
    """As far as retention looks into them."""
    for one in saves:
        part = PartHash(name="rank-0.json", rank=0, bytes=1, hash="", digest="")
        facts = {"epoch": one.epoch, "at": one.at}
        manifest = Manifest(step=one.step, save=one.name, parts=(part,), facts=facts)
        (folder / one.name).mkdir()
        (folder / one.name / "manifest.json").write_bytes(manifest.to_json())


def left_of(saves: list[Saved], newest: Saved, keep: int, keep_for_s: float) -> set[Saved]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        laid_out(folder, saves)
        store.prune(folder, folder / newest.name, keep, keep_for_s)
        names = {path.name for path in store.candidates(folder)}
    return {one for one in saves if one.name in names}


SAVES = st.lists(
    st.builds(Saved, st.integers(1, 3), st.integers(0, 20), st.integers(0, 100)),
    min_size=1,
    max_size=8,
    unique_by=lambda one: one.step,
)


def test_what_every_rank_has_stays_though_there_is_newer(tmp_path: Path) -> None:
    laid_out(tmp_path, [Saved(1, step, 0) for step in range(1, 6)])

    store.prune(tmp_path, tmp_path / "step-00000005", keep=2, common=1)

    left = [store.number_of(path)[0] for path in store.candidates(tmp_path)]
    assert left == [5, 4, 1]


def test_what_a_link_that_stays_leads_to_stays_with_it(tmp_path: Path) -> None:
    laid_out(tmp_path, [Saved(1, step, 0) for step in (1, 2, 5)])
    (tmp_path / "step-00000002.1").symlink_to("step-00000002")

    store.prune(tmp_path, tmp_path / "step-00000005", keep=2)

    left = [path.name for path in store.candidates(tmp_path)]
    assert left == ["step-00000005", "step-00000002.1", "step-00000002"]


@settings(max_examples=300, deadline=None)
@given(SAVES, st.integers(0, 7), st.integers(1, 4), st.sampled_from([0.0, 10.0, 50.0]))
def test_what_stays_is_the_newest_and_what_is_young_whoever_was_verified_last(
    saves: list[Saved], place: int, keep: int, keep_for_s: float
) -> None:
    """`newest` is mostly the latest; a writer may also be late, or the job have gone back."""
    newest = saves[place % len(saves)]
    ours = [one for one in saves if one.step <= newest.step or one.epoch >= newest.epoch]

    left = left_of(saves, newest, keep, keep_for_s)

    assert {newest, *(one for one in ours if one > newest)} <= left <= set(ours)
    assert {*sorted(ours)[-keep:]} <= left
    young = [one for one in ours if keep_for_s and one.at >= newest.at - keep_for_s]
    assert {*young} <= left
    assert left_of(saves, newest, keep, 0.0) <= left
    for gone in {*ours} - left:
        assert gone.at < newest.at - keep_for_s or not keep_for_s
        assert sum(one > gone for one in left) >= keep


@pytest.mark.parametrize("keep", [1, 2])
def test_a_writer_that_is_late_removes_no_later_training_from_an_object_store(
    tmp_path: Path, keep: int
) -> None:
    objects = ObjectStore(f"file://{tmp_path}", "j")
    for step, epoch in ((2, 2), (1, 1)):
        staged = staged_at(step)
        image, save = memoryview(staged.buffer), f"save{step}"
        objects.write(0, staged.table, image, step=step, save=save, ready=lambda _end: None)
        late = objects.publish(step, save, 1, {"epoch": epoch})
    assert late is not None

    objects.prune(late, keep)

    assert [one.manifest.step for one in objects.found() if isinstance(one, Found)] == [2, 1]


def test_a_clock_that_is_ahead_makes_nothing_old(tmp_path: Path) -> None:
    day = Saved(1, 1, 1_000_000), Saved(1, 2, 1_000_100), Saved(1, 3, 1_000_200 + 2 * 86_400)
    laid_out(tmp_path, [*day])

    store.prune(tmp_path, tmp_path / day[-1].name, 1, DAY_S, now=1_000_200.0)

    assert len(store.candidates(tmp_path)) == 3


def test_nor_does_it_keep_what_was_saved_by_it_as_if_it_were_young(tmp_path: Path) -> None:
    day = Saved(1, 1, 1_000_000 + 30 * 86_400), Saved(1, 2, 1_000_060), Saved(1, 3, 1_000_200)
    laid_out(tmp_path, [*day])

    store.prune(tmp_path, tmp_path / day[-1].name, 1, DAY_S, now=1_000_200.0)

    assert [store.number_of(path)[0] for path in store.candidates(tmp_path)] == [3, 2]


def test_nor_does_one_that_is_ahead_of_the_store_s(tmp_path: Path) -> None:
    objects = ObjectStore(f"file://{tmp_path}", "j")
    now = time.time()
    for step, at in ((1, now - 60), (2, now + 2 * DAY_S)):
        staged = staged_at(step)
        image = memoryview(staged.buffer)
        objects.write(0, staged.table, image, step=step, save=f"s{step}", ready=lambda _end: None)
        newest = objects.publish(step, f"s{step}", 1, {"at": at})
    assert newest is not None

    objects.prune(newest, 1, DAY_S)

    assert len(objects.found()) == 2


def test_what_a_rank_left_on_a_node_that_it_is_not_on_any_more_goes(tmp_path: Path) -> None:
    gone, here, fails = (tmp_path / f"replica-0-rank-{rank}" for rank in (1, 2, 3))
    other = tmp_path / "replica-1-rank-1"
    for folder, steps in ((gone, (3, 4)), (here, (4, 7)), (fails, (7,)), (other, (3, 4))):
        folder.mkdir()
        laid_out(folder, [Saved(1, step, 0) for step in steps])

    for folder in siblings(tmp_path / "replica-0-rank-0"):
        store.prune_left(folder, common=7)

    left = {one.name: len(store.candidates(one)) for one in (gone, here, fails, other)}
    assert left == {gone.name: 0, here.name: 2, fails.name: 1, other.name: 2}
    assert siblings(tmp_path / "checkpoints") == []


@pytest.mark.parametrize(
    ("keep", "keep_for_s", "left"),
    [(1, 0, [4]), (3, 0, [4, 3, 2]), (1, 100, [4, 3]), (1, 250, [4, 3, 2]), (3, 100, [4, 3, 2])],
)
def test_the_larger_of_number_and_age_counts_in_a_folder_and_in_an_object_store(
    tmp_path: Path, keep: int, keep_for_s: float, left: list[int]
) -> None:
    objects = ObjectStore(f"file://{tmp_path / 'objects'}", "j")
    for step in (1, 2, 3, 4):
        staged, facts = staged_at(step), {"at": 1000 + 100 * step}
        path = write(tmp_path / "folder", staged, keep=9, facts=facts)
        image = memoryview(staged.buffer)
        objects.write(
            0, staged.table, image, step=step, save=f"save{step}", ready=lambda _end: None
        )
        found = objects.publish(step, f"save{step}", 1, facts)
    assert found is not None

    store.prune(tmp_path / "folder", path, keep, keep_for_s)
    objects.prune(found, keep, keep_for_s)

    there = [one.manifest.step for one in objects.found() if isinstance(one, Found)]
    assert [store.number_of(one)[0] for one in store.candidates(tmp_path / "folder")] == left
    assert there == left
    # What they share with those that went is theirs too.
    assert [store.verify(one) for one in store.candidates(tmp_path / "folder")] == [[]] * len(left)
    assert [objects.read(f"save{step}", 0).digest for step in left] == [
        staged_at(step).digest for step in left
    ]


def test_what_does_not_say_when_it_was_saved_is_kept_by_number_alone(tmp_path: Path) -> None:
    write(tmp_path, staged_at(1), keep=9)
    write(tmp_path, staged_at(2), keep=9, facts={"at": "noon"})
    path = write(tmp_path, staged_at(3), keep=9, facts={"at": 1e9})

    store.prune(tmp_path, path, 1, DAY_S)

    assert store.candidates(tmp_path) == [path]


def test_what_cannot_be_read_goes_once_it_is_older_than_all_that_are_young(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        path = write(tmp_path, staged_at(step), keep=9, facts={"at": 1000 + 100 * step})
    for step in (2, 4):
        (tmp_path / f"step-0000000{step}" / "manifest.json").write_text("{}")

    store.prune(tmp_path, path, 1, 250)

    assert [store.number_of(one)[0] for one in store.candidates(tmp_path)] == [5, 4, 3]


def test_what_cannot_be_read_of_another_replica_s_goes_once_ours_is_later(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    for step in (5, 6):
        write(ours, staged_at(step))
    for step in (3, 4, 5):
        write(other, staged_at(step))
    for name in ("step-00000003", "step-00000005"):
        (other / name / "manifest.json").write_text("{")
    newer = other / "step-00000004" / "manifest.json"
    newer.write_bytes(sealed({**json.loads(newer.read_bytes()), "version": 99}))

    store.prune_others(ours, [other], keep=2)

    assert [path.name for path in store.candidates(other)] == ["step-00000005", "step-00000004"]


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[OneRank]:
    objects = f"file://{tmp_path / 'objects'}"
    one = OneRank(tmp_path, own_disk=True, object_store=objects, keep=1, keep_for_s=DAY_S)
    yield one
    one.saver.finish()


def test_the_slow_tiers_keep_what_is_young_and_a_disk_of_the_node_does_not(
    saver: OneRank,
) -> None:
    saver.save_all(1, 2, 3)

    found = [(step, tier) for step, _save, tier in saver.saver.sources.saves()]
    assert sorted(found) == [
        (1, "object"), (1, "shared"), (2, "object"), (2, "shared"),
        (3, "local"), (3, "object"), (3, "shared"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep_for_s": -1}, "keep_for_s is -1; give a number of seconds, 0 or more"),
        ({"keep_for_s": math.nan}, "keep_for_s is nan; give a number of seconds"),
        ({"keep_for_s": math.inf}, "keep_for_s is inf; give a number of seconds"),
        ({"keep_for_s": "1d"}, "keep_for_s is '1d'; give a number of seconds"),
        ({"keep_for_s": True}, "keep_for_s is True; give a number of seconds"),
        ({"keep_for_s": None}, "keep_for_s is None; give a number of seconds"),
        ({"keep": 0}, "keep is 0; give a whole number, 1 or more"),
        ({"keep": 2.5}, "keep is 2.5; give a whole number"),
        ({"keep": True}, "keep is True; give a whole number"),
    ],
)
def test_what_is_no_retention_is_refused(tmp_path: Path, options: object, said: str) -> None:
    job = OneRank(tmp_path).saver.job

    with pytest.raises(ValueError, match=said):
        Checkpointer(job, **options)  # type: ignore[arg-type]
