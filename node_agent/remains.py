"""What still runs of a rank, in whatever session: found by its environment, killed, waited for.

A launcher such as torchrun gives each of its workers a session, so no group of processes has all.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from node_agent import procfs
from node_agent.config import Config
from node_agent.launch import notice_file
from node_agent.log import log

#: So long a look for them waits where a process of the node hangs. Whoever wants a rank stopped
#: waits meanwhile, and cuts the power after a few seconds.
LOOK_S = 1.0


def processes_of(config: Config, placement: str) -> list[procfs.Process]:
    """What runs of a rank, and may hold its cards.

    Not who writes its checkpoints: that one bears no rank, outlives it and finishes.
    """
    # Which file it is names this agent too: another one of this machine may have a rank of the id.
    notice = str(notice_file(config, placement))
    return procfs.with_environment(
        "DRYDOCK_NOTICE_FILE", notice, having="DRYDOCK_RANK", within_s=LOOK_S
    )


def end(
    config: Config, placement: str, within_s: float, known: Iterable[procfs.Process] = ()
) -> list[procfs.Process]:
    """Kill all that runs of a rank: what has not ended within this time of being found.

    `known`: what ran of it before. A process that the kernel is ending has no environment left.
    """
    left = [*known, *processes_of(config, placement)]
    until = time.monotonic() + within_s
    while left:
        left = _kill(left, until)
        if left:
            pids = [process.pid for process in left]
            log("rank_not_ended", "error", placement=placement, pids=pids)
            return left
        left = processes_of(config, placement)  # one that was just forked
    return []


def _kill(processes: Iterable[procfs.Process], until: float) -> list[procfs.Process]:
    """Kill them; which have not ended by then, each with all of its threads."""
    each = {(process.pid, process.start_ticks): process for process in processes}.values()
    for process in each:
        with _pidfd(process) as pidfd, suppress(ProcessLookupError):
            if pidfd is not None:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    return [process for process in each if not _has_ended(process, until)]


def _has_ended(process: procfs.Process, until: float) -> bool:
    with _pidfd(process) as pidfd:
        if pidfd is None:
            return True
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(1000 * max(0.0, until - time.monotonic())))


@contextmanager
def _pidfd(process: procfs.Process) -> Iterator[int | None]:
    """Of this very process; None if it has ended. One at a time: a rank may have hundreds."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        yield None
        return
    try:
        now = procfs.read(process.pid)
        yield pidfd if now is not None and now.start_ticks == process.start_ticks else None
    finally:
        os.close(pidfd)
