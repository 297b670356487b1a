"""A server of requests that lacks something for a moment has it back in the next."""

from __future__ import annotations

import socket
import threading

import pytest

from runtime.serving import RequestServer
from tests.runtime.replicas import PATIENCE_S


def test_a_connection_for_which_there_is_no_thread_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server = RequestServer("127.0.0.1", "right", lambda _connection, _request: None)
    host, _, port = server.address.rpartition(":")
    with monkeypatch.context() as short_of_threads:
        short_of_threads.setattr(threading.Thread, "start", fails)
        with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
            assert connection.recv(1) == b""
    idle = threading.Thread(target=server.await_idle, args=(0.1,), daemon=True)
    idle.start()
    idle.join(10.0)

    assert not idle.is_alive()
    server.close()
