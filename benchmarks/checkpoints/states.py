"""A state as a transformer with AdamW has it: weights and two moments in float32, of mixed sizes.

Imports torch; only contenders' own processes do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

State = dict[str, torch.Tensor]
WIDTH = 512
SHARES = ("weight", "exp_avg", "exp_avg_sq")  # that each parameter has in the state


def make(size: int, device: str = "cpu") -> State:
    """Tensors of about `size` bytes in all, with random content."""
    state: State = {}
    for name, shape in shapes(size):
        for share in SHARES:
            state[f"{share}.{name}"] = torch.randn(shape, device=device)
        state[f"step.{name}"] = torch.zeros((), device=device)
    return state


def shapes(size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """As many layers as fit, and a table of words that takes the rest."""
    wide = WIDTH
    layer = {
        "norm1": (wide,),
        "attention.in": (3 * wide, wide),
        "attention.in.bias": (3 * wide,),
        "attention.out": (wide, wide),
        "norm2": (wide,),
        "mlp.in": (4 * wide, wide),
        "mlp.in.bias": (4 * wide,),
        "mlp.out": (wide, 4 * wide),
    }
    each = sum(math.prod(shape) for shape in layer.values())
    parameters = size // (4 * len(SHARES))
    layers = max(0, parameters // each - 1)
    for number in range(layers):
        for name, shape in layer.items():
            yield f"layers.{number}.{name}", shape
    yield "words", ((parameters - layers * each) // wide, wide)


def change(state: State) -> None:
    """As an optimizer's step does: all of it."""
    with torch.no_grad():
        for tensor in state.values():
            tensor.add_(1.0)


def size_of(state: State) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def is_equal(state: State, loaded: State) -> bool:
    """Bit for bit, for there is no NaN in it."""
    return state.keys() == loaded.keys() and all(
        torch.equal(tensor, loaded[name]) for name, tensor in state.items()
    )
