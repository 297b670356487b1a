"""Ours and plain DDP in turns, in the same processes, so that both meet the same machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from benchmarks.rivals import train_ddp, train_ours
from benchmarks.rivals.task import TURN, Task
from benchmarks.rivals.training import Driver, settle


def train(task: Task, driver: Driver) -> None:
    """Train until killed."""
    ddp = train_ddp.steps(task)
    next(ddp)  # which connects it, before ours makes connections of its own
    train_ours.train(task, Turns(driver, ddp))


class Turns:
    """The driver to ours: at the end of each turn of ours DDP has one, and both are told."""

    def __init__(self, driver: Driver, ddp: Iterator[list[int]]) -> None:
        self._driver = driver
        self._ddp = ddp
        self._ended = 0  # the step with which the turn of ours ends
        self._began = 0.0

    def tell(self, what: str, **data: Any) -> None:
        """Of single steps nobody asks."""

    def wait_for(self, step: int) -> None:
        """Let DDP take its turn, if it is its turn."""
        if step < self._ended:
            return
        settle()
        ours = (time.perf_counter() - self._began) / TURN
        self._ended = step + TURN
        meet()
        began = time.perf_counter()
        for _ in range(TURN):
            next(self._ddp)
        settle()
        ddp = (time.perf_counter() - began) / TURN
        self._driver.tell("turns", ours=ours if step else None, ddp=ddp)
        self._driver.wait_for(step)
        meet()
        self._began = time.perf_counter()


def meet() -> None:
    """All replicas, in the processor's memory wherever the model is."""
    distributed.all_reduce(torch.zeros(1))
