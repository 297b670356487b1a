"""`runtime.checkpoint` as a training loop drives it. Imports torch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.saving import Kept, Saving, now
from benchmarks.checkpoints.states import State
from runtime.checkpoint import Checkpointer, store
from runtime.checkpoint.tiers import Packing
from runtime.client import CheckpointSaved, Sender, Trouble
from runtime.job import Job
from runtime.snapshot import Copying, When, size_of, state_of


class Overlapped:
    """Copied while the next step is computed; the optimizer waits for what is left."""

    in_place = False

    def __init__(self, state: State, folder: Path, pack: Packing = "auto") -> None:
        self._state = state
        self._under_way: dict[int, Saving] = {}
        sender = Sender("", "t", job="benchmark", replica=0, rank=0, placement="p")
        sender.tell = self._hear  # type: ignore[method-assign]
        job = Job(
            name="benchmark", replica=0, world_replicas=1, rank=0, placement="p", coordinator="",
            token="t", state_dir=folder, sender=sender, stop=threading.Event(),  # noqa: S106
        )  # fmt: skip
        self._saver = Checkpointer(job, every_s=0.0, keep=1, pack=pack)
        self._paths: dict[int, Path] = {}

    def prepare(self) -> None:
        pause = threading.Event()
        while not self._saver.prepare(self._size):
            pause.wait(0.01)

    def save(self, number: int) -> Saving:
        def begin(into: memoryview | None) -> Copying:
            return Copying(self._state, number, into, due_soon)

        self._began = now()
        done = self._under_way[number] = Saving(settle=lambda: None)
        copying = self._saver.save(begin, f"save{number}")
        if copying is None:
            raise RuntimeError("there was no room for it")
        return Saving(copying.wait, done.done)

    def load(self, number: int, into: State) -> State:
        del into
        loaded: State = state_of(store.read(self._paths[number]))
        return loaded

    def close(self) -> None:
        self._saver.finish()

    def _size(self) -> int:
        return size_of(self._state, due_soon)

    def _hear(self, message: Any) -> None:
        """What the control plane would be told."""
        if isinstance(message, CheckpointSaved):
            self._paths[message.step] = path = Path(message.path)
            done = self._under_way.pop(message.step).done
            done.set_result(Kept(self._began + message.seconds, now(), path))
        elif isinstance(message, Trouble):
            while self._under_way:
                _number, saving = self._under_way.popitem()
                saving.done.set_exception(RuntimeError(f"{message.kind}: {message.text}"))


class AtOnce(Overlapped):
    """Nothing is computed before all is copied."""

    def save(self, number: int) -> Saving:
        saving = super().save(number)
        saving.settle()
        return Saving(lambda: None, saving.done)


def due_soon(_name: str, _tensor: object) -> When:
    return "soon"
