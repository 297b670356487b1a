"""What differs between two checkpoints, tensor by tensor, however many ranks saved them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

#: The keys that lead to a leaf; None after them for what their kinds are.
_Place = tuple[str | None, ...]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One tensor or value that is not the same in both."""

    name: str
    #: "left" or "right": only there; "shape", "dtype"; "values"
    what: str
    left: str = ""
    right: str = ""
    #: of a tensor whose values differ: how many elements, and the largest difference
    elements: int = 0
    of: int = 0
    largest: float = 0.0

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.what in ("left", "right"):
            return f"{self.name}: only in the {self.what} one"
        if self.of:
            share = f"{self.elements:,} of {self.of:,} elements"
            return f"{self.name}: {share} differ, by {self.largest:.3g} at most"
        return f"{self.name}: {self.left} -> {self.right}"


def differences(left: Any, right: Any) -> Iterator[Difference]:
    """Of two nested states, in the order of their names."""
    ours, theirs = dict(_leaves(left)), dict(_leaves(right))
    for place in sorted(ours.keys() | theirs.keys(), key=_name_of):
        name = _name_of(place)
        if place not in theirs:
            yield Difference(name=name, what="left")
        elif place not in ours:
            yield Difference(name=name, what="right")
        else:
            yield from _compared(name, ours[place], theirs[place])


def unchanged(left: Any, right: Any) -> list[str]:
    """The model's tensors that are the same to the bit: between two steps, those that are not
    trained, or are trained and not saved."""
    ours, theirs = dict(_leaves(left)), dict(_leaves(right))
    return [
        _name_of(place)
        for place in sorted(ours.keys() & theirs.keys(), key=_name_of)
        if _is_weight(place)
        and isinstance(ours[place], torch.Tensor)
        and not [*_compared("", ours[place], theirs[place])]
    ]


def _is_weight(place: _Place) -> bool:
    """Of the model, or of a rank's; see `interchange.comparable_state`."""
    first, second, *_ = (*place, None, None)
    return first == "model" or (str(first).startswith("rank ") and second == "model")


def _leaves(state: Any, place: _Place = ()) -> Iterator[tuple[_Place, Any]]:
    """Of what holds others also its kind and that of its keys: it may be empty, or a tuple here and
    a list there, and 1 be the key here and "1" there."""
    if isinstance(state, dict):
        texts = Counter(map(str, state))
        written = [str(key) if texts[str(key)] == 1 else f"{key!r}" for key in state]
        items = [*zip(written, state.values(), strict=True)]
        kinds = sorted({type(key).__name__ for key in state})
        yield (*place, None), f"dict by {', '.join(kinds) or 'nothing'}"
    elif isinstance(state, list | tuple):
        items = [(str(number), item) for number, item in enumerate(state)]
        yield (*place, None), type(state).__name__
    else:
        yield place, state
        return
    for key, item in items:
        yield from _leaves(item, (*place, key))


def _name_of(place: _Place) -> str:
    name = ".".join(key for key in place if key is not None)
    return f"{name} (kind)" if place and place[-1] is None else name


def _compared(name: str, left: Any, right: Any) -> Iterator[Difference]:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        # As they are written: NaN is equal to itself, and -0.0 is not 0.0.
        if type(left) is not type(right) or repr(left) != repr(right):
            yield Difference(name=name, what="values", left=repr(left), right=repr(right))
    elif left.dtype != right.dtype:
        yield Difference(name=name, what="dtype", left=str(left.dtype), right=str(right.dtype))
    elif left.shape != right.shape:
        shapes = [str([*one.shape]) for one in (left, right)]
        yield Difference(name=name, what="shape", left=shapes[0], right=shapes[1])
    else:
        # By their bits: NaN is equal to itself, and -0.0 is not 0.0.
        bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in (left, right)]
        if left.numel() and not torch.equal(*bits):
            width = left.element_size()
            differ = (bits[0].view(-1, width) != bits[1].view(-1, width)).any(1)
            ours, theirs = (one.reshape(-1)[differ] for one in (left, right))
            yield Difference(
                name=name, what="values", elements=int(differ.sum()), of=left.numel(),
                largest=_largest_gap(ours, theirs),
            )  # fmt: skip


def _largest_gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Between elements at the same place, of which there are some."""
    if ours.dtype in (torch.int64, torch.uint64):  # a float has not all of their digits
        pairs = zip(ours.tolist(), theirs.tolist(), strict=True)
        return float(max(abs(left - right) for left, right in pairs))
    wide = torch.complex128 if ours.is_complex() else torch.float64
    return float((ours.to(wide) - theirs.to(wide)).abs().max())
