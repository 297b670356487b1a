"""Large buffers used again: the first touch of fresh memory costs ten times a copy into it.

Never gives out what somebody may still read or write.
"""

from __future__ import annotations

import weakref

import torch

MOST = 2  # of one size that are kept for later


class BufferPool:
    """Float32 buffers by their size."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = {}

    def take(self, size: int) -> torch.Tensor:
        """A buffer of so many numbers, of any values. May be called on any thread."""
        try:
            return self._free[size].pop()
        except LookupError:
            return torch.empty(size, device=self._device)

    def give(self, buffer: torch.Tensor) -> None:
        """Nobody uses this one any more. May be called on any thread."""
        free = self._free.setdefault(buffer.numel(), [])
        if len(free) < MOST:
            free.append(buffer)

    def lend(self, buffer: torch.Tensor, holder: object) -> None:
        """Have the buffer back once its holder is gone, whoever passed that on."""
        weakref.finalize(holder, self.give, buffer).atexit = False
