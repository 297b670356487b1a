"""One flat float32 buffer per step: gradients, and behind them the proof and the in-band agreement.

What rides behind the gradients is summed with them, so all members see the same after each step:
which shards were summed how often, which samples those were, the loss, and who wants to regroup,
save or stop. That is why the healthy path needs no vote.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tail:
    """What all members learn from one all-reduce."""

    coverage: list[int]  # how many members summed each shard
    checksums: list[int]
    loss: float  # mean over the samples
    samples: int
    regroup: bool
    checkpoint: bool
    stop: bool


class FlatGradients:
    """The parameters' gradients as views of one buffer, accumulated in place by backward."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], shards: int) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.shards = shards
        self.size = sum(p.numel() for p in self.parameters)
        for parameter in self.parameters:
            if parameter.dtype != torch.float32:
                raise TypeError(
                    f"a parameter is {parameter.dtype}; keep float32 parameters and use autocast"
                )
        self.local = torch.zeros(self.size)
        self.coverage = torch.zeros(shards)
        self.checksums = torch.zeros(shards)
        self.loss_sum = 0.0
        self.samples = 0
        self.bind(self.local)

    def bind(self, flat: torch.Tensor) -> None:
        """Let each parameter's gradient be its part of this buffer."""
        start = 0
        for parameter in self.parameters:
            end = start + parameter.numel()
            parameter.grad = flat[start:end].view_as(parameter)
            start = end

    def add(self, index: int, checksum: int, loss: float, samples: int) -> None:
        """Note that backward has just summed this shard.

        Raises RuntimeError if the gradients are no longer ours: zeros would be trained on.
        """
        self._check_bound()
        self.coverage[index] += 1
        self.checksums[index] += checksum
        self.loss_sum += loss * samples
        self.samples += samples

    def _check_bound(self) -> None:
        """The first and the last gradient lie where they were put; whoever moves one moves all."""
        ends = [(self.parameters[0], 0), (self.parameters[-1], self.size)]
        for parameter, at in ends:
            start = at and at - parameter.numel()
            place = self.local.data_ptr() + start * self.local.element_size()
            if parameter.grad is None or parameter.grad.data_ptr() != place:
                raise RuntimeError(
                    "a parameter's gradient is not where the replica group put it; remove "
                    "optimizer.zero_grad(): the group clears the gradients after each step"
                )

    def clear(self) -> None:
        self.local.zero_()
        self.coverage.zero_()
        self.checksums.zero_()
        self.loss_sum = 0.0
        self.samples = 0

    def copy_out(self, *, regroup: bool, checkpoint: bool, stop: bool) -> torch.Tensor:
        """A fresh buffer to reduce: an abandoned operation may still scribble on an old one."""
        numbers = [self.loss_sum, self.samples, float(regroup), float(checkpoint), float(stop)]
        return torch.cat([self.local, self.coverage, self.checksums, torch.tensor(numbers)])

    def read(self, reduced: torch.Tensor) -> Tail:
        tail = reduced[self.size :]
        n = self.shards
        loss_sum, samples, regroup, checkpoint, stop = tail[2 * n :].tolist()
        return Tail(
            coverage=[round(v) for v in tail[:n].tolist()],
            checksums=[round(v) for v in tail[n : 2 * n].tolist()],
            loss=loss_sum / samples if samples else float("nan"),
            samples=round(samples),
            regroup=regroup > 0,
            checkpoint=checkpoint > 0,
            stop=stop > 0,
        )
