"""What a contender's replica is told to train: plain values, passed as JSON between processes.

Needs the standard library alone: the driver, which has no torch, and the rivals' environments both
read it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

SHARDS, SHARD_SIZE = 12, 2
GLOBAL_BATCH = SHARDS * SHARD_SIZE
SAMPLES = 960
FOR_EVER = 1 << 60
TURN = 20  # steps of a turn in health
ENV_BEAT = "BENCH_BEAT_MS"  # how often a manager of torchft's tells that it lives


@dataclass(frozen=True)
class Model:
    """The size of the model: how long it computes, and how much it has to sum."""

    width: int
    hidden: int
    blocks: int
    tokens: int  # in each sample; more of them is more computing, and no more to sum
    frozen_mb: float = 0.0  # weights that are part of the state and are not trained
    trained_mb: float = 0.0  # weights more, with all that AdamW keeps of them
    device: str = "cpu"  # or "cuda": one card, of all replicas


#: A short all-reduce after a long backward; and one that takes two fifths of the step.
TRAFFIC = {
    "light": Model(width=128, hidden=512, blocks=3, tokens=48),
    "heavy": Model(width=512, hidden=2560, blocks=1, tokens=1),
}


@dataclass(frozen=True)
class State:
    """What a newcomer is to be given."""

    mb: float
    trained: bool = False  # all of it; else as good as none

    def __str__(self) -> str:
        return f"{self.mb:.0f} MB of state{', all of it trained' if self.trained else ''}"


@dataclass(frozen=True)
class Fault:
    """What is done to one replica: a signal."""

    name: str
    signal: signal.Signals


KILL = Fault("SIGKILL", signal.SIGKILL)
STOP = Fault("SIGSTOP", signal.SIGSTOP)
#: The replica itself has its sockets swallow what they are sent.
BLACK_HOLE = Fault("Black hole", signal.SIGUSR1)


@dataclass(frozen=True)
class Task:
    """One start of one replica."""

    replica: int
    replicas: int
    model: Model
    events: str  # path of the socket on which it tells what it does
    folder: str  # for this job's processes to find each other in
    until: int = FOR_EVER  # the first step that is to be waited with, until the driver says more
