"""What exits, and what is left of it, where something on the node hangs in a driver."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from unittest.mock import Mock

import pytest

from node_agent import procfs, supervisor
from node_agent.config import load_config
from node_agent.supervisor import CardsInUse, Supervisor
from tests.node_agent.fleet import DEADLINE_S, Node, eventually


@pytest.fixture
def emit() -> Mock:
    return Mock()


@pytest.fixture
def ranks(node: Node, emit: Mock) -> Supervisor:
    """All of the agent that keeps ranks."""
    (node.state / "ports").mkdir(parents=True)
    ranks = Supervisor(load_config(node.config), "boot-1", emit, Mock())
    ranks.recover()
    return ranks


def started(ranks: Supervisor, node: Node, placement: str, program: str, runs: int) -> int:
    """A rank of which so many processes are up: its pid."""
    pid = ranks.start_rank(node.rank(placement, program=program, coordinator="")).pid
    eventually(lambda: len(left_of(node, placement)) == runs)
    return pid


def left_of(node: Node, placement: str) -> list[int]:
    notice = str(node.state / "notices" / placement)
    eventually((node.shared / "job-1" / placement).exists)
    return [one.pid for one in procfs.with_environment("DRYDOCK_NOTICE_FILE", notice)]


def test_a_stop_without_grace_kills_first_and_then_looks_past_what_hangs(
    ranks: Supervisor, node: Node, emit: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(started(ranks, node, "p-1", "leave", runs=2), signal.SIGSTOP)
    hangs = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    free, locked, read = threading.Event(), threading.Event(), procfs._environment
    free.set()
    held = defaultdict(lambda: free, {hangs.pid: locked})
    exited_before = []

    def environment_of(pid: int) -> list[bytes]:
        exited_before.append(emit.called)
        held[pid].wait()
        return read(pid)

    with monkeypatch.context() as patch:
        patch.setattr(procfs, "_environment", environment_of)
        stopped = ranks.stop("p-1", 0)
    locked.set()
    hangs.kill()
    hangs.wait()

    assert (stopped, left_of(node, "p-1")) == (True, [])
    assert exited_before
    assert all(exited_before)


def test_no_rank_starts_while_something_of_one_that_exited_may_hold_the_cards(
    ranks: Supervisor, node: Node, emit: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = started(ranks, node, "p-1", "leave", runs=2)
    (worker,) = {*left_of(node, "p-1")} - {pid}
    monkeypatch.setattr(signal, "pidfd_send_signal", Mock())  # it hangs in a driver
    monkeypatch.setattr(supervisor, "KILL_WAIT_S", 0.1)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: emit.called)

    eventually(lambda: ranks._ending == {"p-1": [procfs.read(worker)]})
    message = re.escape(f"the rank p-1 has exited, but not all of its processes ({worker})")
    with pytest.raises(CardsInUse, match=message):
        ranks.start_rank(node.rank("p-2", coordinator=""))
    with pytest.raises(CardsInUse, match=message):
        ranks.hold_cards("being reset")
    stopped = ranks.stop("p-1", 0)
    monkeypatch.setattr(supervisor, "KILL_WAIT_S", DEADLINE_S)
    os.kill(worker, signal.SIGKILL)

    assert not stopped
    assert ranks.start_rank(node.rank("p-2", coordinator="")).pid > 0
    assert ranks.stop("p-1", 0)
