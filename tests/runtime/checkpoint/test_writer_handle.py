"""The writer's process, as its trainer starts it."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import subprocess
import threading
from typing import Any

import pytest

from runtime.checkpoint.writer_handle import WriterHandle
from runtime.priority import NICE


def test_a_writer_stands_back_in_its_trainers_session_but_is_not_ended_with_its_group() -> None:
    heard: queue.Queue[dict[str, Any]] = queue.Queue()
    handle = WriterHandle(heard.put)
    handle.start()
    pid = handle.pid

    assert pid is not None
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) == pid
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, own + NICE)

    assert handle.close(90.0)
    assert heard.get(timeout=90.0)["code"] == 0


def test_a_child_that_the_script_forks_as_a_writer_starts_does_not_hide_its_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: queue.Queue[dict[str, Any]] = queue.Queue()
    handle = WriterHandle(heard.put)
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    popen = subprocess.Popen

    def forking(*given: Any, **more: Any) -> subprocess.Popen[bytes]:
        child.start()
        return popen(*given, **more)

    monkeypatch.setattr(subprocess, "Popen", forking)
    handle.start()
    pid = handle.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    said = heard.get(timeout=90.0)
    child.kill()
    child.join()

    assert (said["op"], said["code"]) == ("died", -signal.SIGKILL)


def test_a_writer_that_nobody_would_hear_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = WriterHandle(lambda _message: None)

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        handle.start()
    monkeypatch.undo()
    kept = handle.pid
    handle.start()

    assert kept is None
    assert handle.pid is not None
    assert handle.close(90.0)
