"""Scripts in processes of their own that have torch from the first, forked from one that has it.

The import takes two seconds of a processor, and the tests start hundreds of ranks. What is lost by
it: all processes of one test run have the same seed of Python's hashes, and what torch reads of the
environment as it is imported (OMP_NUM_THREADS) is the test run's.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
ORDER_BYTES = 1 << 20


class Forked(subprocess.Popen[bytes]):
    """A script that runs, or has ended."""

    def __init__(
        self, script: str, environment: dict[str, str], log: IO[bytes], *arguments: str
    ) -> None:
        self.args = [sys.executable, script, *arguments]
        self.returncode: int | None = None
        self.stdin = self.stdout = self.stderr = None
        order = {"words": [script, *arguments], "environment": environment}
        self.pid = int(_ask(order, [log.fileno()]))
        self._pidfd = os.pidfd_open(self.pid)
        self._polling = threading.Lock()

    def poll(self) -> int | None:
        with self._polling:
            if self.returncode is None:
                self.returncode = _ask({"ended": self.pid})
                if self.returncode is not None:
                    os.close(self._pidfd)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            if not ended.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, sig: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sig)


@functools.cache
def _server() -> tuple[socket.socket, threading.Lock]:
    """The way to the process that forks, which ends with us."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.forking", str(theirs.fileno())],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
        )
    return ours, threading.Lock()


def _ask(order: dict[str, Any], descriptors: list[int] | None = None) -> Any:
    connection, lock = _server()
    with lock:
        socket.send_fds(connection, [json.dumps(order).encode()], descriptors or [])
        return json.loads(connection.recv(ORDER_BYTES))


# --- in the process that forks --------------------------------------------------------------------


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork, and tell who has ended. Returns in each child, with what that is to run; None once
    nobody asks any more."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, ORDER_BYTES, 1)
        if not data:
            return None
        order: dict[str, Any] = json.loads(data)
        if "ended" in order:
            answer = status_of(order["ended"])
        else:
            (log,) = descriptors
            answer = os.fork()
            if not answer:
                connection.close()
                for output in (1, 2):
                    os.dup2(log, output)
                return order
            os.close(log)
        connection.send(json.dumps(answer).encode())


def status_of(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def main() -> None:
    import torch
    import torch.distributed.fsdp

    assert torch.distributed.is_available()
    gc.freeze()
    order = serve(socket.socket(fileno=int(sys.argv[1])))
    if order is None:
        return
    os.environ.clear()
    os.environ.update(order["environment"])
    random.seed()
    sys.argv = script, *_ = order["words"]
    sys.path[0] = str(Path(script).parent)
    sys.path.insert(1, str(ROOT))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
