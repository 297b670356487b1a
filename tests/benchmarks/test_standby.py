"""What benchmarks/standby.py says of a run, and with which status it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import standby
from benchmarks.standby import Figures, Job
from runtime.torture import launch
from runtime.torture.watch import Event

WELL = Figures(
    replicas=4,
    steps=900,
    step_s=0.03,
    pauses_s=[0.05, 0.53],
    rescues_s=[0.07, 0.08],
    services_s=[0.07, 0.09],
    lost=0,
    duplicated=0,
    states=1,
    problems=[],
)


def test_the_worst_stands_beside_its_target() -> None:
    text = "\n".join(standby.report(WELL))

    assert "pause by a move         median    290 ms, worst    530 ms  (<= 530 ms: kept)" in text
    assert "kill to full service    median     80 ms, worst     90 ms  (<= 5000 ms: kept)" in text
    assert "gap by a kill           median     75 ms, worst     80 ms\n" in text
    assert "0 lost, 0 duplicated  (both 0: kept)" in text
    assert "states at the end       equal" in text
    assert "MISSED" not in text


def test_a_single_one_beyond_its_target_misses_it() -> None:
    late = replace(WELL, pauses_s=[0.05, 0.05, 0.54], services_s=[0.07, 0.07, 5.1])
    text = "\n".join(standby.report(late))

    assert "worst    540 ms  (<= 530 ms: MISSED)" in text
    assert "worst   5100 ms  (<= 5000 ms: MISSED)" in text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"lost": 2}, "2 lost, 0 duplicated  (both 0: MISSED)"),
        ({"duplicated": 2}, "0 lost, 2 duplicated  (both 0: MISSED)"),
        ({"states": 2}, "states at the end       DIFFER"),
        ({"problems": ["step 7 is missing"]}, "step 7 is missing"),
    ],
)
def test_a_run_that_is_not_whole_ends_with_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: dict[str, object],
    said: str,
) -> None:
    assert status(monkeypatch, replace(WELL, **wrong)) == 1  # type: ignore[arg-type]
    assert said in capsys.readouterr().out


def test_one_that_is_whole_ends_with_0_however_long_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert status(monkeypatch, replace(WELL, pauses_s=[9.0])) == 0


def status(monkeypatch: pytest.MonkeyPatch, found: Figures) -> object:
    """With which it ends once this was found."""
    monkeypatch.setattr("sys.argv", ["standby.py"])
    monkeypatch.setattr(standby, "measure", lambda _job, _times: found)
    with pytest.raises(SystemExit) as ended:
        standby.main()
    return ended.value.code


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """One whose two replicas a test puts in itself."""
    with launch.Fleet(tmp_path / "run", launch.Script(Path("none.py")), 2) as fleet:
        yield Job(fleet)


def put_in(job: Job, replica: int, code: str, *ended: str) -> subprocess.Popen[bytes]:
    """A replica whose process runs this, and what its ranks wrote down."""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    rank = launch.Rank(replica, f"plc_{replica}", process, 0.0)
    job.fleet.ranks[replica] = rank
    job.watch.events[rank.placement] = [
        Event(what, 0.0, replica, rank.placement, {"digest": "same"}) for what in ended
    ]
    return process


def test_one_that_ends_while_it_is_needed_ends_the_benchmark(job: Job) -> None:
    running = put_in(job, 0, "input()")
    put_in(job, 1, "raise SystemExit(3)").wait()
    with pytest.raises(SystemExit, match=r"replica 1 ended with \[3\] before this: more"):
        job.until(lambda: False, "more")
    running.communicate(b"\n")


def test_those_that_end_when_they_are_told_to_end_nothing(job: Job) -> None:
    put_in(job, 0, "", "ended").wait()
    put_in(job, 1, "", "ended").wait()
    job.settle(7)
    job.until(lambda: len(job.fleet.ended()) == 2, "all have ended")
    assert job.unwell() == []


@pytest.mark.parametrize(
    ("code", "ended", "said"),
    [
        ("raise SystemExit(3)", ("ended",), "replica 1 ended with [3]"),
        ("", (), "replica 1 ended with [0] and without the last step"),
    ],
)
def test_one_that_does_not_end_as_the_others_is_a_problem(
    job: Job, code: str, ended: tuple[str, ...], said: str
) -> None:
    put_in(job, 0, "", "ended").wait()
    put_in(job, 1, code, *ended).wait()
    assert job.unwell() == [said]
