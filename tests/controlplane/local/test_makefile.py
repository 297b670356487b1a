"""Every target of the Makefile can be read by make, and an environment cut short is completed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.first_light import LEFT_OUT
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
        ["make", "--dry-run", "--file", str(runfile.REPOSITORY / "Makefile"), ".venv/bin/pip"],
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
        ["make", "PYTHON=", "--file", str(runfile.REPOSITORY / "Makefile"), ".venv/bin/pip"],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Drydock needs Python 3.11 or later" in done.stderr


def half_made(venv: Path) -> None:
    """As one is left that was cut short: pip comes last."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)


def test_an_environment_that_was_cut_short_is_completed(checkout: Path) -> None:
    half_made(checkout / ".venv")
    done = install(checkout)
    assert done.returncode == 0, done.stderr
    assert "making .venv" in done.stdout
    pip = [str(checkout / ".venv" / "bin" / "python"), "-m", "pip", "--version"]
    assert subprocess.run(pip, check=False).returncode == 0
    assert "is up to date" in install(checkout).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One that needs no packages."""
    (tmp_path / "requirements.lock").touch()
    return tmp_path


def install(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *("make", "--file", str(runfile.REPOSITORY / "Makefile"), ".venv/installed"),
            f"PYTHON={sys.executable}",
        ],
        cwd=folder,
        env={**os.environ, "LC_ALL": "C", "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_all_benchmarks_run_and_those_that_fail_are_named_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "a_fails.py").write_text("raise SystemExit(1)")
    (folder / "b_is_left_out.py").write_text(f"raise SystemExit({LEFT_OUT})")
    (folder / "c_runs.py").write_text("print('c runs')")
    done = bench(tmp_path)
    assert done.returncode != 0
    assert "c runs" in done.stdout
    assert "failed: benchmarks/a_fails.py\n" in done.stderr


def test_benchmarks_that_are_left_out_are_no_failure(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "one.py").write_text(f"raise SystemExit({LEFT_OUT})")
    assert bench(tmp_path).returncode == 0


def bench(folder: Path) -> subprocess.CompletedProcess[str]:
    """`make bench` on the benchmarks of another checkout, which has been installed."""
    return subprocess.run(
        [
            *("make", "--file", str(runfile.REPOSITORY / "Makefile"), "bench"),
            *("--old-file", ".venv/installed-dev", f"BIN={Path(sys.executable).parent}"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
