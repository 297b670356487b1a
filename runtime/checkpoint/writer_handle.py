"""The writer's process, as its trainer sees it: started when it is needed, and again if it died."""

from __future__ import annotations

import array
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.checkpoint.copy_buffers import CopyBuffer
from runtime.checkpoint.writer import PACKET_BYTES
from runtime.client import ENV_RANK
from runtime.forking import keep_from_children
from runtime.priority import NICE

log = logging.getLogger("drydock.checkpoint")

#: Names another module to run as the writer: one whose disk has faults, for a trial.
WRITER_MODULE = "DRYDOCK_CHECKPOINT_WRITER"


class WriterHandle:
    """Passes messages on; `hear` is called with each that comes, on a thread of its own, and with
    {"op": "died", "life", "code"} once a process is gone."""

    def __init__(self, hear: Callable[[dict[str, Any]], None]) -> None:
        self._hear = hear
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread | None = None
        self._generation = -1  # of the buffers that it was given
        self._life = 0  # how many processes were started

    @property
    def pid(self) -> int | None:
        """Of the process, if one was started and is not known to be dead."""
        with self._lock:
            return None if self._socket is None or self._process is None else self._process.pid

    def start(self) -> None:
        """Start it unless it runs: it needs a moment. Raises OSError."""
        with self._lock:
            self._started()

    def send(
        self,
        message: dict[str, Any],
        copy_buffers: tuple[int, list[CopyBuffer]],
        stamp: Callable[[int], None] | None = None,
    ) -> None:
        """Send one message, and before it the buffers (see `CopyBuffers.there`) if it was not given
        these yet. `stamp` is told before that which life of the writer it goes to.

        Raises OSError if it cannot be started, or dies meanwhile.
        """
        with self._lock:
            connection = self._started()
            if stamp is not None:
                stamp(self._life)
            try:
                generation, there = copy_buffers
                if self._generation != generation:
                    descriptors = array.array("i", [buffer.fd for buffer in there])
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
                    given = {"op": "buffers", "numbers": [buffer.number for buffer in there]}
                    connection.sendmsg([json.dumps(given).encode()], rights)
                    self._generation = generation
                data = json.dumps(message).encode()
                if len(data) > PACKET_BYTES:
                    raise OSError(f"a message of {len(data)} bytes: shorten the checkpoint's facts")
                connection.send(data)
            except OSError:
                self._forget()
                raise

    def tell(self, message: dict[str, Any]) -> None:
        """Send one message more of what was sent, unless the process is gone, and that with it."""
        with self._lock:
            if self._socket is not None:
                try:
                    self._socket.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
                except OSError:
                    self._forget()

    def close(self, wait_s: float) -> bool:
        """Ask for nothing more; whether it had done all that it was asked within the time. If not
        it goes on by itself."""
        with self._lock:
            process, connection, listener = self._process, self._socket, self._listener
        if process is None or listener is None:
            return True
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        listener.join(wait_s)  # it heard all that was said
        return not listener.is_alive()

    def _started(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keep_from_children(ours)  # its end is ours, as the writer sees it
        keep_from_children(theirs)  # and its death is heard once nobody has its end
        with theirs:
            module = os.environ.get(WRITER_MODULE, "runtime.checkpoint.writer")
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    # What ends the trainer's group spares it. No session of its own: Linux shares
                    # the processors out by sessions first, and within this one it stands back.
                    process_group=0,
                    cwd="/",
                    env=environment(),
                )
            except OSError:
                ours.close()
                raise
        with contextlib.suppress(OSError):  # from its start on, which takes a tenth of a second
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, self._process.pid, own + NICE)
        listener = threading.Thread(
            target=self._listen,
            args=(ours, self._process, self._life + 1),
            name="drydock-writer",
            daemon=True,
        )
        try:
            listener.start()
        except RuntimeError:  # no more threads: nobody would hear it
            ours.close()  # which ends it
            raise
        self._socket, self._generation, self._life = ours, -1, self._life + 1
        self._listener = listener
        return ours

    def _listen(
        self, connection: socket.socket, process: subprocess.Popen[bytes], life: int
    ) -> None:
        while True:
            try:
                data = connection.recv(PACKET_BYTES)
            except OSError:
                data = b""
            if not data:
                break
            try:
                self._hear(json.loads(data))
            except Exception:
                log.exception("what the writer said was not understood")
        with self._lock:
            if self._socket is connection:
                self._forget()
        process.wait()
        self._hear({"op": "died", "life": life, "code": process.returncode})

    def _forget(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # which wakes the listener
            self._socket = None


def environment() -> dict[str, str]:
    """The trainer's, with the way to our own modules; the writer needs nothing else of it. It is no
    rank: a card's fault hits those who compute on it."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    ours = {name: value for name, value in os.environ.items() if name != ENV_RANK}
    return {**ours, "PYTHONPATH": path}
