"""Every target of the Makefile can be read by make."""

from __future__ import annotations

import os
import subprocess

import pytest

from controlplane.local import runfile


@pytest.mark.parametrize("target", ["install", "up", "down", "reset", "lint", "test", "bench"])
def test_make_understands_the_target(target: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", target, "NODES=12", "PORT=9000", "PYTHON=python3"],
        cwd=runfile.REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_python_is_found_where_none_is_named() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--file", str(runfile.REPOSITORY / "Makefile"), ".venv/bin/python"],
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != "PYTHON"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "making .venv with python3" in done.stdout


def test_a_missing_python_is_said_in_a_sentence() -> None:
    done = subprocess.run(
        ["make", "PYTHON=", "--file", str(runfile.REPOSITORY / "Makefile"), ".venv/bin/python"],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Drydock needs Python 3.11 or later" in done.stderr
