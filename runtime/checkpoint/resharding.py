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

_Keys = tuple[Any, ...]
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

    def __init__(
        self, name: str, of: dict[str, Any], like: torch.Tensor, rank: int, ranks: int
    ) -> None:
        """Raises Damaged if `like`, one of the parts, is none of such a tensor."""
        self._name, self._of, self._dtype = name, of, like.dtype
        self._demand_fit(of, like)
        self._dim = int(of["dim"])
        self._low, self._high = span(of["shape"][self._dim], rank, ranks)
        shape = [*of["shape"]]
        shape[self._dim] = self._high - self._low
        self.tensor = torch.empty(shape, dtype=like.dtype)
        self._at = 0  # up to here the tensor has been seen

    def add(self, of: dict[str, Any], part: torch.Tensor) -> None:
        """The next rank's. Raises Damaged if it is of another tensor."""
        self._demand_fit(of, part)
        size = part.shape[self._dim] if part.dim() else 0
        if of != self._of or self._at + size > of["shape"][self._dim]:
            raise Damaged(
                f"the ranks hold parts of different tensors of {self._name}: {self._of} and {of}"
            )
        low, high = max(self._low, self._at), min(self._high, self._at + size)
        if low < high:
            into = self.tensor.narrow(self._dim, low - self._low, high - low)
            into.copy_(part.narrow(self._dim, low - self._at, high - low))
        self._at += size

    def _demand_fit(self, of: dict[str, Any], part: torch.Tensor) -> None:
        """Else torch would stretch one, or round its numbers. Who has nothing of it may have it in
        no dimension."""
        nothing = part.numel() == 0 and part.dim() <= 1
        alike = part.dtype == self._dtype and _is_cut_of(of, [*part.shape])
        if not (alike or (nothing and _is_cut_of(of, None))):
            raise Damaged(
                f"{self._name} is said to be a part of {of} in {self._dtype}, and is "
                f"{[*part.shape]} in {part.dtype}"
            )

    def whole(self, *, marked: bool) -> Any:
        """As a state has it. Raises Damaged unless all of it has been seen."""
        if self._at != self._of["shape"][self._dim]:
            raise Damaged(f"of {self._name}, {self._of['shape']}, only {self._at} were saved")
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
    cuts = {
        keys: _Cut(_name_of(keys), one[MARK], one["part"], rank, ranks)
        for keys, one in _divided(state)
    }
    for source in range(saved):
        given = state if source == own else state_of(read(source))
        parts = dict(_divided(given))
        if odd := [*map(_name_of, parts.keys() ^ cuts.keys())]:
            raise Damaged(f"of ranks {own} and {source} only one saved a part of {min(odd)}")
        for keys, one in parts.items():
            cuts[keys].add(one[MARK], one["part"])
    left = iter(cuts.values())
    return replaced(
        state, lambda value: next(left).whole(marked=ranks > 1) if is_part(value) else value
    )


def has_parts(state: Any) -> bool:
    """Whether it was divided, if only among one rank."""
    return any(True for _ in _divided(state))


def _divided(state: Any, keys: _Keys = ()) -> Iterator[tuple[_Keys, dict[str, Any]]]:
    """What is a part of something, in its order, and the keys that lead there."""
    if is_part(state):
        yield keys, state
    elif isinstance(state, dict):
        for key, item in state.items():
            yield from _divided(item, (*keys, key))
    elif isinstance(state, list | tuple):
        for place, item in enumerate(state):
            yield from _divided(item, (*keys, place))


def _name_of(keys: _Keys) -> str:
    return ".".join(map(str, keys))


def _is_cut_of(of: dict[str, Any], shape: list[int] | None) -> bool:
    """Whether this describes a tensor that is divided along a dimension, of which a part may have
    such a shape. None: it may have any."""
    whole, dim = of.get("shape"), of.get("dim")
    if not isinstance(whole, list) or not all(type(size) is int and size >= 0 for size in whole):
        return False
    if type(dim) is not int or not 0 <= dim < len(whole):
        return False
    return shape is None or [*shape[:dim], whole[dim], *shape[dim + 1 :]] == whole
