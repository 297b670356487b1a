"""How soon the next tier is read after a checkpoint of the first one failed its verification.

    python benchmarks/fall_back.py [--gigabytes 1.0] [--ranks 1] [--rounds 5] [--folder DIR]

A state is saved to the node's own disk and to the shared folder, both below one folder here. What
was written last on the own disk is damaged: all of it is read before that shows. Then a rank loads,
as at the start of a job. Of several ranks, here threads of one process, each has a state of that
size, and of the last one's what was written first is damaged: that shows at once, and the others
have all of theirs still to read. The next tier is read once all have begun to.

Beside it stands what the disk needs for as many bytes. All is read past the page cache; what a
virtual disk's host keeps is out of reach, so the worst is the cold one.
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
from runtime.replica.all_ranks import AllRanks
from runtime.replica.follower import Follower
from runtime.replica.fsdp import ShardGroup
from runtime.replica.gloo import Gloo
from runtime.replica.link import Link
from runtime.replica.observing import Observer
from runtime.replica.rank import Rank
from runtime.replica.reporting import Reporter
from runtime.replica.siblings import Siblings
from runtime.replica.state import TrainingState
from runtime.replica.step import StepEngine

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


@dataclass(frozen=True)
class Read:
    """Of one rank's part, in a tier."""

    tier: TierName
    began: float
    ended: float
    damaged: bool


class Loading:
    """A replica that has saved to two tiers, and loads."""

    def __init__(self, folder: Path, size: int, ranks: int) -> None:
        self._told: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._reads: list[Read] = []
        self._refused: list[float] = []
        first, *others = self._ranks = [self._rank(folder, size, n, ranks) for n in range(ranks)]
        first.link = Link("127.0.0.1:1", list, lambda _epoch, _message: None)
        siblings = Siblings(
            "127.0.0.1", TOKEN, ranks, first.link, lambda _r, _m: None, lambda _r: None
        )
        for rank in others:
            follower = Follower(rank, siblings.address, {}, leave=ignored, abandon=ignored)
            follower.start()
            threading.Thread(
                target=lambda follower=follower: list(follower.shards()), daemon=True
            ).start()
        siblings.meet()
        self._together = AllRanks(first, siblings, Reporter(first.job, first.state.ledger, 1))
        for rank in self._ranks:
            rank.saver.dispatcher.on_saved = self._hear

    def _rank(self, folder: Path, size: int, number: int, ranks: int) -> Rank:
        sender = Sender("", TOKEN, job="benchmark", replica=0, rank=number, placement="p")
        sender.tell = self._hear  # type: ignore[method-assign]
        job = Job(
            name="benchmark", replica=0, world_replicas=1, rank=number, ranks=ranks, placement="p",
            coordinator="127.0.0.1:1", token=TOKEN, state_dir=folder / "shared", sender=sender,
            local_dir=folder / "own", stop=threading.Event(),
        )  # fmt: skip
        model = model_of(size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainingState(model, [optimizer], Batches(samples=24, shards=2))
        gloo, observer = Gloo("127.0.0.1"), Observer()
        engine = StepEngine(
            state, gloo, observer, ShardGroup(model, 0), mode="cover", max_grad_norm=None
        )
        saver = Checkpointer(job)
        saver.sources.read = self._timed(saver.sources.read)  # type: ignore[method-assign]
        return Rank(job, state, engine, gloo, saver, observer, host="127.0.0.1", on_step=None)

    def save(self) -> list[Path]:
        """To both tiers; where each rank's part is on its own disk."""
        for rank in self._ranks:
            rank.state.committed = STEP
            if rank.saver.save(rank.state.begin_copy, "save", last=True) is None:
                raise SystemExit("no copy could be made")
        saved = [self._next() for _ in range(len(self._ranks) + 1)]  # the shared one is whole
        paths = [Path(one.path) for one in saved if one.tier == "local"]
        return sorted(paths, key=lambda path: path.parent.name)

    def load(self) -> Seconds:
        """As new processes do."""
        for rank in self._ranks:
            rank.state.committed = -1
        self._reads.clear()
        self._refused.clear()
        began = time.monotonic()
        self._together.load([])
        ended = time.monotonic()
        (failed,) = [one.ended for one in self._reads if one.damaged]
        again = max(one.began for one in self._reads if one.tier == "shared")
        read = max(one.ended for one in self._reads if one.tier == "shared")
        told = self._refused[0]
        if {rank.state.committed for rank in self._ranks} != {STEP}:
            raise SystemExit("nothing was loaded")
        return Seconds(failed - began, told - failed, again - failed, read - again, ended - read)

    def close(self) -> None:
        for rank in self._ranks:
            rank.saver.finish()
            rank.close()

    def _timed(self, read: Callable[..., Staged]) -> Callable[..., Staged]:
        """The same, noting when it begins and ends."""

        def timed(name: str, tier: TierName, rank: int, *, progress: store.Progress) -> Staged:
            began, damaged = time.monotonic(), False
            try:
                return read(name, tier, rank, progress=progress)
            except Damaged:
                damaged = True
                raise
            finally:
                self._reads.append(Read(tier, began, time.monotonic(), damaged))

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


def ignored(*_given: object, **_named: object) -> None:
    """Nobody leaves here."""


def damage(path: Path, *, first: bool) -> int:
    """Change the first or the last byte of a checkpoint; how many bytes its image has."""
    part = store.part_of(path, store.manifest_of(path), 0)
    name, place = (part.files[0].name, 0) if first else (part.files[-1].name, -1)
    with (path / name).open("r+b") as file:
        where = file.seek(place, 2 if place else 0)
        (byte,) = file.read(1)
        file.seek(where)
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


def report(size: int, ranks: int, rounds: list[Seconds], disk: list[float]) -> None:
    def line(what: str, seconds: list[float], note: str = "") -> str:
        middle, worst = statistics.median(seconds), max(seconds)
        return f"{what:<48} {middle:8.3f} {worst:8.3f}  {note}".rstrip()

    chosen = [one.chosen for one in rounds]
    verdict = "kept" if max(chosen) <= TARGET_S else "MISSED"
    rate = f"{size / statistics.median(disk) / 1e6:,.0f} MB/s"
    where = "at its end" if ranks == 1 else f"where the last of {ranks} ranks begins"
    lines = [
        f"{size / 2**30:.2f} GiB in two tiers, the first damaged {where}; {len(rounds)} starts",
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
    loading = Loading(folder, int(options.gigabytes * 2**30), options.ranks)
    try:
        *_, last = loading.save()
        size = options.ranks * damage(last, first=options.ranks > 1)
        disk = disk_of(folder, size)
        turns = []
        for _ in range(options.rounds):
            forget(folder)  # none of the three is read from a cache
            turns.append((loading.load(), seconds_of(disk)))
        report(size, options.ranks, [one for one, _ in turns], [seconds for _, seconds in turns])
    finally:
        loading.close()
        shutil.rmtree(folder, ignore_errors=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of a rank's state, in GiB")
    parser.add_argument("--ranks", type=int, default=1, help="of the replica")
    parser.add_argument("--rounds", type=int, default=5, help="starts")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
