"""What the random generators of a process will draw next: of torch, Python, NumPy, and cards."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from runtime.replica.fsdp import shard_of

CURRENT = torch.device("cuda")  # the card that torch takes where none is named


def generators(model: object = None) -> dict[str, Any]:
    """What the generators of this process will draw next; of cards those of the model's."""
    version, numbers, gauss = random.getstate()
    state = {"torch": torch.get_rng_state(), "python": [version, torch.tensor(numbers), gauss]}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        of_cards = [torch.cuda.get_rng_state(card) for card in cards_of(model)]
        state["cuda"] = of_cards[0] if len(of_cards) == 1 else of_cards
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, torch.tensor(keys.tolist()), *rest]
    return state


def set_generators(state: Mapping[str, Any], model: object = None) -> None:
    """Let them draw what they would have drawn when `generators` was asked."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        given = state["cuda"]
        of_cards = given if isinstance(given, list) else [given]
        for card, numbers_of_card in zip(cards_of(model), of_cards, strict=False):
            torch.cuda.set_rng_state(numbers_of_card, card)
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys.tolist(), *rest))


def cards_of(model: object) -> list[torch.device]:
    """Which have its weights, in their order. If none is seen to, the current one, which is the
    model's only if the script has said so."""
    weights = model.parameters() if isinstance(model, torch.nn.Module) else ()
    numbers = {one.device.index for one in map(shard_of, weights) if one.is_cuda}
    return [torch.device("cuda", number) for number in sorted(numbers)] or [CURRENT]
