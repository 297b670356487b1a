"""A relay in front of a real server, so that a test can take that server away and give it back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class Relay:
    """Listens where it is told and passes bytes on; `cut` drops all connections and refuses new."""

    def __init__(self, listen: Callable[[], socket.socket], dial: Callable[[], socket.socket]):
        self._listen = listen
        self._dial = dial
        self._open: list[socket.socket] = []
        self._listener: socket.socket | None = None

    def restore(self) -> Relay:
        self._listener = self._listen()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return self

    def cut(self) -> None:
        assert self._listener is not None
        for end in [self._listener, *self._open]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = self._dial()
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


def postgres_relay(folder: Path, socket_folder: str) -> Relay:
    """Postgres at a socket in `folder`, which stands for the one in `socket_folder`."""

    def listen() -> socket.socket:
        path = folder / ".s.PGSQL.5432"
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(64)
        return listener

    def dial() -> socket.socket:
        far = socket.socket(socket.AF_UNIX)
        far.connect(f"{socket_folder}/.s.PGSQL.5432")
        return far

    return Relay(listen, dial)


def tcp_relay(port: int, host: str, target: int) -> Relay:
    """A TCP server at `port` of the loopback, which stands for `host:target`."""
    return Relay(
        lambda: socket.create_server(("127.0.0.1", port)),
        lambda: socket.create_connection((host, target)),
    )
