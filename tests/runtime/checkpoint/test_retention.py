"""Of complete checkpoints the newest stay, and nothing goes before them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.checkpoint import store
from runtime.checkpoint.manifest import Manifest, PartHash
from runtime.checkpoint.objects import Found, ObjectStore
from tests.runtime.checkpoint.states import staged_at


@dataclass(frozen=True, order=True)
class Saved:
    """Later training is larger."""

    epoch: int
    step: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}"


def laid_out(folder: Path, saves: list[Saved]) -> None:
    """As far as retention looks into them."""
    for one in saves:
        part = PartHash(name="rank-0.json", rank=0, bytes=1, hash="", digest="")
        manifest = Manifest(step=one.step, save=one.name, parts=(part,), facts={"epoch": one.epoch})
        (folder / one.name).mkdir()
        (folder / one.name / "manifest.json").write_bytes(manifest.to_json())


def left_of(saves: list[Saved], newest: Saved, keep: int) -> set[Saved]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        laid_out(folder, saves)
        store.prune(folder, folder / newest.name, keep)
        names = {path.name for path in store.candidates(folder)}
    return {one for one in saves if one.name in names}


SAVES = st.lists(
    st.builds(Saved, st.integers(1, 3), st.integers(0, 20)),
    min_size=1,
    max_size=8,
    unique_by=lambda one: one.step,
)


@settings(max_examples=300, deadline=None)
@given(SAVES, st.integers(0, 7), st.integers(1, 4))
def test_the_newest_stay_whoever_was_verified_last(
    saves: list[Saved], place: int, keep: int
) -> None:
    """`newest` is mostly the latest; a writer may also be late, or the job have gone back."""
    newest = saves[place % len(saves)]
    ours = [one for one in saves if one.step <= newest.step or one.epoch >= newest.epoch]

    left = left_of(saves, newest, keep)

    assert left == {newest, *sorted(ours)[-keep:]}


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
