"""What a node's memory keeps is listed and verified on demand, for who knows the token."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import client
from runtime.checkpoint import peer
from runtime.checkpoint.__main__ import main
from runtime.framing import PeerFailed
from runtime.image import Damaged
from tests.runtime.checkpoint.holding import TOKEN, label
from tests.runtime.checkpoint.states import flip_held_bits, staged_at
from tests.runtime.replicas import until

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a holder that keeps what two ranks saved."""
    address = peer.ensured(tmp_path, "j", TOKEN, "127.0.0.1")
    monkeypatch.setenv(client.ENV_TOKEN, TOKEN)
    for rank in (1, 0):
        keeping, staged = peer.Keeping(address, TOKEN), staged_at(7)
        mine = label(7, rank=rank, ranks=2)
        keeping.hold(mine, staged.table, {"at": 1e9}, memoryview(staged.buffer))
        keeping.close()
    pid = pid_of(tmp_path / "j")
    yield tmp_path / "j"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def pid_of(folder: Path) -> int:
    return int(json.loads((folder / "holder.json").read_bytes())["pid"])


def url_of(folder: Path) -> str:
    return f"holder://{peer.running(folder)}"


def test_what_it_keeps_is_listed_rank_by_rank(folder: Path, capsys: Capture) -> None:
    assert main(["ls", str(folder)]) == 0

    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 7 ")
    assert "2001-09-09 01:46:40Z" in first
    assert [line.split("rank ")[1][:6] for line in (first, second)] == ["0 of 2", "1 of 2"]


def test_every_byte_of_it_is_read(folder: Path, capsys: Capture) -> None:
    assert main(["verify", url_of(folder), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert [(one["rank"], one["findings"]) for one in found] == [(0, []), (1, [])]
    assert {one["path"] for one in found} == {url_of(folder)}


def test_a_bit_that_flipped_there_is_found_and_its_rank_and_tensor_named(
    folder: Path, capsys: Capture
) -> None:
    flip_held_bits(pid_of(folder))

    assert main(["verify", str(folder)]) == 1

    said = capsys.readouterr().out
    assert said.count("DAMAGED") == 2
    assert "rank 1, tensors" in said


def test_what_a_newer_one_replaces_meanwhile_is_not_damaged(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        monkeypatch.setattr(peer, "held", lambda *_: [])
        raise PeerFailed("no save save7 of rank 0 is held here")

    monkeypatch.setattr(peer, "read", gone)
    assert main(["verify", str(folder)]) == 0

    assert capsys.readouterr().out.count("replaced meanwhile") == 2


def test_what_cannot_be_read_is_not_judged(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> None:
        raise PeerFailed("the connection was cut")

    monkeypatch.setattr(peer, "read", cut)
    assert main(["verify", str(folder)]) == 2

    assert capsys.readouterr().out.count("NOT CHECKED\n  the connection was cut") == 2


@pytest.mark.parametrize(
    ("token", "said"),
    [("", "DRYDOCK_TOKEN is not set: give the job's token"), ("wrong", "wrong token")],
)
def test_who_does_not_know_the_token_is_told_so(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, token: str, said: str
) -> None:
    monkeypatch.setenv(client.ENV_TOKEN, token)
    assert main(["ls", str(folder)]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_of_a_holder_that_was_killed_says_so(folder: Path, capsys: Capture) -> None:
    os.kill(pid_of(folder), signal.SIGKILL)
    until(lambda: not peer.running(folder), "it is gone")

    assert main(["verify", str(folder)]) == 2
    assert f"no holder runs in {folder}: what one kept there is gone" in capsys.readouterr().err


def test_so_does_that_of_one_that_ended(folder: Path, capsys: Capture) -> None:
    os.kill(pid_of(folder), signal.SIGTERM)
    until(lambda: not (folder / "holder.json").exists(), "it has ended")

    assert main(["ls", str(folder)]) == 2
    assert f"no holder runs in {folder}" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["holder://node-3", "holder://node-3:4000/", "holder://"])
def test_what_is_no_address_is_not_taken_for_a_holder_of_another_version(
    url: str, capsys: Capture
) -> None:
    assert main(["verify", url]) == 2
    assert f"{url} is no address of a holder: give holder://HOST:PORT" in capsys.readouterr().err


def test_what_was_found_damaged_is_told_though_the_holder_dies_meanwhile(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(_address: str, _token: str, rank: int, *_: object) -> None:
        if rank == 0:
            raise Damaged("a bit")
        os.kill(pid_of(folder), signal.SIGKILL)
        raise PeerFailed("the connection was cut")

    monkeypatch.setattr(peer, "read", dies)
    assert main(["verify", str(folder)]) == 1

    said = capsys.readouterr().out
    assert "DAMAGED\n  a bit" in said
    assert "NOT CHECKED\n  the connection was cut" in said
