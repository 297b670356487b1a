"""How soon the next tier is read after a checkpoint of the first one failed its verification.

    python benchmarks/fall_back.py [--gigabytes 1.0] [--rounds 5] [--folder DIR]

A state is saved to the node's own disk and to the shared folder, both below one folder here. What
was written last on the own disk is damaged: all of it is read before that shows. Then a rank loads,
as at the start of a job. Beside it stands what the disk needs for as many bytes. All is read past
the page cache; what a virtual disk's host keeps is out of reach, so the worst is the cold one.
"""

from __future__ import annotations

import argparse
import queue
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.checkpoints.limits import Disk
from benchmarks.checkpoints.saving import forget
from runtime.checkpoint import Checkpointer, store
from runtime.checkpoint.tiers import TierName
from runtime.client import CheckpointSaved, Message, Sender, Trouble
from runtime.data import Batches
from runtime.image import Damaged, Staged
from runtime.job import Job
from runtime.replica.division import Division
from runtime.replica.gloo import Gloo
from runtime.replica.link import Link
from runtime.replica.observing import Observer
from runtime.replica.rank import Rank
from runtime.replica.siblings import Siblings
from runtime.replica.state import TrainingState
from runtime.replica.step import StepEngine
from runtime.replica.telling import Teller
from runtime.replica.together import Together

TARGET_S = 2.0  # from the refusal until the next tier is read
WIDTH = 4096
STEP = 7
TOKEN = "of this benchmark"  # noqa: S105


@dataclass(frozen=True)
class Seconds:
    """Of one start."""

    refused: float  # from its begin until the first tier was refused
    told: float  # from then until an engineer was told
    chosen: float  # from the refusal until the next tier was read
    read: float  # from then until it was read and verified
    restored: float  # from then until it trains, compared once more


class Loading:
    """A replica of one rank that has saved to two tiers, and loads."""

    def __init__(self, folder: Path, size: int) -> None:
        self._told: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._reads: list[tuple[float, float]] = []
        self._refused: list[float] = []
        sender = Sender("", TOKEN, job="benchmark", replica=0, rank=0, placement="p")
        sender.tell = self._hear  # type: ignore[method-assign]
        job = Job(
            name="benchmark", replica=0, world_replicas=1, rank=0, placement="p",
            coordinator="127.0.0.1:1", token=TOKEN, state_dir=folder / "shared", sender=sender,
            local_dir=folder / "own", stop=threading.Event(),
        )  # fmt: skip
        model = model_of(size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.state = TrainingState(model, [optimizer], Batches(samples=24, shards=2))
        gloo, observer = Gloo("127.0.0.1"), Observer()
        engine = StepEngine(
            self.state, gloo, observer, Division(model, 0), mode="cover", max_grad_norm=None
        )
        self._saver = Checkpointer(job)
        self._rank = Rank(
            job, self.state, engine, gloo, self._saver, observer, host="127.0.0.1", on_step=None
        )
        self._rank.link = link = Link(job.coordinator, list, lambda _epoch, _message: None)
        siblings = Siblings("127.0.0.1", TOKEN, 1, link, lambda _r, _m: None, lambda _r: None)
        self._together = Together(self._rank, siblings, Teller(job, self.state.ledger, 1))
        self._saver.delivery.on_saved = self._hear
        sources = self._saver.sources
        sources.read = self._timed(sources.read)  # type: ignore[assignment,method-assign]

    def save(self) -> dict[str, Path]:
        """To both tiers; where it is in each."""
        self.state.committed = STEP
        copying = self._saver.save(self.state.begin_copy, "save", last=True)
        if copying is None:
            raise SystemExit("no copy could be made")
        saved = [self._next() for _tier in self._saver.tiers]
        return {one.tier: Path(one.path) for one in saved}

    def load(self) -> Seconds:
        """As a new process does."""
        self.state.committed = -1
        self._reads.clear()
        self._refused.clear()
        began = time.monotonic()
        self._together.load([])
        ended = time.monotonic()
        (_first, failed), (again, read) = self._reads
        told = self._refused[0]
        if self.state.committed != STEP:
            raise SystemExit("nothing was loaded")
        return Seconds(failed - began, told - failed, again - failed, read - again, ended - read)

    def close(self) -> None:
        self._saver.finish()
        self._rank.close()

    def _timed(
        self, read: Callable[[str, TierName, int], Staged]
    ) -> Callable[[str, TierName, int], Staged]:
        """The same, noting when it begins and ends."""

        def timed(name: str, tier: TierName, rank: int) -> Staged:
            began = time.monotonic()
            try:
                return read(name, tier, rank)
            finally:
                self._reads.append((began, time.monotonic()))

        return timed

    def _hear(self, message: Message) -> None:
        if isinstance(message, Trouble) and message.kind == "checkpoint_refused":
            self._refused.append(time.monotonic())
        else:
            self._told.put(message)

    def _next(self) -> CheckpointSaved:
        message = self._told.get()
        if not isinstance(message, CheckpointSaved):
            raise SystemExit(str(message))
        return message


def model_of(size: int) -> torch.nn.Module:
    """Layers of about so many bytes in all."""
    layers = max(1, round(size / (4 * WIDTH * WIDTH)))
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def damage(path: Path) -> int:
    """Change the last byte of a checkpoint; how many bytes its image has."""
    part = store.part_of(path, store.manifest_of(path), 0)
    with (path / part.files[-1].name).open("r+b") as file:
        file.seek(-1, 2)
        (byte,) = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([byte ^ 1]))
    try:
        store.read(path)
    except Damaged:
        return part.table.bytes
    raise SystemExit("the damage does not show")


