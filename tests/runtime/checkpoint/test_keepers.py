"""Which members' nodes keep the states of which others."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.checkpoint import peer
from runtime.checkpoint.peer import Keepers, Place, holder_for, in_turn
from tests.runtime.checkpoint.holding import label


def members(*domains: str) -> list[dict[str, Any]]:
    return [
        {"replica": n, "holders": [Place(f"h{n}:1", domain).describe()] if domain else [{}]}
        for n, domain in enumerate(domains)
    ]


@pytest.mark.parametrize(
    ("domains", "keepers"),
    [
        (("a/1", "a/2", "a/3"), [1, 2, 0]),  # all equally far: the next one
        (("a/1", "a/2", "b/3", "b/4"), [2, 2, 0, 0]),  # another rack before another node
        (("a/1", "a/1", "a/2"), [2, 2, 0]),  # never the same node if there is another
        (("a/1", "a/1"), [1, 0]),  # there is none
        (("a/1",), [0]),
        (("a/1", "", "a/3"), [2, 2, 0]),  # one has no holder
    ],
)
def test_the_farthest_member_keeps_it(domains: tuple[str, ...], keepers: list[int]) -> None:
    there = members(*domains)

    found = [holder_for(there, n, 0, domain) for n, domain in enumerate(domains)]
    assert [one and one.address for one in found if one] == [f"h{n}:1" for n in keepers]


def test_of_a_job_in_two_halls_no_holder_is_for_more_than_a_few() -> None:
    domains = [f"hall-{n // 256}/rack-{n // 32}/{n}" for n in range(512)]
    there = members(*domains)

    found = [holder_for(there, n, 0, domain) for n, domain in enumerate(domains)]
    apart = [one.domain[:6] != mine[:6] for one, mine in zip(found, domains, strict=True) if one]

    assert apart == [True] * 512
    assert set(Counter(found).values()) == {peer.SHARED_BY}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("cdef")), min_size=2, max_size=12))
def test_of_parts_no_node_keeps_more_than_one_and_another_group_does_where_it_can(
    racks: list[tuple[str, str]],
) -> None:
    nodes = [Place(f"h{n}:1", f"{hall}/{rack}/{n}") for n, (hall, rack) in enumerate(racks)]
    groups = [hall if len({hall for hall, _ in racks}) > 1 else rack for hall, rack in racks]
    group_of = dict(zip(nodes, groups, strict=True))
    largest = max(map(groups.count, groups))

    keepers = {node: in_turn(nodes, node) for node in nodes}
    together = [one for one in nodes if group_of[keepers[one][0]] == group_of[one]]

    assert {keeper for keeper, *_ in keepers.values()} == {*nodes}
    assert all({node, *found} == {*nodes} for node, found in keepers.items())
    assert all(node not in found for node, found in keepers.items())
    assert not together or largest > len(nodes) / 2


def test_of_several_that_could_keep_it_the_next_one_does_if_the_first_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer, "LOST_S", 0.0)
    keepers = Keepers(0, "a/0")
    keepers.follow([Place("h1:1", "a/1"), Place("h2:1", "a/2")])
    there = []
    for gone in ("h1:1", "h2:1"):
        there += [keepers.failed(gone), keepers.failed(gone), address_of(keepers)]

    assert there == [False, True, "h2:1", False, True, "h1:1"]  # which may be back


def test_where_nobody_has_a_holder_nobody_keeps_it() -> None:
    assert holder_for(members("", ""), 0, 0, "a/1") is None


def keepers_of(*domains: str) -> Keepers:
    """Of the first of these members."""
    keepers = Keepers(0, domains[0])
    keepers.meet(members(*domains), 0)
    return keepers


def address_of(keepers: Keepers) -> str:
    assert keepers.keeper is not None
    return keepers.keeper.address


def test_a_holder_to_which_saves_fail_for_long_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer, "LOST_S", 0.0)
    keepers = keepers_of("a/1", "a/2", "a/3")

    assert [keepers.failed("h1:1"), keepers.failed("h1:1")] == [False, True]
    assert address_of(keepers) == "h2:1"


def test_a_holder_that_is_back_soon_keeps_on(monkeypatch: pytest.MonkeyPatch) -> None:
    keepers = keepers_of("a/1", "a/2", "a/3")
    at_once = [keepers.failed("h1:1"), keepers.failed("h1:1")]
    monkeypatch.setattr(peer, "LOST_S", 0.0)
    keepers.kept(time.monotonic())

    assert [*at_once, keepers.failed("h1:1")] == [False] * 3
    assert address_of(keepers) == "h1:1"


def test_who_was_passed_over_is_asked_again_where_nobody_else_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer, "LOST_S", 0.0)
    keepers = keepers_of("a/1", "a/2")
    asked = []
    for _ in range(3):
        asked.append(address_of(keepers))
        keepers.failed(asked[-1])
        keepers.failed(asked[-1])

    assert asked == ["h1:1", "h0:1", "h1:1"]


def test_who_was_passed_over_is_asked_again_once_the_members_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer, "LOST_S", 0.0)
    keepers = keepers_of("a/1", "a/2", "a/3")
    keepers.failed("h1:1")
    keepers.failed("h1:1")
    keepers.meet(members("a/1", "a/2"), 0)

    assert address_of(keepers) == "h1:1"


def test_a_label_is_newer_by_its_epoch_first() -> None:
    assert replace(label(3), epoch=2).age > label(7).age
