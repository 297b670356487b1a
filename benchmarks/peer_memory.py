"""What it costs a training to save its state to a peer's memory at every step.

    python benchmarks/peer_memory.py [--megabytes 64] [--step-s 1.0] [--rounds 12] [--threads 1]

One step is a fixed amount of work on so many threads, measured first. Rounds of steps with and
without saves take turns in one run, two without for one with (A/A), so that the machine's noise
stands beside the figure. The holder is a process of its own on this machine; with more threads than
cores but one there is no core free for it and the writer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.checkpoints import states
from benchmarks.checkpoints.ours import due_soon
from runtime.checkpoint import Checkpointer
from runtime.client import CheckpointSaved, Message, Sender, Trouble
from runtime.job import Job
from runtime.snapshot import Copying, size_of

STEPS = 5  # of a round
KEPT_S = 60.0  # in which what was saved last is kept
TARGET = 0.01  # a step with a save may be slower by this share
TRIES = 2000  # of the bootstrap
TOKEN = "of this benchmark"  # noqa: S105


class Work:
    """Matrix products that take a step's time on so many threads."""

    def __init__(self, seconds: float, threads: int) -> None:
        torch.set_num_threads(threads)
        self._matrix = torch.randn(512, 512)
        self._count = 1
        self.step()  # warms up
        took = min(self._timed() for _ in range(20))
        self._count = max(1, round(seconds / took))

    def step(self) -> None:
        for _ in range(self._count):
            torch.mm(self._matrix, self._matrix)

    def _timed(self) -> float:
        began = time.monotonic()
        self.step()
        return time.monotonic() - began


class Peer:
    """A checkpointer whose states a holder keeps."""

    def __init__(self, folder: Path, size: int) -> None:
        self.state = states.make(size)
        self.kept = threading.Semaphore(0)
        self.seconds: list[float] = []
        self.stalls: list[float] = []
        self._folder = folder
        self._number = 0
        sender = Sender("", TOKEN, job="benchmark", replica=0, rank=0, placement="p")
        sender.tell = self._hear  # type: ignore[method-assign]
        job = Job(
            name="benchmark", replica=0, world_replicas=1, rank=0, placement="p", coordinator="",
            token=TOKEN, state_dir=folder, sender=sender, stop=threading.Event(),
            holder_dir=folder / "memory", domain="here",
        )  # fmt: skip
        self._saver = Checkpointer(job, every_s=0.0)
        there = [{"replica": 0, "holders": [self._saver.open_holder("127.0.0.1")]}]
        self._saver.meet(there, 0)
        pause = threading.Event()
        while not self._saver.prepare(lambda: size_of(self.state, due_soon)):
            pause.wait(0.01)

    def step(self, work: Work) -> None:
        """One step, with a save of what the step before left beside it."""
        self._number += 1
        copying = self._saver.save(self._begin, f"save{self._number}", ["peer"])
        if copying is None:
            raise SystemExit("the holder did not keep up: no room for this step's state")
        work.step()
        copying.wait()

    def close(self) -> None:
        self._saver.finish()
        (found,) = self._folder.glob("memory/*/holder.json")
        os.kill(json.loads(found.read_bytes())["pid"], signal.SIGTERM)

    def _begin(self, into: memoryview | None) -> Copying:
        return Copying(self.state, self._number, into, due_soon)

    def _hear(self, message: Message) -> None:
        if isinstance(message, CheckpointSaved):
            self.seconds.append(message.seconds)
            self.stalls.append(message.stall_s)
            self.kept.release()
        elif isinstance(message, Trouble) and message.kind == "checkpoint_failed":
            print(message.text, file=sys.stderr)


def main() -> None:
    options = arguments()
    folder = Path(tempfile.mkdtemp(prefix="drydock-peer-"))
    peer = Peer(folder, options.megabytes << 20)
    try:
        report(options, peer, *measured(options, peer))
    finally:
        peer.close()
        shutil.rmtree(folder, ignore_errors=True)


def measured(
    options: argparse.Namespace, peer: Peer
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Seconds of a step without and with saves, round by round; and of two without."""
    work = Work(options.step_s, options.threads)

    def timed(*, saves: bool) -> float:
        began = time.monotonic()
        for _ in range(STEPS):
            if saves:
                peer.step(work)
            else:
                work.step()
        took = (time.monotonic() - began) / STEPS
        for _ in range(STEPS if saves else 0):
            # What is still under way is no part of another round.
            if not peer.kept.acquire(timeout=KEPT_S):
                raise SystemExit(f"a save was not kept within {KEPT_S:g} s")
        return took

    timed(saves=True)  # the first makes the holder's memory
    saved, same = [], []
    for turn in range(options.rounds):
        order = (False, True, False) if turn % 2 else (True, False, False)
        took = [timed(saves=saves) for saves in order]
        plain = [seconds for seconds, saves in zip(took, order, strict=True) if not saves]
        saved.append((plain[0], took[order.index(True)]))
        same.append((plain[0], plain[1]))
    return saved, same


def slower(pairs: list[tuple[float, float]]) -> tuple[float, float, float]:
    """By which share the second of each pair is slower at the median; 95% interval of that."""
    shares = [second / first - 1 for first, second in pairs]
    draw = random.Random(1)  # noqa: S311
    medians = sorted(statistics.median(draw.choices(shares, k=len(shares))) for _ in range(TRIES))
    low, high = medians[int(TRIES * 0.025)], medians[int(TRIES * 0.975)]
    return statistics.median(shares), low, high


def judged(share: tuple[float, float, float], most: float) -> str:
    """Whether what `slower` found is within that, as far as its interval tells."""
    middle, low, high = share
    if high <= most:
        return "kept"
    if low > most:
        return "MISSED"
    return f"{'kept' if middle <= most else 'MISSED'} at the median, the interval has it within"


def report(
    options: argparse.Namespace,
    peer: Peer,
    saved: list[tuple[float, float]],
    same: list[tuple[float, float]],
) -> None:
    step_s = statistics.median(first for first, _second in saved)
    word = "a core free" if options.threads < (os.cpu_count() or 1) else "NO core free"
    lines = [
        f"{options.megabytes} MiB saved to a holder at every step of {step_s:.2f} s; "
        f"{options.threads} of {os.cpu_count()} cores compute ({word}); {options.rounds} rounds",
        f"stall {statistics.median(peer.stalls) * 1000:.1f} ms at the median; kept and compared "
        f"after {statistics.median(peer.seconds):.2f} s",
    ]
    for what, pairs in (("with a save", saved), ("without, again (A/A)", same)):
        middle, low, high = slower(pairs)
        lines.append(f"{what:<22} {middle:+.2%} ({low:+.2%} to {high:+.2%})")
    verdict = judged(slower(saved), TARGET)
    free = options.threads < (os.cpu_count() or 1)
    said = verdict if free else "not looked at"
    lines.append(f"target: at most {TARGET:.0%} slower with a core free: {said}")
    print("\n".join(lines))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=64, help="of the state, in MiB")
    parser.add_argument("--step-s", type=float, default=1.0, help="of work")
    parser.add_argument("--rounds", type=int, default=12, help="with, and without")
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    return parser.parse_args()


if __name__ == "__main__":
    main()
