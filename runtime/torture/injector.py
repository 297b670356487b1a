"""The runner's fault injector in one process of a job.

It strikes when it is ordered to, and writes down what the process passes through. A blow that is
aimed at a phase of the training falls in that phase. The training goes on meanwhile, but not beyond
the end of the phase until the blow has fallen.

It talks to the runner through files alone, so that a process whose connections are broken is still
told and heard. Imports no torch: a checkpoint's writer has none.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.client import ENV_PLACEMENT
from runtime.replica.observing import PHASES
from runtime.torture.kinds import ANY, KINDS, Order

#: The folder that the runner and the job's processes share.
ENV_FOLDER = "DRYDOCK_TORTURE"
#: Which rank a process is, or is a writer of.
ENV_OF_RANK = "DRYDOCK_TORTURE_RANK"
#: Where the training is that is in no phase.
BETWEEN = "between"
SOONEST_S = 1e-4  # what is to come sooner than that comes at once


class Injector:
    """What watches and strikes in one process: a rank, or one of a rank's writers.

    `phase` is the phase of the training that this process is in; "" if the process does not train.
    """

    def __init__(self, folder: Path, placement: str, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.phase = ""  # of the training of this process, if that trains
        #: whether others still take part in the sum that this process takes part in
        self.under_way: Callable[[], bool] = lambda: True
        self._blow = threading.Event()  # set but while one is due that is aimed at a phase
        self._blow.set()
        self._put_off: Order | None = None
        self._orders = order_file(folder, placement)
        self._events = os.open(
            events_file(folder, placement), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600
        )

    def enter(self, phase: str) -> None:
        """The phase of the training before this one is over, once what was aimed at it has
        fallen."""
        self._blow.wait()
        self.phase = phase

    def at(self, phase: str, step: int = -1) -> None:
        """A phase has begun: strike, if that is ordered."""
        if self._put_off is not None and self._put_off.phase == phase:
            late, self._put_off = self._put_off, None
            self._obey(late, step)
            return
        order = self._order()
        # At any moment of the training, that is: a writer's would not be a replica's.
        phases = {phase, ANY} if phase in PHASES else {phase}
        if order and order.phase in phases and order.rank == self.rank:
            try:
                self._orders.unlink()
            except FileNotFoundError:  # another process of this rank came to the phase too
                return
            self._obey(order, step)

    def tell(self, what: str, **data: Any) -> None:
        line = json.dumps({"what": what, "at": time.monotonic(), "data": data})
        os.write(self._events, line.encode() + b"\n")  # whole, even if we die at once

    def _order(self) -> Order | None:
        """What is ordered, if anything is; another process may take it away at any time."""
        try:
            return Order(**json.loads(self._orders.read_text()))
        except FileNotFoundError:
            return None

    def _obey(self, order: Order, step: int) -> None:
        if order.phase in PHASES:
            self._blow.clear()

        def strike() -> None:
            try:
                self._strike(order, step)
            finally:
                self._blow.set()

        if order.delay_s:
            threading.Timer(order.delay_s, strike).start()
        else:
            strike()

    def _strike(self, order: Order, step: int) -> None:
        """At once; but if the sum that was to be struck is whole by now, in the next step, and
        sooner."""
        if order.phase == "reduce" and not self.under_way():
            sooner = order.delay_s / 2 if order.delay_s > SOONEST_S else 0.0
            self._put_off = replace(order, delay_s=sooner)
            return
        self.tell("struck", fault=order.fault, step=step, phase=self.phase)
        KINDS[order.kind].strike(order)
        self.tell("landed", fault=order.fault, phase=self.phase)


def from_environment() -> Injector:
    """Of the rank, or of the rank's writer, that this process is."""
    environment = os.environ
    return Injector(
        Path(environment[ENV_FOLDER]), environment[ENV_PLACEMENT], int(environment[ENV_OF_RANK])
    )


def around(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Put `call` in the place of a function of a module or class: it is given that function, and
    then what that would be given. So a job is watched and broken without knowing of it."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*given: Any, **named: Any) -> Any:
        return call(inner, *given, **named)

    setattr(owner, name, outer)


def order_file(folder: Path, placement: str) -> Path:
    """Return the file with the order that waits for this placement, while there is one."""
    return folder / f"order.{placement}"


def events_file(folder: Path, placement: str) -> Path:
    """Return the file of JSON lines in which this placement's processes tell their events."""
    return folder / f"events.{placement}"
