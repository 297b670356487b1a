"""Notice at once, without polling, that processes ended; and tell the job's coordinator.

This works for children and for adopted processes alike.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable

from node_agent.log import log

COORDINATOR_TIMEOUT_S = 0.5


class ExitWatcher:
    """Calls back, in its own thread, when a process has ended. A child is then still a zombie."""

    def __init__(self) -> None:
        # One epoll takes registrations from any thread while another waits in it.
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}

    def watch(self, pid: int, callback: Callable[[], None]) -> int:
        """Watch a process; returns its pidfd, valid until `callback` has returned.

        Raises ProcessLookupError if there is no such process.
        """
        fd = os.pidfd_open(pid)
        self._callbacks[fd] = callback
        self._epoll.register(fd, select.EPOLLIN)
        return fd

    def run(self) -> None:
        """Call back for each watched process that has ended, for ever.

        Each callback runs on this thread, after which the process's pidfd is closed. What a
        callback raises passes through and ends the thread.
        """
        while True:
            for fd, _ in self._epoll.poll():
                self._epoll.unregister(fd)
                try:
                    self._callbacks.pop(fd)()
                finally:
                    os.close(fd)


def tell_coordinator(
    address: str, token: str, replica: int, placement: str, code: int | None
) -> bool:
    """Say that a rank has exited. False, and a log line, if the coordinator does not say ok."""
    host, _, port = address.rpartition(":")
    message = {
        "op": "exit",
        "token": token,
        "replica": replica,
        "placement": placement,
        "code": code,
    }
    try:
        with socket.create_connection((host, int(port)), COORDINATOR_TIMEOUT_S) as connection:
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as answers:
                answer = json.loads(answers.readline(65536) or b"{}")
    except (OSError, ValueError) as error:
        log("coordinator_not_told", "warning", address=address, error=str(error))
        return False
    if not isinstance(answer, dict) or answer.get("ok") is not True:
        log("coordinator_refused", "warning", address=address, answer=answer)
        return False
    return True
