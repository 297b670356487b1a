"""Which checkpoint a job that restarts as a whole resumes from if a rank refuses its part."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

import runtime
from runtime.image import Damaged, Staged
from runtime.replica.all_ranks import MAX_TRIES
from runtime.whole import newest
from runtime.whole.newest import Found, Newest
from tests.runtime.replicas import until
from tests.runtime.whole.runs import (
    Alone,
    imported_into,
)


def refusing(whole: runtime.WholeJob, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of those that it tries to read, and cannot, from now on."""
    tried: list[str] = []

    def read(name: str, *_where: object, **_also: object) -> Staged:
        tried.append(name)
        raise Damaged("a bit")

    monkeypatch.setattr(whole.saver.sources, "ranks", lambda *_asked, **_also: 1)
    monkeypatch.setattr(whole.saver.sources, "read", read)
    return tried


def newest_of(whole: runtime.WholeJob) -> Newest:
    return Newest(whole.job, whole.saver, whole._ranks, whole._start)


def test_a_tier_of_which_two_checkpoints_fail_comes_after_the_others(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[Found] = [
        (9, "d", "local"), (8, "c", "local"), (7, "b", "local"), (5, "a", "shared"),
    ]  # fmt: skip
    with alone.start() as whole:
        tried = refusing(whole, monkeypatch)
        with pytest.raises(ValueError, match="none of the 4 checkpoints of this job can be loaded"):
            newest_of(whole).load(there, there)

    assert tried == ["d", "c", "a", "b"]
    text = "\n".join(one["text"] for one in alone.door.messages("trouble"))
    assert re.findall(r"a bit; the next one is (\w+, step \d)", text) == [
        "local, step 8",
        "shared, step 5",
        "local, step 7",
    ]


def test_what_another_rank_refuses_is_not_read_to_its_end(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newest, "LOOK_S", 0.0)

    def endless(*_where: object, progress: Callable[[int], object]) -> Staged:
        until(lambda: progress(1), "the block comes after which it is given up")
        raise AssertionError("nothing was there to be read")

    with alone.start() as whole:
        refusing(whole, monkeypatch)
        refused = newest_of(whole).read("d", "shared")
        monkeypatch.setattr(whole, "job", replace(whole.job, ranks=2))
        monkeypatch.setattr(whole.saver.sources, "ranks", lambda *_asked, **_also: 2)
        monkeypatch.setattr(whole.saver.sources, "read", endless)
        given_up = newest_of(whole).read("d", "shared")
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
            newest_of(whole).load(there, there)

    assert len(tried) == MAX_TRIES
    texts = [one["text"] for one in alone.door.messages("trouble")]
    assert sum("the next one is" in one for one in texts) == MAX_TRIES - 1


def test_it_takes_weights_alone_for_no_checkpoint_of_its_own(alone: Alone) -> None:
    imported_into(alone.folder / "state" / "checkpoints")

    with pytest.raises(
        ValueError, match=r"weights alone, .*: load them in the script.* other than"
    ):
        alone.start().__enter__()