def disk_of(folder: Path, size: int) -> Disk:
    """As many bytes beside the checkpoints, past the page cache."""
    disk = Disk({"all": torch.empty(size, dtype=torch.uint8)}, folder)
    disk.prepare()
    disk.save(1)
    return disk


def seconds_of(disk: Disk) -> float:
    """In which it reads them."""
    began = time.monotonic()
    disk.load(1, {})
    return time.monotonic() - began


def report(size: int, rounds: list[Seconds], disk: list[float]) -> None:
    def line(what: str, seconds: list[float], note: str = "") -> str:
        middle, worst = statistics.median(seconds), max(seconds)
        return f"{what:<48} {middle:8.3f} {worst:8.3f}  {note}".rstrip()

    chosen = [one.chosen for one in rounds]
    verdict = "kept" if max(chosen) <= TARGET_S else "MISSED"
    rate = f"{size / statistics.median(disk) / 1e6:,.0f} MB/s"
    lines = [
        f"{size / 2**30:.2f} GiB in two tiers, the first damaged at its end; {len(rounds)} starts",
        f"{'seconds':<48} {'median':>8} {'worst':>8}",
        line("the first tier read, until it is refused", [one.refused for one in rounds]),
        line("from the refusal: an engineer is told", [one.told for one in rounds]),
        line("from the refusal: the next tier is read", chosen, f"target {TARGET_S:g}: {verdict}"),
        line("the next tier read and verified", [one.read for one in rounds]),
        line("the state replaced, and compared once more", [one.restored for one in rounds]),
        line("the disk alone, as many bytes", disk, rate),
    ]
    print("\n".join(lines))


def main() -> None:
    options = arguments()
    folder = Path(tempfile.mkdtemp(prefix="drydock-fall-back-", dir=options.folder))
    loading = Loading(folder, int(options.gigabytes * 2**30))
    try:
        size = damage(loading.save()["local"])
        disk = disk_of(folder, size)
        turns = []
        for _ in range(options.rounds):
            forget(folder)  # none of the three is read from a cache
            turns.append((loading.load(), seconds_of(disk)))
        report(size, [one for one, _ in turns], [seconds for _, seconds in turns])
    finally:
        loading.close()
        shutil.rmtree(folder, ignore_errors=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the state, in GiB")
    parser.add_argument("--rounds", type=int, default=5, help="starts")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
