"""What all ranks of a replica save is told of once it is whole, and is loaded by all or by none."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from runtime.checkpoint.draft import Draft
from runtime.checkpoint.manifest import digest_of_all
from runtime.client import CheckpointSaved, Trouble
from runtime.image import Damaged, Staged
from runtime.replica import rank as rank_module
from runtime.replica.all_ranks import HANGS_S, MAX_TRIES, MAX_UNTOLD
from runtime.replica.gradients import Wishes
from runtime.snapshot import state_of
from tests.runtime.pair import Counted, Pair, new_state, trained
from tests.runtime.replicas import until

REFUSED = {"failed": "unloadable", "text": "a bit"}
SAVE = "save5"


def saved_locally(step: int, rank: int) -> CheckpointSaved:
    """A rank's part, on the disk of its node."""
    return CheckpointSaved(
        step=step, tier="local", path=f"/{rank}", bytes=10, digest=f"d{rank}", stall_s=0.1,
        seconds=1.0, at=rank,
    )  # fmt: skip


def test_a_checkpoint_is_told_of_once_every_part_is_durable(pair: Pair) -> None:
    parts = [saved_locally(9, rank) for rank in (0, 1)]

    pair.together.saved(0, parts[0])
    early = list(pair.told.messages)
    pair.together.saved(1, parts[1])

    assert early == []
    (told,) = pair.told.messages
    assert isinstance(told, CheckpointSaved)
    assert (told.step, told.bytes, told.digest, told.path) == (
        9,
        20,
        digest_of_all(["d0", "d1"]),
        "/0",
    )


def test_parts_of_which_one_rank_tells_nothing_do_not_add_up(pair: Pair) -> None:
    for step in range(5 * MAX_UNTOLD):
        pair.together.saved(0, saved_locally(step, 0))
    kept = len(pair.together._saved["local"])
    pair.together.saved(1, saved_locally(step, 1))

    assert kept == MAX_UNTOLD
    assert [one.step for one in pair.told.messages if isinstance(one, CheckpointSaved)] == [step]


def test_a_checkpoint_in_the_folder_of_all_is_told_of_by_whoever_finished_it(pair: Pair) -> None:
    whole = CheckpointSaved(
        step=9, tier="shared", path="/9", bytes=20, digest="d", stall_s=0.1, seconds=1.0, at=1.0
    )

    pair.together.saved(1, whole)

    assert pair.told.messages == [whole]
    said = pair.together.sharing.wishes(0, 1, due=False, able=False, free=False)
    assert said["whole"]


def test_what_is_to_be_compared_waits_for_checkpoints_once_and_not_for_ever(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"all": False, "any": True}
    monkeypatch.setattr(pair.saver.copy_buffers, "all_free", lambda: free["all"])
    monkeypatch.setattr(pair.saver.copy_buffers, "any_free", lambda: free["any"])
    pair.together._compare_every = 10
    pair.other.answers["has_room_to_compare"] = {"value": True}

    pair.state.committed = 8
    in_time = pair.together.ready_to_compare()
    pair.state.committed = 18
    late = pair.together.ready_to_compare()
    free["any"] = False
    never = [pair.together.ready_to_compare() for _ in range(3)]

    assert (in_time, late, never) == (False, True, [False] * 3)
    (told,) = [m for m in pair.told.messages if isinstance(m, Trouble)]
    assert told.kind == "not_compared"
    assert "for 2 times 10 steps" in told.text
    assert "every_s" in told.text


@pytest.mark.parametrize(("late", "told"), [(False, []), (True, ["not_compared"])])
def test_states_are_compared_once_every_rank_has_room_for_a_copy(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, late: bool, told: list[str]
) -> None:
    monkeypatch.setattr(pair.saver.copy_buffers, "all_free", lambda: True)
    pair.together._compare_every = 10
    pair.state.committed = 18 if late else 8
    pair.other.answers["has_room_to_compare"] = {"value": False}

    before = pair.together.ready_to_compare()
    pair.other.answers["has_room_to_compare"] = {"value": True}

    assert (before, pair.together.ready_to_compare()) == (False, True)
    assert [m.kind for m in pair.told.messages if isinstance(m, Trouble)] == told


