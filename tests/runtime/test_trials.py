"""What is held back from saving: weights that lead nowhere or are spoilt, and half of a step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint.interval import Pace
from runtime.checkpoint.suspects import HELD_BACK_S, TOO_MANY, TRIAL_STEPS, DoesNotTrain
from runtime.client import Trouble
from runtime.image import Staged
from runtime.replica import all_ranks as together_module
from runtime.replica.gradients import Tail
from runtime.replica.peers import Reduced
from runtime.replica.reporting import Committed
from runtime.replica.step import Applied
from runtime.snapshot import Changed, Copying
from tests.runtime.pair import GRANT, Pair, hold_summed, trained


@pytest.mark.parametrize(
    ("began", "begins", "holds_back"),
    [
        ({"epoch": 0, "step": -1}, True, False),  # a new job
        ({"epoch": 1, "step": 5}, True, True),
        ({"epoch": 1, "step": 0}, False, True),  # a newcomer in the middle of the trial
        ({"epoch": 1, "step": 5 - TRIAL_STEPS}, False, False),  # which is over
        (None, False, False),
    ],
)
def test_a_state_that_the_job_began_from_is_on_trial_with_all_members(
    pair: Pair, began: dict[str, int] | None, begins: bool, holds_back: bool
) -> None:
    pair.state.committed = 5
    pair.together.put_on_trial({**GRANT, "began": began, "begins": begins})

    assert pair.together.holds_back is holds_back


def test_with_long_steps_a_trial_holds_saves_back_for_some_minutes_and_goes_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together_module, "HELD_BACK_S", 0.0)
    pair.state.committed = 5
    pair.together.put_on_trial({**GRANT, "began": {"epoch": 1, "step": 5}, "begins": True})

    assert not pair.together.holds_back
    for _ in range(TOO_MANY - 1):
        pair.together.judge(math.nan)
        assert pair.together.holds_back  # what may lead nowhere must not become the newest
    with pytest.raises(DoesNotTrain):
        pair.together.judge(math.nan)


def test_nothing_is_saved_while_losses_are_no_numbers_however_long_the_job_has_trained(
    pair: Pair,
) -> None:
    """What leads nowhere verifies too, and would take the place of all that is good."""
    pair.together.reporter.members = [0]
    pair.together.judge(1.0)
    assert not pair.together.holds_back
    for _ in range(TOO_MANY + 2):
        pair.together.judge(math.nan)
        assert pair.together.holds_back
    pair.together.judge(1.0)

    assert not pair.together.holds_back
    told = [one.kind for one in pair.told.messages if isinstance(one, Trouble)]
    assert told == ["loss_not_finite", "loss_finite_again"]


def test_who_was_away_during_a_trial_comes_back_with_none_of_before(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end alone, and have a state that trains remembered as one that does not."""
    pair.state.committed = 5
    began = {"epoch": 1, "step": 5}
    pair.together.put_on_trial({**GRANT, "began": began, "begins": True})
    pair.together.judge(math.nan)

    monkeypatch.setattr(pair.together, "_all", lambda *_order, **_with: [])  # it has the state
    pair.together.take(5000, "", [])
    pair.state.committed = 5000
    pair.together.put_on_trial({**GRANT, "began": began, "begins": False})

    assert not pair.together.holds_back
    for _ in range(TOO_MANY):
        pair.together.judge(math.nan)


