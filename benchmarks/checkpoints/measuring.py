"""The rounds: contenders take turns, each turn in a fresh process, so that all meet the same
machine. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import psutil

from benchmarks.checkpoints.contenders import ALL, OURS, Contender, python_of

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLE_S = 0.02  # between two looks at the memory
LATER = 3  # saves of a turn after its first, that are timed
LOADS = 3  # of the last of them, each from a cold disk
LAST_LINES = 4  # of a log, which say why a contender ended
END_S = 60.0  # that a contender has to end


@dataclass(frozen=True)
class Plan:
    rounds: Mapping[float, int]  # of each size in GiB, in this order
    step_ms: float
    only_ours: bool = False  # and the limits
    device: str = "cpu"
    here: bool = False  # every contender runs in this environment


def measure(
    plan: Plan, folder: Path, say: Callable[[str], None]
) -> Iterator[tuple[list[dict[str, Any]], dict[str, str]]]:
    """After each turn what there is: rows, one for each size and contender, and why some are left
    out. One that fails loses its row of that size, whatever its turns before had shown."""
    rows: dict[tuple[float, str], dict[str, Any]] = {}
    failed: dict[str, str] = {}
    pythons: dict[str, str] = {}
    contenders = [one for one in ALL if one.limit or one in OURS or not plan.only_ours]
    for contender in contenders:
        try:
            pythons[contender.name] = sys.executable if plan.here else python_of(contender)
        except RuntimeError as error:
            failed[contender.name] = str(error)
            say(f"{contender.name} is left out: {error}")
    yield [], failed
    for gib, rounds in plan.rounds.items():
        for number in range(rounds):
            for contender in contenders:
                if contender.name in failed:
                    continue
                say(f"{gib:g} GiB, round {number + 1} of {rounds}: {contender.name}")
                try:
                    with Turn(contender, pythons[contender.name], gib, plan, folder) as turn:
                        turn.play(rows, look_at_memory=number == 0)
                except RuntimeError as error:
                    rows.pop((gib, contender.name), None)
                    failed[contender.name] = f"{gib:g} GiB: {error}"
                    say(f"{contender.name} is left out: {error}")
                yield list(rows.values()), failed


class Turn:
    """One process of a contender, from its start to its end."""

    def __init__(
        self, contender: Contender, python: str, gib: float, plan: Plan, folder: Path
    ) -> None:
        self._contender = contender
        self._gib = gib
        self._folder = folder / "turn"
        self._folder.mkdir()
        self._log = folder / f"{contender.worker}.log"
        command = [
            python, "-W", "ignore", "-m", "benchmarks.checkpoints.worker", contender.worker,
            str(int(gib * (1 << 30))), str(plan.step_ms), str(self._folder), plan.device,
        ]  # fmt: skip
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._commands = cast(IO[str], self._process.stdin)
        self._answers = cast(IO[str], self._process.stdout)

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        shutil.rmtree(self._folder)
        os.sync()  # what is removed is nobody else's load

    def play(self, rows: dict[tuple[float, str], dict[str, Any]], *, look_at_memory: bool) -> None:
        """A first save, later ones, cold loads; what they took is added to the row. In one turn one
        more save, untimed, for looking at the memory costs time; before the loads, for of what
        these took much stays with the process."""
        started = self._heard()
        row = rows.setdefault(
            (self._gib, self._contender.name),
            {
                "size_gib": self._gib,
                "name": self._contender.name,
                "limit": self._contender.limit,
                "state_bytes": started["bytes"],
                "card": started["card"],
                "prepare_s": [],
                "first": [],
                "later": [],
                "load_s": [],
            },
        )
        before = memory_of(self._process.pid)
        row["prepare_s"].append(self._ask("prepare")["seconds"])
        row["first"].append(self._save(None))
        last = row["first"][-1]["path"]
        for _ in range(LATER):
            row["later"].append(self._save(last))
            last = row["later"][-1]["path"]
        if look_at_memory:
            with peak_of(self._process.pid) as looked:
                self._ask("look")
            row["memory_bytes"] = max(looked) - before
        for _ in range(LOADS):
            loaded = self._ask("load")
            if not loaded["equal"]:
                raise RuntimeError("what it loaded is not what it saved")
            row["load_s"].append(loaded["seconds"])

    def _save(self, former: str | None) -> dict[str, Any]:
        """One that was there before is removed, so that the disk does not fill."""
        if former is not None and Path(former) != self._folder:
            shutil.rmtree(former, ignore_errors=True)
            os.sync()
        return self._ask("save")

    def _ask(self, what: str) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # it ended; its log says why
            self._commands.write(f"{what}\n")
            self._commands.flush()
        return self._heard()

    def _heard(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            last = self._log.read_text().splitlines()[-LAST_LINES:]
            raise RuntimeError(f"it ended; {' / '.join(last)}")
        heard: dict[str, Any] = json.loads(line)
        return heard


@contextmanager
def peak_of(pid: int) -> Iterator[list[int]]:
    """What the process and those it started held, again and again, until the end."""
    looked = [memory_of(pid)]
    over = threading.Event()

    def look() -> None:
        while not over.wait(SAMPLE_S):
            looked.append(memory_of(pid))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield looked
    finally:
        over.set()
        looking.join()


def memory_of(pid: int) -> int:
    """Bytes: each shared page counts by its share."""
    root = psutil.Process(pid)
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue  # it just ended
    return total
