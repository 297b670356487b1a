"""The coordinator's record: the one durable fact about who may train.

Written with fsync before any member is told, so that an epoch is never granted twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

LOCK_POLL_S = 0.05
RECORD = "coordinator.json"  # in the coordinator's folder


@dataclass(frozen=True, kw_only=True)
class Record:
    """The last epoch granted. `epoch` 0 means that none was."""

    job: str
    epoch: int = 0
    members: dict[int, str] = field(default_factory=dict)  # replica -> placement
    step: int = -1  # last committed step known when the epoch was granted
    grant: dict[str, Any] = field(default_factory=dict)  # what its members are told, verbatim
    superseded: list[str] = field(default_factory=list)  # placements whose place another has
    #: replica -> addresses of the holders on its ranks' nodes, when it was a member last
    holders: dict[int, list[str]] = field(default_factory=dict)


class Unusable(ValueError):
    """What is on disk is no record of this job."""


class StaleEpoch(RuntimeError):
    """The record moved on: read it again and judge anew."""


def hold_alone(folder: Path, wait_s: float) -> TextIO:
    """Be the only coordinator on this machine that uses the folder, while the file stays open.

    Waits for one that is about to end. Raises StaleEpoch if it does not within `wait_s`. For those
    of other machines see `keeper`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"coordinator.{socket.gethostname()}.lock"
    file = path.open("a")
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                file.close()
                raise StaleEpoch(
                    f"another coordinator holds {path}: end it, or give another --state-dir"
                ) from error
            time.sleep(LOCK_POLL_S)  # a lock has no event to wait for with a limit
        else:
            return file


class RecordFile:
    """Compare-and-set on one file."""

    def __init__(self, folder: Path, job: str) -> None:
        self.path = folder / RECORD
        #: the next one; of this machine, for one that was superseded may still write its own
        self.next = folder / f"coordinator.{socket.gethostname()}.new"
        self.job = job
        folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> Record:
        """The record on disk, or an empty one.

        Raises Unusable if the file belongs to another job, or is damaged.
        """
        if not self.path.exists():
            return Record(job=self.job)
        try:
            raw = json.loads(self.path.read_bytes())
            found = Record(
                job=str(raw["job"]),
                epoch=raw["epoch"],
                members={int(replica): placed for replica, placed in raw["members"].items()},
                step=raw["step"],
                grant=raw["grant"],
                superseded=raw.get("superseded", []),
                holders={int(replica): at for replica, at in raw.get("holders", {}).items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unusable(
                f"{self.path} is damaged ({error!r}): move it away, and the coordinator takes the "
                "epoch from a majority of the last members"
            ) from error
        if found.job != self.job:
            raise Unusable(
                f"{self.path} belongs to job {found.job}, not {self.job}; give another --state-dir"
            )
        return found

    def advance(self, expected_epoch: int, new: Record) -> None:
        """Replace the record if it still names `expected_epoch`; durable when it returns.

        Raises StaleEpoch if it moved on, and OSError.
        """
        found = self.read().epoch
        if expected_epoch and not found:
            raise self._gone()  # no other coordinator took it away
        if found != expected_epoch or new.epoch <= expected_epoch:
            raise StaleEpoch(
                f"{self.path} is at epoch {found}, not {expected_epoch}; is a second coordinator "
                "running on the same --state-dir?"
            )
        self._write(new)
        self.next.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def draft(self, record: Record) -> None:
        """Write a record beside the one that holds: whether it could be replaced now, and the room
        for the next. Raises OSError."""
        if not self.path.exists():
            raise self._gone()
        self._write(record)

    def _write(self, record: Record) -> None:
        with self.next.open("w") as file:
            json.dump(asdict(record), file)
            file.flush()
            os.fsync(file.fileno())

    def _gone(self) -> FileNotFoundError:
        """Its folder was unmounted, as a rule: what is beneath is no place for the next."""
        return FileNotFoundError(
            f"{self.path} is gone: mount its folder again, or start the coordinator anew, which "
            "takes the epoch from a majority of the members"
        )
