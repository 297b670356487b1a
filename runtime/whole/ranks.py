"""What all ranks of a job tell each other, over a group of their own beside the script's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, default_pg_timeout

#: Bytes and digest of one rank's part of a checkpoint.
Part = tuple[int, str]


class Ranks:
    """All ranks. Each method returns once every one of them has called it, the same on each."""

    def __init__(self, rank: int, count: int) -> None:
        """`rank`: ours, of `count`. All call it, after the script has made its default group."""
        self.rank = rank
        self.count = count
        self.group: Any = dist.new_group(backend="gloo", timeout=_patience())

    def on_any(self, flags: Sequence[bool]) -> list[bool]:
        """Each of them, if it is true on any rank."""
        return [bool(one) for one in self.highest(flags)]

    def highest(self, numbers: Sequence[int]) -> list[int]:
        """Of each, what is the highest that a rank gives."""
        told = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
        return _listed(told)

    def from_each(self, value: Any) -> list[Any]:
        """What each rank gives, which JSON can say."""
        words = json.dumps(value).encode()
        (longest,) = self.highest([len(words)])
        here = torch.frombuffer(bytearray(words.ljust(longest)), dtype=torch.uint8)
        return [json.loads(bytes(one)) for one in self._gathered(here)]

    def parts(self, size: int, digest: str) -> list[Part]:
        """Of a checkpoint, each rank's; ours is of so many bytes and has this digest."""
        here = torch.tensor([size, *digest.encode()])
        return [(size, bytes(digest).decode()) for size, *digest in self._gathered(here)]

    def from_first(self, value: Any) -> Any:
        """What the first rank gives, which JSON can say."""
        words = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor(len(words))
        dist.broadcast(size, src=0, group=self.group)
        told = torch.empty(int(size), dtype=torch.uint8) if self.rank else words
        dist.broadcast(told, src=0, group=self.group)
        return json.loads(bytes(_listed(told)))

    def _gathered(self, here: torch.Tensor) -> list[list[int]]:
        there = [torch.empty_like(here) for _ in range(self.count)]
        dist.all_gather(there, here, group=self.group)
        return [_listed(one) for one in there]


def _patience() -> timedelta:
    """How long a rank waits at an edge for the others, one of which may evaluate alone: as long as
    the script's own group would, or torch's default if that is more."""
    group, longest = _get_default_group(), default_pg_timeout
    for kind in group._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):  # some backends do not tell
            longest = max(longest, group._get_backend(torch.device(kind)).options._timeout)
    return longest


def _listed(numbers: torch.Tensor) -> list[int]:
    return [int(one) for one in numbers.tolist()]
