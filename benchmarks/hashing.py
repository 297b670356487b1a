"""What the hashes cost a save: the same save with them and without, in turns of one run.

    python benchmarks/hashing.py [--gib 0.25] [--rounds 40]

A save is what the writer process does: write, flush, make visible, and read all of it back. Without
hashes it is the same but for a stand-in that says of every chunk that it is as it should be. One
core computes meanwhile, as a trainer's does. Beside it two without (A/A), and the hashes alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peer_memory import judged, slower
from runtime.checkpoint import store
from runtime.checkpoint.draft import Draft
from runtime.image import Buffer, Table, chunks_of, hash_of, pages

TARGET = 0.05  # of a save
BUSY = "import os; ours = os.getppid()\nwhile os.getppid() == ours: pass"  # until we end


@dataclass(frozen=True)
class Took:
    """Seconds of one save."""

    durable: float
    verified: float


def main() -> None:
    options = arguments()
    size = int(options.gib * (1 << 30))
    image = pages(size)
    for chunk in chunks_of(image):
        chunk[:] = os.urandom(len(chunk))
    folder = Path(tempfile.mkdtemp(prefix="drydock-hashing-", dir=options.folder))
    busy = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        alone = statistics.median(hashed(image) for _ in range(options.rounds))
        rounds = [turn(folder, image, number) for number in range(options.rounds)]
    finally:
        busy.kill()
        busy.wait()
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(report(options, size, alone, rounds)))


def turn(folder: Path, image: memoryview, number: int) -> dict[str, Took]:
    """One save of each kind."""
    order = ("without", "with", "again") if number % 2 else ("with", "without", "again")
    took = {}
    for kind in order:
        with contextlib.nullcontext() if kind == "with" else unhashed():
            took[kind] = saved(folder, image)
    return took


@contextlib.contextmanager
def unhashed() -> Iterator[None]:
    def same(_chunk: Buffer) -> str:
        return ""

    with (
        mock.patch("runtime.checkpoint.draft.hash_of", same),
        mock.patch("runtime.checkpoint.store.hash_of", same),
    ):
        yield


def saved(folder: Path, image: memoryview) -> Took:
    """One checkpoint, and its end."""
    began = time.monotonic()
    draft = Draft(folder, 1, uuid.uuid4().hex, 1, {})
    written = draft.write(0, Table(None, (), len(image)), image)
    draft.publish()
    durable = time.monotonic()
    if findings := store.verify_part(written.part, draft.handle):
        raise SystemExit(f"what was written cannot be read back: {findings}")
    verified = time.monotonic()
    draft.close()
    store.remove(draft.path)
    os.sync()  # what is removed is no load of the next
    return Took(durable - began, verified - began)


def hashed(image: memoryview) -> float:
    began = time.monotonic()
    for chunk in chunks_of(image):
        hash_of(chunk)
    return time.monotonic() - began


def report(
    options: argparse.Namespace, size: int, alone: float, rounds: list[dict[str, Took]]
) -> Iterator[str]:
    durable, verified = (
        statistics.median(seconds for _plain, seconds in pairs(rounds, until, "with"))
        for until in ("durable", "verified")
    )
    yield (
        f"{options.gib:g} GiB, {options.rounds} rounds, one of {os.cpu_count()} cores busy: "
        f"durable after {durable:.3f} s, verified after {verified:.3f} s"
    )
    yield f"its hashes alone, on one core: {alone:.3f} s, {size / alone / 1e9:.1f} GB/s"
    for until in ("durable", "verified"):
        for what, kind in (("hashes", "with"), ("without, again (A/A)", "again")):
            middle, low, high = slower(pairs(rounds, until, kind))
            yield f"until {until:<9} {what:<22} {middle:+.1%} ({low:+.1%} to {high:+.1%})"
    verdict = judged(slower(pairs(rounds, "durable", "with")), TARGET)
    yield f"target: hashing lengthens a save by at most {TARGET:.0%}: {verdict}"


def pairs(rounds: list[dict[str, Took]], until: str, kind: str) -> list[tuple[float, float]]:
    """Seconds without hashes, and of this kind, of each round."""
    return [(getattr(took["without"], until), getattr(took[kind], until)) for took in rounds]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=0.25, help="of the state")
    parser.add_argument("--rounds", type=int, default=40, help="of three saves")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
