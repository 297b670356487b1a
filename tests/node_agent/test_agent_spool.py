"""Durable files, wherever their writer was killed."""

from __future__ import annotations

import json
import tempfile
import threading
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from node_agent.files import Journal, write_atomically
from node_agent.spool import Spool
from tests.node_agent.fleet import DEADLINE_S

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
