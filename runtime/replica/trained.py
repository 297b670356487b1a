"""Whether all that the script trains is summed. What is not, each replica would train alone: they
would drift apart, and nothing would show it.

What is summed is settled as the group is made, for all members must agree on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from runtime.replica.fsdp import is_sharded, shard_of
from runtime.replica.optimizers import groups_of

_DRIFT = (
    "only what required grad as ReplicaGroup was made is summed, and the replicas would drift apart"
)
_UNFROZEN = (
    "was frozen as ReplicaGroup was made, and is trained now",
    "Let it require grad before, in a group of the optimizer's parameters whose learning rate is 0 "
    "until a schedule raises it; or end the job, and start it anew with it unfrozen",
)
_CHANGED = (
    "was changed while a step's shards were computed, as by an optimizer that steps in a hook of "
    "backward, by Embedding(max_norm=...), or by an average made in forward: each replica changes "
    "its own, by its own shards, and they would drift apart. Leave the step to ReplicaGroup, and "
    "change weights in its after_step, between two of them"
)
_WRITTEN = (
    "was written between two steps. If it is not as it was before, no replica that makes up for "
    "steps of others, as each newcomer and spare does, holds the same: it does not run the loop, "
    "nor on_step. Change weights in after_step, an argument of ReplicaGroup, which all call after "
    "each step"
)
_NOT_GIVEN = (
    "has a gradient that backward did not give it: give it all losses of the shard added up; for "
    "anything else there is torch.autograd.grad, or zero_grad() afterwards"
)
_ANOTHER = (
    "came to the model after ReplicaGroup was made, or is another object than it was then",
    "Give the model all its parameters before, and change their values in place (copy_, or "
    "load_state_dict without assign)",
)


class Trained:
    """The weights that are summed, the model's others, and the optimizers' groups."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[Any]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._groups = [*map(_sizes_of, optimizers)]
        self._at_first = [*model.parameters()]  # kept, so that nothing else ever has their ids
        self._summed = {id(one) for one in self._at_first if one.requires_grad}
        self._counted = [one for one in self._at_first if not one.is_inference()]
        self._divided = any(map(is_sharded, self._counted))
        self._before: list[int] | None = None
        self._at_edge: list[int] | None = None
        self._told = False
        self._note()

    def at_edge(self) -> None:
        """A step was applied, or a state put back: until the next begins all weights stay as they
        are."""
        self._at_edge = None if self._told else self._changes()

    def begin(self) -> str:
        """A shard is about to be computed: from a step's first one on all weights stay as they
        are. What was written since the last edge, with the remedy, once; "" if nothing was."""
        if self._before is not None:
            return ""
        self._before = self._changes()
        before, self._at_edge = self._at_edge, None
        if before is None or before == self._before:
            return ""
        self._told = True
        return f"the parameter {self._named(before, self._before)} {_WRITTEN}"

    def end(self) -> None:
        """The step was made, or given up."""
        self._before = None

    def flaw(self) -> str:
        """What is trained and not summed, with the remedy; "" if all is well. For each step: it
        takes some microseconds."""
        if self._before is not None and (now := self._changes()) != self._before:
            return f"the parameter {self._named(self._before, now)} {_CHANGED}"
        if self._is_as_noted():
            return ""
        named = self._model.named_parameters()
        stray = [(name, one) for name, one in named if self._strays(one)]
        if stray:
            (name, first), more = stray[0], len(stray) - 1
            was_there = any(first is one for one in self._at_first)
            what, remedy = _UNFROZEN if was_there else _ANOTHER
            others = f" (like {more} more)" if more else ""
            return f"the parameter {name}{others} {what}: {_DRIFT}. {remedy}"
        for place, before in enumerate(self._groups):
            now = _sizes_of(self._optimizers[place])
            if now != before:
                return (
                    f"optimizer {place} has groups of {now} tensors, and had {before} as "
                    "ReplicaGroup was made: no newcomer and no later start of the job could take "
                    "its state. Give it all groups before, with a learning rate of 0 for what a "
                    "schedule is to raise later"
                )
        self._note()  # what came trains nothing
        return ""

    def not_given(self) -> str:
        """Which parameter has a gradient, as none has but within backward, with the remedy; "" if
        none has, or only zeros, as zero_grad may leave them."""
        if all(one.grad is None for one in self._at_first):
            return ""
        named = self._model.named_parameters()
        name = next((n for n, one in named if one.grad is not None and _is_any(one.grad)), "")
        return f"the parameter {name} {_NOT_GIVEN}" if name else ""

    def _strays(self, weight: torch.Tensor) -> bool:
        """Also one that does not require grad any more, but has one that would be applied."""
        return id(weight) not in self._summed and (weight.requires_grad or weight.grad is not None)

    def _named(self, before: list[int], now: list[int]) -> str:
        """Those that were written between these two."""
        were = zip(self._counted, before, now, strict=True)
        changed = {id(one) for one, first, last in were if first != last}
        named = self._model.named_parameters()
        name = next((n for n, one in named if id(one) in changed), "of another object")
        return f"{name} (like {len(changed) - 1} more)" if len(changed) > 1 else name

    def _changes(self) -> list[int]:
        """How often each weight was changed in place."""
        parts = map(shard_of, self._counted) if self._divided else self._counted
        return [one._version for one in parts]

    def _note(self) -> None:
        self._modules = [*self._model.modules()]
        weights = [*self._model.parameters()]
        self._known = {id(one) for one in (None, *self._modules, *weights)}
        self._frozen = [one for one in weights if id(one) not in self._summed]

    def _is_as_noted(self) -> bool:
        known = self._known
        return (
            not any(one.requires_grad or one.grad is not None for one in self._frozen)
            and all(
                id(part) in known
                for module in self._modules
                for part in chain(module._parameters.values(), module._modules.values())
            )
            and [*map(_sizes_of, self._optimizers)] == self._groups
        )


def stranger(model: torch.nn.Module, optimizers: Sequence[Any]) -> str:
    """What an optimizer trains that is not the model's, with the remedy; "" if there is nothing."""
    ours = {id(one) for one in model.parameters()}
    for place, optimizer in enumerate(optimizers):
        for weight in chain.from_iterable(groups_of(optimizer)):
            if weight.requires_grad and id(weight) not in ours:
                return (
                    f"optimizer {place}, {type(optimizer).__name__}, trains a tensor of shape "
                    f"{tuple(weight.shape)} that is no parameter of the model: it would be neither "
                    "summed over the replicas nor saved. Give ReplicaGroup one module with all "
                    "that is trained, as torch.nn.ModuleList([model, loss]), and make the "
                    "optimizer from its parameters, after fully_shard"
                )
    return ""


def _is_any(gradient: torch.Tensor) -> bool:
    return gradient.is_sparse or bool(shard_of(gradient).any())


def _sizes_of(optimizer: Any) -> list[int]:
    return [len(weights) for weights in groups_of(optimizer)]
