"""What a replica passes through, told to whoever watches from inside the process.

Does nothing by itself. A tool that breaks things at a named phase, or measures, puts an observer in
its place through the environment, so that any script can be watched without being changed.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from runtime.job import Job
    from runtime.replica.reporting import Committed
    from runtime.replica.state import TrainingState

#: module:function that returns an Observer; for tools, never set in production.
ENV_OBSERVER = "DRYDOCK_OBSERVER"

Phase = Literal[
    "forward",  # a shard was handed out; its loss is being computed
    "backward",  # inside the backward pass of a shard
    "reduce",  # the gradients are on their way: the collective has begun
    "apply",  # the reduced gradient is whole; the optimizer has not begun
    "optimizer",  # the optimizer has begun
    "regroup",  # the epoch broke; the next one is awaited
    "sync",  # a newcomer takes the state from its peers
]
PHASES: tuple[Phase, ...] = get_args(Phase)


class Observer:
    """Called on the training thread, in the order in which things happen."""

    def joined(self, job: Job) -> None:
        """This process has its place in the job."""

    def at(self, phase: Phase, step: int) -> None:
        """A phase of the step has begun."""

    def committed(self, step: Committed) -> None:
        """A step was applied, together with the other members."""

    def granted(self, message: dict[str, Any]) -> None:
        """An epoch was granted, and is entered."""

    def lost(self, message: dict[str, Any]) -> None:
        """The coordinator said that a member is gone: `replica`, `how`, `at` (Unix time)."""

    def ended(self, state: TrainingState) -> None:
        """The loop has ended, at an edge."""


def from_environment() -> Observer:
    """The observer that DRYDOCK_OBSERVER names; else one that does nothing.

    Raises RuntimeError if what it names does not exist.
    """
    name = os.environ.get(ENV_OBSERVER, "")
    if not name:
        return Observer()
    module, _, function = name.partition(":")
    try:
        made: Observer = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"{ENV_OBSERVER}={name}: {error}; give module:function") from error
    return made