def test_each_rank_that_can_make_no_copy_to_compare_is_told(pair: Pair) -> None:
    """Its replica says nothing of that step then, and the comparison ends for all."""
    pair.other.answers["compare"] = {"value": "no copy could be made: MemoryError()"}
    pair.state.committed = 9

    pair.together.compare()  # here no memory was asked for

    told = [(one.kind, one.text) for one in pair.told.messages if isinstance(one, Trouble)]
    assert [(kind, text.partition(";")[0]) for kind, text in told] == [
        ("not_compared", "step 9, rank 0: another copy has just taken the memory"),
        ("not_compared", "step 9, rank 1: no copy could be made: MemoryError()"),
    ]
    assert all("training goes on" in text for _kind, text in told)


def test_who_writes_alone_for_far_too_long_passes_it_on_and_tells(pair: Pair) -> None:
    sharing = pair.together.sharing
    sharing.wishes(0, 1, due=True, able=False, free=True)
    assert sharing.decide(Wishes(shared=True, alone=True), 1) == "one"
    pair.other.answers["ready"] = {"value": []}

    pair.together.begins_alone()
    early = pair.together.passes_on()
    pair.together._alone_since -= HANGS_S + 1.0
    late = pair.together.passes_on()
    heard = sharing.wishes(0, 1, due=True, able=False, free=False)
    sharing.decide(Wishes(alone_failed=heard["alone_failed"]), 1)

    assert (early, late, pair.together.passes_on()) == (False, True, False)
    assert pair.other.heard == ["ready"]


def test_who_took_too_long_and_then_fails_tells_that_too(pair: Pair) -> None:
    pair.other.answers["ready"] = {"value": []}
    pair.together.sharing.writes_alone = True
    pair.together._alone_since = -math.inf
    assert pair.together.passes_on()

    pair.together.hear_of_shared(Wishes(alone_failed=True))
    pair.saver.dispatcher.failed("shared", "no space left")

    assert "no space left" in str(pair.told.messages)


def test_what_one_alone_could_not_write_either_is_told_by_that_one(pair: Pair) -> None:
    pair.together.hear_of_shared(Wishes(alone_failed=True))
    pair.saver.dispatcher.failed("shared", "no space left")

    assert pair.told.messages == []


def test_only_a_checkpoint_whose_parts_are_of_one_run_is_loaded(pair: Pair) -> None:
    for step in (5, 8):
        staged = trained(step).copy()
        draft = Draft(pair.saver.folders.shared, step, f"save{step}", 2, {"torch": "1.0"})
        for rank in (0, 1):
            draft.write(rank, staged.table, memoryview(staged.buffer))
        assert draft.publish()
        draft.close()
    history = rank_module.history_of(state_of(trained(5).copy()))
    pair.other.answers["checkpoints"] = {
        "value": [[8, "save8", "shared"], [5, "save5", "shared"], [2, "save2", "shared"]]
    }
    pair.other.answers["read"] = {"value": ["of another run", "d"]}
    of_others = r"\(shared, step 8: its parts are of other runs; shared, step 5: its .*\)"
    with pytest.raises(ValueError, match=rf"none of the 2 .* {of_others}.*runtime.checkpoint v"):
        pair.together.load([])
    refused = pair.state.committed
    pair.other.answers["read"] = {"value": [history, "d1"]}
    pair.other.answers["digest"] = {"value": "d1"}
    pair.together.load([])

    assert (refused, pair.state.committed) == (-1, 8)
    told = [m for m in pair.told.messages if isinstance(m, Trouble)]
    damaged = "shared, step 8: a part is damaged, or of another run"
    assert ("shared", damaged) in [(m.subject, m.text.split(";")[0]) for m in told]
    assert [m.text.partition(", is")[0] for m in told if m.kind == "changed_since"] == [
        "since save8 was saved: torch was '1.0'"
    ]
    assert pair.together.digest() == f"{pair.state.digest(ledger=True)}-d1"


def seen_by_both(pair: Pair, staged: Staged) -> Staged:
    """As the checkpoint SAVE."""
    draft = Draft(pair.saver.folders.shared, 5, SAVE, 2, {})
    for rank in (0, 1):
        draft.write(rank, staged.table, memoryview(staged.buffer))
    assert draft.publish()
    draft.close()
    pair.other.answers["checkpoints"] = {"value": [[5, SAVE, "shared"]]}
    return staged


