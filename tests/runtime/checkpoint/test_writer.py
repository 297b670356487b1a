"""A save counts once all that was written of it was read back; one that failed is told."""

from __future__ import annotations

import errno
import json
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from runtime.checkpoint import disk, store
from runtime.checkpoint.draft import IDLE_S, Draft
from runtime.checkpoint.objects import ObjectStore
from runtime.checkpoint.tiers import known_run
from runtime.checkpoint.writer import PACKET_BYTES, Writer
from runtime.image import aligned, pages
from tests.runtime.checkpoint.states import flip_a_bit, staged_at
from tests.runtime.replicas import until

#: And whose they are said to be.
JSON = {"manifest.json": "", "rank-0.json": " (rank 0)"}


class Asked:
    """A writer in this process, which keeps one checkpoint in a folder, and who asks it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer, self.ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.writer = Writer(self.ours)

    def to_save(self, step: int, rank: int = 0, ranks: int = 1) -> list[dict[str, Any]]:
        """What it says of that."""
        return self._to_keep(step, folder=str(self.folder), rank=rank, ranks=ranks)

    def to_put(self, url: str, step: int, rank: int, ranks: int) -> list[dict[str, Any]]:
        """The same, to an object store."""
        return self._to_keep(step, objects=url, job="j", rank=rank, ranks=ranks)

    def _to_keep(self, step: int, **where: Any) -> list[dict[str, Any]]:
        order = self.order(step, **where)
        self.copied(step)
        self.writer._save(order)
        said: list[dict[str, Any]] = []
        while not said or said[-1]["op"] != "done":
            said.append(json.loads(self.trainer.recv(PACKET_BYTES)))
        return said

    def order(self, step: int, room: int = 0, **where: Any) -> dict[str, Any]:
        """To save the state that lies in this room."""
        staged, name = staged_at(step), f"save{step}"
        size, start = len(staged.buffer), aligned(len(staged.buffer), mmap.PAGESIZE)
        described = json.dumps({"step": step, "save": name, **staged.table.describe()}).encode()
        memory = self.writer._copy_buffers[room] = pages(start + len(described))
        memory[:size], memory[start:] = memoryview(staged.buffer), described
        return {
            "op": "save", "buffer": room, "image": size, "described": len(described), "step": step,
            "save": name, "facts": {}, "share": 0, "shares": 1, "keep": 1, "keep_for_s": 0,
            "common": None, "pack": False, **where,
        }  # fmt: skip

    def copied(self, step: int) -> None:
        whole = len(staged_at(step).buffer)
        self.tell({"op": "copied", "save": f"save{step}", "bytes": whole})

    def tell(self, message: dict[str, Any]) -> None:
        self.trainer.send(json.dumps(message).encode())

    def close(self) -> None:
        self.trainer.close()
        self.ours.close()


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    made = Asked(tmp_path)
    yield made
    made.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Asked]:
    """The writer of another rank."""
    made = Asked(tmp_path)
    yield made
    made.close()


def ops(said: list[dict[str, Any]]) -> list[str]:
    return [one["op"] for one in said]


def test_where_there_is_a_checkpoint_for_all_the_run_has_its_name(asked: Asked) -> None:
    """Who saves elsewhere asks for it, and could not give it once that folder is full."""
    asked.to_save(1)

    assert known_run(asked.folder)


@pytest.mark.parametrize(("name", "whose"), JSON.items())
def test_json_that_is_not_on_the_disk_as_it_was_written_is_written_again_and_told(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, name: str, whose: str
) -> None:
    publish = Draft.publish

    def damaged_since(draft: Draft) -> bool:
        published = publish(draft)
        flip_a_bit(draft.path / name, 50)
        return published

    monkeypatch.setattr(Draft, "publish", damaged_since)

    said = asked.to_save(1)

    assert ops(said) == ["durable", "alarm", "verified", "done"]
    assert said[1]["kind"] == "checkpoint_damaged"
    why = f"written again, for it was not what was saved: {name}{whose}: "
    assert said[1]["text"].startswith(why)
    (path,) = store.candidates(asked.folder)
    assert store.verify(path) == []


@pytest.mark.parametrize(("name", "whose"), JSON.items())
def test_where_the_disk_does_not_give_the_json_back_the_one_before_stays(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, name: str, whose: str
) -> None:
    """Though the page cache has it whole."""
    asked.to_save(1)
    read = disk.read

    def bad_sector(one: str, *given: Any) -> None:
        if one == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), one)
        read(one, *given)

    monkeypatch.setattr(disk, "read", bad_sector)

    said = asked.to_save(2)

    assert ops(said) == ["durable", "alarm", "failed", "done"]
    assert said[2]["error"] == f"{name}{whose}: [Errno 5] Input/output error: '{name}'"
    assert [path.name for path in store.candidates(asked.folder)] == ["step-00000001"]
    (aside,) = asked.folder.glob(".damaged-*")
    assert "step-00000002" in aside.name


@pytest.mark.parametrize(
    ("ranks", "idle_s", "op", "text"),
    [
        (2, IDLE_S, "given_up", ""),
        (2, -1.0, "failed", "it took more than 600 s and is gone from "),
        (1, IDLE_S, "failed", "it was removed from "),
    ],
)
def test_a_draft_that_is_gone_was_given_up_by_another_or_else_that_is_told(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, ranks: int, idle_s: float, op: str, text: str
) -> None:
    def write(_name: str, _data: memoryview, folder: int, *_more: Any) -> NoReturn:
        store.remove(Path(f"/proc/self/fd/{folder}").readlink())
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr("runtime.checkpoint.draft.IDLE_S", idle_s)
    monkeypatch.setattr(disk, "write", write)

    said = asked.to_save(1, ranks=ranks)

    assert ops(said) == [op, "done"]
    assert said[0].get("error", "").startswith(text)


def test_what_cannot_be_removed_is_told(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked.to_save(1)
    (asked.folder / ".gone-step-00000000-x").mkdir()
    monkeypatch.setattr("shutil.rmtree", lambda *_path, **_how: None)

    said = [asked.to_save(step) for step in (2, 3)]

    quiet = ["durable", "verified", "done"]
    assert [ops(one) for one in said] == [quiet, ["durable", "verified", "alarm", "done"]]
    assert said[1][2]["kind"] == "checkpoint_not_pruned"
    assert f"{asked.folder}/.gone-step-00000000-x" in said[1][2]["text"]


def test_a_checkpoint_that_cannot_be_removed_is_told_too(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refused(path: Path, to: Path) -> Path:
        if path.name == "step-00000001":
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refused)

    said = [asked.to_save(step) for step in (1, 2, 3)]

    quiet = ["durable", "verified", "done"]
    assert [ops(one) for one in said] == [quiet, quiet, ["durable", "verified", "alarm", "done"]]
    assert said[2][2]["kind"] == "checkpoint_not_pruned"
    assert f"{asked.folder}/step-00000001" in said[2][2]["text"]


@pytest.mark.parametrize("rank", [0, 1])
def test_saves_that_never_have_the_parts_of_others_are_told(asked: Asked, rank: int) -> None:
    """As where each node has mounted another folder: what each writes there is durable."""
    said = [asked.to_save(step, rank, ranks=2) for step in range(1, 6)]

    quiet, told = ["durable", "verified", "done"], ["alarm", "durable", "verified", "done"]
    assert [ops(one) for one in said] == [quiet, quiet, quiet, told, told]
    assert said[3][0]["kind"] == "checkpoint_not_whole"
    assert said[3][0]["text"].startswith(f"the last 3 saves to {asked.folder} lack the parts of ")
    assert store.candidates(asked.folder) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_what_nobody_finishes_does_not_fill_the_folder(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setattr("runtime.checkpoint.draft.IDLE_S", -1.0)
    for step in range(1, 9):
        asked.to_save(step, rank, ranks=2)

    assert len([*asked.folder.glob(".writing-*")]) < 5


def test_saves_that_have_all_parts_in_the_end_are_not_told(asked: Asked, other: Asked) -> None:
    said = []
    for step in range(1, 7):
        said += asked.to_save(step, 0, ranks=2)
        said += other.to_save(step, 1, ranks=2)

    assert "alarm" not in ops(said)
    assert len(store.candidates(asked.folder)) == 1


def test_once_the_parts_of_others_come_it_is_told_no_more(asked: Asked, other: Asked) -> None:
    alone = [asked.to_save(step, 0, ranks=2) for step in range(1, 5)]
    asked.to_save(5, 0, ranks=2)
    other.to_save(5, 1, ranks=2)

    assert "alarm" in ops(alone[-1])
    assert "alarm" not in ops(asked.to_save(6, 0, ranks=2))


def test_of_puts_that_never_have_the_parts_of_others_the_last_few_stay_and_it_is_told(
    asked: Asked,
) -> None:
    """As where the ranks of a replica reach different stores."""
    url = f"file://{asked.folder / 'objects'}"
    said = [asked.to_put(url, step, 0, 2) for step in range(1, 9)]

    quiet, told = ["durable", "verified", "done"], ["alarm", "durable", "verified", "done"]
    assert [ops(one) for one in said] == [quiet] * 3 + [told] * 5
    assert said[3][0]["kind"] == "checkpoint_not_whole"
    assert said[3][0]["text"].startswith(f"the last saves to {url}")
    left = sorted(path.name[:13] for path in asked.folder.rglob("step-*"))
    assert left == [f"step-{step:08d}" for step in (5, 6, 7, 8)]


def test_a_put_is_made_though_nobody_can_tell_what_became_of_those_before(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{asked.folder / 'objects'}"
    asked.to_put(url, 1, 0, 2)

    def refuse(*_given: object) -> NoReturn:
        raise PermissionError(errno.EACCES, "Forbidden")

    monkeypatch.setattr(ObjectStore, "is_whole", refuse)

    assert ops(asked.to_put(url, 2, 0, 2)) == ["durable", "verified", "done"]


def test_puts_that_have_all_parts_in_the_end_are_not_told(asked: Asked, other: Asked) -> None:
    url = f"file://{asked.folder / 'objects'}"
    said = []
    for step in range(1, 7):
        said += asked.to_put(url, step, 0, 2)
        said += other.to_put(url, step, 1, 2)

    assert "alarm" not in ops(said)


def test_a_writer_that_outlives_its_trainer_keeps_only_the_memory_that_it_still_writes(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's next start takes as much again, and a slow store may hold the writer."""
    inner, begun, goes_on = disk.write, threading.Event(), threading.Event()

    def slow(*given: Any) -> None:
        begun.set()
        goes_on.wait(60.0)
        inner(*given)

    monkeypatch.setattr(disk, "write", slow)
    folders = [asked.folder / "first", asked.folder / "second"]
    for room, folder in enumerate(folders):
        asked.tell(asked.order(1, room, folder=str(folder), rank=0, ranks=1))
        asked.copied(1)
    asked.writer._copy_buffers[2] = pages(1)
    running = threading.Thread(target=asked.writer.run, daemon=True)
    running.start()
    assert begun.wait(60.0)
    asked.trainer.close()
    until(lambda: len(asked.writer._copy_buffers) < 3, "a room is given up")
    left = set(asked.writer._copy_buffers)
    goes_on.set()
    running.join(60.0)

    assert left == {0, 1}
    paths = [path for folder in folders for path in store.candidates(folder)]
    assert [store.verify(path) for path in paths] == [[], []]
