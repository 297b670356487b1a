"""What the ranks of one run wrote down, read while they write. Only reads; judges nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.torture.injector import events_file


@dataclass(frozen=True)
class Event:
    """One thing that one start of a replica passed through."""

    #: phase, commit, granted, lost, struck, landed, met, trouble, saved, loaded, ended, part
    what: str
    at: float  # monotonic, which is one clock for all processes of a machine
    replica: int
    placement: str
    data: dict[str, Any]


class Watch:
    """All events so far, by placement, in the order in which each happened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: dict[str, list[Event]] = {}
        self.commits: dict[str, Event] = {}  # the last one of each placement
        self._replicas: dict[str, int] = {}
        self._read: dict[str, int] = {}

    def follow(self, replica: int, placement: str) -> None:
        """Read this placement's events from now on."""
        self._replicas[placement] = replica
        self.events[placement] = []

    def poll(self) -> None:
        """Read what was written since."""
        for placement, replica in self._replicas.items():
            for line in self._new_lines(placement):
                raw = json.loads(line)
                event = Event(raw["what"], raw["at"], replica, placement, raw["data"])
                self.events[placement].append(event)
                if event.what == "commit":
                    self.commits[placement] = event

    def newest(self) -> int:
        """The highest step that anyone committed; -1 for none."""
        return max((event.data["step"] for event in self.commits.values()), default=-1)

    def restart(self) -> None:
        """The whole job begins anew, from an older state: how far those before it came does not
        count any more."""
        self.poll()
        self.commits.clear()

    def find(self, what: str, *placements: str, since: float = 0.0) -> list[Event]:
        """Events of one sort, oldest first; of all placements if none is named."""
        found = [
            event
            for placement in placements or tuple(self.events)
            for event in self.events[placement]
            if event.what == what and event.at >= since
        ]
        return sorted(found, key=lambda event: event.at)

    def _new_lines(self, placement: str) -> Iterator[bytes]:
        path = events_file(self.folder, placement)
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read.get(placement, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[placement] = self._read.get(placement, 0) + len(whole)
        yield from whole.splitlines()
