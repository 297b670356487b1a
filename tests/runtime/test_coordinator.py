"""What the coordinator tells those who reconnect, and whom it refuses: over real connections."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.replica import server
from runtime.replica.coordinator import Coordinator
from runtime.replica.epochs import GATHER_S
from runtime.replica.record import Record, RecordFile, StaleEpoch, Unusable, hold_alone
from runtime.replica.roster import PEER_SILENT_S
from runtime.replica.succession import Succession, Superseded
from tests.runtime.replicas import PATIENCE_S

REPORT = {
    "op": "report",
    "epoch": 5,
    "step": 9,
    "held": [],
    "planned": False,
    "leaving": False,
    "silent": False,
}


class Member:
    """A replica's side of the connection; never trains."""

    def __init__(self, replica: int, placement: str, epoch: int) -> None:
        self.standing = {
            "job": "j",
            "standby": "",
            "replica": replica,
            "placement": placement,
            "addresses": ["127.0.0.1:1"],
            "gloo": [f"127.0.0.1:{replica + 1}"],
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

    async def settled(self) -> None:
        """Once what we said before was heard."""
        self.say(op="get", epoch=5, key="k", id=1)
        self.say(op="set", epoch=5, key="k", value="v")
        await self.hear("value")

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
    folder: Path,
    members: dict[int, str],
    scene: Callable[[Coordinator, int], Awaitable[None]],
    **settings: Any,
) -> None:
    """Play a scene with a coordinator that was restarted in epoch 5 of these members."""
    file = RecordFile(folder, "j")
    grant = settings.pop("grant", {})
    file.advance(0, Record(job="j", epoch=5, members=members, step=9, grant=grant))
    settings = {"world": len(members), "min_replicas": 1, **settings}
    coordinator = Coordinator(file, "t", **settings)

    async def play() -> None:
        listener = await asyncio.start_server(
            functools.partial(server.serve, coordinator), "127.0.0.1", 0
        )
        async with listener:
            await scene(coordinator, listener.sockets[0].getsockname()[1])

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
    clock = Clock()

    async def scene(coordinator: Coordinator, port: int) -> None:
        await survivor.join(port)
        await old.join(port)
        await new.join(port)
        await old.hear("ping")  # and it does not answer
        clock.now += PEER_SILENT_S + 0.1
        coordinator.peers[0].heard = coordinator.last_word = clock.now
        coordinator.last_tick = clock.now
        coordinator.tick()
        await survivor.hear("lost")
        survivor.say(**REPORT)
        await survivor.hear("epoch")
        coordinator.tick()
        await survivor.hear("stage")
        survivor.say(op="staged", step=9, digest="d")
        await new.hear("sync")
        await woken.join(port)
        await woken.hear("refused")
        record.extend(coordinator.file.read().superseded)
        assert (await ask(port, op="status"))["peers"] == {"0": "member", "1": "syncing"}

    serve(tmp_path, {0: "a", 1: "old"}, scene, clock=clock)

    assert "replaced by new" in woken.heard[-1]["error"]
    assert record == ["old"]


def test_a_job_that_is_started_twice_is_refused_the_second_time(tmp_path: Path) -> None:
    member, twin = Member(1, "b", 5), Member(1, "second", 0)

    async def scene(coordinator: Coordinator, port: int) -> None:
        await member.join(port)
        await twin.join(port)
        asked = await member.hear("ping")
        member.say(op="pong", n=asked["n"], step=9)
        await twin.hear("refused")
        assert coordinator.alive == {0: "a", 1: "b"}
        assert coordinator.peers[1].placement == "b"

    serve(tmp_path, {0: "a", 1: "b"}, scene)

    assert "replica 1 of j lives, as b: give each job an id of its own" in twin.heard[-1]["error"]


def test_a_member_that_is_to_connect_again_keeps_its_place_from_a_second_start(
    tmp_path: Path,
) -> None:
    """The coordinator was started anew, and the second start of the job found it first."""
    member, twin = Member(1, "b", 5), Member(1, "second", 0)

    async def scene(coordinator: Coordinator, port: int) -> None:
        await twin.join(port)
        assert (await ask(port, op="status"))["peers"] == {}
        await member.join(port)
        asked = await member.hear("ping")
        member.say(op="pong", n=asked["n"], step=9)
        await twin.hear("refused")
        assert coordinator.alive == {0: "a", 1: "b"}

    serve(tmp_path, {0: "a", 1: "b"}, scene)


