"""The command says what is there, and what is wrong with it, to people and to programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.checkpoint.__main__ import main
from runtime.checkpoint.draft import write
from tests.runtime.checkpoint.states import flip_a_bit, staged_at

Capture = pytest.CaptureFixture[str]


def test_checkpoints_are_listed_newest_first(tmp_path: Path, capsys: Capture) -> None:
    for step in (1, 2):
        write(tmp_path / "checkpoints", staged_at(step))

    assert main(["ls", str(tmp_path)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step-00000002", "step-00000001"]
    assert staged_at(2).digest in lines[0]


def test_every_tensor_is_listed(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path, staged_at(2))

    assert main(["inspect", str(path), "--json"]) == 0

    (found,) = json.loads(capsys.readouterr().out)
    tensors = {one["name"]: (one["dtype"], one["shape"]) for one in found["tensors"]}
    assert tensors[".model.weight"] == ("float32", [300, 7])
    assert tensors[".scalar"] == ("int64", [])
    assert main(["inspect", str(path)]) == 0
    assert "float32   300x7          model.weight" in capsys.readouterr().out


def test_damage_is_named_and_is_the_exit_status(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, staged_at(1))
    flip_a_bit(write(tmp_path, staged_at(2)) / "rank-0-0001.bin", 80)

    assert main(["verify", str(tmp_path)]) == 1

    newer, finding, older = capsys.readouterr().out.splitlines()
    assert newer.split() == ["step-00000002", "DAMAGED"]
    assert "rank-0-0001.bin (rank 0), tensors model.weight" in finding
    assert older.split() == ["step-00000001", "well"]
    for verb in ("ls", "verify"):
        (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
        assert main([verb, str(tmp_path), "--json"]) == 1


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify"])
def test_where_nothing_is_that_is_said(tmp_path: Path, verb: str, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")

    assert [main([verb, str(tmp_path / name)]) for name in ("file", "absent", "")] == [2, 2, 2]

    said = capsys.readouterr().err
    assert "file is no folder; a checkpoint is one" in said
    assert "absent does not exist" in said
    assert "holds no checkpoint: none of its folders is named as" in said


def test_it_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path, staged_at(1))
    program = (
        "import sys; sys.modules['torch'] = None; from runtime.checkpoint.__main__ import main; "
        f"sys.exit(main(['verify', {str(tmp_path)!r}]))"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
