"""What cannot be killed is not said to have ended."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from node_agent import remains
from node_agent.launch import notice_file


@pytest.mark.parametrize("seen", ["before", "now"])
def test_what_is_killed_and_does_not_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    config = Mock(state_dir=tmp_path)
    ours = {"DRYDOCK_NOTICE_FILE": str(notice_file(config, "p-1")), "DRYDOCK_RANK": "0"}
    asleep = [sys.executable, "-c", "import signal; signal.pause()"]
    process = subprocess.Popen(asleep, env=os.environ | ours)
    before = remains.processes_of(config, "p-1")
    with monkeypatch.context() as patch:
        patch.setattr(signal, "pidfd_send_signal", Mock())  # it hangs in a driver
        # One that the kernel is ending has no environment that would tell.
        patch.setattr(remains, "processes_of", lambda *_: {"before": [], "now": before}[seen])
        stuck = remains.end(config, "p-1", 0.0, {"before": before, "now": []}[seen])
    ended = remains.end(config, "p-1", 60.0)

    assert [one.pid for one in before] == [process.pid]
    assert ([one.pid for one in stuck], ended) == ([process.pid], [])
    assert process.wait() == -signal.SIGKILL


def test_a_rank_may_have_more_processes_than_the_agent_may_open_files(tmp_path: Path) -> None:
    config = Mock(state_dir=tmp_path)
    ours = {"DRYDOCK_NOTICE_FILE": str(notice_file(config, "p-1")), "DRYDOCK_RANK": "0"}
    many = [subprocess.Popen(["sleep", "600"], env=os.environ | ours) for _ in range(40)]
    before = remains.processes_of(config, "p-1")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 20, limits[1]))
    try:
        ended = remains.end(config, "p-1", 60.0, before)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert ended == []
    assert {process.wait() for process in many} == {-signal.SIGKILL}


def test_another_s_rank_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    theirs, config = Mock(state_dir=tmp_path / "a"), Mock(state_dir=tmp_path / "b")
    named = {"DRYDOCK_NOTICE_FILE": str(notice_file(theirs, "p-1")), "DRYDOCK_RANK": "0"}
    asleep = [sys.executable, "-c", "import signal; signal.pause()"]
    process = subprocess.Popen(asleep, env=os.environ | named | {"DRYDOCK_PLACEMENT": "p-1"})

    ended = remains.end(config, "p-1", 60.0)
    alive = process.poll() is None
    process.kill()
    process.wait()

    assert (ended, alive) == ([], True)
