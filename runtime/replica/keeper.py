"""That one coordinator alone keeps a job's record, also where two machines share its folder.

A lock serves for those of one machine (`record.hold_alone`); over a network it may hang, or outlive
its holder. So whoever keeps the record gives a sign of life beside it, and ends once another has
taken it over.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from runtime.replica.record import RECORD, StaleEpoch

log = logging.getLogger("drydock.coordinator")

BEAT_S = 1.0
#: One that gave no sign for so long is gone, or cannot reach the folder. Less than the time after
#: which members that were not heard of may be replaced: one that sleeps, and wakes up when its
#: place is taken, still ends before anybody else trains.
SILENT_S = 3.0
AWAY_S = 60.0  # no more often is it logged, for one reason, that the folder takes no sign


class Keeper:
    """One coordinator's claim to the record in a folder."""

    def __init__(self, folder: Path, host: str = "") -> None:
        """`host`: what this machine is called among those that share the folder."""
        self._path = folder / "coordinator.keeper"
        self._record, self._seen = folder / RECORD, False
        self._host = host or socket.gethostname()
        self._name = f"{self._host} {os.getpid()} {uuid.uuid4().hex[:8]}"
        self._beats = 0
        self._beat_at = 0.0  # monotonic
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take_over(self) -> None:
        """Be the one that keeps the record; to be called by whoever holds this machine's lock.

        Where another machine's coordinator kept it last this waits for a sign of life of that one,
        for SILENT_S. Raises StaleEpoch if there is one, and OSError.
        """
        before = self._read()
        if before and before.split()[0] != self._host:
            deadline = time.monotonic() + SILENT_S
            while time.monotonic() < deadline:
                self._ended.wait(BEAT_S / 4)  # files of a network tell nobody that they changed
                if self._read() != before:
                    raise StaleEpoch(
                        f"the coordinator on {before.split()[0]} keeps the record in "
                        f"{self._path.parent}, and lives: end it, or give another --state-dir"
                    )
            log.warning("record_taken_over of=%s", before)
        self._beat()

    def keep(self, on_lost: Callable[[], object]) -> None:
        """Give signs of life from now on, on a thread of its own. `on_lost` is called there once
        another has taken over: it must end this process, for others may train by then."""
        self._thread = threading.Thread(
            target=self._run, args=(on_lost,), name="drydock-keeper", daemon=True
        )
        self._thread.start()

    def answers(self) -> bool:
        """Whether the folder took a sign of life just now: where it hangs nobody is to wait for
        what is written there."""
        return time.monotonic() - self._beat_at < SILENT_S

    def release(self) -> None:
        """Whoever comes next need not wait."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        try:
            if self._is_ours(self._read()):
                self._path.unlink()
        except OSError as error:
            log.warning("record_not_released error=%s", error)

    def _run(self, on_lost: Callable[[], object]) -> None:
        told, tell_at = "", 0.0
        while not self._ended.wait(BEAT_S):
            try:
                self._demand_record()
                found = self._read()
                if found and not self._is_ours(found):
                    log.critical("record_lost to=%s", found)
                    on_lost()
                    return
                self._beat()  # also where somebody removed it: nobody has taken over
            except OSError as error:
                why, now = str(error), time.monotonic()
                if why != told or now >= tell_at:
                    told, tell_at = why, now + AWAY_S
                    log.warning("no_sign_of_life path=%s error=%s", self._path, why)

    def _demand_record(self) -> None:
        """Raises FileNotFoundError where it was there and is not any more: its folder was
        unmounted, as a rule, and no sign is to lie beneath, where the next one would find it."""
        there = self._record.exists()
        if self._seen and not there:
            raise FileNotFoundError(f"{self._record} is gone")
        self._seen = there

    def _is_ours(self, found: str) -> bool:
        return found.rpartition(" ")[0] == self._name

    def _read(self) -> str:
        """Whose it is, and the number of the last sign; "" if it is nobody's."""
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return ""

    def _beat(self) -> None:
        self._beats += 1
        draft = self._path.with_name(f"{self._path.name}.{self._host}")
        draft.write_text(f"{self._name} {self._beats}")
        draft.replace(self._path)
        self._beat_at = time.monotonic()
