"""What every contender trains, and how it tells what it did: the same for all, in each environment.

Must not know which contender it serves.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

import runtime.replica.gloo  # noqa: F401 - here, and not while a replica is struck
from benchmarks.rivals.task import BLACK_HOLE, SAMPLES, SHARD_SIZE, SHARDS, Model, Task
from runtime.torture.kinds import swallow

WORDS = 64


class Network(nn.Module):
    """Residual blocks over each token: the feed-forward half of a transformer."""

    def __init__(self, size: Model) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, size.width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(size.width),
                nn.Linear(size.width, size.hidden),
                nn.GELU(),
                nn.Linear(size.hidden, size.width),
            )
            for _ in range(size.blocks)
        )
        self.head = nn.Linear(size.width, WORDS)
        if size.frozen_mb:
            frozen = torch.rand(int(size.frozen_mb * 1e6 / 4))
            self.frozen = nn.Parameter(frozen, requires_grad=False)
        # A third of it is weights, the rest two moments of each.
        more = torch.zeros(int(size.trained_mb * 1e6 / 12))
        self.more = nn.Parameter(more) if size.trained_mb else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The mean loss over rows of tokens, each to be told from the one before it."""
        x = self.words(rows[:, :-1])
        if self.more is not None:
            x = x + 0.0 * self.more.sum()  # no computing to speak of, and all the gradients
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), rows[:, 1:].flatten())


def prepare(size: Model) -> tuple[Network, torch.optim.Optimizer, torch.Tensor]:
    """The model, its optimizer and the samples; equal in all replicas."""
    torch.set_num_threads(1)
    # NCCL refuses a card to two ranks of one host: each passes for a host of its own.
    os.environ.setdefault("NCCL_HOSTID", str(os.getpid()))
    torch.manual_seed(7)
    network = Network(size).to(size.device)
    trained = [p for p in network.parameters() if p.requires_grad]
    return (
        network,
        torch.optim.AdamW(trained, lr=1e-3, fused=True),
        torch.randint(WORDS, (SAMPLES, size.tokens + 1)).to(size.device),
    )


def settle() -> None:
    """Until a card has done all it was given."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def backward(
    wrapped: nn.parallel.DistributedDataParallel, rows: torch.Tensor, task: Task, step: int
) -> list[int]:
    """A replica's fixed share of a step, in as many passes as ours makes; returns its shards.

    As with any accumulation of gradients, only the last pass sums.
    """
    first = task.replica * SHARDS // task.replicas
    shards = range(first, (task.replica + 1) * SHARDS // task.replicas)
    for index in shards:
        wrapped.require_backward_grad_sync = index == shards[-1]
        start = (step * SHARDS + index) * SHARD_SIZE % SAMPLES
        (wrapped(rows[start : start + SHARD_SIZE]) / len(shards)).backward()
    return list(shards)


class Driver:
    """The replica's line to the driver: a socket, so that what was said survives a SIGKILL."""

    def __init__(self, task: Task) -> None:
        self._until = task.until
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(task.events)
        self._words = self._socket.makefile()
        # Of a thread of its own, for the training one may be in a collective for ever. No other
        # thread of this process gets the signal: those that begin from now on inherit the mask.
        signal.pthread_sigmask(signal.SIG_BLOCK, {BLACK_HOLE.signal})
        threading.Thread(target=self._swallow, daemon=True).start()

    def tell(self, what: str, **data: Any) -> None:
        line = json.dumps({"what": what, "at": time.monotonic(), "data": data})
        self._socket.sendall(line.encode() + b"\n")

    def wait_for(self, step: int) -> None:
        """Hold the step back until the driver lets it begin."""
        while step >= self._until:
            self._until = int(self._words.readline())

    def _swallow(self) -> None:
        signal.sigwait({BLACK_HOLE.signal})
        swallow(math.inf)
