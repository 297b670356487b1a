"""What benchmarks/first_light.py needs, and whose memory it counts as whose."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from benchmarks import fault_to_quarantine, first_light
from controlplane.local import processes

Eventually = Callable[..., object]
Start = Callable[..., psutil.Process]
#: Until its standard input is closed.
RUNNING = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch(); sys.stdin.read()"
#: Its child is without a mark, as PostgreSQL's backends are: these write what `ps` shows over it.
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {RUNNING!r}, sys.argv[1]], env={{}})
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRYDOCK_HOME", str(tmp_path))
    return tmp_path.resolve()


@pytest.fixture
def start(folder: Path, eventually: Eventually) -> Iterator[Start]:
    """Starts code as what `up` of this home has started, and returns once it has made its file."""
    with ExitStack() as running:

        def start(code: str, file: str, **environment: str) -> psutil.Process:
            process = running.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", code, file],
                    cwd=folder,
                    env={**environment, processes.MARK: str(folder)},
                    stdin=subprocess.PIPE,
                )
            )
            running.callback(process.communicate)
            eventually(lambda: (folder / file).exists(), 120, f"{file} is there")
            return psutil.Process(process.pid)

        yield start


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("main", [first_light.main, fault_to_quarantine.main])
def test_without_a_product_it_is_left_out_with_a_word(
    main: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["it"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == first_light.LEFT_OUT
    assert "make up" in capsys.readouterr().out


def test_children_that_hide_their_mark_are_counted_and_each_once(
    folder: Path, start: Start
) -> None:
    parent = start(PARENT, "child")
    marked = processes.marked(folder)
    assert marked == [parent]
    assert first_light.with_children([*marked, parent]) == [parent, *parent.children()]
    assert len(parent.children()) == 1


def test_what_ranks_start_is_no_rank(start: Start) -> None:
    rank = start(RUNNING, "rank", DRYDOCK_REPLICA="0", DRYDOCK_RANK="0")
    holder = start(RUNNING, "holder", DRYDOCK_REPLICA="0")
    assert first_light.is_rank(rank)
    assert not first_light.is_rank(holder)
