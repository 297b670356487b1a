"""What the coordinator tells those who reconnect, and whom it refuses: over real connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.replica import coordinator as subject
from runtime.replica.coordinator import Coordinator
from runtime.replica.record import Record, RecordFile

PATIENCE_S = 10.0


class Member:
    """A replica's side of the connection; never trains."""

    def __init__(self, replica: int, placement: str, epoch: int) -> None:
        self.standing = {
            "replica": replica,
            "placement": placement,
            "address": "127.0.0.1:1",
            "gloo_port": replica + 1,
            "shards": 12,
            "shape": {"mode": "cover"},
            "world": 2,
            "epoch": epoch,
            "step": 9,
            "members": {},
        }
        self.heard: list[dict[str, Any]] = []

    async def join(self, port: int) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        self.say(op="join", token="t", **self.standing)

    def say(self, **message: Any) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def hear(self, op: str) -> dict[str, Any]:
        """Read until this op."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                line = await self.reader.readline()
                assert line, f"hung up before {op!r}, after {self.heard}"
                self.heard.append(json.loads(line))
                if self.heard[-1].get("op", "refused") == op:
                    return self.heard[-1]

    async def hear_the_end(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            self.heard += [json.loads(line) async for line in self.reader]


async def ask(port: int, **message: Any) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(json.dumps({"token": "t", **message}).encode() + b"\n")
    answer: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    return answer


def serve(
    folder: Path, members: dict[int, str], scene: Callable[[Coordinator, int], Awaitable[None]]
) -> None:
    """Play a scene with a coordinator that was restarted in epoch 5 of these members."""
    file = RecordFile(folder, "j")
    file.advance(0, Record(job="j", epoch=5, members=members, step=9))
    coordinator = Coordinator(file, "t", len(members), 1)

    async def play() -> None:
        server = await asyncio.start_server(coordinator.serve, "127.0.0.1", 0)
        async with server:
            await scene(coordinator, server.sockets[0].getsockname()[1])

    asyncio.run(play())


def test_who_reconnects_late_is_told_that_the_epoch_is_broken(tmp_path: Path) -> None:
    late = Member(1, "b", 5)

    async def scene(_coordinator: Coordinator, port: int) -> None:
        early = Member(0, "a", 5)
        await early.join(port)
        await ask(port, op="exit", replica=2, placement="c")
        await early.hear("broken")
        await late.join(port)
        await late.hear("broken")

    serve(tmp_path, {0: "a", 1: "b", 2: "c"}, scene)

    assert [(m["op"], m.get("replica")) for m in late.heard] == [("lost", 2), ("broken", None)]


def test_the_newest_start_of_a_replica_keeps_its_place(tmp_path: Path) -> None:
    members = [Member(0, "a", 5), Member(1, "old", 5), Member(1, "new", 0), Member(1, "old", 5)]
    survivor, old, new, woken = members
    record: list[str] = []

    async def scene(coordinator: Coordinator, port: int) -> None:
        await survivor.join(port)
        await old.join(port)
        await new.join(port)
        await old.hear("refused")
        await new.hear("sync")
        await woken.join(port)
        await woken.hear("refused")
        survivor.say(op="report", epoch=5, step=9, held=[], planned=False, leaving=False)
        await survivor.hear("epoch")
        record.extend(coordinator.file.read().superseded)
        assert (await ask(port, op="status"))["peers"] == {"0": "member", "1": "syncing"}

    serve(tmp_path, {0: "a", 1: "old"}, scene)

    assert "replaced by new" in woken.heard[-1]["error"]
    assert record == ["old"]


def test_a_past_member_that_nobody_remembers_takes_no_place(tmp_path: Path) -> None:
    woken = Member(1, "old", 3)

    async def scene(coordinator: Coordinator, port: int) -> None:
        await woken.join(port)
        await woken.hear("refused")
        assert coordinator.alive == {0: "a", 1: "new"}

    serve(tmp_path, {0: "a", 1: "new"}, scene)


def test_a_full_disk_drops_nobody_and_the_epoch_is_granted_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    survivor = Member(0, "a", 5)

    async def scene(coordinator: Coordinator, port: int) -> None:
        obstacle = coordinator.file.path.with_suffix(".new")
        obstacle.mkdir()
        await survivor.join(port)
        await ask(port, op="exit", replica=1, placement="b")
        survivor.say(op="report", epoch=5, step=9, held=[], planned=False, leaving=False)
        survivor.say(op="get", epoch=5, key="asked", id=1)
        survivor.say(op="set", epoch=5, key="asked", value="answered")
        await survivor.hear("value")
        assert coordinator.record.epoch == 5
        obstacle.rmdir()
        coordinator.tick()
        await survivor.hear("epoch")

    serve(tmp_path, {0: "a", 1: "b"}, scene)

    assert survivor.heard[-1]["epoch"] == 6
    assert "record_not_written" in caplog.text


def test_a_second_coordinator_on_the_same_record_ends_the_first(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, "j")
    first = Coordinator(file, "t", 1, 1)
    file.advance(0, Record(job="j", epoch=1))

    with pytest.raises(SystemExit):
        first.keep(Record(job="j", epoch=1))


def test_a_stranger_that_says_nothing_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "FIRST_LINE_S", 0.05)

    async def scene(_coordinator: Coordinator, port: int) -> None:
        reader, _writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""

    serve(tmp_path, {0: "a"}, scene)


@pytest.mark.parametrize("mine", ["shards", "world", "model"])
def test_a_misfit_changes_nothing_for_those_that_are_there(tmp_path: Path, mine: str) -> None:
    async def scene(coordinator: Coordinator, port: int) -> None:
        member, stranger = Member(0, "a", 5), Member(1, "x", 0)
        await member.join(port)
        differs: dict[str, dict[str, object]] = {
            "shards": {"shards": 1},
            "world": {"world": 20},
            "model": {"shape": {"mode": "cover", "model": "another"}},
        }
        stranger.standing |= differs[mine]
        await stranger.join(port)
        await stranger.hear("refused")
        again = Member(0, "a", 5)
        await again.join(port)
        assert (await ask(port, op="status"))["peers"] == {"0": "member"}
        assert coordinator.world == 2

    serve(tmp_path, {0: "a", 1: "b"}, scene)


def test_who_came_before_there_was_a_measure_is_measured_later(tmp_path: Path) -> None:
    async def scene(_coordinator: Coordinator, port: int) -> None:
        early, member = Member(1, "x", 0), Member(0, "a", 5)
        early.standing["shape"] = {"mode": "drop"}
        await early.join(port)
        await member.join(port)
        refused = await early.hear("refused")
        assert "this replica's mode is drop, the job's is cover" in refused["error"]

    serve(tmp_path, {0: "a", 1: "b"}, scene)


def test_shards_are_divided_by_what_was_granted_not_by_who_asked(tmp_path: Path) -> None:
    async def scene(coordinator: Coordinator, port: int) -> None:
        members = [Member(0, "a", 5), Member(1, "b", 5)]
        for member in members:
            member.standing["shape"] = {"mode": "drop"}
            await member.join(port)
        asker = Member(4, "e", 0)
        asker.standing |= {"shape": {"mode": "drop"}, "world": 5}
        await asker.join(port)
        await asker.hear("sync")
        asker.writer.close()
        members[1].writer.close()
        members[0].say(op="report", epoch=5, step=9, held=[], planned=False, leaving=False)
        grant = await members[0].hear("epoch")
        assert (grant["world"], grant["dropped"]) == (2, [6, 7, 8, 9, 10, 11])
        assert coordinator.world == 2

    serve(tmp_path, {0: "a", 1: "b"}, scene)
