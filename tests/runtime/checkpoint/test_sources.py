"""Of several who hold one save the first whose copy is whole is read, and what is not is told."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from runtime.checkpoint import disk, peer, store
from runtime.checkpoint.draft import write
from runtime.checkpoint.sources import Sources
from runtime.checkpoint.tiers import Folders, epochs_taken, next_epoch, run_of, tiers_of
from runtime.client import Trouble
from runtime.framing import send_chunk, send_json
from runtime.image import Damaged, chunks_of
from runtime.job import Job
from runtime.serving import RequestServer
from tests.runtime.checkpoint.holding import TOKEN, answering, label
from tests.runtime.checkpoint.states import flip_a_bit, flip_held_bits, staged_at, unreadable
from tests.runtime.replicas import until
from tests.runtime.told import Told

STEP = 7
SAVE = f"save{STEP}"
NOBODY = "127.0.0.1:9"


class Node:
    """A node whose memory has a copy of the save."""

    def __init__(self, folder: Path, run: str) -> None:
        self.address = peer.ensured(folder, "j", TOKEN, "127.0.0.1")
        self.pid = int(json.loads((folder / "j" / "holder.json").read_bytes())["pid"])
        self.keep(run)

    def keep(self, run: str, **more: Any) -> None:
        keeping, staged = peer.Keeping(self.address, TOKEN), staged_at(STEP)
        keeping.hold(label(STEP, run=run, **more), staged.table, {}, memoryview(staged.buffer))
        keeping.close()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(
        name="j", replica=0, rank=0, ranks=1, world_replicas=3, placement="p-0",
        coordinator="127.0.0.1:1", token=TOKEN, state_dir=tmp_path, sender=Told(),
        stop=threading.Event(), holder_dir=tmp_path / "memory",
    )  # fmt: skip


@pytest.fixture
def nodes(job: Job, tmp_path: Path) -> Iterator[list[Node]]:
    (tmp_path / "checkpoints").mkdir()
    run = run_of(tmp_path / "checkpoints")
    made = [Node(tmp_path / f"node-{number}", run) for number in range(3)]
    yield made
    for node in made:
        with contextlib.suppress(ProcessLookupError):
            os.kill(node.pid, signal.SIGKILL)


@pytest.fixture
def sources(job: Job, nodes: list[Node]) -> Sources:
    sources = sources_of(job)
    sources.holder = nodes[0].address
    return sources


def troubles(job: Job) -> list[Trouble]:
    assert isinstance(job.sender, Told)
    return [one for one in job.sender.messages if isinstance(one, Trouble)]


def test_a_save_that_several_hold_is_there_once(sources: Sources, nodes: list[Node]) -> None:
    found = sources.saves([node.address for node in nodes[1:]])

    assert found == [(STEP, SAVE, "peer")]


def test_the_nearest_whole_copy_is_read(job: Job, sources: Sources, nodes: list[Node]) -> None:
    sources.saves([node.address for node in nodes[1:]])
    for node in nodes[:2]:
        flip_held_bits(node.pid)

    assert sources.read(SAVE, "peer", 0).digest == staged_at(STEP).digest
    assert [(one.kind, one.subject) for one in troubles(job)] == [
        ("checkpoint_damaged", "peer"),  # of the own node alone
        *[("checkpoint_passed_over", "peer")] * 2,
    ]
    assert nodes[0].address in troubles(job)[0].text


def test_a_bit_that_flipped_in_the_own_nodes_memory_is_a_fault_of_it(
    job: Job, sources: Sources, nodes: list[Node]
) -> None:
    sources.saves()
    flip_held_bits(nodes[0].pid)
    with pytest.raises(Damaged):
        sources.read(SAVE, "peer", 0)

    (told,) = troubles(job)
    assert (told.kind, told.subject) == ("checkpoint_damaged", "peer")
    assert told.text.startswith(f"peer, when it was read: holder {nodes[0].address}, rank 0")


def test_a_description_that_does_not_fit_is_none(
    job: Job, sources: Sources, nodes: list[Node]
) -> None:
    staged = staged_at(STEP)
    described = {"step": STEP, **staged.table.describe(), "skeleton": {}}
    answers: dict[str, tuple[dict[str, Any], list[memoryview]]] = {
        "list": ({"held": peer.held(nodes[0].address, TOKEN)}, []),
        "read": (described, [*chunks_of(staged.buffer)]),
    }

    def serve(connection: socket.socket, request: dict[str, Any]) -> None:
        answer, chunks = answers[request["op"]]
        send_json(connection, answer)
        for chunk in chunks:
            send_chunk(connection, chunk)

    server = RequestServer("127.0.0.1", TOKEN, serve)
    sources.holder = server.address
    sources.saves()
    with pytest.raises(Damaged, match="take another copy"):
        sources.read(SAVE, "peer", 0)
    server.close()

    assert troubles(job) == []


def test_where_none_is_whole_the_last_ones_damage_is_raised(
    sources: Sources, nodes: list[Node]
) -> None:
    sources.saves([node.address for node in nodes[1:]])
    for node in nodes:
        flip_held_bits(node.pid)

    with pytest.raises(Damaged, match=nodes[2].address):
        sources.read(SAVE, "peer", 0)


def test_what_is_of_no_use_any_more_is_read_from_no_other_holder_either(
    job: Job, sources: Sources, nodes: list[Node]
) -> None:
    sources.saves([node.address for node in nodes[1:]])

    def refuse(_bytes: int) -> None:
        raise RuntimeError("of no use")

    with pytest.raises(RuntimeError, match="of no use"):
        sources.read(SAVE, "peer", 0, refuse)
    assert troubles(job) == []


def test_what_lies_in_a_folder_is_given_up_and_its_store_is_not_blamed(
    job: Job, sources: Sources, tmp_path: Path
) -> None:
    write(tmp_path / "checkpoints", staged_at(STEP + 1), facts={"epoch": STEP})
    (_, name, tier), *_ = sources.saves()

    def refuse(_bytes: int) -> None:
        raise RuntimeError("of no use")

    with pytest.raises(RuntimeError, match="of no use"):
        sources.read(name, tier, 0, refuse)
    assert sources.read(name, tier, 0).step == STEP + 1
    assert troubles(job) == []


def test_a_holder_that_has_died_since_costs_nothing(sources: Sources, nodes: list[Node]) -> None:
    sources.saves([node.address for node in nodes[1:]])
    os.kill(nodes[0].pid, signal.SIGKILL)

    assert sources.read(SAVE, "peer", 0).digest == staged_at(STEP).digest


def test_who_does_not_answer_is_named(job: Job, sources: Sources, nodes: list[Node]) -> None:
    found = sources.saves([NOBODY, nodes[1].address])

    assert found == [(STEP, SAVE, "peer")]
    (trouble,) = troubles(job)
    assert (trouble.kind, trouble.subject) == ("holder_out_of_reach", NOBODY)


def test_what_has_changed_since_a_state_was_made_is_told(
    job: Job, sources: Sources, tmp_path: Path
) -> None:
    write(tmp_path / "checkpoints", staged_at(STEP + 1), facts={"torch": "1.0"})
    ((_, held, _), (_, save, _)) = sources.saves()

    sources.loaded(held)  # which says nothing of who made it
    assert troubles(job) == []
    sources.loaded(save)

    (trouble,) = troubles(job)
    assert trouble.kind == "changed_since"
    assert f"since {save} was saved: torch was '1.0', is '2." in trouble.text


@pytest.fixture
def of_another_version(nodes: list[Node]) -> Iterator[str]:
    """The address of a holder that lists what the first node's does, and gives nothing that we
    know."""
    answers: dict[str, dict[str, Any]] = {
        "list": {"held": peer.held(nodes[0].address, TOKEN)},
        "read": {"step": STEP},
    }

    def serve(connection: socket.socket, request: dict[str, Any]) -> None:
        send_json(connection, answers[request["op"]])

    server = RequestServer("127.0.0.1", TOKEN, serve)
    yield server.address
    server.close()


def test_of_a_holder_that_gives_nothing_that_we_know_the_next_ones_copy_is_read(
    job: Job, sources: Sources, nodes: list[Node], of_another_version: str
) -> None:
    sources.holder = of_another_version
    sources.saves([nodes[1].address])

    assert sources.read(SAVE, "peer", 0).digest == staged_at(STEP).digest
    (trouble,) = troubles(job)
    assert (trouble.kind, trouble.subject) == ("checkpoint_passed_over", "peer")
    assert f"holder {of_another_version} is of another version" in trouble.text


def test_of_a_holder_that_lists_what_we_do_not_know_it_is_told_and_other_nodes_are_asked(
    job: Job, sources: Sources, nodes: list[Node]
) -> None:
    server = answering({"held": [{"save": SAVE}]})
    sources.holder = server.address
    found = [sources.saves(), sources.saves([nodes[1].address])]
    server.close()

    assert found == [[], [(STEP, SAVE, "peer")]]
    told = [(one.kind, one.subject) for one in troubles(job)]
    assert told == [("checkpoints_out_of_reach", "peer")] * 2


def test_of_two_runs_in_memory_none_is_believed_to_be_the_jobs(
    sources: Sources, nodes: list[Node], tmp_path: Path
) -> None:
    """Of the later one a part may never have come."""
    nodes[0].keep("odd", ranks=2)
    (tmp_path / "checkpoints" / "run").write_text("../..")

    with pytest.raises(ValueError, match="does not say of which run: if it is not mounted"):
        sources.saves()


def sources_of(job: Job) -> Sources:
    return Sources(job, tiers_of(job, 1.0, 2, None), Folders(job))


def refused(path: Path, *, exist_ok: bool) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def test_a_start_that_cannot_be_counted_is_later_than_those_that_were(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_epoch(tmp_path / "checkpoints", 6)
    monkeypatch.setattr(Path, "touch", refused)
    sources = sources_of(job)

    assert sources.saves() == []
    assert sources.next_epoch(sources.latest_epoch) == 8


def note_epoch(sources: Sources, epoch: int) -> None:
    """On the thread of its own that it has."""
    sources.note_epoch(epoch)
    for thread in [one for one in threading.enumerate() if one.name == "drydock-epoch"]:
        thread.join()


def test_before_the_first_save_there_is_no_folder_to_note_an_epoch_in_and_nothing_to_warn_of(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources = sources_of(job)

    note_epoch(sources, 3)
    assert not (tmp_path / "checkpoints").exists()
    (tmp_path / "checkpoints").mkdir()
    note_epoch(sources, 3)

    assert epochs_taken(tmp_path / "checkpoints") == [3]
    assert caplog.messages == []


def test_an_epoch_that_cannot_be_noted_is_warned_of(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(Path, "touch", lambda path: refused(path, exist_ok=True))

    note_epoch(sources_of(job), 3)

    assert "epoch_not_noted epoch=3" in caplog.text


def test_where_there_can_be_no_more_threads_an_epoch_is_noted_later(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(_thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    (tmp_path / "checkpoints").mkdir()
    sources = sources_of(job)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(threading.Thread, "start", none_left)
        sources.note_epoch(3)
    note_epoch(sources, 3)

    assert "epoch_not_noted epoch=3 error=can't start new thread" in caplog.text
    assert epochs_taken(tmp_path / "checkpoints") == [3]


def test_a_folder_that_hangs_is_asked_by_one_thread_to_note_an_epoch(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    answer = threading.Event()

    def hang(_folder: Path, epoch: int) -> None:
        asked.append(epoch)
        answer.wait(30)

    monkeypatch.setattr("runtime.checkpoint.sources.note_epoch", hang)
    sources = sources_of(job)
    for _ in range(20):
        sources.note_epoch(3)
    until(lambda: asked, "it is asked")
    answer.set()
    until(lambda: sources._noted == 3, "it is noted")
    until(lambda: sources.note_epoch(4) or sources._noted == 4, "so is the next one")  # type: ignore[func-returns-value]

    assert asked == [3, 4]


@pytest.fixture
def on_disk(job: Job, tmp_path: Path) -> tuple[Sources, Path]:
    """Who looks for what this node's own disk has, and a checkpoint there."""
    run = run_of(tmp_path / "checkpoints")
    folder = tmp_path / "disk" / "j" / run / "replica-0-rank-0"
    path = write(folder, staged_at(STEP), facts={"epoch": 1, "ranks": 1})
    return sources_of(replace(job, local_dir=tmp_path / "disk", holder_dir=None)), path


