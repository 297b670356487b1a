"""What differs between two checkpoints, tensor by tensor, however many ranks saved them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch


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
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            yield Difference(name=name, what="left")
        elif name not in ours:
            yield Difference(name=name, what="right")
        else:
            yield from _compared(name, ours[name], theirs[name])


def unchanged(left: Any, right: Any) -> list[str]:
    """The model's tensors that are the same to the bit: between two steps, those that are not
    trained, or are trained and not saved."""
    ours, theirs = dict(_leaves(left)), dict(_leaves(right))
    return [
        name
        for name in sorted(ours.keys() & theirs.keys())
        if name.startswith("model.")
        and isinstance(ours[name], torch.Tensor)
        and not [*_compared(name, ours[name], theirs[name])]
    ]


def _leaves(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Of what holds others also its kind and that of its keys: it may be empty, or a tuple here and
    a list there, and 1 be the key here and "1" there."""
    if isinstance(state, dict):
        items = [(str(key), item) for key, item in state.items()]
        kinds = sorted({type(key).__name__ for key in state})
        yield f"{name} (kind)", f"dict by {', '.join(kinds) or 'nothing'}"
    elif isinstance(state, list | tuple):
        items = [(str(number), item) for number, item in enumerate(state)]
        yield f"{name} (kind)", type(state).__name__
    else:
        yield name, state
        return
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}" if name else key)


def _compared(name: str, left: Any, right: Any) -> Iterator[Difference]:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        same = type(left) is type(right) and (left == right or repr(left) == repr(right))
        if not same:
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
            wide = torch.complex128 if left.is_complex() else torch.float64
            ours, theirs = (one.reshape(-1)[differ].to(wide) for one in (left, right))
            gaps = (ours - theirs).abs()
            yield Difference(
                name=name, what="values", elements=int(differ.sum()), of=left.numel(),
                largest=float(gaps.max()),
            )  # fmt: skip