def test_who_hung_up_while_it_waited_takes_no_place(tmp_path: Path) -> None:
    holder, newcomer = Member(1, "old", 5), Member(1, "new", 0)

    async def scene(coordinator: Coordinator, port: int) -> None:
        await holder.join(port)
        await newcomer.join(port)
        await holder.hear("ping")
        newcomer.writer.close()
        await newcomer.writer.wait_closed()
        holder.writer.close()
        async with asyncio.timeout(PATIENCE_S):
            while 1 in coordinator.alive:
                await ask(port, op="status")
        await ask(port, op="status")
        assert coordinator.peers == {}
        assert coordinator.places.superseded == []

    serve(tmp_path, {0: "a", 1: "old"}, scene, clock=Clock())


async def says_goodbye(holder: Member, _port: int) -> None:
    holder.say(op="goodbye")


async def hangs_up(holder: Member, _port: int) -> None:
    holder.writer.close()


async def its_agent_says_that_it_ended(_holder: Member, port: int) -> None:
    await ask(port, op="exit", replica=1, placement="old")


@pytest.mark.parametrize("goes", [says_goodbye, hangs_up, its_agent_says_that_it_ended])
def test_who_waits_for_a_place_has_it_once_its_holder_is_gone(
    tmp_path: Path, goes: Callable[[Member, int], Awaitable[None]]
) -> None:
    holder, newcomer = Member(1, "old", 5), Member(1, "new", 0)

    async def scene(coordinator: Coordinator, port: int) -> None:
        await Member(0, "a", 5).join(port)
        await holder.join(port)
        await newcomer.join(port)
        await holder.hear("ping")
        assert coordinator.peers[1].placement == "old"
        await goes(holder, port)
        async with asyncio.timeout(PATIENCE_S):
            while 1 not in coordinator.peers or coordinator.peers[1].placement == "old":
                await ask(port, op="status")
        assert coordinator.peers[1].placement == "new"

    serve(tmp_path, {0: "a", 1: "old"}, scene, clock=Clock())


def test_a_past_member_that_nobody_remembers_takes_no_place(tmp_path: Path) -> None:
    woken = Member(1, "old", 3)

    async def scene(coordinator: Coordinator, port: int) -> None:
        await woken.join(port)
        await woken.hear("refused")
        assert coordinator.alive == {0: "a", 1: "new"}

    serve(tmp_path, {0: "a", 1: "new"}, scene)


def test_who_was_replaced_by_one_that_nobody_remembers_is_not_named_as_that_one() -> None:
    """The job ended well since, and its coordinator was started anew."""
    places = Succession(Record(job="j", epoch=6, superseded=["old"]))

    assert places.refusal(1, "old", was_member=True) == Superseded(
        "old was replaced by another start: this process must end"
    )


def test_a_full_disk_drops_nobody_and_the_epoch_is_granted_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    survivor = Member(0, "a", 5)

    async def scene(coordinator: Coordinator, port: int) -> None:
        obstacle = coordinator.file.next
        obstacle.mkdir()
        await survivor.join(port)
        await ask(port, op="exit", replica=1, placement="b")
        survivor.say(**REPORT)
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


def test_an_unmounted_folder_drops_nobody_and_the_epoch_is_granted_once_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    survivor = Member(0, "a", 5)
    folder, mounted = tmp_path / "c", tmp_path / "mounted"

    async def scene(coordinator: Coordinator, port: int) -> None:
        folder.rename(mounted)
        folder.mkdir()  # what is beneath
        await survivor.join(port)
        await ask(port, op="exit", replica=1, placement="b")
        survivor.say(**REPORT)
        await survivor.settled()
        assert coordinator.record.epoch == 5
        assert list(folder.iterdir()) == []
        mounted.rename(folder)
        coordinator.tick()
        await survivor.hear("epoch")

    serve(folder, {0: "a", 1: "b"}, scene)

    assert survivor.heard[-1]["epoch"] == 6
    assert "coordinator.json is gone: mount its folder again" in caplog.text


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"job": "j", "epoch": 5, "members": 3}'])
def test_a_record_that_is_damaged_is_said_with_its_path_and_the_remedy(
    tmp_path: Path, damage: str
) -> None:
    file = RecordFile(tmp_path, "j")
    file.path.write_text(damage)

    with pytest.raises(Unusable, match=r"coordinator\.json is damaged .*: move it away, and the"):
        Coordinator(file, "t", 1, 1)


