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
        layers = [m for m in model.modules() if isinstance(m, _NormBase)]
        found = [b for layer in layers for b in layer.buffers(recurse=False)]
        self._tensors = [b for b in found if b is not None]
        tracked = {id(b) for b in self._tensors}
        self._others = {
            name: buffer for name, buffer in model.named_buffers() if id(buffer) not in tracked
        }
        self.size = sum(tensor.numel() for tensor in self._tensors)
        self._edge = self._read()
        self._others_before: dict[str, torch.Tensor] | None = None

    @torch.no_grad()
    def begin(self) -> None:
        """A shard begins: from what the last edge left."""
        self._write(self._edge)
        if self._others_before is None:
            self._others_before = {name: one.clone() for name, one in self._others.items()}

    def change(self) -> torch.Tensor:
        """What the shard changed."""
        return self._read() - self._edge

    @torch.no_grad()
    def apply(self, mean_change: torch.Tensor) -> None:
        """The step is committed: all members change alike. Raises RuntimeError if forward changes
        a buffer of another kind of layer."""
        self._edge += mean_change
        self._write(self._edge)
        for name, before in (self._others_before or {}).items():
            if not torch.equal(before, self._others[name]):
                raise RuntimeError(
                    f"forward changes the buffer {name!r}, which would make the replicas differ: "
                    "keep it in a normalisation layer, or out of the model"
                )
        self._others, self._others_before = {}, {}  # once is enough: it does it always or never

    def reload(self) -> None:
        """The model was loaded, or a shard was abandoned in the middle: take what is there."""
        self._edge = self._read()

    def restore(self) -> None:
        """Forget what shards changed since the last edge."""
        self._write(self._edge)

    def _read(self) -> torch.Tensor:
        if not self._tensors:
            return torch.zeros(0)
        return torch.cat([tensor.detach().flatten().float() for tensor in self._tensors])

    @torch.no_grad()
    def _write(self, flat: torch.Tensor) -> None:
        start = 0
        for tensor in self._tensors:
            end = start + tensor.numel()
            values = flat[start:end].view_as(tensor)
            tensor.copy_(values if tensor.is_floating_point() else values.round())
            start = end