def told_of(sources: Sources) -> list[tuple[str, str]]:
    return [(one.kind, one.subject) for one in troubles(sources._job)]


def read_again(sources: Sources) -> None:
    for _step, name, tier in sources.saves():
        with pytest.raises(Damaged):
            sources.read(name, tier, 0)


def test_a_bit_that_flipped_on_the_own_disk_is_a_fault_of_it(on_disk: tuple[Sources, Path]) -> None:
    sources, path = on_disk
    flip_a_bit(path / "rank-0-0000.bin", 80)
    read_again(sources)

    (told,) = troubles(sources._job)
    assert (told.kind, told.subject) == ("checkpoint_damaged", "local")
    assert told.text.startswith(f"local, when it was read: {path}: rank-0-0000.bin (rank 0)")


def test_so_is_one_in_its_manifest(on_disk: tuple[Sources, Path]) -> None:
    sources, path = on_disk
    flip_a_bit(path / "manifest.json", 80)

    assert sources.saves() == []
    assert told_of(sources) == [("checkpoint_refused", "local"), ("checkpoint_damaged", "local")]


def test_where_a_newer_one_is_whole_what_is_damaged_is_only_passed_over(
    on_disk: tuple[Sources, Path],
) -> None:
    sources, path = on_disk
    write(path.parent, staged_at(STEP + 1), facts={"epoch": 1, "ranks": 1})
    flip_a_bit(path / "manifest.json", 80)
    sources.saves()

    assert told_of(sources)[0] == ("checkpoint_passed_over", "local")


