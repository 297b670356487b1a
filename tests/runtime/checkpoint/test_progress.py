"""A bar for a person at a terminal; a program that reads the output sees none of it."""

from __future__ import annotations

import re
import sys
from io import StringIO
from pathlib import Path

import pytest

from runtime.checkpoint import progress
from runtime.checkpoint.__main__ import main
from runtime.checkpoint.draft import write
from runtime.checkpoint.interchange import EXPORTS, whole_state
from runtime.checkpoint.progress import Bar
from tests.runtime.checkpoint.states import staged_at

FULL = re.compile(r"\r\x1b\[K(\S+) \[#{30}\] 100%")
#: What is asked, and of what a bar is drawn until it is full.
ASKED = [
    (["verify", "job"], ["step-00000002", "step-00000001"]),
    (["diff", "job/step-00000001", "job/step-00000002"], ["step-00000001", "step-00000002"]),
    *(
        (["export", "job", f"new.{kind}", "--to", kind], ["step-00000002", f"new.{kind}"])
        for kind in sorted(EXPORTS)
    ),
    *((["import", f"theirs.{kind}", "new"], [f"theirs.{kind}", "new"]) for kind in sorted(EXPORTS)),
    (["prune", "job", "--keep", "1"], ["step-00000002"]),
]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_how_much_is_done_and_then_a_clear_line() -> None:
    out = Terminal()
    bar = Bar("step-00000012", 400_000_000, out)
    bar(100_000_000)
    bar.close()

    drawn = out.getvalue()
    assert "step-00000012 [#######......................." in drawn
    assert drawn.endswith("\r\033[K")
    assert bar.text(seconds=2.0).endswith("25%  50 MB/s")


def test_what_is_no_terminal_sees_nothing() -> None:
    out = StringIO()
    bar = Bar("x", 10, out)
    bar(5)
    bar.close()
    assert out.getvalue() == ""


def test_more_than_was_announced_is_all_of_it() -> None:
    bar = Bar("x", 0)
    bar(5)
    assert "100%" in bar.text(1.0)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkpoints, and what other tools made; every byte that is told of is drawn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "REDRAW_S", 0.0)
    for step in (1, 2):
        write(Path("job"), staged_at(step))
    for kind, export in EXPORTS.items():
        export(whole_state(Path("job/step-00000001")), Path(f"theirs.{kind}"))


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(("asked", "bars"), ASKED, ids=lambda one: "-".join(one))
def test_whoever_waits_at_a_terminal_sees_a_bar(
    asked: list[str], bars: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)

    main(asked)

    assert [*dict.fromkeys(FULL.findall(out.getvalue()))] == bars
    assert out.getvalue().endswith("\r\033[K")


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(("out", "more"), [(Terminal(), ["--json"]), (StringIO(), [])])
@pytest.mark.parametrize("asked", [asked for asked, _bars in ASKED], ids="-".join)
def test_a_program_sees_none(
    asked: list[str], out: StringIO, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", out)

    main([*asked, *more])

    assert out.getvalue() == ""
