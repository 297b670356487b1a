"""The same tree, whoever sums which of its branches."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from runtime.replica.plan import divide
from runtime.replica.tree import Branch, branches_of, collapse


def plus(left: float, right: float) -> float:
    return left + right


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=24), st.data())
def test_any_division_among_members_adds_up_to_the_same_bits(
    values: list[float], data: st.DataObject
) -> None:
    shards = len(values)
    everything: dict[Branch, float] = {(k, k + 1): v for k, v in enumerate(values)}
    alone = collapse(dict(everything), shards, plus)

    owner = [data.draw(st.integers(0, 4)) for _ in values]
    collected: dict[Branch, float] = {}
    for member in set(owner):
        mine = {(k, k + 1): v for k, v in enumerate(values) if owner[k] == member}
        collected |= collapse(mine, shards, plus)

    assert collapse(collected, shards, plus) == alone
    assert list(alone) == [(0, shards)]


@given(st.integers(1, 40), st.sets(st.integers(0, 39)), st.randoms())
def test_what_is_left_is_what_others_expect(
    shards: int, summed: set[int], order: random.Random
) -> None:
    mine = [shard for shard in summed if shard < shards]
    order.shuffle(mine)
    parts: dict[Branch, frozenset[int]] = {}
    for shard in mine:
        parts[shard, shard + 1] = frozenset([shard])
        collapse(parts, shards, frozenset.union)

    assert sorted(parts) == branches_of(mine, shards)
    assert all(parts[branch] == set(range(*branch)) for branch in parts)


def test_four_members_of_twelve_shards_send_one_branch_each() -> None:
    shares = divide(range(12), [0, 1, 2, 3])
    assert [len(branches_of(share, 12)) for share in shares.values()] == [1, 1, 1, 1]
