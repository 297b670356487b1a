"""Reading /proc: which processes exist, who their parents are, when they started.

A pid alone names nobody: it is reused. A pid with its start time names one process for ever.
Standard library only; the chassis uses it too.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from node_agent.log import log

#: So long the kernel may take to show the environments of all processes, copies from their memory;
#: and once that is over, of each of the rest.
ENVIRONMENTS_S, ONE_S = 10.0, 0.1


@dataclass(frozen=True)
class Process:
    """One process as /proc/PID/stat shows it (proc(5)).

    `session` is the id of its session. `pid` and `start_ticks` together name one process of a boot.
    """

    pid: int
    ppid: int
    session: int
    state: str  # R, S, D, T, Z, ... as in proc(5)
    start_ticks: int  # clock ticks after the kernel's boot: field 22 of /proc/PID/stat

    @property
    def running(self) -> bool:
        return self.state not in "ZXx"


def read(pid: int) -> Process | None:
    """The process with this pid, or None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may itself hold spaces and parentheses.
    fields = text[text.rindex(b")") + 2 :].split()
    return Process(
        pid=pid,
        state=fields[0].decode(),
        ppid=int(fields[1]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
    )


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether exactly this process still runs; a zombie does not."""
    process = read(pid)
    return process is not None and process.running and process.start_ticks == start_ticks


def processes() -> Iterator[Process]:
    """Yield every process that there is, running or zombie; one that ends meanwhile is left out."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - names alone, and quickly
        if name.isdigit():
            process = read(int(name))
            if process is not None:
                yield process


def descendants(root: int) -> list[Process]:
    """All running descendants of `root`, itself not included."""
    children: dict[int, list[Process]] = {}
    for process in processes():
        children.setdefault(process.ppid, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        for child in children.get(queue.pop(), []):
            found.append(child)
            queue.append(child.pid)
    return [process for process in found if process.running]


def with_environment(name: str, value: str) -> list[Process]:
    """Running processes that were started with `name=value` in their environment.

    Those of other users are passed over where the kernel does not let us look, and those whose
    memory it keeps locked: they hang in a driver.
    """
    wanted = f"{name}={value}".encode()
    running = [process for process in processes() if process.running]
    return [process for process, environment in _environments(running) if wanted in environment]


def has_variable(pid: int, name: str) -> bool:
    """Whether the process was started with this variable in its environment, whatever its value."""
    prefix = f"{name}=".encode()
    return any(variable.startswith(prefix) for variable in _environment(pid))


def _environments(left: list[Process]) -> Iterator[tuple[Process, list[bytes]]]:
    end = time.monotonic() + ENVIRONMENTS_S
    while left:
        read: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        # On a thread that is left behind where it hangs.
        threading.Thread(target=_read_environments, args=(left, read), daemon=True).start()
        for number, process in enumerate(left, 1):
            try:
                environment = read.get(timeout=max(ONE_S, end - time.monotonic()))
            except queue.Empty:
                log("environment_not_read", "warning", pid=process.pid, state=process.state)
                left = left[number:]
                break
            yield process, environment
        else:
            return


def _read_environments(of: list[Process], read: queue.SimpleQueue[list[bytes]]) -> None:
    for process in of:
        read.put(_environment(process.pid))


def _environment(pid: int) -> list[bytes]:
    """Empty for a process that is gone, or that we may not look into."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
