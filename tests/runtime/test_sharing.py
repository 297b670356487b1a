"""Who writes the checkpoint in the folder of all: as many members see it, and none otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.replica.gradients import Wishes
from runtime.replica.sharing import PATIENCE, Sharing


@dataclass
class Members:
    """Some that decide together, the first of which speaks."""

    count: int
    each: list[Sharing] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.each = [Sharing() for _ in range(self.count)]

    def edge(self, *, due: bool = False, able: int | None = None, page: bool = False) -> str:
        """One step and its edge; `able` of them could write their share."""
        able = self.count if able is None else able
        said = [
            one.wishes(speaks=place == 0, due=due, able=place < able)
            for place, one in enumerate(self.each)
        ]
        decided = {one.decide(summed(said, page), self.count) for one in self.each}
        assert len(decided) == 1
        return decided.pop()


def summed(said: list[dict[str, Any]], checkpoint: bool) -> Wishes:
    """As the all-reduce adds them up."""
    return Wishes(
        checkpoint=checkpoint,
        shared=any(one["shared"] for one in said),
        share=sum(one["share"] for one in said),
        alone=any(one["alone"] for one in said),
        outcome=sum(one["outcome"] for one in said),
    )


def test_the_first_is_written_by_one_alone_and_the_next_by_all() -> None:
    members = Members(3)

    first = members.edge(due=True, able=0)
    members.each[0].hear(1)
    later = [members.edge(), members.edge(due=True)]

    assert (first, later) == ("one", ["nobody", "all"])


def test_one_that_cannot_yet_is_waited_for_and_then_no_more() -> None:
    members = Members(3)
    members.edge()

    early = [members.edge(due=True, able=2), members.edge(able=2), members.edge()]
    members.each[2].hear(1)
    members.edge()
    late = [members.edge(due=True, able=2) for _ in range(PATIENCE + 1)]

    assert early == ["nobody", "nobody", "all"]
    assert late == ["nobody"] * PATIENCE + ["one"]


def test_after_a_share_failed_one_writes_alone_at_once_and_then_all_again() -> None:
    members = Members(2)
    members.edge()
    shared_out = members.edge(due=True)

    members.each[1].hear(-1)
    after = [members.edge(), members.edge()]
    members.each[0].hear(1)
    again = [members.edge(), members.edge(due=True)]

    assert shared_out == "all"
    assert after == ["nobody", "one"]
    assert again == ["nobody", "all"]


def test_what_is_not_whole_when_the_next_is_due_is_not_shared_out_again() -> None:
    members = Members(2)
    members.edge()

    assert [members.edge(due=True), members.edge(), members.edge(due=True)] == [
        "all",
        "nobody",
        "one",
    ]


def test_when_a_member_is_lost_meanwhile_the_others_save_anew() -> None:
    members = Members(3)
    members.edge()
    members.edge(due=True)
    del members.each[0]  # who spoke
    members.count = 2

    for one in members.each:
        one.lost()

    assert [members.edge(), members.edge()] == ["all", "nobody"]


def test_what_was_heard_is_told_until_a_step_is_made() -> None:
    members = Members(2)
    members.edge()
    members.edge(due=True)
    members.each[1].hear(1)
    members.each[1].wishes(speaks=False, due=False, able=True)  # a step that came to nothing

    again = members.each[1].wishes(speaks=False, due=False, able=True)

    assert again["outcome"] == 1


def test_what_is_heard_after_a_step_began_is_told_with_the_next() -> None:
    one = Sharing()
    before = one.wishes(speaks=True, due=False, able=True)
    one.hear(1)
    one.decide(summed([before], checkpoint=False), 1)

    assert one.wishes(speaks=True, due=False, able=True)["outcome"] == 1


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 3), st.booleans(), st.sampled_from((None, -1, 1))),
        max_size=60,
    )
)
def test_all_decide_alike_and_what_is_due_is_begun(
    edges: list[tuple[bool, int, bool, int | None]],
) -> None:
    members = Members(3)
    for due, able, page, heard in edges:
        members.edge(due=due, able=able, page=page)
        for outcome in [] if heard is None else [heard]:
            members.each[able % 3].hear(outcome)

    assert "nobody" in {members.edge(due=True, able=0) for _ in range(PATIENCE + 1)} | {"nobody"}
    assert members.edge(due=True, able=0) == "one"
