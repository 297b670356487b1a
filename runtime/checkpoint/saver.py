"""When to save, and the thread that writes: the training thread pays one memcpy.

A failed save raises an alarm and never stops the training.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint import store
from runtime.client import CheckpointSaved
from runtime.job import Job
from runtime.snapshot import Staged

FINISH_S = 30.0  # how long the end of a job waits for its last checkpoint


@dataclass(frozen=True)
class Request:
    staged: Staged
    asked: float  # monotonic
    stall_s: float


class Checkpointer:
    """Saves of one job to its state folder, every `every_s` seconds and when asked."""

    def __init__(self, job: Job, *, every_s: float = 20.0, keep: int = store.KEEP) -> None:
        self.job = job
        self.every_s = every_s
        self.keep = keep
        self.folder = Path(job.state_dir) / "checkpoints"
        if job.ranks > 1:
            self.folder /= f"rank-{job.rank}-of-{job.ranks}"
        #: called, on the writer's thread, with each one that is durable
        self.on_saved: Callable[[CheckpointSaved], None] = job.sender.tell
        self._last = time.monotonic()
        self._requests: queue.Queue[Request | None] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None

    def steps(self) -> list[int]:
        """Of the checkpoints that are there, unverified.

        Raises ValueError if there are none but those of replicas with another number of ranks.
        """
        if not store.candidates(self.folder) and (others := self._of_other_shapes()):
            raise ValueError(
                f"{others[0]} is of replicas with another number of ranks than {self.job.ranks}: "
                "resume with as many, or give another DRYDOCK_STATE_DIR"
            )
        return [store.step_of(path) for path in store.candidates(self.folder)]

    def read(self, step: int) -> Staged | None:
        """The checkpoint of this step, or None if it does not verify."""
        return store.verified(store.place(self.folder, step))

    def due(self) -> bool:
        """Whether the interval is over and the writer is free."""
        return time.monotonic() - self._last >= self.every_s and self._requests.empty()

    def save(self, staged: Staged, asked: float, *, last: bool = False) -> None:
        """Hand a copy to the writer.

        A writer that is a whole save behind is not waited for, except, for FINISH_S, with the last
        save of all: training goes on, an engineer is told.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write_all, name="drydock-saver", daemon=True
            )
            self._thread.start()
        self._last = time.monotonic()
        request = Request(staged, asked, self._last - asked)
        try:
            self._requests.put(request, block=last, timeout=FINISH_S)
        except queue.Full:
            self.job.trouble("checkpoint_skipped", f"step {staged.step}: the store is too slow")

    def finish(self) -> None:
        """Wait until everything handed over is durable or was refused, for FINISH_S at most."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):  # then the join below ends by its time too
            self._requests.put(None, timeout=FINISH_S)
        self._thread.join(FINISH_S)
        if self._thread.is_alive():
            self.job.trouble("checkpoint_unfinished", f"not durable after {FINISH_S:g} s")
        self._thread = None

    def _last_whole(self) -> list[Path]:
        """Our part of the newest checkpoint of which every rank's part is there: one of us may be
        slower, or fail, and the others must not remove theirs meanwhile."""
        folders = list(self.folder.parent.glob(f"rank-*-of-{self.job.ranks}"))
        parts = [{path.name for path in store.candidates(folder)} for folder in folders]
        whole = sorted(set.intersection(*parts)) if len(parts) == self.job.ranks else []
        return [self.folder / name for name in whole[-1:]]

    def _of_other_shapes(self) -> list[Path]:
        top = Path(self.job.state_dir) / "checkpoints"
        parts = [p for p in top.glob("rank-*-of-*") if p.name.split("-")[-1] != str(self.job.ranks)]
        folders = [top, *parts] if self.job.ranks > 1 else parts
        return [path for folder in folders for path in store.candidates(folder)]

    def _write_all(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                path = store.write(self.folder, request.staged, self.keep, self._last_whole())
            except Exception as error:  # without this thread no later save would be written
                self.job.trouble("checkpoint_failed", f"step {request.staged.step}: {error!r}")
                continue
            self.on_saved(
                CheckpointSaved(
                    step=request.staged.step,
                    tier="shared",
                    path=str(path),
                    bytes=len(request.staged.buffer),
                    digest=request.staged.digest,
                    stall_s=request.stall_s,
                    seconds=time.monotonic() - request.asked,
                    at=time.time(),
                )
            )
