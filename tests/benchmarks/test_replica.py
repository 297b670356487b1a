"""The arithmetic and the tables of benchmarks/replica.py, and ours alone by its own hands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import replica
from benchmarks.rivals import plot, report
from benchmarks.rivals.contenders import BOTH, OURS
from benchmarks.rivals.figures import (
    Event,
    Samples,
    account,
    against,
    gap,
    interval,
    median_step,
    share,
    together,
)
from benchmarks.rivals.measuring import Bench, healthy_together, losses
from benchmarks.rivals.task import BLACK_HOLE, KILL, STOP, Fault, Model

TINY = Model(width=16, hidden=16, blocks=1, tokens=4)
COMMITS = [0.0, 1.0, 2.0, 5.0, 6.0, 9.0]


def test_a_gap_is_the_longest_time_between_commits_that_touches_the_span() -> None:
    assert gap(COMMITS, 2.5, 5.5) == 3.0
    assert gap(COMMITS, 5.1, 5.9) == 1.0
    assert gap(COMMITS, 9.5, 12.0) is None


def test_the_median_step_needs_two_commits() -> None:
    assert median_step(COMMITS) == 1.0
    assert median_step([1.0]) is None


@pytest.mark.parametrize(("count", "found"), [(1, 1), (20, 20), (100, 99), (200, 198)])
def test_the_99th_percentile_is_exceeded_by_one_in_a_hundred(count: int, found: int) -> None:
    assert share(range(count, 0, -1), 0.99) == found


def test_a_turn_is_compared_with_the_mean_of_those_around_it() -> None:
    assert against([3.0, 6.0], [1.0, 2.0], [2.0, 4.0]) == [2.0, 2.0]


def test_the_interval_lies_around_the_median() -> None:
    low, high = interval([1.0, 1.1, 1.2, 1.3, 1.4, 1.5]) or (0.0, 0.0)
    assert 1.0 <= low < 1.25 < high <= 1.5


def test_of_few_turns_there_is_no_interval() -> None:
    assert interval([1.0, 1.1, 1.2, 1.3, 1.4]) is None


def commit(step: int, samples: int, *shards: int) -> Event:
    return Event("commit", 0.0, {"step": step, "samples": samples, "shards": list(shards)})


def discard(step: int, *shards: int) -> Event:
    return Event("discard", 0.0, {"step": step, "shards": list(shards)})


def test_a_step_without_a_replica_has_lost_its_samples() -> None:
    first = [commit(7, 24, 0, 1), commit(8, 18, 0, 1)]
    second = [commit(7, 24, 2, 3), commit(8, 18, 2, 3)]
    assert account([first, second], batch=24, shard_size=2) == Samples(2, 1, 18, 6, 0)


def test_a_gradient_that_was_thrown_away_was_computed_twice() -> None:
    told = [discard(7, 0, 1, 2), commit(7, 24, 0, 1, 2)]
    assert account([told], batch=24, shard_size=2) == Samples(1, 0, 24, 0, 6)


def test_where_survivors_differ_on_a_step_the_fuller_one_counts() -> None:
    told = [[commit(7, 18, 0)], [commit(7, 24, 1)]]
    assert account(told, batch=24, shard_size=2).lost == 0


def test_stretches_add_up() -> None:
    both = together([Samples(10, 3, 12, 36, 4), Samples(5, 1, 18, 6, 0)])
    assert both == Samples(15, 4, 12, 42, 4)


MACHINE = {
    "processor": "a < b", "cores": 2, "python": "3.11", "torch": "2.13.0", "day": "2026-11-28",
}  # fmt: skip


def rows() -> dict[str, Any]:
    common = {"replicas": 4, "traffic": "light"}
    samples = {"steps": 9, "other_batch": 2, "smallest": 18, "lost": 12, "computed_twice": 0}
    health = {"replicas": 4, "how": "light, the same processes", "step_s": 0.05}
    loss = {
        **common,
        "made": 2,
        "wanted": 2,
        "step_s": 0.05,
        "batch": 24,
        "hung": 0,
        "words": "",
        "not_back": 0,
    }
    kill = {**loss, "fault": "SIGKILL"}
    nothing = {**samples, "steps": 0}
    return {
        "machines": dict.fromkeys(("healthy", "kill", "silent", "rejoin"), MACHINE),
        "healthy": [
            {**health, "name": "plain DDP"},
            {
                **health, "name": "ours",
                "over_ddp": 1.01, "low": 0.99, "high": 1.02, "turns": 9,
            },
            {
                **health, "name": "a rival",
                "over_ddp": 1.2, "low": None, "high": None, "turns": 3,
            },
        ],
        "kill": [
            {
                **kill, "name": "ours", "gaps_s": [0.1, 0.2],
                "died": 0, "deadly": 0, "samples": samples,
            },
            {
                **kill, "name": "a rival", "gaps_s": [],
                "died": 6, "deadly": 2, "samples": nothing,
            },
            {
                **kill, "name": "a lucky one", "made": 3, "wanted": 3, "gaps_s": [0.05],
                "died": 6, "deadly": 2, "samples": nothing,
            },
        ],
        "silent": [
            {
                **loss, "fault": "SIGSTOP", "name": "ours", "gaps_s": [1.9, 2.1],
                "died": 0, "deadly": 0, "samples": samples,
            },
        ],
        "rejoin": [
            {
                "name": "ours", "state": "10 MB of state", "replicas": 4, "failed": 1,
                "step_s": 0.05,
                "gaps_s": [0.1], "gaps_steps": [2.0], "calm_steps": [1.5], "service_s": [0.5],
            }
        ],
    }  # fmt: skip


def test_the_tables_name_everybody_also_who_did_not_survive() -> None:
    text = "\n".join(report.lines(rows()))
    assert "+1.0%        -1.0% to +2.0%" in text
    assert "+20.0%                     -       3" in text
    assert text.count("2 cores of a < b") == 1
    assert "A healthy step of 4 replicas, light, the same processes" in text
    assert "SIGSTOP of one of 4 replicas, light" in text
    assert "a rival" in text
    assert "none: nobody went on" in text
    assert "1 / 2" in text


def verdicts(given: dict[str, Any]) -> list[str]:
    return [line for line in report.lines(given) if line.startswith("ours: ")]


def test_each_limit_is_kept_or_missed_beside_its_table() -> None:
    nobody = "0 died, 0 hung, 0 not back, 0 not made (all 0: kept)"
    samples = "ours: 12 samples lost, 2 steps of another batch (both 0: MISSED)"
    assert verdicts(rows()) == [
        "ours: +1.0%, up to +2.0% (<= 1%: MISSED)",
        f"ours: p99 0.200 s (<= 0.3: kept), {nobody}",
        samples,
        f"ours: worst 2.100 s (<= 2.5: kept), {nobody}",
        samples,
        "ours: median 2.00 steps (<= 2: kept), worst 2.00 (<= 2: kept), "
        "1 never entered (0: MISSED)",
    ]


@pytest.mark.parametrize(
    ("part", "number", "changed", "said"),
    [
        ("healthy", 1, {"high": 1.009}, "+1.0%, up to +0.9% (<= 1%: kept)"),
        ("healthy", 1, {"low": None, "high": None}, "of too few turns for an interval: MISSED"),
        ("kill", 0, {"gaps_s": [0.1, 0.31]}, "p99 0.310 s (<= 0.3: MISSED)"),
        ("kill", 0, {"gaps_s": [0.1]}, "p99 never (<= 0.3: MISSED)"),  # the other has no end
        ("kill", 0, {"died": 1}, "1 died, 0 hung, 0 not back, 0 not made (all 0: MISSED)"),
        ("kill", 0, {"hung": 1}, "1 hung, 0 not back, 0 not made (all 0: MISSED)"),
        ("kill", 0, {"not_back": 1}, "1 not back, 0 not made (all 0: MISSED)"),
        ("kill", 0, {"made": 0, "gaps_s": []}, "2 not made (all 0: MISSED)"),
        ("silent", 0, {"gaps_s": [1.9, 2.6]}, "worst 2.600 s (<= 2.5: MISSED)"),
        ("rejoin", 0, {"gaps_steps": [1.5, 2.04, 2.3]}, "median 2.04 steps (<= 2: MISSED)"),
        ("rejoin", 0, {"gaps_steps": [1.5, 1.6, 2.3]}, "worst 2.30 (<= 2: MISSED)"),
        ("rejoin", 0, {"failed": 0}, "0 never entered (0: kept)"),
    ],
)
def test_one_that_is_worse_misses_its_limit(
    part: str, number: int, changed: dict[str, Any], said: str
) -> None:
    given = rows()
    given[part][number] |= changed

    assert said in "\n".join(verdicts(given))


def test_where_nobody_of_ours_went_on_the_samples_are_no_proof() -> None:
    given = rows()
    given["kill"][0]["samples"] = {**given["kill"][0]["samples"], "steps": 0}

    assert "ours: nobody went on: MISSED" in verdicts(given)


def test_six_newcomers_have_an_interval_and_fewer_have_none() -> None:
    given = rows()
    six = [1.5, 1.6, 1.7, 1.8, 1.9, 2.0]
    given["rejoin"].append({**given["rejoin"][0], "name": "a rival", "gaps_steps": six})
    (ours, theirs) = [line for line in report.lines(given) if line.endswith("0.50 s")]

    assert " 2.0             -    2.0   1.5 " in ours
    assert " 1.8    1.6 to 1.9    2.0   1.5 " in theirs


@pytest.mark.parametrize(
    ("said", "rejoins"),
    [
        ([], 2),  # all parts, for which there are 40 minutes
        (["--parts", "rejoin"], 6),
        (["--parts", "rejoin,kill"], 2),
        (["--parts", "rejoin", "--rejoins", "3"], 3),
        (["--parts", "rejoin", "--quick"], 1),
    ],
)
def test_newcomers_alone_are_as_many_as_an_interval_takes(
    monkeypatch: pytest.MonkeyPatch, said: list[str], rejoins: int
) -> None:
    monkeypatch.setattr("sys.argv", ["replica.py", *said])

    assert replica.arguments().rejoins == rejoins


def test_parts_of_another_day_stand_below_their_own_machine() -> None:
    given = rows()
    given["machines"]["rejoin"] = {**MACHINE, "day": "2026-11-29"}
    told = list(report.lines(given))

    assert [one[-10:] for one in told if one.startswith("2 cores")] == ["2026-11-28", "2026-11-29"]


def test_a_gap_that_has_no_end_is_the_longest_of_all() -> None:
    (line, _samples) = [one for one in report.lines(rows()) if one.startswith("a lucky one")]

    assert " ".join(line.split()) == "a lucky one 3 / 3 2 6 0 0 never never never - 0.050 s 50 ms"


def test_the_plot_is_a_picture_of_all_parts() -> None:
    root = ElementTree.fromstring(plot.svg(rows()))  # noqa: S314 - our own
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "2 of 2 deadly" in words
    assert "if lived, median 0.05 s, 2 of 3 deadly" in words
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 8


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, replicas=3, seed=1)
    yield bench
    bench.end()


@pytest.mark.parametrize(
    ("fault", "unnoticed_s"),
    [(KILL, 0.0), (STOP, 1.0), (BLACK_HOLE, 1.0)],  # it is silence alone that tells of the latter
    ids=["kill", "stop", "black hole"],
)
def test_what_befalls_one_of_ours_loses_nothing_and_nobody_else(
    bench: Bench, fault: Fault, unnoticed_s: float
) -> None:
    (loss,) = losses(bench, OURS, TINY, fault, wanted=1)
    assert (loss.died, loss.hung, loss.back) == (0, 0, True)
    assert loss.gap_s is not None
    assert loss.gap_s > unnoticed_s
    assert loss.samples.lost == 0
    assert loss.samples.computed_twice == 0
    assert loss.samples.other_batch == 0


def test_ours_and_ddp_take_turns_in_the_same_processes(bench: Bench) -> None:
    ddp, found = healthy_together(bench, BOTH, 2, TINY)
    counts = {name: len(turns.over_ddp) for name, turns in found.items()}
    assert len(ddp) == 3
    assert counts == {"ours": 2, "plain DDP again (A/A)": 1}