def test_what_is_pruned_while_it_is_listed_is_no_fault_of_a_disk(
    on_disk: tuple[Sources, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, path = on_disk
    candidates = store.candidates

    def pruned(folder: Path) -> list[Path]:
        found = candidates(folder)
        store.remove(path)
        return found

    monkeypatch.setattr(store, "candidates", pruned)
    sources.saves()

    assert told_of(sources) == [("checkpoint_refused", "local")]


def test_what_was_pruned_meanwhile_is_no_fault_of_a_disk(on_disk: tuple[Sources, Path]) -> None:
    sources, path = on_disk
    there = sources.saves()
    flip_a_bit(path / "rank-0-0000.bin", 80)
    listed = sources._folders.listed("local")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folders, "listed", lambda *_: listed)
        path.rename(path.with_name("gone"))
        with pytest.raises(Damaged):
            sources.read(there[0][1], "local", 0)

    assert told_of(sources) == []


def test_what_only_could_not_be_read_is_none_either(on_disk: tuple[Sources, Path]) -> None:
    sources, path = on_disk
    there = sources.saves()
    with unreadable(path):
        sources.saves()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "_fill", no_bytes)
        with pytest.raises(Damaged):
            sources.read(there[0][1], "local", 0)

    assert told_of(sources) == [("checkpoint_refused", "local")]


def no_bytes(*_: object) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
