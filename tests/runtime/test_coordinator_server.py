"""The coordinator's socket: who comes by must not keep out those who belong to the job."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from runtime.replica import server
from runtime.replica.coordinator import Coordinator
from runtime.replica.record import RecordFile
from tests.runtime.replicas import PATIENCE_S, until

STATUS = json.dumps({"op": "status", "token": "t"}).encode() + b"\n"
JOIN = {
    "op": "join", "token": "t", "job": "j", "standby": "", "replica": 0, "placement": "a",
    "addresses": ["127.0.0.1:1"], "gloo": ["127.0.0.1:2"], "shards": 12, "shape": {}, "world": 2,
    "epoch": 0, "step": -1, "members": {},
}  # fmt: skip


def test_who_is_told_to_end_ends_though_members_stay_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "DRAIN_S", 0.2)
    coordinator = Coordinator(RecordFile(tmp_path, "j"), "t", world=2, min_replicas=1)
    port_file = tmp_path / "port"

    async def play() -> bool:
        running = asyncio.create_task(server.run(coordinator, "127.0.0.1", 0, port_file))
        await asyncio.to_thread(until, port_file.exists, "it listens")
        member = await asyncio.open_connection("127.0.0.1", int(port_file.read_text()))
        member[1].write(json.dumps(JOIN).encode() + b"\n")
        await asyncio.to_thread(until, lambda: coordinator.peers, "one has joined")
        os.kill(os.getpid(), signal.SIGTERM)
        ended, _ = await asyncio.wait([running], timeout=PATIENCE_S)
        return running in ended and not member[0].at_eof()

    assert asyncio.run(play())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--min-replicas", "4"], "--min-replicas is 4 and DRYDOCK_WORLD_REPLICAS 2: once one is"),
        (["--lease", "0.5"], "--lease is 0.5: give "),
        (["--silence", "0.5"], "--silence is 0.5: give "),
    ],
)
def test_what_would_stop_the_job_one_day_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    monkeypatch.setenv("DRYDOCK_TOKEN", "t")
    monkeypatch.setenv("DRYDOCK_WORLD_REPLICAS", "2")
    monkeypatch.setattr("sys.argv", ["coordinator", "--job", "j", "--state-dir", "s", *more])

    with pytest.raises(SystemExit):
        server.options("")

    assert words in capsys.readouterr().err


def test_a_number_of_replicas_that_is_none_is_refused_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRYDOCK_TOKEN", "t")
    monkeypatch.setenv("DRYDOCK_WORLD_REPLICAS", "four")
    monkeypatch.setattr("sys.argv", ["coordinator", "--job", "j", "--state-dir", "s"])

    with pytest.raises(SystemExit):
        server.options("")

    assert "DRYDOCK_WORLD_REPLICAS is 'four': give a whole number" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "203.0.113.9"])
def test_where_it_cannot_listen_it_ends_with_the_option_to_change(
    tmp_path: Path, host: str
) -> None:
    """Another has the port there, or it is the address of another machine."""
    coordinator = Coordinator(RecordFile(tmp_path, "j"), "t", world=2, min_replicas=1)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            SystemExit, match=f"--listen is {host}:{port}, and nothing can listen there"
        ):
            asyncio.run(server.run(coordinator, host, port, None))


@pytest.mark.parametrize("listen", ["node1", "node1:", "7070", "node1:http", "node1:70000"])
def test_an_address_that_is_none_is_refused_with_what_is_expected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], listen: str
) -> None:
    words = ["--job", "j", "--state-dir", "s", "--listen", listen]
    monkeypatch.setattr("sys.argv", ["coordinator", *words])

    with pytest.raises(SystemExit):
        server.options("")

    assert f"--listen is {listen}: give host:port" in capsys.readouterr().err


def test_of_many_strangers_those_who_came_first_are_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FIRST_LINE_S", 600.0)
    monkeypatch.setattr(server, "MAX_STRANGERS", 2)
    coordinator = Coordinator(RecordFile(tmp_path, "j"), "t", world=2, min_replicas=1)
    port_file = tmp_path / "port"

    async def play() -> tuple[bytes, bytes]:
        running = asyncio.create_task(server.run(coordinator, "127.0.0.1", 0, port_file))
        await asyncio.to_thread(until, port_file.exists, "it listens")
        port = int(port_file.read_text())
        async with asyncio.timeout(PATIENCE_S):
            member, to_member = await asyncio.open_connection("127.0.0.1", port)
            to_member.write(json.dumps(JOIN).encode() + b"\n")
            await asyncio.to_thread(until, lambda: coordinator.peers, "one has joined")
            strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            hung_up = await strangers[0][0].read()
            strangers[4][1].write(STATUS)
            answer = await strangers[4][0].readline()
        assert list(coordinator.peers) == [0]
        assert not member.at_eof()
        running.cancel()
        await asyncio.wait([running])
        return hung_up, answer

    hung_up, answer = asyncio.run(play())

    assert hung_up == b""
    assert json.loads(answer)["ok"]
