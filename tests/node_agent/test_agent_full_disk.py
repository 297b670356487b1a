"""An agent whose disk is full goes on telling, and executes nothing that it cannot write down."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from node_agent import procfs
from tests.node_agent.fleet import Node, eventually
from tests.node_agent.test_agent_events import XID, kernel, lines


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """This process, and what it starts, can write to no file meanwhile."""
    room = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, room[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_FSIZE, room)


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