def test_the_record_of_another_job_is_not_taken(tmp_path: Path) -> None:
    RecordFile(tmp_path, "other").advance(0, Record(job="other", epoch=1))

    with pytest.raises(Unusable, match="belongs to job other, not j; give another --state-dir"):
        Coordinator(RecordFile(tmp_path, "j"), "t", 1, 1)


def test_a_second_coordinator_on_the_same_record_ends_the_first(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, "j")
    first = Coordinator(file, "t", 1, 1)
    file.advance(0, Record(job="j", epoch=1))

    with pytest.raises(SystemExit):
        first.keep(Record(job="j", epoch=1))


def test_two_coordinators_of_one_machine_take_turns(tmp_path: Path) -> None:
    first = hold_alone(tmp_path, 0.0)
    with pytest.raises(StaleEpoch, match="another coordinator holds"):
        hold_alone(tmp_path, 0.0)

    threading.Timer(0.2, first.close).start()
    second = hold_alone(tmp_path, PATIENCE_S)

    second.close()


def test_a_stranger_that_says_nothing_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FIRST_LINE_S", 0.05)

    async def scene(_coordinator: Coordinator, port: int) -> None:
        reader, _writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""

    serve(tmp_path, {0: "a"}, scene)


@pytest.mark.parametrize(
    ("mine", "sentence"),
    [
        ("shards", "1 shards cannot be divided among 2 replicas: give Batches at least as many"),
        ("world", "12 shards cannot be divided among 20 replicas: give Batches at least as many"),
        ("model", "this replica's model is another, the job's is not told"),
    ],
)
def test_a_misfit_changes_nothing_for_those_that_are_there(
    tmp_path: Path, mine: str, sentence: str
) -> None:
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
        assert sentence in (await stranger.hear("refused"))["error"]
        again = Member(0, "a", 5)
        await again.join(port)
        assert (await ask(port, op="status"))["peers"] == {"0": "member"}
        assert coordinator.world == 2

    serve(tmp_path, {0: "a", 1: "b"}, scene)


def test_a_first_line_of_another_version_is_answered_with_what_it_lacks(tmp_path: Path) -> None:
    async def scene(coordinator: Coordinator, port: int) -> None:
        stranger = Member(0, "x", 0)
        del stranger.standing["gloo"], stranger.standing["world"]
        await stranger.join(port)
        error = (await stranger.hear("refused"))["error"]
        assert "first line lacks world, gloo: run the coordinator and all replicas with" in error
        assert coordinator.peers == {}

    serve(tmp_path, {}, scene)


def test_before_there_is_a_member_two_that_differ_are_both_named(tmp_path: Path) -> None:
    async def scene(coordinator: Coordinator, port: int) -> None:
        first, second = Member(1, "a", 0), Member(0, "b", 0)
        second.standing["shape"] = {"mode": "drop"}
        await first.join(port)
        await second.join(port)
        error = (await second.hear("refused"))["error"]
        assert "this replica's mode is drop, that of replica 1, which came first, is cover" in error
        assert sorted(coordinator.peers) == [1]

    serve(tmp_path, {}, scene)


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
        await members[0].hear("stage")
        asker.writer.close()
        members[1].writer.close()
        members[0].say(**REPORT)
        grant = await members[0].hear("epoch")
        assert (grant["world"], grant["dropped"]) == (2, [6, 7, 8, 9, 10, 11])
        assert coordinator.world == 2

    serve(tmp_path, {0: "a", 1: "b"}, scene, clock=Clock())


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def claimants() -> list[Member]:
    """Members of an epoch that the coordinator's record does not know."""
    names = {"0": "a", "1": "b", "2": "c"}
    found = [Member(int(replica), name, 8) for replica, name in names.items()]
    for member in found:
        member.standing["members"] = names
    return found


def test_an_unknown_epoch_is_taken_from_a_majority_of_its_members(tmp_path: Path) -> None:
    first, second, _third = claimants()

    async def scene(coordinator: Coordinator, port: int) -> None:
        await first.join(port)
        assert (await ask(port, op="status"))["peers"] == {"0": "claiming"}
        assert coordinator.record.epoch == 5
        await second.join(port)
        status = await ask(port, op="status")
        assert (status["epoch"], status["members"]) == (8, [0, 1, 2])
        assert status["peers"] == {"0": "member", "1": "member"}

    serve(tmp_path, {0: "a", 1: "b", 2: "c"}, scene)