@pytest.fixture
def saved(pair: Pair) -> Staged:
    """What both ranks see as the checkpoint SAVE."""
    return seen_by_both(pair, trained(5).copy())


def test_what_all_ranks_have_on_their_disks_is_known_from_the_start(
    pair: Pair, saved: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stays, if a disk fails before they have another one."""
    there = [(5, SAVE, "shared"), (4, "c", "local"), (3, "b", "local"), (2, "a", "peer")]
    pair.other.answers["checkpoints"] = {"value": [[*found] for found in there if found[0] != 4]}
    history = rank_module.history_of(state_of(saved))
    pair.other.answers["read"] = {"value": [history, "d"]}
    pair.other.answers["digest"] = {"value": "d"}
    monkeypatch.setattr(pair.saver.sources, "saves", lambda _elsewhere, _after: there)

    pair.together.load([])

    assert pair.together._common == {"local": 3, "peer": 2}


def test_a_state_that_is_not_what_was_saved_is_told(pair: Pair, saved: Staged) -> None:
    pair.other.answers["read"] = {"value": [rank_module.history_of(state_of(saved)), "saved"]}
    pair.other.answers["digest"] = {"value": "loaded"}

    pair.together.load([])

    (told,) = [m for m in pair.told.messages if isinstance(m, Trouble)]
    assert told.kind == "checkpoint_not_restored"
    assert told.text.startswith("step 5, ranks [1]")


class Forgetful(Counted):
    """Gives back less."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(("kind", "told"), [(Counted, []), (Forgetful, ["step 5, ranks [0]"])])
def test_that_weights_are_trained_that_were_not_when_they_were_saved_is_no_flaw(
    pair: Pair, kind: type[Counted], told: list[str]
) -> None:
    """They lie elsewhere in each copy from now on, and among members only such copies count."""
    before = new_state(frozen=True)
    before.committed, before.extra = 5, {"own": Counted(3)}
    staged = seen_by_both(pair, before.copy())
    pair.other.answers["read"] = {"value": [rank_module.history_of(state_of(staged)), ""]}
    pair.other.answers["digest"] = {"value": "other"}
    pair.state.extra = {"own": kind(0)}

    pair.together.load([])

    flaws = [m.text for m in pair.told.messages if isinstance(m, Trouble)]
    assert [text.partition(":")[0] for text in flaws] == told
    assert pair.together.digest() == f"{pair.state.digest(ledger=True)}-other"
    assert pair.state.digest(ledger=True) != staged.digest


def test_a_tier_of_which_two_checkpoints_fail_comes_after_the_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [(9, "d", "local"), (8, "c", "local"), (7, "b", "local"), (5, "a", "shared")]
    pair.other.answers["checkpoints"] = {"value": [[*found] for found in there]}
    pair.other.answers["read"] = REFUSED
    tried: list[str] = []
    monkeypatch.setattr(pair.saver.sources, "saves", lambda _elsewhere, _after: there)

    def read(name: str, *_where: object, **_also: object) -> Staged:
        tried.append(name)
        raise Damaged("a bit")

    monkeypatch.setattr(pair.saver.sources, "ranks", lambda *_asked, **_also: 2)
    monkeypatch.setattr(pair.saver.sources, "read", read)

    with pytest.raises(ValueError, match="none of the 4 checkpoints of this job can be loaded"):
        pair.together.load([])

    assert tried == ["d", "c", "a", "b"]
    text = "\n".join(map(str, pair.told.messages))
    assert re.findall(r"the next one is (\w+, step \d)", text) == [
        "local, step 8",
        "shared, step 5",
        "local, step 7",
    ]


@pytest.mark.usefixtures("saved")
def test_what_another_rank_refuses_is_not_read_to_its_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.other.answers["read"] = REFUSED

    def endless(*_where: object, progress: Callable[[int], object]) -> Staged:
        until(lambda: progress(1), "the block comes after which it is given up")
        raise AssertionError("nothing was there to be read")

    monkeypatch.setattr(pair.saver.sources, "read", endless)

    with pytest.raises(ValueError, match="none of the 1 checkpoints of this job can be loaded"):
        pair.together.load([])

    (told,) = [m for m in pair.told.messages if isinstance(m, Trouble)]
    assert told.text.startswith("shared, step 5: a part is damaged")  # its own part it blames not


@pytest.mark.usefixtures("saved")
def test_the_others_hear_at_once_that_the_first_rank_refuses_a_checkpoint(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.other.answers |= {"read": {}, "give_up": REFUSED}  # it reads on until then

    def fails(*_where: object, **_also: object) -> Staged:
        raise Damaged("a bit")

    monkeypatch.setattr(pair.saver.sources, "read", fails)

    with pytest.raises(ValueError, match="none of the 1 checkpoints of this job can be loaded"):
        pair.together.load([])

    assert pair.other.heard[-2:] == ["read", "give_up"]


@pytest.mark.usefixtures("saved")
def test_what_is_given_up_is_not_used_and_the_next_read_is_not_given_up(
    pair: Pair,
) -> None:
    """Also if that is known before the read begins: the other rank may be that much quicker."""
    asked = {"name": SAVE, "tier": "shared"}
    pair.rank.give_up(1)

    given_up = pair.rank.obey("read", {**asked, "number": 1})
    with pytest.raises(RuntimeError, match="no state was read"):
        pair.rank.obey("load", {})
    read = pair.rank.obey("read", {**asked, "number": 2})

    assert given_up == {"failed": "unloadable", "text": "another rank refused it"}
    assert len(read["value"]) == 2
    assert pair.told.messages == []


def test_what_lies_where_all_should_see_it_and_we_do_not_is_no_reason_to_begin_anew(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.other.answers["checkpoints"] = {"value": [[9, "a", "shared"]]}
    monkeypatch.setattr(pair.saver.sources, "saves", lambda _elsewhere, _after: [])

    with pytest.raises(ValueError, match=r"none of the 1 .* loaded \(ranks \[0\] see no check"):
        pair.together.load([])

    (told,) = pair.told.messages
    assert "ranks [0] see no checkpoint in " in str(told)


def test_a_bounded_number_of_checkpoints_is_tried_before_a_person_has_to_look(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [(step, f"save{step}", "shared") for step in range(MAX_TRIES + 3, 0, -1)]
    pair.other.answers["checkpoints"] = {"value": [[*found] for found in there]}
    pair.other.answers["read"] = REFUSED
    monkeypatch.setattr(pair.saver.sources, "saves", lambda _elsewhere, _after: there)

    with pytest.raises(ValueError, match=r"none of the 11 checkpoints of this job can be loaded"):
        pair.together.load([])

    assert pair.other.heard.count("read") == MAX_TRIES


@pytest.mark.usefixtures("saved")
def test_that_none_can_be_loaded_says_which_rank_refuses_what(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    gives_up = {"failed": "unloadable", "text": "another rank refused it"}
    pair.other.answers |= {"read": {}, "give_up": gives_up}

    def fails(*_where: object, **_also: object) -> Staged:
        raise Damaged("a bit")

    with monkeypatch.context() as patch:
        patch.setattr(pair.saver.sources, "read", fails)
        with pytest.raises(ValueError, match=r"loaded \(shared, step 5: rank 0: a bit\): mend"):
            pair.together.load([])
    pair.other.answers |= {"read": {**REFUSED, "text": "another bit"}, "give_up": {}}
    with pytest.raises(ValueError, match=r"loaded \(shared, step 5: rank 1: another bit\): mend"):
        pair.together.load([])


def test_of_many_reasons_why_none_can_be_loaded_the_last_are_said_in_short(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [(step, f"save{step}", "shared") for step in range(MAX_TRIES, 0, -1)]
    pair.other.answers["checkpoints"] = {"value": [[*found] for found in there]}
    pair.other.answers |= {"read": {}, "give_up": REFUSED}
    monkeypatch.setattr(pair.saver.sources, "saves", lambda _elsewhere, _after: there)

    def fails(*_where: object, **_also: object) -> Staged:
        raise Damaged("a bit\n" * 1000)

    monkeypatch.setattr(pair.saver.sources, "ranks", lambda *_asked, **_also: 2)
    monkeypatch.setattr(pair.saver.sources, "read", fails)

    with pytest.raises(ValueError, match=r"\(shared, step 3: rank 0: a bit a bit") as error:
        pair.together.load([])

    assert len(str(error.value)) < 2000
    assert str(error.value).count("…; shared, step ") == 2
    assert "\n" not in str(error.value)
