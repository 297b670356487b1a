"""Kills its own process at a named phase: KILL_AT is "phase", at once, or "phase:step"."""

from __future__ import annotations

import os
import signal
import threading

from runtime.replica.observing import Observer, Phase


class Killer(Observer):
    def __init__(self, phase: str, step: int) -> None:
        self.phase = phase
        self.step = step

    def at(self, phase: Phase, step: int) -> None:
        if phase != self.phase or (step < self.step and phase != "sync"):
            return  # a newcomer that syncs is at an old step of its own
        if phase == "optimizer":  # while it is at work
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def make() -> Observer:
    phase, _, step = os.environ["KILL_AT"].partition(":")
    return Killer(phase, int(step or 0))
