"""In which order shards are added up: one fixed binary tree over all of them, whoever sums what.

Floating-point addition is not associative, so the same tree gives the same bits on any members.
Pure functions: what is added need only have a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping
from typing import TypeVar

T = TypeVar("T")
#: A branch of the tree: the shards from the first to before the second number.
Branch = tuple[int, int]


def halves(branch: Branch) -> tuple[Branch, Branch] | None:
    """What is added to make this branch; None for a single shard."""
    first, end = branch
    if end - first == 1:
        return None
    middle = first + (end - first) // 2
    return (first, middle), (middle, end)


def branches_of(summed: Collection[int], shards: int) -> list[Branch]:
    """The largest branches that these shards make up whole, in their order."""

    def within(branch: Branch) -> list[Branch]:
        if all(shard in summed for shard in range(*branch)):
            return [branch]
        parts = halves(branch)
        return [] if parts is None else within(parts[0]) + within(parts[1])

    return within((0, shards))


def collapse(
    parts: MutableMapping[Branch, T], shards: int, add: Callable[[T, T], T]
) -> MutableMapping[Branch, T]:
    """Add up every two halves that are both there, as far as it goes, in place.

    A half is taken out as it is added, so that what is left is what `branches_of` names.
    """

    def whole(branch: Branch) -> bool:
        if branch in parts:
            return True
        both = halves(branch)
        if both is None or not all([whole(both[0]), whole(both[1])]):
            return False
        parts[branch] = add(parts.pop(both[0]), parts.pop(both[1]))
        return True

    whole((0, shards))
    return parts
