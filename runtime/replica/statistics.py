"""Running statistics of a model's normalisation layers: changed by forward, hence by who computes.

Each shard begins from the statistics of the last edge; what it changes is summed over all shards
like a gradient, and their mean is applied at the commit. So all members hold the same, whoever
computed, and a shard that is computed twice changes nothing.
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _NormBase


class RunningStatistics:
    """The running mean, variance and count of every layer that keeps them, as one flat vector."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        layers = [m for m in model.modules() if isinstance(m, _NormBase)]
        found = [b for layer in layers for b in layer.buffers(recurse=False)]
        self._tensors = [b for b in found if b is not None]
        self._tracked = {
            name
            for name, b in model.named_buffers(remove_duplicate=False)
            if any(b is one for one in self._tensors)
        }
        self.size = sum(tensor.numel() for tensor in self._tensors)
        self._edge = self._read()
        self._others: dict[str, torch.Tensor] | None = None  # as they were after the first step
        self._begun = self._looked = False

    def begin(self) -> None:
        """A shard begins: from what the last edge left."""
        self._begun = True
        self._write(self._edge)

    def change(self) -> torch.Tensor:
        """What the shard changed."""
        return self._read() - self._edge

    def apply(self, mean_change: torch.Tensor) -> None:
        """The step is committed: all members change alike.

        Raises RuntimeError, once two steps were computed, as `restore` does.
        """
        if self._tensors:
            self._put(self._edge + mean_change.to(self._edge.device))
            self._edge = self._read()  # as it is stored, so that a newcomer begins from the same
        if self._others is None:
            self._note_others()
        elif self._begun and not self._looked:
            self._demand_others()
            self._looked = True
        self._begun = False

    def changed_at_edge(self) -> None:
        """All members changed buffers alike, by what the script does after each step."""
        self._edge = self._read()
        self._note_others()

    def reload(self) -> None:
        """The model was loaded: what is there is the edge."""
        self._edge = self._read()
        self._others = None

    def at_edge(self) -> dict[str, torch.Tensor]:
        """By the buffers' names, as the last edge left them; changes nothing."""
        parts = torch.split(self._edge, [tensor.numel() for tensor in self._tensors])
        edges = {id(one): part for one, part in zip(self._tensors, parts, strict=True)}
        made: dict[int, torch.Tensor] = {}
        for buffer in self._tensors:
            values = edges[id(buffer)].view_as(buffer)
            exact = values if buffer.is_floating_point() else values.round()
            made[id(buffer)] = exact.to(buffer.dtype)
        # By all its names: a state has a layer that is used twice by both, and ties them.
        every = self._model.named_buffers(remove_duplicate=False)
        return {name: made[id(buffer)] for name, buffer in every if id(buffer) in made}

    def restore(self) -> None:
        """Forget what shards changed since the last edge.

        Raises RuntimeError if forward changes a buffer of another kind of layer.
        """
        self._write(self._edge)
        self._demand_others()

    def forget(self) -> None:
        """What shards changed since the last edge is not wanted."""
        if self._begun:
            self._write(self._edge)
        self._begun = False

    def _note_others(self) -> None:
        self._others = {name: one.clone() for name, one in self._untracked().items()}

    def _demand_others(self) -> None:
        for name, now in self._untracked().items():
            before = (self._others or {}).get(name, now)
            if before is not now and not _same_bytes(before, now):
                raise RuntimeError(
                    f"forward changes the buffer {name!r}, or the loop does, which would make the "
                    "replicas differ: change it in after_step, keep it in a normalisation layer or "
                    "out of the model, or, if it is made anew from nothing, register it with "
                    "persistent=False"
                )

    def _untracked(self) -> dict[str, torch.Tensor]:
        """But those that no state has."""
        left_out = {
            f"{prefix}.{name}".lstrip(".")
            for prefix, module in self._model.named_modules()
            for name in module._non_persistent_buffers_set
        }
        known = self._tracked | left_out
        return {name: one for name, one in self._model.named_buffers() if name not in known}

    def _read(self) -> torch.Tensor:
        if not self._tensors:
            return torch.zeros(0)
        return torch.cat([tensor.detach().flatten().float() for tensor in self._tensors])

    def _write(self, flat: torch.Tensor) -> None:
        if self._tensors:
            self._put(flat)

    @torch.no_grad()
    def _put(self, flat: torch.Tensor) -> None:
        start = 0
        for tensor in self._tensors:
            end = start + tensor.numel()
            values = flat[start:end].view_as(tensor)
            tensor.copy_(values if tensor.is_floating_point() else values.round())
            start = end


def _same_bytes(before: torch.Tensor, now: torch.Tensor) -> bool:
    if (before.shape, before.dtype) != (now.shape, now.dtype):
        return False
    as_bytes = [one.contiguous().flatten().view(torch.uint8) for one in (before, now)]
    return torch.equal(*as_bytes)
