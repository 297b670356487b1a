"""Packages for tests are never run out of a folder that somebody else may have filled."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from controlplane.local import runfile
from tests.controlplane.local.conftest import by_root

ASK = "set -euo pipefail; . .ci/environment; place=$(environment tools one==1); echo $place"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the environment is looked for."""
    return tmp_path / f"drydock-tools-{os.getuid()}"


def fill(folder: Path) -> None:
    """As it is once it has been made."""
    folder.mkdir()
    (folder / "versions").write_text("one==1\n")


def ask(place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", ASK],
        cwd=runfile.REPOSITORY,
        env={**os.environ, "TMPDIR": str(place.parent), "PYTHON": "false"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_that_is_there_is_used(place: Path) -> None:
    fill(place)
    assert ask(place).stdout == f"{place}\n"


def test_a_new_one_is_closed_to_others(place: Path) -> None:
    assert ask(place).returncode != 0  # there is no Python here to make it with
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_link_is_refused(place: Path, tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    refused = ask(place)
    assert refused.returncode == 1
    assert f"{place} is not a folder of yours" in refused.stderr


@by_root
def test_another_users_folder_is_refused(place: Path) -> None:
    fill(place)
    shutil.chown(place, "nobody")
    refused = ask(place)
    assert refused.returncode == 1
    assert f"{place} is not a folder of yours" in refused.stderr