def test_a_minority_waits_and_a_person_is_told_once(tmp_path: Path) -> None:
    member, _second, _third = claimants()
    clock = Clock()

    async def scene(coordinator: Coordinator, port: int) -> None:
        await member.join(port)
        await ask(port, op="status")
        for _ in range(3):
            clock.now += 6.0
            coordinator.peers[0].heard = clock.now
            coordinator.tick()
        told = await member.hear("undecided")
        assert "only replicas [0] of its members [0, 1, 2] are here" in told["text"]
        member.writer.close()
        await member.hear_the_end()
        assert coordinator.record.epoch == 5

    serve(tmp_path, {0: "a", 1: "b", 2: "c"}, scene, clock=clock)

    assert [heard["op"] for heard in member.heard].count("undecided") == 1


def test_who_claims_an_epoch_keeps_its_place_from_an_older_start_that_claims_an_earlier_one(
    tmp_path: Path,
) -> None:
    claimant, _second, _third = claimants()
    woken = Member(0, "old", 7)

    async def scene(coordinator: Coordinator, port: int) -> None:
        await claimant.join(port)
        assert (await ask(port, op="status"))["peers"] == {"0": "claiming"}
        await woken.join(port)
        asked = await claimant.hear("ping")
        claimant.say(op="pong", n=asked["n"], step=9)
        await woken.hear("refused")
        assert coordinator.peers[0].placement == "a"

    serve(tmp_path, {0: "a", 1: "b", 2: "c"}, scene)

    assert "replica 0 of j lives, as a" in woken.heard[-1]["error"]


def test_a_person_may_take_any_members_word(tmp_path: Path) -> None:
    member, _second, _third = claimants()

    async def scene(coordinator: Coordinator, port: int) -> None:
        await member.join(port)
        status = await ask(port, op="status")
        assert (status["epoch"], status["peers"]) == (8, {"0": "member"})

    serve(tmp_path, {0: "a", 1: "b", 2: "c"}, scene, any_claim=True)


@pytest.mark.parametrize("how", ["the lease runs out", "the agent says that one ended"])
def test_nobody_begins_anew_while_the_last_members_may_train_unseen(
    tmp_path: Path, how: str
) -> None:
    clock = Clock()
    newcomer = Member(2, "x", 0)

    async def scene(coordinator: Coordinator, port: int) -> None:
        async def lease_runs_out() -> None:
            clock.now += 2 * GATHER_S
            coordinator.peers[2].heard = clock.now
            coordinator.tick()

        async def agent_says_so() -> None:
            await ask(port, op="exit", replica=1, placement="b")

        old = [Member(0, "a", 5), Member(1, "b", 5)]
        for member in old:
            await member.join(port)
        await newcomer.join(port)
        await old[0].hear("stage")
        for member in old:
            member.writer.close()
        order = (await newcomer.hear("load"))["order"]
        clock.now += GATHER_S + 0.5  # gathered for long enough
        coordinator.peers[2].heard = clock.now
        newcomer.say(op="ready", order=order, step=3, digest="d")
        await newcomer.settled()
        assert coordinator.record.epoch == 5
        ways = {
            "the lease runs out": lease_runs_out,
            "the agent says that one ended": agent_says_so,
        }
        await ways[how]()
        await newcomer.hear("epoch")

    serve(tmp_path, {0: "a", 1: "b"}, scene, clock=clock, lease_s=2 * GATHER_S)

    assert newcomer.heard[-1]["begins"]


def test_the_last_of_those_who_come_one_by_one_may_bring_the_newest_state(tmp_path: Path) -> None:
    clock = Clock()
    members = {0: "a", 1: "b", 2: "c", 3: "d"}
    came = [Member(replica, f"new-{replica}", 0) for replica in range(3)]

    async def scene(coordinator: Coordinator, port: int) -> None:
        async def pass_time(seconds: float) -> None:
            clock.now += seconds
            for peer in coordinator.peers.values():
                peer.heard = clock.now
            coordinator.tick()

        async def come(member: Member, step: int) -> None:
            await member.join(port)
            order = (await member.hear("load"))["order"]
            member.say(op="ready", order=order, step=step, digest=f"of {step}")
            await member.settled()

        for replica, placement in members.items():
            await ask(port, op="exit", replica=replica, placement=placement)
        await come(came[0], 20)
        await pass_time(GATHER_S - 4.0)
        await come(came[1], 20)
        await pass_time(GATHER_S - 4.0)
        assert coordinator.record.epoch == 5
        await come(came[2], 29)
        await pass_time(GATHER_S - 0.5)
        assert coordinator.admission.staging is None  # for one more
        await pass_time(1.0)
        await came[2].hear("stage")
        assert coordinator.record.epoch == 5  # the others take its state first

    serve(tmp_path, members, scene, clock=clock)


