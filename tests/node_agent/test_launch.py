"""A process becomes a program, or says why it does not: also to nobody, once it took too long."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from node_agent import launch
from node_agent.launch import NOT_LAUNCHED
from tests.node_agent.fleet import DEADLINE_S, eventually


def test_who_cannot_become_the_program_later_gives_no_verdict_of_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LAUNCH_S", 0.0)
    path = tmp_path / "log"
    with path.open("wb") as output:
        process = launch.launch(["no-such-program"], tmp_path, {**os.environ}, output)

    assert process.wait(DEADLINE_S) == NOT_LAUNCHED
    assert path.read_text() == "no-such-program: No such file or directory\n"


def test_a_log_that_has_grown_too_long_is_cut_and_written_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MAX_LOG_BYTES", 8)
    monkeypatch.setattr(launch, "LOG_TAIL_BYTES", 4)
    os.mkfifo(tmp_path / "go")
    script = "printf 'many words'; read -r _ < go; printf more"
    config = Mock(state_dir=tmp_path, workdir=tmp_path)
    process, *_ = launch.spawn(config, "p-1", ["sh", "-c", script], {**os.environ}, [])
    logs = tmp_path / "logs"
    log = logs / "p-1.log"
    eventually(lambda: log.read_text() == "many words")
    (logs / "p-2.log").write_text("short")
    (logs / "field-diagnostic-GPU-a.log").write_text("its verdict")

    launch.cut_logs(logs)
    (tmp_path / "go").write_text("on\n")
    process.wait(DEADLINE_S)

    assert {path.name: path.read_text() for path in logs.iterdir()} == {
        "p-1.log": "more",
        "p-1.log.1": "ords",
        "p-2.log": "short",
        "field-diagnostic-GPU-a.log": "its verdict",
    }


def test_a_log_whose_writer_goes_on_behind_the_cut_is_not_cut_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "MAX_LOG_BYTES", 2**20)
    monkeypatch.setattr(launch, "LOG_TAIL_BYTES", 4)
    log = tmp_path / "p-1.log"
    with log.open("wb", buffering=0) as output:
        output.write(b"many words " * 2**20)
        launch.cut_logs(tmp_path)
        output.write(b"more")
        launch.cut_logs(tmp_path)

    assert log.read_bytes().lstrip(b"\0") == b"more"
    assert (tmp_path / "p-1.log.1").read_bytes() == b"rds "


def test_an_interpreter_that_does_not_start_is_told_apart_from_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    with (
        (tmp_path / "log").open("wb") as output,
        pytest.raises(OSError, match="own Python did not start: '/bin/false'"),
    ):
        launch.launch(["true"], tmp_path, {**os.environ}, output)
