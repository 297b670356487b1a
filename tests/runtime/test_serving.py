"""A server of requests that lacks something for a moment has it back in the next."""

from __future__ import annotations

import socket
import threading

import pytest

from runtime.serving import Requests, RequestServer
from tests.runtime.replicas import PATIENCE_S, until


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

    until(lambda: not server._strangers, "it is forgotten")
    server.close()


def test_who_does_not_know_the_token_keeps_no_server_from_being_idle() -> None:
    """As who scans ports, or a later start of the job that was given another."""
    server = RequestServer("127.0.0.1", "right", lambda _connection, _request: None)
    host, _, port = server.address.rpartition(":")
    idle = threading.Thread(target=server.await_idle, args=(0.5,), daemon=True)
    idle.start()
    with socket.create_connection((host, int(port)), PATIENCE_S):
        until(lambda: server._strangers, "it is connected")
        idle.join(PATIENCE_S)

    assert not idle.is_alive()
    server.close()


def test_for_who_knows_the_token_is_waited_and_not_for_ever() -> None:
    server = RequestServer("127.0.0.1", "right", lambda connection, _: connection.sendall(b"."))
    requests = Requests(server.address, "right")
    requests.ask(op="any").recv(1)
    server.await_parted(0.1)
    parted = threading.Thread(target=server.await_parted, args=(PATIENCE_S,), daemon=True)
    parted.start()
    parted.join(0.5)
    connected = parted.is_alive()
    requests.close()
    parted.join(PATIENCE_S)

    assert connected
    assert not parted.is_alive()
    server.close()


def test_who_knows_the_token_does_while_it_is_connected_and_for_a_time_after() -> None:
    server = RequestServer("127.0.0.1", "right", lambda connection, _: connection.sendall(b"."))
    requests = Requests(server.address, "right")
    requests.ask(op="any").recv(1)
    idle = threading.Thread(target=server.await_idle, args=(0.0,), daemon=True)
    idle.start()
    idle.join(0.5)
    connected = idle.is_alive()
    requests.close()
    idle.join(PATIENCE_S)

    assert connected
    assert not idle.is_alive()
    server.close()


def test_what_is_no_fault_of_the_network_is_said_where_it_happened(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever asked sees no more than that it was hung up on."""

    def fails(_connection: socket.socket, _request: object) -> None:
        raise RuntimeError("no memory can be pinned")

    server = RequestServer("127.0.0.1", "right", fails)
    asking = Requests(server.address, "right", PATIENCE_S)
    assert asking.ask(op="give").recv(1) == b""
    asking.close()
    server.close()

    assert "request_not_served op=give" in caplog.text
    assert "RuntimeError: no memory can be pinned" in caplog.text
