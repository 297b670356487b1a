"""A state saved by a replica of so many ranks, taken up by one of another number of ranks.

What was divided is put together along its dimension, in the order of the ranks, and cut anew. One
part is read after another, so that a rank needs the memory of its
own part and of one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from runtime.image import Damaged, Staged
from runtime.snapshot import state_of

MARK = "part_of"  # the key under which a saved part says what it is a part of
#: The key of a state of a `WholeJob`: how its ranks' parts belong together only its script knows.
AS_SAVED = "as_saved"


def is_part(value: Any) -> bool:
    """Whether this is a saved part of a divided tensor: a dict of it, and of what it is a part."""
    return (
        isinstance(value, dict)
        and value.keys() == {MARK, "part"}
        and isinstance(value[MARK], dict)
        and isinstance(value["part"], torch.Tensor)
    )


def replaced(value: Any, by: Callable[[Any], Any]) -> Any:
    """A nested value in which each part was replaced that `by` gives another for."""
    other = by(value)
    if other is not value:
        return other
    if isinstance(value, dict):
        return {key: replaced(item, by) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(replaced(item, by) for item in value)
    if isinstance(value, list):
        return [replaced(item, by) for item in value]
    return value


def span(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Which of so many rows `fully_shard` gives to a rank, as torch.chunk cuts them."""
    most = -(-size // ranks)
    return min(rank * most, size), min((rank + 1) * most, size)


class _Cut:
    """Our part of one divided tensor, filled from the parts that were saved."""

    def __init__(self, of: dict[str, Any], like: torch.Tensor, rank: int, ranks: int) -> None:
        self._of = of
        self._dim = int(of["dim"])
        self._low, self._high = span(of["shape"][self._dim], rank, ranks)
        shape = [*of["shape"]]
        shape[self._dim] = self._high - self._low
        self.tensor = torch.empty(shape, dtype=like.dtype)
        self._at = 0  # up to here the tensor has been seen

    def add(self, of: dict[str, Any], part: torch.Tensor) -> None:
        """The next rank's. Raises Damaged if it is of another tensor."""
        size = part.shape[self._dim] if part.dim() else 0
        if of != self._of or self._at + size > of["shape"][self._dim]:
            raise Damaged(f"its ranks hold parts of different tensors: {self._of} and {of}")
        low, high = max(self._low, self._at), min(self._high, self._at + size)
        if low < high:
            into = self.tensor.narrow(self._dim, low - self._low, high - low)
            into.copy_(part.narrow(self._dim, low - self._at, high - low))
        self._at += size

    def whole(self, *, marked: bool) -> Any:
        """As a state has it. Raises Damaged unless all of it has been seen."""
        if self._at != self._of["shape"][self._dim]:
            raise Damaged(f"of a tensor of {self._of['shape']} only {self._at} were saved")
        return {MARK: self._of, "part": self.tensor} if marked else self.tensor


def resharded(read: Callable[[int], Staged], saved: int, rank: int, ranks: int) -> Any:
    """The part of rank `rank` of `ranks` of a state that `saved` ranks have saved, of which `read`
    gives each its part. Raises Damaged if these do not fit together."""
    # What is not divided is alike on all ranks, but the running statistics of their own samples.
    own = rank % saved
    state = state_of(read(own))
    if isinstance(state, dict) and AS_SAVED in state and saved > 1:
        raise Damaged(
            f"its {saved} ranks divided the model as only their script knows; nothing but a "
            f"runtime.WholeJob of {saved} ranks can read it; to see what each has: python -m "
            "runtime.checkpoint inspect STATE_DIR"
        )
    cuts = [_Cut(one[MARK], one["part"], rank, ranks) for one in _divided(state)]
    for source in range(saved):
        given = state if source == own else state_of(read(source))
        parts = [*_divided(given)]
        if len(parts) != len(cuts):
            raise Damaged(f"rank {source} saved {len(parts)} divided tensors, {own} {len(cuts)}")
        for cut, one in zip(cuts, parts, strict=True):
            cut.add(one[MARK], one["part"])
    left = iter(cuts)
    return replaced(
        state, lambda value: next(left).whole(marked=ranks > 1) if is_part(value) else value
    )


def has_parts(state: Any) -> bool:
    """Whether it was divided, if only among one rank."""
    return any(True for _ in _divided(state))


def _divided(state: Any) -> Iterator[dict[str, Any]]:
    """What is a part of something, in its order."""
    if is_part(state):
        yield state
    elif isinstance(state, dict):
        for item in state.values():
            yield from _divided(item)
    elif isinstance(state, list | tuple):
        for item in state:
            yield from _divided(item)
