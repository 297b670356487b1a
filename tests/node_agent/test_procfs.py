"""Looking for processes where one of them hangs in a driver."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import defaultdict

import pytest

from node_agent import procfs


def test_a_process_whose_memory_is_locked_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = {**os.environ, "LOOKED_FOR": "here"}
    asleep = [sys.executable, "-c", "import signal; signal.pause()"]
    stuck, *others = (subprocess.Popen(asleep, env=environment) for _ in range(3))
    free, locked, read = threading.Event(), threading.Event(), procfs._environment
    free.set()
    held = defaultdict(lambda: free, {stuck.pid: locked})

    def environment_of(pid: int) -> list[bytes]:
        held[pid].wait()
        return read(pid)

    monkeypatch.setattr(procfs, "_environment", environment_of)
    monkeypatch.setattr(procfs, "ENVIRONMENTS_S", 2.0)
    monkeypatch.setattr(procfs, "ONE_S", 2.0)
    try:
        found = procfs.with_environment("LOOKED_FOR", "here")
    finally:
        locked.set()
        for process in (stuck, *others):
            process.kill()
            process.wait()

    assert {process.pid for process in found} == {process.pid for process in others}
    assert f'"event": "environment_not_read", "pid": {stuck.pid}' in capfd.readouterr().err
