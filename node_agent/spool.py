"""Messages that must not be lost: kept on disk until the control plane says that it has them.

A message leaves the spool in two ways only: its id was acknowledged, or it was refused for what it
is and now lies in the dead-letter file (on a full disk: in the log), with the reason.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from node_agent.files import Journal
from node_agent.log import log

#: Above this many waiting messages `wait_for_room` holds back those who can be held back.
MAX_WAITING = 20_000
#: The file is rewritten once it holds this many dead lines, and more of them than live ones: so a
#: line costs the same, however many wait.
MAX_DEAD_LINES = 2_000
#: From a rewrite that failed, on a full disk, to the next attempt.
REWRITE_PAUSE_S = 60.0


class Spool:
    """Messages by id, oldest first. Safe for several threads."""

    def __init__(self, path: Path, max_waiting: int = MAX_WAITING) -> None:
        self._journal = Journal(path)
        self._dead_letters = path.with_suffix(".dead.jsonl")
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: dict[str, dict[str, Any]] = {}
        self._dead_lines_borne = MAX_DEAD_LINES
        self._refused = False  # something that the file lacks
        self._rewrite_at = 0.0  # not before; monotonic
        entries = self._journal.load()
        for entry in entries:
            self._apply(entry)
        self._lines = len(entries)
        self._compact()

    def __len__(self) -> int:
        with self._changed:
            return len(self._waiting)

    def put(self, messages: Iterable[dict[str, Any]]) -> None:
        """Keep messages (each with its `id`), durable on return. A newer one of an id replaces it.

        If the disk refuses, they are kept in memory alone and the log says so: a message that may
        still be delivered is worth more than an error nobody can handle. Once there is room, all
        that waits is written.
        """
        with self._changed:
            new = [m for m in messages if self._waiting.get(m["id"]) != m]
            entries = [{"put": message} for message in new]
            for entry in entries:
                self._apply(entry)
            self._append(entries)
            self._changed.notify_all()

    def oldest(self, count: int, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Up to `count` messages, waiting for the first one; empty only when time is up."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting), timeout_s)
            return list(itertools.islice(self._waiting.values(), count))

    def acknowledge(self, ids: Iterable[str], sent: Iterable[dict[str, Any]] = ()) -> None:
        """Forget messages that are safe elsewhere. Unknown ids are ignored, and of the `sent` ones
        those that a newer one has replaced since: that is still to be told."""
        with self._changed:
            replaced = {m["id"] for m in sent if self._waiting.get(m["id"], m) != m}
            known = [one for one in ids if one in self._waiting and one not in replaced]
            if known:
                entry = {"gone": known}
                self._apply(entry)
                self._append([entry])
                self._changed.notify_all()

    def bury(self, message_id: str, reason: dict[str, Any]) -> None:
        """Move a message that will never be accepted to the dead-letter file.

        If the disk refuses, to the log: kept here, it would hold up all others.
        """
        with self._changed:
            message = self._waiting[message_id]
        log("dead_letter", "error", id=message_id, reason=reason, file=self._dead_letters)
        try:
            with closing(Journal(self._dead_letters)) as dead_letters:
                dead_letters.append([{"message": message, "reason": reason}])
        except OSError as error:
            log("dead_letter_not_kept", "error", message=message, error=str(error))
        self.acknowledge([message_id])

    def wait_for_room(self) -> None:
        """Block while the spool is full: for sources that are themselves durable for a while."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < self._max_waiting)

    def _apply(self, entry: dict[str, Any]) -> None:
        if "put" in entry:
            self._waiting[entry["put"]["id"]] = entry["put"]
        for message_id in entry.get("gone", []):
            self._waiting.pop(message_id, None)

    def _append(self, entries: list[dict[str, Any]]) -> None:
        if not entries:
            return
        try:
            self._journal.append(entries)
        except OSError as error:
            log("spool_not_durable", "error", path=self._journal.path, error=str(error))
            self._refused = True
            return
        self._lines += len(entries)
        self._compact()

    def _compact(self) -> None:
        dead = self._lines - len(self._waiting)
        if not self._refused and dead <= max(self._dead_lines_borne, len(self._waiting)):
            return
        if time.monotonic() < self._rewrite_at:
            return
        try:
            self._journal.rewrite({"put": message} for message in self._waiting.values())
        except OSError as error:
            log("spool_not_compacted", "error", path=self._journal.path, error=str(error))
            # Not again with each message of a full disk.
            self._rewrite_at = time.monotonic() + REWRITE_PAUSE_S
            self._dead_lines_borne = max(self._dead_lines_borne, 2 * dead)
            return
        self._dead_lines_borne = MAX_DEAD_LINES
        self._refused = False
        self._lines = len(self._waiting)
