"""A trainer's side of its checkpoints: one rank, with the real writers' processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.checkpoint import Checkpointer
from runtime.checkpoint.copy_buffers import COPY_BUFFERS
from runtime.checkpoint.tiers import TierName
from runtime.client import CheckpointSaved, Sender, Trouble
from runtime.job import Job
from runtime.snapshot import Copying
from tests.runtime.checkpoint.states import (
    copy_of_step,
    staged_at,
)

PATIENCE_S = 300.0
SIZE = staged_at(0).table.bytes


@dataclass
class Told:
    """What an engineer and the control plane hear."""

    messages: list[Any] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, message: Any) -> None:
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()

    def saved(self) -> list[int]:
        return [m.step for m in self.messages if isinstance(m, CheckpointSaved)]

    def troubles(self) -> list[str]:
        return [m.kind for m in self.messages if isinstance(m, Trouble)]

    def until(self, condition: Callable[[], bool]) -> None:
        """What is no message shows within a moment too."""
        end = time.monotonic() + PATIENCE_S
        with self.changed:
            while not condition():
                assert time.monotonic() < end, self.messages
                self.changed.wait(0.02)


class OneRank:
    """A trainer's side: a checkpointer whose room is made."""

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        ranks: int = 1,
        *,
        own_disk: bool = False,
        holder: bool = False,
        object_store: str = "",
        **options: Any,
    ) -> None:
        self.told = Told()
        sender = Sender("", "t", job="j", replica=0, rank=rank, placement="p")
        sender.tell = self.told  # type: ignore[method-assign]
        self.saver = Checkpointer(
            Job(
                name="j", replica=0, rank=rank, ranks=ranks, world_replicas=1, placement="p",
                coordinator="", token="t", state_dir=folder, sender=sender,
                local_dir=folder / "disk" if own_disk else None,
                holder_dir=folder / "memory" if holder else None, domain="here",
                object_store=object_store,
                stop=threading.Event(),
            ),
            every_s=0.0,
            **options,
        )  # fmt: skip

    def save(
        self,
        step: int,
        name: str = "",
        *,
        share: tuple[int, int] = (0, 1),
        last: bool = True,
        begin: Callable[[int, memoryview | None], Copying] = copy_of_step,
    ) -> Copying | None:
        """Waits for room: with `last` the saver does."""
        self.saver.prepare(lambda: SIZE)
        return self.saver.save(
            lambda into: begin(step, into), name or f"save{step}", share=share, last=last
        )

    def save_all(self, *steps: int) -> None:
        for step in steps:
            assert self.save(step) is not None
            self.told.until(lambda step=step: step in self.told.saved())  # type: ignore[misc]
            self.told.until(lambda: not self.saver.dispatcher._asked)
        copy_buffers = COPY_BUFFERS + ("object" in self.saver.tiers)
        self.told.until(lambda: len(self.saver.copy_buffers.there()[1]) == copy_buffers)

    def writer(self, tier: TierName = "shared") -> int:
        pid = self.saver.dispatcher._writers[tier].pid
        assert pid is not None
        return pid


def read_from(trainer: OneRank, step: int, tier: TierName, name: str = "") -> str:
    return trainer.saver.sources.read(name or f"save{step}", tier, 0).digest


def unasked() -> int:
    """The size of a state for which there is room."""
    raise AssertionError("it is not asked for while there are buffers")
