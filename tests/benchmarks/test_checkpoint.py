"""The arithmetic, the table and the picture of benchmarks/checkpoint.py, and one turn of ours."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.checkpoints import measuring, picture, report, states
from benchmarks.checkpoints.contenders import AT_ONCE, DISK, MEMCPY, OVERLAPPED
from benchmarks.checkpoints.measuring import Plan, Turn, measure
from benchmarks.checkpoints.worker import slower, units


def row(name: str, stalls: list[float], durable_s: float, load_s: float) -> dict[str, Any]:
    def save(stall_s: float) -> dict[str, Any]:
        return {
            "stall_s": stall_s, "durable_s": durable_s, "verified_s": None, "slower": None,
            "bytes": 1 << 30, "path": "",
        }  # fmt: skip

    return {
        "size_gib": 1.0, "name": name, "limit": False, "state_bytes": 1 << 30, "card": "",
        "prepare_s": [0.5],
        "first": [save(stalls[0])], "later": [save(stall) for stall in stalls[1:]],
        "load_s": [load_s], "memory_bytes": 2 << 30,
    }  # fmt: skip


ROWS = [
    row(MEMCPY.name, [0.1, 0.1, 0.1, 0.1], 0.1, 0.0),
    row(DISK.name, [0.8, 0.8, 0.8, 0.8], 0.8, 0.4),
    row(AT_ONCE.name, [0.3, 0.1, 0.11, 0.5], 1.0, 0.8),
]
RESULTS = {
    "machine": {"processor": "a < b", "cores": 2, "python": "3.11", "torch": "2.13.0"},
    "step_ms": 200.0,
    "rows": ROWS,
    "failed": {"a rival": "1 GiB: what it loaded is not what it saved"},
}


def test_each_figure_stands_beside_its_limit() -> None:
    found = report.figures_of(ROWS[2], ROWS)

    assert (found["stall_s"], found["stall_p99_s"]) == (0.11, 0.5)
    assert found["of_memcpy"] == pytest.approx(1.1)
    assert found["first_of_later"] == pytest.approx(0.3 / 0.11)
    assert (found["of_disk"], found["of_reads"]) == pytest.approx((0.8, 0.5))


def test_the_table_says_which_limits_ours_keeps() -> None:
    text = "\n".join(report.lines(RESULTS))

    assert "first save 2.73x later (<= 1.5: MISSED)" in text
    assert "durable at 0.80 of the disk (>= 0.8: kept)" in text
    assert "memory +0 MB beyond 2 states (<= 64: kept)" in text
    assert "a rival failed, and has no row of that size: 1 GiB: what it loaded" in text


def test_the_picture_has_a_dot_for_every_save() -> None:
    root = ElementTree.fromstring(picture.svg(RESULTS))  # noqa: S314 - our own

    stalls, durable = 9, 6
    circles = root.iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(circles)) == stalls + durable


def test_work_that_took_twice_as_long_is_slower_by_all() -> None:
    assert units([1.0, 1.5, 2.5]) == [0.5, 1.0]
    assert slower([0.5, 0.5], [1.0] * 20) == pytest.approx(1.0)
    assert slower([0.5, 0.5], [1.0] * 19) is None


@pytest.mark.parametrize("size", [16 << 20, 1 << 30])
def test_a_state_has_the_size_that_was_asked_for(size: int) -> None:
    numbers = sum(math.prod(shape) for _name, shape in states.shapes(size))
    assert 4 * len(states.SHARES) * numbers == pytest.approx(size, rel=0.01)


def test_a_turn_of_ours_saves_and_loads(tmp_path: Path) -> None:
    rows: dict[tuple[float, str], dict[str, Any]] = {}
    plan = Plan({1 / 64: 1}, 20.0)
    with Turn(OVERLAPPED, sys.executable, 1 / 64, plan, tmp_path) as turn:
        turn.play(rows, look_at_memory=True)

    (found,) = rows.values()
    assert [save["bytes"] >= found["state_bytes"] for save in found["later"]] == [True] * 3
    assert found["memory_bytes"] > 0
    assert not list(tmp_path.glob("turn"))


def test_one_that_fails_keeps_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it had shown before: what it loaded in a later round was not what it saved."""
    turns = iter(range(2))

    class Failing:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Failing:
            return self

        def __exit__(self, *_: object) -> None: ...

        def play(self, rows: dict[tuple[float, str], dict[str, Any]], **_: object) -> None:
            rows[1.0, OVERLAPPED.name] = ROWS[2]
            if next(turns):
                raise RuntimeError("what it loaded is not what it saved")

    monkeypatch.setattr(measuring, "Turn", Failing)
    monkeypatch.setattr(measuring, "ALL", [OVERLAPPED])

    found = list(measure(Plan({1.0: 2}, 20.0, here=True), tmp_path, lambda _: None))

    assert [rows for rows, _ in found] == [[], [ROWS[2]], []]
    assert "1 GiB: what it loaded" in found[-1][1][OVERLAPPED.name]