@pytest.mark.parametrize("grant", [{"world": 2}, {}], ids=["killed whole", "ended well"])
def test_a_coordinator_started_anew_knows_how_many_a_job_waits_for(
    tmp_path: Path, grant: dict[str, int]
) -> None:
    """Whoever starts it need not say: the record does, or those who come."""
    first, second = Member(0, "new-0", 0), Member(1, "new-1", 0)

    async def scene(coordinator: Coordinator, port: int) -> None:
        for replica, placement in {0: "a", 1: "b"}.items():
            await ask(port, op="exit", replica=replica, placement=placement)

        async def come(member: Member) -> None:
            await member.join(port)
            order = (await member.hear("load"))["order"]
            member.say(op="ready", order=order, step=20, trained_in=5, digest="of 20")

        await come(first)
        await first.settled()
        coordinator.tick()
        assert coordinator.record.epoch == 5
        await come(second)
        await first.hear("epoch")
        assert sorted(coordinator.record.members) == [0, 1]

    members = {0: "a", 1: "b"} if grant else {}
    serve(tmp_path, members, scene, world=1, grant=grant)


def test_who_begins_looks_into_the_memory_of_nodes_of_which_nobody_came(tmp_path: Path) -> None:
    clock = Clock()
    came = Member(0, "new-0", 0)
    came.standing["holders"] = [{"address": "node-0:1", "domain": "node-0"}]

    async def scene(coordinator: Coordinator, port: int) -> None:
        coordinator.record = replace(
            coordinator.record, holders={0: ["node-0:1"], 1: ["node-1:1"], 2: []}
        )
        for replica, placement in {0: "a", 1: "b", 2: "c"}.items():
            await ask(port, op="exit", replica=replica, placement=placement)
        await came.join(port)
        first = await came.hear("load")
        came.say(op="ready", order=first["order"], step=20, trained_in=5, digest="of 20")
        await came.settled()
        clock.now += GATHER_S + 0.5
        coordinator.peers[0].heard = clock.now
        coordinator.tick()
        second = await came.hear("load")
        assert (first["holders"], second["holders"]) == ([], [["node-1:1"]])
        came.say(op="ready", order=second["order"], step=29, trained_in=5, digest="of 29")
        grant = await came.hear("epoch")
        began = {"epoch": 5, "step": 29, "at": grant["started_at"], "first": grant["epoch"]}
        assert grant["began"] == began
        assert coordinator.record.holders == {0: ["node-0:1"], 1: ["node-1:1"], 2: []}

    serve(tmp_path, {0: "a", 1: "b", 2: "c"}, scene, clock=clock)


def test_who_has_an_import_goes_before_who_does_not_see_it(tmp_path: Path) -> None:
    blind, sees = Member(0, "new-0", 0), Member(1, "new-1", 0)

    async def scene(coordinator: Coordinator, port: int) -> None:
        for replica, placement in {0: "a", 1: "b"}.items():
            await ask(port, op="exit", replica=replica, placement=placement)
        for member, loaded in ((blind, False), (sees, True)):
            await member.join(port)
            order = (await member.hear("load"))["order"]
            member.say(op="ready", order=order, step=-1, loaded=loaded, digest=f"of {loaded}")
            await member.settled()
        assert coordinator.admission.staging is not None

    serve(tmp_path, {0: "a", 1: "b"}, scene)

    asked = ["stage" in [message["op"] for message in one.heard] for one in (blind, sees)]
    assert asked == [False, True]


def test_a_member_that_answers_no_more_is_lost_after_two_seconds(tmp_path: Path) -> None:
    clock = Clock()

    async def scene(coordinator: Coordinator, port: int) -> None:
        silent, member = Member(0, "a", 5), Member(1, "b", 5)
        await silent.join(port)
        await member.join(port)
        await ask(port, op="status")

        async def pass_time(tenths: int) -> None:
            for _ in range(tenths):
                clock.now += 0.1
                member.say(op="pong", n=0, step=9)
                await ask(port, op="status")
                coordinator.tick()

        await pass_time(19)
        assert coordinator.alive == {0: "a", 1: "b"}
        await pass_time(3)
        assert coordinator.alive == {1: "b"}
        assert (await member.hear("lost"))["how"] == "heartbeat"

    serve(tmp_path, {0: "a", 1: "b"}, scene, clock=clock)


