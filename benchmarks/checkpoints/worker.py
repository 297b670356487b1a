"""One contender in a process of its own, fresh, so that its first save and its memory are its own.

    python -m benchmarks.checkpoints.worker CONTENDER BYTES STEP_MS FOLDER DEVICE

Reads commands, one word a line, from stdin: `prepare`, `save`, `load`, `look`; it answers each, and
its own start, with a line of JSON on what was stdout; what libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpoints import limits, ours, rivals, states
from benchmarks.checkpoints.memory import have_at_hand
from benchmarks.checkpoints.saving import Contender, Saving, bytes_in, forget, now

CONTENDERS: dict[str, Callable[[states.State, Path], Contender]] = {
    "overlapped": ours.Overlapped,
    "at-once": ours.AtOnce,
    "torch.save": rivals.TorchSave,
    "safetensors": rivals.Safetensors,
    "dcp": rivals.Dcp,
    "dcp-thread": rivals.DcpAsync,
    "dcp-process": rivals.DcpProcess,
    "dcp-thread-staged": rivals.DcpStaged,
    "dcp-process-staged": rivals.DcpStagedProcess,
    "torchsnapshot": rivals.Torchsnapshot,
    "memcpy": limits.Memcpy,
    "disk": limits.Disk,
    "disk-of-state": limits.DiskOfState,
}
SIDE = {"cpu": 128, "cuda": 2048}  # of the matrices in a unit of work
PRODUCTS = 4  # in a unit, which takes about a millisecond at most
FEWEST = 20  # units that tell how fast the work went on
PATIENCE_S = 300.0
AT_HAND = 2  # states, for which memory is at hand when a clock starts


def main() -> None:
    name, size, step_ms, folder, device = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    state = states.make(int(size), device)
    contender = CONTENDERS[name](state, Path(folder))
    bench = Bench(contender, state, float(step_ms) / 1e3, device)
    todo = {
        "prepare": bench.prepare, "save": bench.save, "load": bench.load, "look": bench.look,
    }  # fmt: skip
    card = torch.cuda.get_device_name() if device == "cuda" else ""
    start = {"bytes": states.size_of(state), "card": card}
    print(json.dumps(start), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(todo[line.strip()]()), file=answers, flush=True)
    contender.close()


class Work:
    """Matrix products, on one thread or the card: what a trainer computes meanwhile."""

    def __init__(self, device: str) -> None:
        self._left, self._right, self._out = torch.randn(3, SIDE[device], SIDE[device]).to(device)
        self._on_card = device == "cuda"

    def until(self, over: Callable[[], bool]) -> list[float]:
        """When each unit ended, the beginning before them."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        ends = [now()]
        while not over():
            for _ in range(PRODUCTS):
                torch.mm(self._left, self._right, out=self._out)
            if self._on_card:
                torch.cuda.current_stream().synchronize()  # and no other stream
            ends.append(now())
        torch.set_num_threads(threads)
        return ends

    def during(self, seconds: float) -> list[float]:
        end = now() + seconds
        return self.until(lambda: now() >= end)


class Bench:
    """What the commands do."""

    def __init__(
        self, contender: Contender, state: states.State, step_s: float, device: str
    ) -> None:
        self._contender = contender
        self._state = state
        self._step_s = step_s
        self._work = Work(device)
        self._device = device
        self._numbers = count(1)
        self._last = 0
        self._path: Path | None = None

    def prepare(self) -> dict[str, Any]:
        self._make_ready()
        began = now()
        self._contender.prepare()
        return {"seconds": now() - began}

    def save(self) -> dict[str, Any]:
        """One save, with a step's work after it, and more until it is over."""
        self._make_ready()
        return self.look()

    def look(self) -> dict[str, Any]:
        """The same for one who looks at the memory, of which nothing else is used before."""
        states.change(self._state)
        quiet = units(self._work.during(self._step_s))
        self._last = next(self._numbers)
        began = now()
        saving = self._contender.save(self._last)
        begun = now()
        spans, waited = self._go_on(saving)
        kept = saving.done.result(PATIENCE_S)
        self._path = kept.path
        over = kept.verified or kept.durable
        meanwhile = [unit for ends in spans for unit in units([e for e in ends if e <= over])]
        return {
            "stall_s": begun - began + waited,
            "durable_s": kept.durable - began,
            "verified_s": None if kept.verified is None else kept.verified - began,
            "slower": slower(quiet, meanwhile),
            "bytes": 0 if kept.path is None else bytes_in(kept.path),
            "path": str(kept.path),
        }

    def _make_ready(self) -> None:
        """For a clock to start."""
        have_at_hand(AT_HAND * states.size_of(self._state))

    def _go_on(self, saving: Saving) -> tuple[list[list[float]], float]:
        """When units of work ended, and how long the optimizer waited after the first step."""
        if saving.done.done():
            return [], 0.0
        first = self._work.during(self._step_s)
        began = now()
        saving.settle()
        waited = now() - began
        return [first, self._work.until(saving.done.done)], waited

    def load(self) -> dict[str, Any]:
        """Load the last save, from the disk to where the state is; compared with that outside the
        time."""
        into: states.State = {}
        if self._contender.in_place:
            into = {
                name: torch.empty_like(tensor).fill_(-1) for name, tensor in self._state.items()
            }
        if self._path is not None:
            forget(self._path)
        self._make_ready()
        began = now()
        loaded = self._contender.load(self._last, into)
        loaded = {name: tensor.to(self._device) for name, tensor in loaded.items()}
        if self._device == "cuda":
            torch.cuda.synchronize()
        seconds = now() - began
        return {"seconds": seconds, "equal": not loaded or states.is_equal(self._state, loaded)}


def units(ends: list[float]) -> list[float]:
    return [end - begin for begin, end in pairwise(ends)]


def slower(quiet: list[float], meanwhile: list[float]) -> float | None:
    """By what share; None if there was too little of it to tell. Of means: what one unit waited
    for counts."""
    if len(meanwhile) < FEWEST:
        return None
    return statistics.fmean(meanwhile) / statistics.fmean(quiet) - 1


if __name__ == "__main__":
    main()
