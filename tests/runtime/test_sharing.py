"""Who writes the checkpoint in the folder of all: as many members see it, and none otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.replica.gradients import Wishes
from runtime.replica.sharing import PATIENCE, Outcome, Sharing, Who


@dataclass
class Members:
    """Some that decide together, the first of which speaks."""

    count: int
    each: list[Sharing] = field(default_factory=list)
    hang: set[int] = field(default_factory=set)  # whose folder does
    writer: int = 0  # of those that one wrote alone, the last

    def __post_init__(self) -> None:
        self.each = [Sharing() for _ in range(self.count)]

    def edge(
        self, *, due: bool = False, able: int | None = None, free: bool = True, page: bool = False
    ) -> Who:
        """One step and its edge; `able` of them could write their share, and the one that speaks
        all of it, if it is `free`."""
        able = self.count if able is None else able
        said = [
            one.wishes(
                place,
                self.count,
                due=due and place == 0,
                able=place < able and free and place not in self.hang,
                free=(free or place > 0) and place not in self.hang,
            )
            for place, one in enumerate(self.each)
        ]
        decided = {(one.decide(summed(said, page), self.count), one.writer) for one in self.each}
        ((who, self.writer),) = decided
        return who

    def edges(self, count: int, **how: Any) -> list[Who]:
        return [self.edge(**how) for _ in range(count)]

    def seeing(self) -> Members:
        """The first one was written by one alone, and all see it."""
        assert self.edge(due=True, able=0) == "one"
        self.each[0].hear("whole")
        assert self.edge() == "nobody"
        return self


def summed(said: list[dict[str, Any]], checkpoint: bool) -> Wishes:
    """As the all-reduce adds them up."""
    names = {name for one in said for name in one} - {"share"}
    together: dict[str, Any] = {name: any(one.get(name) for one in said) for name in names}
    return Wishes(checkpoint=checkpoint, share=sum(one["share"] for one in said), **together)


def test_the_first_is_written_by_one_alone_and_the_next_by_all() -> None:
    assert Members(3).seeing().edge(due=True) == "all"


def test_one_that_cannot_yet_is_waited_for_and_then_no_more() -> None:
    members = Members(3).seeing()

    early = [members.edge(due=True, able=2), members.edge(able=2), members.edge()]
    members.each[2].hear("whole")
    late = [members.edge(), *members.edges(PATIENCE + 1, due=True, able=2)]

    assert early == ["nobody", "nobody", "all"]
    assert late == ["nobody"] * (PATIENCE + 1) + ["one"]


def test_after_a_share_failed_one_writes_alone_at_once_and_then_all_again() -> None:
    members = Members(2).seeing()
    shared_out = members.edge(due=True)

    members.each[1].hear("share_failed")
    after = members.edges(2)
    members.each[0].hear("whole")
    again = [members.edge(), members.edge(due=True)]

    assert shared_out == "all"
    assert after == ["nobody", "one"]
    assert again == ["nobody", "all"]


def test_a_share_that_fails_later_than_another_is_not_taken_for_the_one_alone() -> None:
    members = Members(3).seeing()
    members.edge(due=True)
    members.each[1].hear("share_failed")
    members.edges(2)

    members.each[2].hear("share_failed")
    late = members.edge()
    members.each[0].hear("whole")

    assert [late, members.edge(), members.edge(due=True)] == ["nobody", "nobody", "all"]


def test_what_is_not_whole_when_the_next_is_due_is_not_shared_out_again() -> None:
    members = Members(2).seeing()

    assert [members.edge(due=True), members.edge(), members.edge(due=True)] == [
        "all",
        "nobody",
        "one",
    ]


def test_when_the_members_change_meanwhile_they_save_anew() -> None:
    members = Members(3).seeing()
    members.edge(due=True)
    members.each = [Sharing(), *members.each[1:]]  # who spoke was replaced, and knows of nothing

    for one in members.each:
        one.regrouped()

    assert members.edges(2) == ["one", "nobody"]


def test_after_one_failed_alone_it_is_another_s_turn_until_the_members_change() -> None:
    members = Members(3)
    writers = []
    for _ in range(4):
        assert members.edge(due=True, able=0) == "one"
        writers.append(members.writer)
        members.each[members.writer].hear("alone_failed")
        members.edge()
        members.edges(PATIENCE, able=0)
    for one in members.each:
        one.regrouped()
    members.edges(PATIENCE, able=0)

    assert writers == [0, 1, 2, 0]
    assert (members.edge(due=True, able=0), members.writer) == ("one", 0)


@pytest.mark.parametrize("turn", [0, 1])
def test_one_whose_folder_hangs_does_not_keep_the_others_from_theirs(turn: int) -> None:
    members = Members(3).seeing()
    for place in range(turn):  # it could not write, and is well again
        members.edge(due=True)
        members.each[1].hear("share_failed")
        members.edges(2)
        members.each[place].hear("alone_failed")
        members.edges(2)
        members.edges(PATIENCE, able=0)
        members.edge(due=True)
        members.each[1].hear("whole")
        members.edge()
    members.hang = {turn}

    begun = members.edges(3 * PATIENCE, due=True)

    assert [who for who in begun if who != "nobody"] == ["one"]
    assert members.writer == turn + 1
    assert members.each[0].is_stuck() is False


def test_one_that_hangs_as_it_writes_alone_passes_it_on_until_it_is_through() -> None:
    members = Members(3)
    assert members.edge(due=True, able=0) == "one"
    members.hang = {0}
    writing = [one.writes_alone for one in members.each]

    members.each[0].hear("alone_failed")  # for it has waited for long enough
    begun = members.edges(PATIENCE + 2, due=True)
    passed_on = (members.writer, [one.writes_alone for one in members.each])
    members.hang = set()
    members.each[0].hear("whole")
    members.each[1].hear("whole")

    assert writing == [True, False, False]
    assert [who for who in begun if who != "nobody"] == ["one"]
    assert passed_on == (1, [False, True, False])
    assert members.edge() == "all"
    assert not any(one.writes_alone for one in members.each)


def test_one_that_takes_longer_alone_than_the_interval_is_shared_out_then() -> None:
    members = Members(2)
    assert members.edge(due=True, able=0) == "one"
    under_way = members.edges(50, due=True, free=False)
    members.each[0].hear("whole")

    assert under_way == ["nobody"] * 50
    assert members.edge(able=1) == "nobody"
    assert members.edge() == "all"


def test_what_was_heard_is_told_until_a_step_is_made() -> None:
    members = Members(2).seeing()
    members.edge(due=True)
    one = members.each[1]
    one.hear("whole")
    one.wishes(1, 2, due=False, able=True, free=True)  # a step that came to nothing

    assert one.wishes(1, 2, due=False, able=True, free=True)["whole"]


def test_what_is_heard_after_a_step_began_is_told_with_the_next() -> None:
    one = Sharing()
    before = one.wishes(0, 1, due=False, able=True, free=True)
    one.hear("whole")
    one.decide(summed([before], checkpoint=False), 1)

    assert one.wishes(0, 1, due=False, able=True, free=True)["whole"]


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.integers(0, 3),
            st.booleans(),
            st.booleans(),
            st.lists(st.sampled_from(["whole", "share_failed", "alone_failed"]), max_size=1),
        ),
        max_size=60,
    )
)
def test_all_decide_alike_and_what_is_due_is_begun(
    edges: list[tuple[bool, int, bool, bool, list[Outcome]]],
) -> None:
    members = Members(3)
    for due, able, free, page, heard in edges:
        members.edge(due=due, able=able, free=free, page=page)
        for outcome in heard:
            members.each[able % 3].hear(outcome)

    assert "one" in members.edges(PATIENCE + 1, due=True, able=0)