def test_of_two_that_do_not_reach_each_other_one_is_left_out(tmp_path: Path) -> None:
    first, second, third = members = [Member(n, name, 5) for n, name in enumerate("abc")]

    async def scene(_coordinator: Coordinator, port: int) -> None:
        for member in members:
            await member.join(port)
        first.say(**{**REPORT, "silent": True})
        for member in members[1:]:
            await member.hear("broken")
            member.say(**REPORT)
        for member, missed in zip(members, ([1], [0], []), strict=True):
            asked = await member.hear("probe")
            assert sorted(asked["peers"]) == sorted({"0", "1", "2"} - {str(members.index(member))})
            member.say(op="unreached", epoch=5, replicas=missed)
        await second.hear("evicted")
        granted = await first.hear("epoch")
        assert [m["replica"] for m in granted["members"]] == [0, 2]
        await third.hear("epoch")

    serve(tmp_path, {0: "a", 1: "b", 2: "c"}, scene)

    told = [m for m in third.heard if m["op"] == "lost"]
    assert [(m["replica"], m["how"]) for m in told] == [(1, "unreached")]


def test_a_network_that_fails_twice_before_the_next_epoch_is_looked_at_twice(
    tmp_path: Path,
) -> None:
    members = [Member(n, name, 5) for n, name in enumerate("abc")]
    again = Member(0, "a", 5)
    staying = members[2]

    async def scene(_coordinator: Coordinator, port: int) -> None:
        for member in members:
            await member.join(port)
        for member in members:
            member.say(**{**REPORT, "silent": True})
        for member, missed in zip(members, ([1], [0], []), strict=True):
            await member.hear("probe")
            member.say(op="unreached", epoch=5, replicas=missed)
        await members[1].hear("evicted")  # and two are not enough
        await again.join(port)
        again.say(**{**REPORT, "silent": True})
        for member in (again, staying):
            await member.hear("probe")
            member.say(op="unreached", epoch=5, replicas=[])
        assert (await ask(port, op="status"))["members"] == [0, 2]

    serve(tmp_path, {0: "a", 1: "b", 2: "c"}, scene, min_replicas=3)

    assert [m["op"] for m in staying.heard].count("probe") == 2


def test_whom_all_reach_after_all_stays(tmp_path: Path) -> None:
    members = [Member(n, name, 5) for n, name in enumerate("ab")]

    async def scene(_coordinator: Coordinator, port: int) -> None:
        for member in members:
            await member.join(port)
        for member in members:
            member.say(**{**REPORT, "silent": True})
        for member in members:
            await member.hear("probe")
            member.say(op="unreached", epoch=5, replicas=[])
        for member in members:
            granted = await member.hear("epoch")
            assert [m["replica"] for m in granted["members"]] == [0, 1]

    serve(tmp_path, {0: "a", 1: "b"}, scene)


@pytest.mark.parametrize(
    "rubbish",
    [{"op": ["report"]}, {"op": "report", "epoch": 5, "step": None, "holds": []}],
    ids=["no verb", "no number"],
)
def test_who_talks_rubbish_is_hung_up_on_and_lost_to_the_others(
    tmp_path: Path, rubbish: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    sane, mad = Member(0, "a", 5), Member(1, "b", 5)

    async def scene(_coordinator: Coordinator, port: int) -> None:
        await sane.join(port)
        await mad.join(port)
        mad.say(**rubbish)
        await mad.hear_the_end()
        await sane.hear("lost")

    serve(tmp_path, {0: "a", 1: "b"}, scene)

    assert sane.heard[-1]["replica"] == 1
    assert "connection_failed" in caplog.text


def test_a_job_cannot_join_another_jobs_coordinator(tmp_path: Path) -> None:
    stranger = Member(1, "x", 0)
    stranger.standing["job"] = "other"

    async def scene(_coordinator: Coordinator, port: int) -> None:
        await stranger.join(port)
        await stranger.hear("refused")

    serve(tmp_path, {0: "a"}, scene)

    assert "this replica's job is other, the coordinator's is j" in stranger.heard[-1]["error"]
