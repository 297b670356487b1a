"""An agent whose disk is full, or read-only, goes on telling, and executes nothing that it cannot
write down, but for stops."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node_agent import procfs, wire
from tests.node_agent.fleet import Node, eventually
from tests.node_agent.test_agent_events import XID, kernel, lines


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """This process, and what it starts, can write to no file meanwhile."""
    room = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, room[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_FSIZE, room)


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """What is opened in it meanwhile cannot be written to."""
    subprocess.run(["mount", "--bind", "-o", "ro", folder, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def pid_of(node: Node) -> int:
    assert node.process is not None
    return node.process.pid


def test_a_full_disk_ends_no_agent_and_nothing_is_executed_unrecorded(agent: Node) -> None:
    with full_disk(pid_of(agent)):
        kernel(agent, f"{XID} 1")
        eventually(lambda: lines(agent.plane))
        command_id = agent.plane.send(agent.rank())
        unrecorded = agent.plane.result(command_id)
    agent.plane.send(agent.rank(), id=command_id)
    kernel(agent, f"{XID} 2")
    eventually(lambda: len(lines(agent.plane)) == 2 and len(agent.plane.results) == 2)

    assert (unrecorded.state, "not executed" in unrecorded.error) == ("failed", True)
    assert agent.plane.results[1] == unrecorded
    assert not procfs.with_environment("DRYDOCK_PLACEMENT", "p-1")
    assert agent.started_rank("p-2") > 0


def test_a_rank_is_stopped_though_the_disk_is_full(agent: Node) -> None:
    pid = agent.started_rank()
    with full_disk(pid_of(agent)):
        result = agent.plane.result(agent.plane.send(wire.StopProcess(placement="p-1")))
    stopped = procfs.read(pid)

    assert result.output == {"stopped": True}
    assert stopped is None


def test_an_agent_begins_on_a_full_disk_and_adopts_what_runs(agent: Node) -> None:
    pid = agent.started_rank()
    agent.kill()
    reported = len(agent.plane.reports)
    with full_disk(os.getpid()):
        agent.start()
    kernel(agent, XID)

    eventually(lambda: lines(agent.plane) and len(agent.plane.reports) > reported)

    assert [process.pid for process in agent.plane.reports[-1].processes] == [pid]


def test_a_boot_with_a_full_disk_is_told_and_what_ran_before_it(agent: Node) -> None:
    agent.started_rank()
    agent.kill()
    agent.boot("boot-2")
    with full_disk(os.getpid()):
        agent.start()

    exits = eventually(lambda: agent.plane.events_of("process_exited"))

    assert [event.data["reason"] for event in exits] == ["reboot"]
    assert [event.boot_id for event in agent.plane.events_of("boot")] == ["boot-1", "boot-2"]


@only_root
def test_an_agent_begins_on_a_read_only_disk_and_obeys_again_once_it_is_mended(
    agent: Node,
) -> None:
    pid = agent.started_rank()
    agent.kill()
    reported = len(agent.plane.reports)
    with read_only(agent.state):
        agent.start()
        kernel(agent, XID)
        eventually(lambda: lines(agent.plane) and len(agent.plane.reports) > reported)
        unrecorded = agent.plane.result(agent.plane.send(agent.rank("p-2")))

    assert [process.pid for process in agent.plane.reports[-1].processes] == [pid]
    assert (unrecorded.state, "Read-only file system" in unrecorded.error) == ("failed", True)
    assert agent.started_rank("p-3") > 0


@only_root
def test_a_disk_that_becomes_read_only_during_a_stop_ends_no_agent(agent: Node) -> None:
    pid = agent.started_rank()
    os.kill(pid, signal.SIGSTOP)
    order = agent.plane.send(wire.StopProcess(placement="p-1", grace_s=600))
    eventually((agent.state / "notices" / "p-1").exists)
    with read_only(agent.state):
        os.kill(pid, signal.SIGKILL)
        result = agent.plane.result(order)

    assert result.output == {"stopped": True}


@only_root
def test_a_coordinator_is_back_once_a_read_only_disk_is_mended(agent: Node) -> None:
    start = wire.StartCoordinator(job="job-1", placement="c-1", token="t", min_replicas=1)
    started = agent.plane.result(agent.plane.send(start))
    with read_only(agent.state):
        os.kill(started.output["pid"], signal.SIGKILL)
        eventually(lambda: agent.log("coordinator_not_started"))

    event = eventually(lambda: agent.plane.events_of("coordinator_restarted"))[0]

    assert event.data["address"] == started.output["address"]
    assert len(agent.log("agent_started")) == 1
