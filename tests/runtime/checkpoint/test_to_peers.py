"""What is saved to other nodes' memory, and found there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint import peer
from runtime.checkpoint.holder import Holder
from runtime.framing import send_json
from runtime.serving import RequestServer
from runtime.snapshot import Copying
from tests.runtime.checkpoint.one_rank import OneRank, read_from
from tests.runtime.checkpoint.states import (
    staged_at,
)


def test_two_replicas_that_one_holder_keeps_have_one_name_for_each_state(tmp_path: Path) -> None:
    """Else of two ranks one might be held as the one's, the other as the other's."""
    replicas = [OneRank(tmp_path, holder=True) for _ in (0, 1)]
    (place, _same) = [one.saver.open_holder("127.0.0.1") for one in replicas]
    for one in replicas:
        one.saver.meet([{"replica": 0, "placement": "p", "holders": [place]}], 0)
        one.save_all(7)

    assert [one.saver.sources.saves()[0] for one in replicas] == [(7, "0-7", "peer")] * 2
    assert read_from(replicas[1], 7, "peer", "0-7") == staged_at(7).digest
    for one in replicas:
        one.saver.finish()
    os.kill(json.loads((tmp_path / "memory/j/holder.json").read_bytes())["pid"], signal.SIGKILL)


def test_that_the_own_node_alone_keeps_it_is_taken_back_once_another_has_something(
    tmp_path: Path,
) -> None:
    server = RequestServer("127.0.0.1", "t", Holder().serve)
    one = OneRank(tmp_path, holder=True)
    near = one.saver.open_holder("127.0.0.1")
    away = {"address": server.address, "domain": "there"}
    members = [
        {"replica": number, "placement": f"p{number}", "holders": [place]}
        for number, place in enumerate((near, away))
    ]

    for present in (members[:1], members[:1], members):
        one.saver.meet(present, 0)
    before = one.told.troubles()
    one.save_all(1)
    one.save_all(2)

    assert before == ["checkpoint_not_apart"]
    assert one.told.troubles() == ["checkpoint_not_apart", "checkpoint_apart"]
    one.saver.finish()
    server.close()
    os.kill(json.loads((tmp_path / "memory/j/holder.json").read_bytes())["pid"], signal.SIGKILL)


def test_of_several_ranks_memory_keeps_what_all_have_though_one_s_next_saves_are_refused(
    tmp_path: Path,
) -> None:
    one = OneRank(tmp_path, ranks=2, holder=True)
    place = one.saver.open_holder("127.0.0.1")
    one.saver.meet([{"replica": 0, "placement": "p", "holders": [place]}], 0)
    for step in (1, 2, 3):
        one.saver.dispatcher.common = {"peer": 1}  # of these the other rank has the first alone
        assert one.save(step) is not None
        one.told.until(lambda step=step: step in one.told.saved())  # type: ignore[misc]
    held = [label["step"] for label in peer.held(place["address"], "t")]
    one.saver.finish()
    os.kill(json.loads((tmp_path / "memory/j/holder.json").read_bytes())["pid"], signal.SIGKILL)

    assert held == [3, 1]


def held_elsewhere(tmp_path: Path) -> tuple[OneRank, OneRank, str]:
    """Ours, which has nothing, and one whose step 7 its own node's holder has, at that address."""
    ours, theirs = (OneRank(tmp_path / name, holder=True) for name in ("ours", "theirs"))
    place = theirs.saver.open_holder("127.0.0.1")
    theirs.saver.meet([{"replica": 0, "placement": "p", "holders": [place]}], 0)
    theirs.save_all(7)
    return ours, theirs, place["address"]


def test_other_nodes_memory_is_looked_into_as_far_as_it_answers(tmp_path: Path) -> None:
    ours, theirs, address = held_elsewhere(tmp_path)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "checkpoints").symlink_to(tmp_path / "theirs" / "checkpoints")
    sources = ours.saver.sources
    there = [gone_address(), address]

    assert sources.saves() == [(7, "save7", "shared")]
    assert sources.saves(there) == [(7, "0-7", "peer"), (7, "save7", "shared")]
    assert read_from(ours, 7, "peer", "0-7") == staged_at(7).digest
    assert sources.saves(there, after=(0, 7)) == []
    assert ours.told.troubles() == ["holder_out_of_reach"] * 2  # once each time it was asked
    for one in (ours, theirs):
        one.saver.finish()
    os.kill(json.loads((tmp_path / "theirs/memory/j/holder.json").read_bytes())["pid"], 9)


def test_whose_node_came_to_the_job_since_finds_its_part_also_without_the_shared_folder(
    tmp_path: Path,
) -> None:
    """Of which run it is those say who hold it."""
    ours, theirs, address = held_elsewhere(tmp_path)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "checkpoints").write_text("no folder")

    assert ours.saver.sources.saves([address]) == [(7, "0-7", "peer")]
    for one in (ours, theirs):
        one.saver.finish()
    os.kill(json.loads((tmp_path / "theirs/memory/j/holder.json").read_bytes())["pid"], 9)


