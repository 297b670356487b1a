"""A state that verifies and leads to NaN is told apart from one bad batch, and remembered."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint.suspects import (
    TOO_MANY,
    TRIAL_STEPS,
    DoesNotTrain,
    Losses,
    Trial,
    suspect,
    suspects,
)

NAN, INF = math.nan, math.inf


def noted(*losses: float) -> Trial:
    trial = Trial((2, 40))
    for loss in losses:
        trial.note(loss)
    return trial


@pytest.mark.parametrize("bad", [[NAN] * TOO_MANY, [1.0, NAN, INF, NAN], [NAN, 1.0, NAN, NAN, NAN]])
def test_losses_that_stay_no_numbers_condemn_a_state(bad: list[float]) -> None:
    with pytest.raises(DoesNotTrain, match=r"state of step 40 \(epoch 2\)"):
        noted(*bad)


@given(st.lists(st.sampled_from([1.0, NAN, INF]), max_size=30))
def test_of_losses_that_are_no_numbers_each_run_is_told_once_and_its_end(
    losses: list[float],
) -> None:
    seen = Losses()
    told = [kind for kind, _text in filter(None, map(seen.note, losses))]

    text = "".join("x" if math.isfinite(loss) else "o" for loss in losses)
    runs = re.findall(r"o{3,}", text)
    assert told.count("loss_not_finite") == len(runs)
    assert told.count("loss_finite_again") == len(re.findall(r"o{3,}x", text))
    assert seen.odd == len(text) - len(text.rstrip("o"))


def test_a_bad_batch_does_not() -> None:
    assert not noted(1.0, NAN, NAN, 1.0, NAN).over


def test_a_state_that_trained_for_a_while_is_no_longer_to_blame() -> None:
    trial = noted(*[1.0] * TRIAL_STEPS)
    assert trial.over
    for _ in range(TOO_MANY):
        trial.note(NAN)


def test_a_trial_does_not_end_in_the_middle_of_bad_losses() -> None:
    trial = noted(*[1.0] * (TRIAL_STEPS - 1), NAN)
    assert not trial.over
    trial.note(NAN)
    with pytest.raises(DoesNotTrain):
        trial.note(NAN)


def test_one_is_remembered_though_nothing_was_saved_there_yet(tmp_path: Path) -> None:
    """The job went on from an object store, and its folder is new."""
    suspect(tmp_path / "job" / "checkpoints", (5, 1000))

    assert suspects(tmp_path / "job" / "checkpoints") == {(5, 1000)}


def test_each_is_remembered(tmp_path: Path) -> None:
    assert suspects(tmp_path) == set()
    for state in ((2, 40), (1, 7), (2, 40)):
        suspect(tmp_path, state)

    assert suspects(tmp_path) == {(1, 7), (2, 40)}
    assert [path.name for path in tmp_path.iterdir()] == ["suspects.json"]


@pytest.mark.parametrize("text", ["{]", '[{"epoch": Infinity, "step": 1}]', "[" * 100_000])
def test_a_damaged_list_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "suspects.json").write_text(text)
    with pytest.raises(ValueError, match=r"suspects.json is damaged .*: remove it"):
        suspects(tmp_path)
