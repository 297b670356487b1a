"""The checkpoint writer of a rank, with the injector of the runner in it.

It may be struck in each phase of a save, and its disk may be full or slow. It packs half of what it
may pack. The rank learns of it through DRYDOCK_CHECKPOINT_WRITER. Imports no torch.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.checkpoint import compression, disk, packing, peer, store, writer
from runtime.checkpoint.draft import Draft
from runtime.checkpoint.objects import ObjectStore
from runtime.checkpoint.packing import Packer
from runtime.torture import injector
from runtime.torture.injector import Injector, around

MODULE = "runtime.torture.writer"  # under whatever name it was imported
#: Where each phase of a save begins.
BEGINNINGS: dict[str, tuple[Any, str]] = {
    "write": (disk, "write"),
    "pack": (disk, "write_pieces"),
    "publish": (Draft, "publish"),
    "verify": (store, "verify_part"),
    "prune": (store, "prune"),
    "replicate": (peer.Keeping, "hold"),
    "put": (ObjectStore, "write"),
    "announce": (ObjectStore, "publish"),
    "expire": (ObjectStore, "prune"),
}


@dataclass(frozen=True)
class DiskFault:
    """What the disk of a folder does wrong, for as long as the runner says so."""

    kind: str  # of fault
    under: str  # folder
    seconds: float  # that each file takes, of a slow one


def main() -> None:
    """Run the checkpoint writer with the injector in it, on a disk that the runner may break."""
    ours = injector.from_environment()
    break_disk(ours)
    pack_half()
    for phase, (owner, name) in BEGINNINGS.items():
        come_to(ours, phase, owner, name)
    writer.main()


def come_to(injector: Injector, phase: str, owner: Any, name: str) -> None:
    """Have the injector come to `phase` whenever the function `name` of `owner` begins."""

    def begin(inner: Callable[..., Any], *given: Any, **named: Any) -> Any:
        injector.at(phase)
        return inner(*given, **named)

    around(owner, name, begin)


def pack_half() -> None:
    """Pack every other file that may be packed, whether or not that pays: what is small and goes to
    a quick disk never does, and both ways are to be struck, damaged and loaded."""
    turns = itertools.cycle((True, False))

    def may_pay(_inner: Callable[..., bool], _packer: Packer) -> bool:
        return compression.is_installed() and next(turns)

    def pays(
        inner: Callable[..., bool], sample: packing.Sample, _speed: float, cores: float
    ) -> bool:
        return inner(sample, 1.0, cores)

    around(Packer, "may_pay", may_pay)
    around(packing, "pays", pays)


def break_disk(injector: Injector) -> None:
    """Have each file that is written meet what the runner says of its disk by then, and tell."""

    def met(into: int) -> DiskFault | None:
        """What is wrong with the disk of this folder, if anything is."""
        fault = present_fault(injector.folder)
        where = Path(f"/proc/self/fd/{into}").readlink()
        if fault is None or not where.is_relative_to(fault.under):
            return None
        injector.tell("met", kind=fault.kind)
        return fault

    def write(
        inner: Callable[..., None], name: str, data: memoryview, into: int, *more: Any
    ) -> None:
        if (fault := met(into)) is not None:
            if fault.kind == "full":
                inner(name, data[: len(data) // 2], into, *more)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
            time.sleep(fault.seconds)
        inner(name, data, into, *more)

    def write_pieces(
        inner: Callable[..., int], name: str, pieces: Any, most: int, into: int, *more: Any
    ) -> int:
        """Of what is packed, that is: its first half is not known before the second."""
        if (fault := met(into)) is not None:
            if fault.kind == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
            time.sleep(fault.seconds)
        return inner(name, pieces, most, into, *more)

    around(disk, "write", write)
    around(disk, "write_pieces", write_pieces)


def present_fault(folder: Path) -> DiskFault | None:
    """Return what the run's disk does wrong now; None if it is well."""
    try:
        return DiskFault(**json.loads(fault_file(folder).read_text()))
    except FileNotFoundError:
        return None


def set_fault(folder: Path, fault: DiskFault) -> None:
    """Break the run's disk: writers see the fault from their next file on."""
    draft = fault_file(folder).with_suffix(".new")
    draft.write_text(json.dumps(asdict(fault)))
    draft.replace(fault_file(folder))


def end_fault(folder: Path) -> None:
    """Mend the run's disk; nothing happens if it is well."""
    fault_file(folder).unlink(missing_ok=True)


def all_ended(folder: Path) -> bool:
    """Whether no writer of this run is left: also none that was only just started, which finishes
    what it was given before it could read it."""
    return not writers(folder)


def writers(folder: Path) -> list[int]:
    """Those of this run that there are."""
    run = f"{injector.ENV_FOLDER}={folder}"
    found = [one for one in Path("/proc").iterdir() if one.name.isdigit()]
    return [int(one.name) for one in found if _is_writer(one, run)]


def _is_writer(process: Path, run: str) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        variables = (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended
        return False
    return MODULE.encode() in words and run.encode() in variables


def fault_file(folder: Path) -> Path:
    """Return the file in which the runner says what is wrong with the disk."""
    return folder / "disk"


if __name__ == "__main__":
    main()
