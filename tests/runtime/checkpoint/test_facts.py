"""What computes otherwise than where a checkpoint was made is said in one text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoint import facts
from runtime.checkpoint.facts import changed_since, computes
from tests.runtime.replicas import ROOT

HERE = {
    "script": {"name": "train.py", "xxh3": "00"}, "own_modules": {"files": 2, "xxh3": "11"},
    "torch": "2.13.0", "numpy": None, "cuda": "13.0", "python": "3.11.7",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "computes", lambda: HERE)


@pytest.mark.parametrize(
    ("there", "changed"),
    [
        ({}, ""),
        (HERE, ""),
        ({**HERE, "torch": "2.12.1"}, "torch was '2.12.1', is '2.13.0'"),
        ({**HERE, "numpy": "2.4.0"}, ""),  # nobody imported it here
        ({**HERE, "own_modules": {}}, ""),  # it was made before these were looked at
        (
            {**HERE, "own_modules": {"files": 1, "xxh3": "12"}},
            "own_modules was {'files': 1, 'xxh3': '12'}, is {'files': 2, 'xxh3': '11'}",
        ),
        (
            {"script": {"name": "old.py", "xxh3": "ff"}, "python": "3.12.1"},
            "script was {'name': 'old.py', 'xxh3': 'ff'}, "
            "is {'name': 'train.py', 'xxh3': '00'}; python was '3.12.1', is '3.11.7'",
        ),
    ],
)
def test_what_both_say_is_compared(there: dict[str, Any], changed: str) -> None:
    assert changed_since(there) == changed


def test_facts_that_anybody_wrote_make_one_short_line() -> None:
    said = changed_since({"script": "\x1b[2J\n" * 99, "torch": [[1] * 99], "cuda": {"name": "\n"}})

    assert said.startswith("script was ")
    assert said.isprintable()
    assert len(said) < 500


def test_what_computes_here_says_which_torch() -> None:
    assert computes()["torch"].startswith("2.")


TRAINS = """
import json, sys
sys.path.append("lib/python3/site-packages")
import model, parts.layers, installed
from runtime.checkpoint.facts import computes
first = computes()
import late
print(json.dumps([first, computes()]))
"""


def ran(folder: Path) -> list[dict[str, Any]]:
    """What a script in this folder says of itself, before and after a last import."""
    words = [sys.executable, "train.py"]
    said = subprocess.check_output(words, cwd=folder, env={"PYTHONPATH": str(ROOT)})
    found: list[dict[str, Any]] = json.loads(said)
    return found


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAINS)
    for name in ("model", "parts/layers", "late", "lib/python3/site-packages/installed", "unused"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("depth = 2")
    return tmp_path


def test_modules_of_the_user_s_own_count_once_for_all(program: Path) -> None:
    first, later = ran(program)

    assert first["own_modules"] == later["own_modules"]
    assert first["own_modules"]["files"] == 2


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("model.py", True),
        ("parts/layers.py", True),
        ("unused.py", False),  # nobody imports it
        ("lib/python3/site-packages/installed.py", False),
    ],
)
def test_a_module_that_the_script_imports_is_seen_to_change(
    program: Path, name: str, changed: bool
) -> None:
    before, _later = ran(program)
    (program / name).write_text("depth = 3")
    after, _later = ran(program)

    assert (before["own_modules"] != after["own_modules"]) is changed
    assert before["script"] == after["script"]


def test_a_module_that_lies_elsewhere_is_seen_to_change(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script, package = tmp_path / "scripts" / "train.py", tmp_path / "model.py"
    script.write_text(
        "import json, sys; sys.path.append('..'); import model\n"
        "from runtime.checkpoint.facts import computes\n"
        "print(json.dumps([computes()]))"
    )
    package.write_text("depth = 2")
    (before,) = ran(script.parent)
    package.write_text("depth = 3")
    (after,) = ran(script.parent)

    assert before["own_modules"]["files"] == 1
    assert before["own_modules"] != after["own_modules"]
