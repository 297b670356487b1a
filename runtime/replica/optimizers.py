"""Of which kind an optimizer's state is, and what it trains.

torch loads the state of any kind into any other, whose next step then fails, or trains with other
numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from runtime.checkpoint.manifest import shown

#: The one setting by whose value two kinds differ that have the same ones, Adam and AdamW.
_DECOUPLED = "decoupled_weight_decay"


def other_kind(theirs: Any, ours: Any) -> bool:
    """Whether these groups of weights, a state's and an optimizer's, are known to be of two kinds.
    Of what is not torch's own, and of another version's, nothing is known."""
    one, other = _kind_of(theirs), _kind_of(ours)
    return bool(one and other) and one != other


def in_words(groups: Any, kind: str = "") -> str:
    """What it is, for a message: the `kind`, or else what its groups of weights tell."""
    kind = kind or _kind_of(groups) or "none that this torch has"
    if not _are_groups(groups):
        return kind
    return f"{kind} with groups of {shown([len(one['params']) for one in groups])} tensors"


def torchs_own() -> list[type[Optimizer]]:
    """The optimizers that torch brings."""
    there = [one for one in vars(torch.optim).values() if isinstance(one, type)]
    return [one for one in there if issubclass(one, Optimizer) and one is not Optimizer]


@functools.cache
def _settings() -> dict[str, dict[str, Any]]:
    """What each of torch's own is set to unless told otherwise, by its name."""
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    return {one.__name__: one([weight]).defaults for one in torchs_own()}  # type: ignore[call-arg]


def _kind_of(groups: Any) -> str:
    """Which of torch's own has the settings of these groups; "" if none has. What schedules and
    scripts keep beside them does not count."""
    if not _are_groups(groups):
        return ""
    known = _settings()
    has = groups[0].keys() & {*chain(*known.values())}
    alike = [kind for kind, settings in known.items() if settings.keys() == has]
    decoupled = groups[0].get(_DECOUPLED)
    return min(alike, key=lambda kind: known[kind].get(_DECOUPLED) != decoupled, default="")


def _are_groups(given: Any) -> bool:
    """As torch's optimizers have them."""
    if not isinstance(given, Sequence) or not given:
        return False
    return all(isinstance(one, dict) and isinstance(one.get("params"), list) for one in given)


def groups_of(optimizer: Any) -> list[list[torch.Tensor]]:
    """The parameters that it trains, by group; none of one that is not made as torch's are."""
    groups = getattr(optimizer, "param_groups", ())
    return [group["params"] for group in groups] if _are_groups(groups) else []
