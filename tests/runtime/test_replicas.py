"""Replicas die, others take over, newcomers come back: with real processes and sockets."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime.checkpoint import peer, store
from runtime.checkpoint.__main__ import main as checkpoint_tool
from runtime.checkpoint.draft import Draft
from runtime.image import CHUNK_BYTES
from runtime.replica.pacing import BURST
from runtime.replica.record import RecordFile
from tests.runtime.checkpoint.states import flip_a_bit, flip_held_bits
from tests.runtime.replicas import PATIENCE_S, TOKEN, Cable, Fleet, until
from tests.runtime.test_client import Door

MakeFleet = Callable[..., Fleet]


def assert_every_sample_once(steps: list[dict[str, Any]], first: int) -> None:
    """The steps follow each other, and each summed each of its twelve shards exactly once."""
    assert [s["step"] for s in steps] == list(range(first, first + len(steps)))
    assert {tuple(s["coverage"]) for s in steps} == {(1,) * 12}
    assert {s["samples"] for s in steps} == {24}


def test_survivors_take_over_and_a_newcomer_enters_with_an_equal_state(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(4)
    fleet.start()
    fleet.wait_for_step(20)

    fleet.kill(2)
    fleet.wait_for_members([0, 1, 3])
    fleet.train_on()
    fleet.start_rank(2)
    fleet.wait_for_members([0, 1, 2, 3])
    fleet.train_on()
    fleet.stop()

    for replica in (0, 1, 3):  # in the processes that began: each has ended with 0
        assert_every_sample_once(fleet.steps(replica), 0)
    assert len(fleet.digests()) == 1


@contextlib.contextmanager
def busy_processors() -> Iterator[None]:
    """Four times as many processes as there are processors want all of them, as data loaders
    may."""
    loop = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    with contextlib.ExitStack() as ended:
        for _ in range(4 * (os.cpu_count() or 1)):
            process = ended.enter_context(subprocess.Popen([sys.executable, "-c", loop]))
            ended.callback(process.kill)
        yield


@pytest.mark.soak  # no other test that awaits anything should run beside it
def test_a_newcomer_enters_while_others_want_all_processors(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(3, options={"width": 300_000, "pace_s": 0})
    fleet.start()
    fleet.wait_for_step(5)
    fleet.kill(2)
    fleet.wait_for_members([0, 1])

    with busy_processors():
        fleet.start_rank(2)
        fleet.wait_for_members([0, 1, 2])
    fleet.train_on(5)
    fleet.stop()

    assert len(fleet.digests()) == 1


def test_two_deaths_at_once_and_two_newcomers(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(4)
    fleet.start()
    fleet.wait_for_step(20)

    fleet.kill(0, 3)
    fleet.wait_for_members([1, 2])
    fleet.start_rank(3)
    fleet.start_rank(0)
    fleet.wait_for_members([0, 1, 2, 3])
    fleet.train_on()
    fleet.stop()

    assert_every_sample_once(fleet.steps(1), 0)
    assert_every_sample_once(fleet.steps(2), 0)
    assert len(fleet.digests()) == 1


def test_below_the_minimum_members_wait_holding_their_state(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2, min_replicas=2)
    fleet.start()
    fleet.wait_for_step(20)

    fleet.kill(1)
    until(lambda: fleet.ask(op="status")["members"] == [0], "the loss is known")
    fleet.start_rank(1)
    fleet.train_on()
    fleet.stop()

    assert {tuple(s["members"]) for s in fleet.steps(0)} == {(0, 1)}
    assert_every_sample_once(fleet.steps(0), 0)
    assert len(fleet.digests()) == 1


@pytest.mark.parametrize("what_is_left", ["coordinator.json", "nothing.json"])
def test_a_dead_coordinator_costs_no_step_and_its_successor_goes_on(
    make_fleet: MakeFleet, what_is_left: str
) -> None:
    # So long they may train without it: 50 steps of a busy machine take longer than ten seconds.
    fleet = make_fleet(3, lease_s=60.0)
    fleet.start()
    fleet.wait_for_step(20)

    assert fleet.coordinator is not None
    fleet.coordinator.kill()
    fleet.coordinator.wait()
    fleet.train_on(50)
    (fleet.folder / "c" / "coordinator.json").rename(fleet.folder / "c" / what_is_left)
    fleet.start_coordinator()
    until(lambda: len(fleet.ask(op="status")["peers"]) == 3, "members found the successor")
    fleet.train_on()
    unbroken = {s["epoch"] for s in fleet.steps(0)}
    fleet.kill(1)
    fleet.wait_for_members([0, 2])
    fleet.stop()

    assert unbroken == {1}
    assert_every_sample_once(fleet.steps(0), 0)
    assert len(fleet.digests()) == 1


def test_members_out_of_the_coordinators_reach_hold_before_others_begin(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(2, lease_s=8.0)
    fleet.start_coordinator()
    cable = Cable(fleet.port)
    cut_off = [fleet.start_rank(replica, port=cable.port) for replica in (0, 1)]
    fleet.wait_for_step(20)

    cable.unplug()
    behind = fleet.last(0)["step"]
    for replica in (2, 3):  # once they are heard, the others' silence says something
        fleet.start_rank(replica)
    until(lambda: fleet.ask(op="status")["members"] == [], "both are taken for dead")
    until(lambda: fleet.last(2)["step"] >= 20, "other replicas begin")
    held = [fleet.steps(0)[-1], fleet.steps(1)[-1]]

    assert [process.poll() for process in cut_off] == [None, None]
    assert max(entry["at"] for entry in held) < fleet.steps(2)[0]["at"]
    assert held[0]["step"] > behind  # they trained on for as long as their lease lasted


def test_a_coordinator_that_is_stopped_for_longer_than_the_lease_loses_nobody(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(2, lease_s=1.0)
    fleet.start()
    fleet.wait_for_step(20)

    assert fleet.coordinator is not None
    fleet.coordinator.send_signal(signal.SIGSTOP)
    # One of them: the other may be a step further, and wait for it in a collective.
    logs = [fleet.folder / f"rank{replica}.log" for replica in (0, 1)]
    until(lambda: any("holding" in log.read_text() for log in logs), "training holds")
    held = fleet.last(0)
    fleet.coordinator.send_signal(signal.SIGCONT)
    fleet.train_on()
    # Before it is told to stop: who holds just then ends its epoch, for it may be cut off.
    after = fleet.last(0)
    fleet.stop()

    assert after["epoch"] == held["epoch"] == 1
    assert_every_sample_once(fleet.steps(0), 0)
    assert len(fleet.digests()) == 1


def test_who_holds_out_of_reach_obeys_when_it_is_told_to_stop(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1, lease_s=1.0)
    fleet.start()
    fleet.wait_for_step(20)

    assert fleet.coordinator is not None
    fleet.coordinator.send_signal(signal.SIGSTOP)
    until(lambda: "holding" in (fleet.folder / "rank0.log").read_text(), "training holds")
    fleet.stop()

    assert (fleet.folder / "state" / "checkpoints").exists()


@pytest.mark.parametrize("moved", [0, 1])
def test_a_replica_moves_to_another_process_at_an_edge(make_fleet: MakeFleet, moved: int) -> None:
    fleet = make_fleet(3, options={"mode": "reproducible"})
    fleet.start()
    fleet.wait_for_step(20)

    leaver = fleet.ranks[moved]
    fleet.ranks[moved] = fleet.start_rank(moved, standby="migrate")
    assert leaver.wait(PATIENCE_S) == 0
    # What else its script does is for another to write.
    assert (fleet.folder / f"speaks.{moved}").read_text() == "False"
    fleet.train_on()
    fleet.stop()

    assert_every_sample_once(fleet.steps(0), 0)
    assert {tuple(s["members"]) for s in fleet.steps(0)} == {(0, 1, 2)}
    assert fleet.last(0)["epoch"] == 2
    assert len(fleet.digests()) == 1


def test_a_warm_spare_takes_the_place_of_whoever_dies(make_fleet: MakeFleet) -> None:
    door = Door()
    fleet = make_fleet(3, url=door.url)
    fleet.start()
    fleet.wait_for_step(20)
    spare = fleet.start_rank(7, standby="spare")
    until(
        lambda: "follows" in [one["stage"] for one in door.messages("hello")], "the spare follows"
    )
    assert fleet.ask(op="status")["peers"]["-1"] == "ready"
    fleet.train_on()

    fleet.kill(2)
    fleet.ranks[7] = spare
    fleet.wait_for_epoch(2)
    fleet.train_on()
    fleet.stop()

    assert_every_sample_once(fleet.steps(0), 0)
    assert {tuple(s["members"]) for s in fleet.steps(0)} == {(0, 1, 2)}
    assert fleet.steps(7)[0]["epoch"] == 2  # it entered as the other was lost
    assert len(fleet.digests()) == 1
    door.close()


def test_a_job_grows_beyond_its_first_size(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1, options={"mode": "reproducible"})
    fleet.start()
    fleet.wait_for_step(20)

    fleet.start_rank(1)
    fleet.wait_for_members([0, 1])
    fleet.start_rank(2)
    fleet.start_rank(3)
    fleet.wait_for_members([0, 1, 2, 3])
    fleet.train_on()
    fleet.stop()

    assert_every_sample_once(fleet.steps(0), 0)
    assert len(fleet.digests()) == 1


def test_the_agents_word_counts_only_for_the_present_placement(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2)
    fleet.start()
    fleet.wait_for_step(5)
    status = fleet.ask(op="status")

    stale = fleet.ask(op="exit", replica=1, placement="plc_of_long_ago", code=-9)
    unmoved = fleet.ask(op="status")
    fleet.ask(op="exit", replica=1, placement="plc_2", code=-9)
    until(lambda: fleet.ask(op="status")["epoch"] > 1, "the agent's word counts")

    assert stale == {"ok": True}
    assert unmoved["epoch"] == status["epoch"] == 1
    assert unmoved["members"] == [0, 1]


def test_a_silent_replica_is_dropped_and_comes_back_by_itself(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(3)
    fleet.start()
    fleet.wait_for_step(5)

    fleet.ranks[1].send_signal(signal.SIGSTOP)
    until(lambda: fleet.last(0)["members"] == [0, 2], "the silent one is dropped")
    fleet.ranks[1].send_signal(signal.SIGCONT)
    fleet.wait_for_members([0, 1, 2])
    fleet.train_on()
    fleet.stop()

    assert_every_sample_once(fleet.steps(0), 0)
    assert len(fleet.digests()) == 1


def test_a_whole_job_resumes_from_the_newest_checkpoint_of_any_replica(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(2, shared_disk=False)
    fleet.start()
    fleet.wait_for_step(20)
    fleet.stop()
    stopped_at = fleet.last(0)["step"]
    written = [r for r in (0, 1) if (fleet.folder / f"state{r}" / "checkpoints").exists()]

    fleet.start_rank(0)
    fleet.start_rank(1)
    fleet.wait_for_step(stopped_at + 20)
    fleet.stop()

    assert written == [0]
    assert fleet.last(1)["epoch"] == 3  # between them one in which nobody trained
    assert_every_sample_once(fleet.steps(1), 0)
    assert len(fleet.digests()) == 1


def test_a_job_killed_whole_goes_on_from_the_nodes_own_disks(make_fleet: MakeFleet) -> None:
    """Even if nobody tells that its processes have ended."""
    fleet = make_fleet(2, own_disks=True, agents=False, lease_s=4.0, options={"local_s": 0.2})
    fleet.start()
    until(lambda: min(newest_local(fleet, r) for r in (0, 1)) > 20, "both disks hold a checkpoint")

    saved = kill_whole(fleet)
    went_on = started_anew(fleet)

    assert_every_sample_once(went_on, max(saved) + 1)
    assert len(fleet.digests()) == 1


def test_what_a_disk_kept_is_older_than_what_was_trained_without_it(make_fleet: MakeFleet) -> None:
    """Also if the coordinator's record was lost meanwhile, so that it knows of no epoch."""
    fleet = make_fleet(2, own_disks=True, options={"local_s": 0.2})
    fleet.start()
    until(lambda: min(newest_local(fleet, r) for r in (0, 1)) > 100, "both disks hold checkpoints")
    kill_whole(fleet)
    disks = [fleet.folder / f"disk{replica}" for replica in (0, 1)]
    for disk in disks:
        disk.rename(disk.with_suffix(".away"))
    shutil.rmtree(fleet.folder / "c")
    for told in fleet.folder.glob("steps.*"):
        told.unlink()  # so that it makes fewer steps than before

    began_anew = started_anew(fleet)
    kill_whole(fleet)
    for disk in disks:
        shutil.rmtree(disk)
        disk.with_suffix(".away").rename(disk)
    went_on = started_anew(fleet)

    assert began_anew[0]["step"] == 0
    assert began_anew[-1]["step"] < 100
    assert_every_sample_once(went_on, began_anew[-1]["step"] + 1)


