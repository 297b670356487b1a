"""Durable files, wherever their writer was killed."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node_agent import files, spool
from node_agent.files import Journal, TakenByAnother, take_alone, write_atomically
from node_agent.spool import Spool
from tests.node_agent.fleet import DEADLINE_S

FULL = OSError(errno.ENOSPC, "No space left on device")
#: Dead lines that the spool's file may have in tests that would write too much else.
FEW = 20
TEXTS = st.text(max_size=40)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 9), TEXTS),
        st.tuples(st.just("gone"), st.integers(0, 9), st.just("")),
    ),
    max_size=30,
)


def message(number: int, text: str) -> dict[str, Any]:
    return {"id": f"ev_{number}", "raw": text}


@settings(max_examples=60, deadline=None)
@given(entries=st.lists(TEXTS, min_size=1, max_size=8), cut=st.integers(0, 10_000))
def test_a_journal_cut_anywhere_keeps_its_whole_entries(entries: list[str], cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        journal = Journal(path)
        journal.append({"text": text} for text in entries)
        journal.close()
        data = path.read_bytes()[: cut % (path.stat().st_size + 1)]
        path.write_bytes(data)

        reopened = Journal(path)
        kept = reopened.load()
        reopened.append([{"text": "next"}])
        reopened.close()

        assert kept == [{"text": text} for text in entries[: data.count(b"\n")]]
        last = Journal(path)
        assert last.load() == [*kept, {"text": "next"}]
        last.close()


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS, torn=st.binary(max_size=20))
def test_a_spool_reopened_after_a_kill_holds_what_was_not_acknowledged(
    operations: list[tuple[str, int, str]], torn: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        spool = Spool(path)
        expected: dict[str, dict[str, Any]] = {}
        for verb, number, text in operations:
            change = {"put": [message(number, text)], "gone": []}[verb]
            gone = {"put": [], "gone": [f"ev_{number}"]}[verb]
            spool.put(change)
            spool.acknowledge(gone)
            expected.update({item["id"]: item for item in change})
            expected = {key: item for key, item in expected.items() if key not in gone}
        with path.open("ab") as file:
            file.write(torn.replace(b"\n", b" "))

        again = Spool(path)

        assert again.oldest(100, timeout_s=0) == list(expected.values())


def test_a_broken_line_in_the_middle_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"a": 1}\n\x00\x00rubbish\n[1]\n{"a": 2}\n')

    assert Journal(path).load() == [{"a": 1}, {"a": 2}]


def test_a_full_spool_holds_back_a_source_until_there_is_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "events.jsonl", max_waiting=2)
    spool.put([message(1, ""), message(2, "")])
    passed = threading.Event()

    def source() -> None:
        spool.wait_for_room()
        passed.set()

    threading.Thread(target=source, daemon=True).start()

    assert not passed.wait(0.1)
    spool.acknowledge(["ev_1"])
    assert passed.wait(DEADLINE_S)


def test_a_spool_does_not_grow_with_what_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    spool = Spool(path)
    spool.put(message(number, "x" * 50) for number in range(3000))
    spool.acknowledge([f"ev_{number}" for number in range(2999)])

    assert len(path.read_text().splitlines()) == 1
    assert [item["id"] for item in Spool(path).oldest(9)] == ["ev_2999"]


@pytest.fixture
def few_dead_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MAX_DEAD_LINES", FEW)


@pytest.mark.usefixtures("few_dead_lines")
def test_a_spool_does_not_grow_with_what_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = Spool(path)
    events.put([message(0, "waits")])
    for count in range(5 * FEW):
        events.put([message(1, f"counted {count}")])

    assert len(path.read_text().splitlines()) <= FEW + 2
    assert Spool(path).oldest(9) == [message(0, "waits"), message(1, f"counted {5 * FEW - 1}")]


@pytest.mark.usefixtures("few_dead_lines")
def test_a_message_costs_a_spool_the_same_however_many_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite = create_autospec(Journal.rewrite, side_effect=Journal.rewrite)
    monkeypatch.setattr(Journal, "rewrite", rewrite)
    events = Spool(tmp_path / "events.jsonl")
    waiting = 10 * FEW
    events.put(message(number, "first") for number in range(waiting))
    for count in range(3 * waiting):
        events.put([message(count % waiting, f"counted {count}")])

    assert 1 <= rewrite.call_count <= 3  # each of `waiting` lines, for as many that were put


@pytest.mark.usefixtures("few_dead_lines")
def test_a_full_disk_does_not_have_all_rewritten_with_each_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite = Mock(side_effect=FULL)
    monkeypatch.setattr(Journal, "rewrite", rewrite)
    events = Spool(tmp_path / "events.jsonl")
    for count in range(5 * FEW):
        events.put([message(1, f"counted {count}")])

    assert 1 <= rewrite.call_count <= 3


def test_what_is_appended_after_a_rewrite_that_failed_late_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "commands.jsonl"
    journal = Journal(path)
    journal.append([{"id": "a"}])
    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_folder", Mock(side_effect=FULL))
        with pytest.raises(OSError, match="No space"):
            journal.rewrite([{"id": "a"}])
    journal.append([{"id": "b"}])

    assert Journal(path).load() == [{"id": "a"}, {"id": "b"}]


def test_a_dead_letter_that_a_full_disk_refuses_is_logged_and_holds_up_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events.dead.jsonl").mkdir()  # so that it cannot be opened
    spool = Spool(tmp_path / "events.jsonl")
    spool.put([message(1, "bad"), message(2, "good")])
    spool.bury("ev_1", {"code": "invalid"})

    assert spool.oldest(9) == [message(2, "good")]
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in logged if "message" in line] == [message(1, "bad")]


def test_a_lock_holds_though_a_full_disk_has_no_room_for_the_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=FULL))
    held = take_alone(tmp_path / "agent.lock")

    with pytest.raises(TakenByAnother):
        take_alone(tmp_path / "agent.lock")
    os.close(held)


def test_a_dead_letter_keeps_the_message_and_the_reason(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "events.jsonl")
    spool.put([message(1, "bad"), message(2, "good")])
    spool.bury("ev_1", {"code": "invalid"})

    dead = json.loads((tmp_path / "events.dead.jsonl").read_text())
    assert dead == {"message": message(1, "bad"), "reason": {"code": "invalid"}}
    assert spool.oldest(9) == [message(2, "good")]


def test_a_file_is_replaced_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_atomically(path, b"one")
    write_atomically(path, b"two")

    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["key"]


def test_what_a_full_disk_refused_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    events = Spool(path)
    events.put([message(0, "sent meanwhile"), message(1, "before")])
    with monkeypatch.context() as patch:
        patch.setattr(files, "_write_all", Mock(side_effect=FULL))
        events.put([message(2, "meanwhile")])
        events.acknowledge(["ev_0"])
    events.put([message(3, "after")])

    kept = [message(1, "before"), message(2, "meanwhile"), message(3, "after")]
    assert Spool(path).oldest(9) == kept


def test_a_full_disk_is_not_asked_to_take_all_that_waits_with_each_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Mock(side_effect=FULL)
    monkeypatch.setattr(files, "_write_all", write)
    events = Spool(tmp_path / "events.jsonl")
    for number in range(5):
        events.put([message(number, "meanwhile")])

    assert [call.args[1].count(b"\n") for call in write.call_args_list] == [1] * 5