def test_without_the_shared_folder_our_own_node_knows_better_than_others_which_run_it_is(
    tmp_path: Path,
) -> None:
    """They may be nodes that the job has left before it began anew."""
    ours, theirs = (OneRank(tmp_path / name, holder=True) for name in ("ours", "theirs"))
    places = [one.saver.open_holder("127.0.0.1") for one in (ours, theirs)]
    for step, one, place in zip((7, 9), (ours, theirs), places, strict=True):
        one.saver.meet([{"replica": 0, "placement": "p", "holders": [place]}], 0)
        one.save_all(step)
        one.saver.finish()
    shutil.rmtree(tmp_path / "ours" / "checkpoints")
    (tmp_path / "ours" / "checkpoints").write_text("no folder")
    again = OneRank(tmp_path / "ours", holder=True)
    again.saver.open_holder("127.0.0.1")

    assert again.saver.sources.saves([places[1]["address"]]) == [(7, "0-7", "peer")]
    again.saver.finish()
    for name in ("ours", "theirs"):
        os.kill(json.loads((tmp_path / f"{name}/memory/j/holder.json").read_bytes())["pid"], 9)


def test_what_our_own_node_cannot_keep_another_still_does(tmp_path: Path) -> None:
    server = RequestServer("127.0.0.1", "t", Holder().serve)
    one = OneRank(tmp_path, holder=True)
    one.saver.sources.look_into(gone_address())
    one.saver.dispatcher.own_holder = lambda: one.saver.sources.holder
    one.saver.dispatcher.keepers.follow([peer.Place(server.address, "node-1")])
    one.save_all(1)
    one.saver.finish()

    (held,) = peer.held(server.address, "t")
    assert (held["step"], held["save"]) == (1, "save1")  # no other start has that name
    assert one.told.troubles() == ["checkpoint_failed"]
    server.close()


def test_what_our_own_node_has_otherwise_another_keeps(tmp_path: Path) -> None:
    own, lost, there = (RequestServer("127.0.0.1", "t", Holder().serve) for _ in range(3))
    one = OneRank(tmp_path, holder=True)
    one.saver.sources.look_into(own.address)
    one.saver.dispatcher.own_holder = lambda: one.saver.sources.holder
    one.saver.dispatcher.keepers.follow([peer.Place(lost.address, "node-1")])
    one.save_all(1)
    one.saver.dispatcher.keepers.follow([peer.Place(there.address, "node-2")])
    one.saver.save(lambda into: Copying({"w": torch.ones(9)}, 1, into), "save1", ["peer"])
    one.saver.finish()

    (held,) = peer.held(there.address, "t")
    assert (held["step"], held["save"]) == (1, "save1")
    assert one.told.troubles() == ["checkpoint_failed"]
    for server in (own, lost, there):
        server.close()


def test_a_writer_is_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a card's fault does to ranks spares who writes what they saved."""
    monkeypatch.setenv("DRYDOCK_RANK", "0")
    monkeypatch.setenv("DRYDOCK_PLACEMENT", "plc_1")
    one = OneRank(tmp_path)
    one.save_all(1)
    environment = Path(f"/proc/{one.writer()}/environ").read_bytes().split(b"\0")
    one.saver.finish()

    assert b"DRYDOCK_PLACEMENT=plc_1" in environment
    assert not [said for said in environment if said.startswith(b"DRYDOCK_RANK=")]


def to_peers(tmp_path: Path, *addresses: str) -> OneRank:
    """The first of a job's members, whose holders are there."""
    one = OneRank(tmp_path, holder=True)
    places = [{"address": address, "domain": f"node-{n}"} for n, address in enumerate(addresses)]
    members = [{"replica": n, "placement": f"p{n}", "holders": [at]} for n, at in enumerate(places)]
    one.saver.meet(members, 0)
    return one


def test_where_a_keeper_is_gone_another_keeps_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "LOST_S", 0.0)
    server = RequestServer("127.0.0.1", "t", Holder().serve)
    one = to_peers(tmp_path, gone_address(), gone_address(), server.address)
    one.save_all(1, 2, 3)
    one.saver.finish()

    assert [held["step"] for held in peer.held(server.address, "t")] == [3]
    assert one.told.troubles() == ["checkpoint_failed", "checkpoint_recovered"]
    server.close()


@pytest.mark.parametrize(
    ("answer", "times"),
    [
        ({"error": "no memory"}, 2),
        ({"error": "others save another run", "everywhere": True}, 3),
    ],
)
def test_a_keeper_that_cannot_is_passed_over_and_not_one_that_refuses_as_others_would(
    answer: dict[str, Any], times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "LOST_S", 0.0)
    asked: list[str] = []

    def serve(connection: socket.socket, request: dict[str, Any]) -> None:
        asked.append(request["op"])
        send_json(connection, answer)

    server = RequestServer("127.0.0.1", "t", serve)
    one = to_peers(tmp_path, gone_address(), server.address, gone_address())
    one.save_all(1, 2, 3)
    one.saver.finish()
    server.close()

    assert asked == ["hold"] * times


def gone_address() -> str:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"