def test_what_is_damaged_on_one_tier_is_taken_from_another(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2, own_disks=True, options={"local_s": 0.2, "checkpoint_s": 0.5})
    fleet.start()
    until(lambda: min(newest_local(fleet, r) for r in (0, 1)) > 20, "both disks hold a checkpoint")
    shared = fleet.folder / "state" / "checkpoints"
    until(lambda: store.candidates(shared), "a checkpoint in the shared folder")

    kill_whole(fleet)
    for path in fleet.folder.glob("disk*/*/*/replica-*/step-*/rank-0-0000.bin"):
        flip_a_bit(path, 1000)
    there = store.number_of(store.candidates(shared)[0])[0]
    went_on = started_anew(fleet)

    assert_every_sample_once(went_on, there + 1)


def test_replicas_share_the_checkpoint_out_whoever_dies(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(3, options={"checkpoint_s": 0.3})
    fleet.start()
    shared = fleet.folder / "state" / "checkpoints"
    until(lambda: shared_out(shared, 0), "all three have written their share of one")

    fleet.kill(1)
    dead_at = fleet.last(0)["step"]
    until(lambda: shared_out(shared, dead_at + 1), "the other two have")
    fleet.start_rank(1)
    fleet.wait_for_members([0, 1, 2])
    back_at = fleet.last(0)["step"]
    until(lambda: shared_out(shared, back_at + 1), "all three have again")
    kill_whole(fleet)
    newest = store.candidates(shared)[0]
    went_on = started_anew(fleet)

    assert_every_sample_once(went_on, store.number_of(newest)[0] + 1)
    assert len(fleet.digests()) == 1
    assert [store.verify(path) for path in store.candidates(shared)[1:]] == [[]] * 2


def test_replicas_whose_folders_are_not_one_write_all_the_same(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2, shared_disk=False, options={"checkpoint_s": 0.3})
    fleet.start()
    folder = fleet.folder / "state0" / "checkpoints"
    until(lambda: store.candidates(folder), "a first one")
    first = store.number_of(store.candidates(folder)[0])[0]
    until(lambda: store.number_of(store.candidates(folder)[0])[0] > first + 20, "a later one")
    fleet.stop()

    assert not list(folder.glob(".writing-*"))
    assert not (fleet.folder / "state1" / "checkpoints").exists()


def shared_out(folder: Path, step: int) -> bool:
    """Whether one of this step or a later one was written by several."""
    found = [path for path in store.candidates(folder) if store.number_of(path)[0] >= step]
    return any((path / "verified").exists() for path in found)


def test_a_newcomer_is_served_by_two_on_the_network_and_at_the_rate_that_were_named(
    make_fleet: MakeFleet,
) -> None:
    rate, state = 10_000_000, 2 * 4 * 230_000 * 18  # weights and what the optimizer has of them
    # Steps outlast what is kept.
    options = {"width": 230_000, "checkpoint_s": 600, "pace_s": 0.1, "tells": True}
    fleet = make_fleet(3, network="127.0.0.2", rate_cap="10M", options=options)
    fleet.start()
    fleet.wait_for_step(3)
    fleet.kill(1)
    fleet.start_rank(1)
    fleet.wait_for_members([0, 1, 2])
    fleet.wait_for_epoch(3)
    grant = RecordFile(fleet.folder / "c", "job_t").read().grant
    fleet.stop()

    took_s, gave = state_fetched_by(fleet, 1)
    state_servers = [address for donor in grant["donors"] for address in donor]
    gloo = [address for member in grant["members"] for address in member["gloo"]]
    assert {address.partition(":")[0] for address in gloo} == {"127.0.0.2"}
    assert {address.partition(":")[0] for address in state_servers} == {"127.0.0.2"}
    assert len(state_servers) == 2
    assert set(gave) == set(state_servers)
    assert sum(gave.values()) >= state / CHUNK_BYTES
    one_gave = (max(gave.values()) - 1) * CHUNK_BYTES  # at least: the last chunk may be short
    assert took_s >= (one_gave - BURST) / rate


def state_fetched_by(fleet: Fleet, replica: int) -> tuple[float, dict[str, int]]:
    """How long its last state took, in seconds, and how many chunks of it who gave."""
    lines = (fleet.folder / f"rank{replica}.log").read_text().splitlines()
    told = [line for line in lines if "state_fetched" in line][-1]
    took_s, _, gave = told.partition("took_s=")[2].partition(" chunks=")
    return float(took_s), json.loads(gave)


def test_a_job_killed_whole_goes_on_from_peers_memory(make_fleet: MakeFleet) -> None:
    """Even if a node is lost with what it kept."""
    fleet = both_held(make_fleet)

    kill_whole(fleet)
    end_holder(fleet, 1)
    saved = newest_held(fleet, 0)
    went_on = started_anew(fleet)

    assert_every_sample_once(went_on, saved + 1)
    assert len(fleet.digests()) == 1


def test_a_job_killed_whole_goes_on_from_the_memory_of_a_node_that_it_left(
    make_fleet: MakeFleet,
) -> None:
    """One replica starts on another node; what the other's node held is lost."""
    fleet = both_held(make_fleet)

    kill_whole(fleet)
    end_holder(fleet, 0)
    saved = newest_held(fleet, 1)
    _address, left = fleet.holder(1)
    (fleet.folder / "memory1").rename(fleet.folder / "memory-left")
    went_on = started_anew(fleet)
    os.kill(left, signal.SIGKILL)

    assert_every_sample_once(went_on, saved + 1)
    assert len(fleet.digests()) == 1


def test_a_state_that_was_damaged_in_memory_is_taken_from_disk(make_fleet: MakeFleet) -> None:
    options = {"peer_s": 0.2, "local_s": 0.5}
    fleet = both_held(make_fleet, own_disks=True, options=options)
    until(lambda: min(newest_local(fleet, r) for r in (0, 1)) > 0, "both disks hold a checkpoint")

    on_disk = max(kill_whole(fleet))
    for replica in (0, 1):
        flip_held_bits(fleet.holder(replica)[1])
    went_on = started_anew(fleet)

    assert_every_sample_once(went_on, on_disk + 1)


def both_held(make_fleet: MakeFleet, **settings: Any) -> Fleet:
    """Two replicas, each of whose nodes keeps a state of the other."""
    fleet = make_fleet(2, **{"holders": True, "options": {"peer_s": 0.2}, **settings})
    fleet.start()
    until(lambda: min(newest_held(fleet, r) for r in (0, 1)) > 20, "both nodes hold a state")
    return fleet


def started_anew(fleet: Fleet, steps: int = 20) -> list[dict[str, Any]]:
    """The steps that it makes then, so many at least, until it is stopped."""
    before = len(fleet.steps(0))
    fleet.start()
    fleet.train_on(steps)
    fleet.stop()
    return fleet.steps(0)[before:]


def test_a_state_that_leads_to_nan_is_not_loaded_twice(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2, options={"checkpoint_s": 0.3})
    fleet.start()
    folder = fleet.folder / "state" / "checkpoints"
    until(lambda: len(store.candidates(folder)) > 2, "several checkpoints")
    kill_whole(fleet)
    good = poison_newest(folder)

    fleet.start()
    codes = {process.wait(PATIENCE_S) for process in fleet.ranks.values()}
    kill_whole(fleet)
    went_on = started_anew(fleet, 40)

    assert codes == {1}
    assert "was loaded: it is not loaded again" in (fleet.folder / "rank0.log").read_text()
    assert went_on[0]["step"] == good + 1
    assert all(math.isfinite(step["loss"]) for step in went_on)


def poison_newest(folder: Path) -> int:
    """Replace the newest checkpoint by one that verifies and has NaN for weights; the step of the
    newest that is left as it was."""
    newest, *older = store.candidates(folder)
    manifest, staged = store.manifest_of(newest), store.read(newest)
    for piece in staged.table.pieces:
        if piece.name.startswith(".model"):
            nan = struct.pack("<f", math.nan) * (piece.bytes // 4)
            staged.buffer[piece.offset : piece.offset + piece.bytes] = nan
    store.remove(newest)
    draft = Draft(folder, staged.step, "poisoned", 1, manifest.facts)
    draft.write(0, staged.table, memoryview(staged.buffer))
    assert draft.publish()
    draft.close()
    return store.number_of(older[0])[0]


def newest_held(fleet: Fleet, replica: int) -> int:
    """The step of the newest state that this replica's node holds for a peer; -1 for none."""
    try:
        address, _pid = fleet.holder(replica)
    except FileNotFoundError:
        return -1
    return max((int(one["step"]) for one in peer.held(address, TOKEN)), default=-1)


def end_holder(fleet: Fleet, replica: int) -> None:
    _address, pid = fleet.holder(replica)
    gone = os.pidfd_open(pid)
    signal.pidfd_send_signal(gone, signal.SIGKILL)
    select.select([gone], [], [], PATIENCE_S)
    (fleet.folder / f"memory{replica}" / "job_t" / "holder.json").unlink()


def newest_local(fleet: Fleet, replica: int) -> int:
    """The step of the newest checkpoint on this replica's own disk; -1 for none."""
    found = (fleet.folder / f"disk{replica}").glob("*/*/replica-*/step-*")
    return max((store.number_of(path)[0] for path in found), default=-1)


def writers_of(rank: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The writers that this rank has started; of one that is dead none can be told."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(rank.pid).children()
        return [child for child in children if "runtime.checkpoint.writer" in child.cmdline()]
    return []


def kill_whole(fleet: Fleet) -> list[int]:
    """Every rank and the coordinator; the newest step on each disk. The writers finish."""
    writers = [one for rank in fleet.ranks.values() for one in writers_of(rank)]
    fleet.kill(*fleet.ranks)
    assert fleet.coordinator is not None
    fleet.coordinator.kill()
    fleet.coordinator.wait()
    until(lambda: not any(one.is_running() for one in writers), "all is written")
    return [newest_local(fleet, replica) for replica in range(fleet.world)]


def test_a_job_begins_from_weights_that_another_tool_wrote(make_fleet: MakeFleet) -> None:
    first = make_fleet(1, options={"steps": 30, "pace_s": 0})
    first.start()
    assert first.ranks[0].wait(PATIENCE_S) == 0
    out = first.folder / "weights.pt"
    assert checkpoint_tool(["export", str(first.folder / "state"), str(out), "--to", "torch"]) == 0

    second = make_fleet(2, options={"steps": 30, "pace_s": 0})
    assert checkpoint_tool(["import", str(out), str(second.folder / "state")]) == 0
    second.start()
    assert [second.ranks[replica].wait(PATIENCE_S) for replica in (0, 1)] == [0, 0]

    assert [step["step"] for step in second.steps(0)] == [*range(30)]
    assert second.steps(0)[0]["loss"] < first.steps(0)[0]["loss"]
    assert len(second.digests()) == 1


def test_a_wrong_token_is_refused_with_one_line(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1)
    fleet.start_coordinator()

    with socket.create_connection(("127.0.0.1", fleet.port), PATIENCE_S) as connection:
        connection.sendall(b'{"op": "status", "token": "guessed"}\n')
        lines = connection.makefile().readlines()

    assert len(lines) == 1
    assert "wrong token" in json.loads(lines[0])["error"]


def test_a_resume_equals_the_run_that_was_left_alone(make_fleet: MakeFleet) -> None:
    alone = make_fleet(1, options={"steps": 400, "pace_s": 0})
    alone.start()
    assert alone.ranks[0].wait(PATIENCE_S) == 0
    killed = make_fleet(1, options={"steps": 400, "checkpoint_s": 0.01})
    killed.start()
    checkpoints = killed.folder / "state" / "checkpoints"
    until(lambda: len(list(checkpoints.glob("step-*"))) >= 2, "two checkpoints")

    killed.kill(0)
    killed.tell_ended()
    resumed = killed.start_rank(0, checkpoint_s=3600, pace_s=0)

    assert resumed.wait(PATIENCE_S) == 0
    assert killed.weights() == alone.weights()
