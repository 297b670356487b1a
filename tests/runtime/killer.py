"""Kills its own process at a named phase: KILL_AT is "phase", at once, "phase:step", or
"phase:step:replica": once that replica has committed the step."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

from runtime.replica.observing import Observer, Phase
from tests.runtime.replicas import until


class Killer(Observer):
    def __init__(self, phase: str, step: int, other: str = "") -> None:
        self.phase = phase
        self.step = step
        self.other = other

    def at(self, phase: Phase, step: int) -> None:
        if phase != self.phase or (step < self.step and phase != "sync"):
            return  # a newcomer that syncs is at an old step of its own
        if self.other:
            until(self.is_committed, f"replica {self.other} commits step {self.step}")
        if phase == "optimizer":  # while it is at work
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def is_committed(self) -> bool:
        """Whether the other replica has it in its log; see `tests.runtime.tiny`."""
        folder = Path(json.loads(os.environ["DRYDOCK_OPTIONS"])["folder"])
        lines = (folder / f"steps.{self.other}").read_text().splitlines(keepends=True)
        return any(json.loads(line)["step"] >= self.step for line in lines if line.endswith("\n"))


def make() -> Observer:
    phase, _, at = os.environ["KILL_AT"].partition(":")
    step, _, other = at.partition(":")
    return Killer(phase, int(step or 0), other)
