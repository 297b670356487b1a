"""A process becomes a program, or says why it does not: also to nobody, once it took too long."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from node_agent import launch
from node_agent.launch import NOT_LAUNCHED
from tests.node_agent.fleet import DEADLINE_S


def test_who_cannot_become_the_program_later_gives_no_verdict_of_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LAUNCH_S", 0.0)
    path = tmp_path / "log"
    with path.open("wb") as output:
        process = launch.launch(["no-such-program"], tmp_path, {**os.environ}, output)

    assert process.wait(DEADLINE_S) == NOT_LAUNCHED
    assert path.read_text() == "no-such-program: No such file or directory\n"


def test_an_interpreter_that_does_not_start_is_told_apart_from_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    with (
        (tmp_path / "log").open("wb") as output,
        pytest.raises(OSError, match="own Python did not start: '/bin/false'"),
    ):
        launch.launch(["true"], tmp_path, {**os.environ}, output)