def test_a_suspect_that_cannot_be_noted_is_told(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is started next would load it again, and end of it again."""

    def full(_folder: Path, _state: tuple[int, int]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runtime.checkpoint.saver.suspect", full)
    pair.state.committed = 5
    pair.together.put_on_trial({**GRANT, "began": {"epoch": 1, "step": 5}, "begins": True})

    for _ in range(TOO_MANY - 1):
        pair.together.judge(math.nan)

    with pytest.raises(DoesNotTrain):
        pair.together.judge(math.nan)

    (told,) = [one for one in pair.told.messages if isinstance(one, Trouble)]
    assert told.kind == "suspect_not_noted"
    assert told.text.endswith("the next start may load it: [Errno 28] No space left on device")


def test_who_comes_within_a_trial_holds_back_no_longer_than_the_others(pair: Pair) -> None:
    pair.state.committed = 6
    began = {"epoch": 1, "step": 5, "at": 1.0 - HELD_BACK_S}

    pair.together.put_on_trial({**GRANT, "began": began, "begins": False})

    assert not pair.together.holds_back


def test_a_clock_that_was_put_back_makes_no_trial_longer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together_module, "HELD_BACK_S", 0.0)
    pair.state.committed = 6
    began = {"epoch": 1, "step": 5, "at": 1e9}

    pair.together.put_on_trial({**GRANT, "began": began, "begins": False})

    assert not pair.together.holds_back


def test_a_step_that_peers_hand_over_is_judged_as_they_judge_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.together.put_on_trial({**GRANT, "began": {"epoch": 1, "step": 0}, "begins": True})

    def handed_over(op: str, **_given: Any) -> list[Any]:
        pair.state.committed += op == "commit"
        return [math.nan, math.nan]

    monkeypatch.setattr(pair.together, "_all", handed_over)

    with pytest.raises(DoesNotTrain):
        pair.together.replay(pair.state.committed + TOO_MANY, [])


def is_sound(pair: Pair) -> bool:
    """Whether the weights are numbers."""
    return all(bool(one.isfinite().all()) for one in pair.state.model.parameters())


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
@pytest.mark.parametrize("clipped", [None, 1.0])
def test_nothing_is_saved_of_weights_that_took_gradients_that_are_no_numbers(
    pair: Pair, gradient: float, clipped: float | None
) -> None:
    """The loss is told before, and is a number."""
    pair.rank.engine.max_grad_norm = clipped
    hold_summed(pair, gradient)

    pair.together.judge(pair.together.commit())

    assert not is_sound(pair)
    assert pair.together.holds_back


def test_gradients_that_a_scaler_keeps_from_the_weights_hold_nothing_back(pair: Pair) -> None:
    pair.state.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    hold_summed(pair, math.inf)

    pair.together.judge(pair.together.commit())

    assert (is_sound(pair), pair.state.loss_scale) == (True, 2.0)
    assert not pair.together.holds_back


def test_a_scaler_that_is_off_keeps_nothing_from_the_weights(pair: Pair) -> None:
    pair.state.scaler = torch.amp.GradScaler("cpu", enabled=False)
    hold_summed(pair, math.inf)

    pair.together.judge(pair.together.commit())

    assert not is_sound(pair)
    assert pair.together.holds_back


def test_an_optimizer_that_refuses_such_gradients_holds_nothing_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    (optimizer,) = pair.state.optimizers
    monkeypatch.setattr(optimizer, "step", lambda *_given: None)
    hold_summed(pair, math.inf)

    pair.together.judge(pair.together.commit())

    assert is_sound(pair)
    assert not pair.together.holds_back


def test_spoilt_weights_are_never_saved_whatever_the_losses_are(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = spied(pair.rank, "_save", monkeypatch)
    pair.rank._members = [0]
    hold_summed(pair, math.nan)
    pair.together.judge(pair.together.commit())
    pair.rank.save_aside()
    monkeypatch.setattr(
        pair.rank.engine, "apply", lambda *_given: Applied(loss=1.0, grad_norm=1.0, samples=4)
    )
    hold_summed(pair, 1.0)

    pair.together.judge(pair.together.commit())

    assert pair.together.holds_back
    assert saved == []


def test_who_takes_over_spoilt_weights_saves_them_no_more_than_who_spoilt_them(
    pair: Pair,
) -> None:
    with torch.no_grad():
        next(pair.state.model.parameters())[0, 0] = math.nan
    spoilt = pair.state.copy()
    pair.state.load(trained(6).copy())
    before = pair.state.spoilt

    pair.state.load(spoilt)

    assert (before, pair.state.spoilt) == (False, True)


def test_weights_that_the_script_has_made_infinite_are_not_spoilt(pair: Pair) -> None:
    with torch.no_grad():
        next(pair.state.model.parameters())[0, 0] = -math.inf
    pair.state.load(pair.state.copy())
    pair.state.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    hold_summed(pair, math.inf)

    pair.together.judge(pair.together.commit())

    assert not pair.together.holds_back


@pytest.mark.parametrize("made", [[1.0, math.nan], [math.nan, 1.0]])
def test_weights_that_are_spoilt_on_one_rank_are_on_all(
    pair: Pair, made: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.together, "_all", lambda _op, **_given: made)

    pair.together.judge(pair.together.commit())

    assert pair.together.holds_back
    assert pair.state.spoilt


def test_a_loss_that_is_no_number_on_another_rank_alone_counts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_summed(pair, 1.0)
    of_all = Applied(loss=math.nan, grad_norm=1.0, samples=4)
    monkeypatch.setattr(pair.rank.engine, "apply", lambda _reduced, _tail: of_all)

    pair.together.judge(pair.together.commit())

    assert pair.rank.tail is not None
    assert math.isfinite(pair.rank.tail.loss)
    assert pair.together.holds_back


def test_what_an_evaluation_puts_in_the_weights_place_is_not_saved_aside(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Staged] = []
    weight = pair.state.model.weight
    assert isinstance(weight, torch.nn.Parameter)

    def save(begin: Callable[[None], Copying], *_given: object, **_how: object) -> None:
        with contextlib.suppress(Changed):
            copies.append(begin(None).finish())

    def evaluates(_step: Committed) -> None:
        with torch.no_grad():
            trained = weight.clone()
            weight.zero_()
            pair.rank.save_aside()
            weight.copy_(trained)

    monkeypatch.setattr(pair.saver, "save", save)
    pair.rank._members, pair.rank.on_step = [0], evaluates
    hold_summed(pair, 1.0)

    pair.rank.commit(newcomer=False)
    during = len(copies)
    pair.rank.save_aside()

    assert during == 0
    (saved,) = copies
    assert saved.digest == pair.state.copy().digest


def test_a_step_that_was_applied_in_part_is_not_saved(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.state.committed = 7
    pair.rank._members = [0]
    begun = spied(pair.saver, "save", monkeypatch)

    def apply(_reduced: Reduced, _tail: Tail) -> Applied:
        raise RuntimeError("of the script's own")

    pair.rank.save_aside()
    pair.rank._reduced, pair.rank.tail = Reduced(8, 1, torch.zeros(1)), Tail.__new__(Tail)
    monkeypatch.setattr(pair.rank.engine, "apply", apply)
    with pytest.raises(RuntimeError, match="of the script's own"):
        pair.rank.commit(newcomer=True)
    pair.rank.save_aside()

    assert len(begun) == 1


def spied(of: object, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A call more for each."""
    calls: list[str] = []
    monkeypatch.setattr(of, name, lambda *_given, **_named: calls.append(name))
    return calls


@pytest.mark.parametrize(("bad", "saves"), [(TOO_MANY - 1, ["_save"]), (TOO_MANY, [])])
def test_what_leads_nowhere_is_not_saved_aside_either(
    pair: Pair, bad: int, saves: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = spied(pair.rank, "_save", monkeypatch)
    pair.rank._members, pair.state.committed = [0], 6
    for _ in range(bad):
        pair.together.judge(math.nan)

    pair.rank.save_aside()

    assert saved == saves


def test_who_waits_for_room_to_save_aside_holds_up_no_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    monkeypatch.setattr(
        pair.saver.copy_buffers, "await_free", lambda _s: held.append(pair.rank._changing.locked())
    )

    pair.rank.save_aside()

    assert held == [False]


def fails(pair: Pair) -> None:
    """What was saved to the disk of our node last."""
    pair.saver.dispatcher.failed("local", "No space left on device")


def hangs(pair: Pair) -> None:
    """What is being saved there."""
    pair.saver.dispatcher._under_way["local", "save6"] = time.monotonic() - 60.0


@pytest.mark.parametrize("happens", [fails, hangs])
def test_whoever_is_to_be_killed_relies_on_no_tier_that_takes_nothing_now(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, happens: Callable[[Pair], None]
) -> None:
    pair.state.committed = 7
    pair.rank._members = [0]
    tiers = pair.saver.tiers
    pace = Pace(None, 1, lambda: 1e-3)
    tiers["local"] = replace(tiers["shared"], name="local", own=True, pace=pace)
    pace.note(0.0, 0.5)
    tiers["shared"].pace.note(0.0, 16.0)
    asked: list[set[str]] = []
    monkeypatch.setattr(
        pair.saver, "save", lambda _begin, _name, tiers, **_how: asked.append(tiers)
    )
    monkeypatch.setattr(pair.rank.preemption, "left_s", lambda: 16.2)

    usually = pair.rank._save_takes_s()
    pair.rank.save_aside()
    happens(pair)
    now = pair.rank._save_takes_s()
    pair.rank.save_aside()

    assert asked == [{"local"}, {"shared"}]
    assert usually < pair.rank.preemption.grace_s < now  # which is at once
