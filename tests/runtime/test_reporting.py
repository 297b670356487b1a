"""What a replica tells the control plane of its epochs, and who of several tells it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from runtime.client import Hello, Regrouped
from runtime.job import Job
from runtime.ledger import SampleLedger
from runtime.replica.reporting import Reporter
from tests.runtime.told import Told


def regrouped(told: Told) -> list[Regrouped]:
    return [message for message in told.messages if isinstance(message, Regrouped)]


def grant(epoch: int, members: list[int], **changed: Any) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "begins": False,
        "members": [{"replica": number, "placement": f"e{epoch}-{number}"} for number in members],
        "lost": [],
        "joined": [],
        "taken_over": [],
        "started_at": float(epoch),
        **changed,
    }


def loss(replica: int) -> dict[str, Any]:
    return {"replica": replica, "placement": f"p-{replica}", "at": 1.0, "how": "reset"}


@pytest.fixture
def told() -> Told:
    return Told()


def join(told: Told, folder: Path, standby: str = "") -> Job:
    return Job(
        name="j", replica=0, rank=0, ranks=1, world_replicas=3, placement="p-0", standby=standby,
        coordinator="127.0.0.1:1", token="", state_dir=folder, sender=told,
        stop=threading.Event(),
    )  # fmt: skip


@pytest.fixture
def reporter(told: Told, tmp_path: Path) -> Reporter:
    made = Reporter(join(told, tmp_path), SampleLedger({}), 1)
    made.granted(grant(1, [0, 1, 2], begins=True), -1, 0)
    made.committed(0, 1, 1.0, 1.0, 24)
    return made


def test_an_epoch_is_told_at_its_first_commit_and_once(told: Told, reporter: Reporter) -> None:
    reporter.granted(grant(2, [0, 1], lost=[loss(2)]), 0, 0)
    unsaid = [*regrouped(told)]
    reporter.committed(1, 2, 1.0, 1.0, 24)
    reporter.committed(2, 2, 1.0, 1.0, 24)

    assert unsaid == []
    assert [(one.epoch, one.lost, one.step) for one in regrouped(told)] == [(2, [2], 1)]


def stages(told: Told) -> list[str]:
    return [message.stage for message in told.messages if isinstance(message, Hello)]


@pytest.mark.parametrize("standby", ["spare", "migrate"])
def test_who_stands_by_says_when_it_follows_and_when_it_has_a_place(
    told: Told, tmp_path: Path, standby: str
) -> None:
    reporter = Reporter(join(told, tmp_path, standby), SampleLedger({}), 1)
    reporter.follows()
    reporter.follows()  # it began anew
    before = stages(told)
    reporter.granted(grant(2, [0, 1, 2], lost=[loss(1)], joined=[1]), 4, 1)
    granted = stages(told)
    reporter.committed(5, 2, 1.0, 1.0, 24)
    reporter.committed(6, 2, 1.0, 1.0, 24)

    assert before == granted == ["follows"]
    assert stages(told) == ["follows", "entered"]
    assert told.replica == 1


def test_a_newcomer_that_has_a_place_from_the_start_says_neither(
    told: Told, reporter: Reporter
) -> None:
    reporter.follows()
    reporter.committed(1, 1, 1.0, 1.0, 24)

    assert stages(told) == []


def test_the_beginning_of_a_job_is_no_regrouping(told: Told, reporter: Reporter) -> None:
    assert regrouped(told) == []


def test_who_was_lost_before_an_epoch_that_broke_at_once_is_told_with_the_next(
    told: Told, reporter: Reporter
) -> None:
    reporter.granted(grant(2, [0, 1], lost=[loss(2)]), 0, 0)
    reporter.granted(grant(3, [0], lost=[loss(1)]), 0, 0)
    reporter.committed(1, 3, 1.0, 1.0, 24)

    (one,) = regrouped(told)
    assert (one.epoch, one.lost, one.replicas) == (3, [2, 1], [0])
    assert one.started_at == 2.0  # from when on nobody trained


def test_who_came_in_an_epoch_that_broke_at_once_is_told_with_the_next(
    told: Told, reporter: Reporter
) -> None:
    reporter.granted(grant(2, [0, 1, 2, 3, 4], joined=[3, 4]), 0, 0)
    reporter.granted(grant(3, [0, 1, 3], joined=[], lost=[loss(2), loss(4)]), 0, 0)
    reporter.committed(1, 3, 1.0, 1.0, 24)

    (one,) = regrouped(told)
    assert (one.joined, one.lost) == ([3], [2, 4])  # the other one has gone again
    assert one.entered == ["e3-3"]


def test_who_came_is_told_before_any_step_that_they_made(
    told: Told, reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    told.gather()
    steps_told_by_then = []
    monkeypatch.setattr(told, "tell", lambda _message: steps_told_by_then.extend(told.gather()))
    reporter.granted(grant(2, [0, 1, 2], joined=[2]), 0, 0)
    reporter.committed(1, 2, 1.0, 1.0, 24)

    assert steps_told_by_then == []
    assert len(told.gather()) == 1


def test_who_came_tells_if_nobody_is_left_of_those_before(told: Told, reporter: Reporter) -> None:
    reporter.granted(grant(2, [0, 1, 2], joined=[0]), 0, 0)
    reporter.granted(grant(3, [0], lost=[loss(1), loss(2)]), 0, 0)
    reporter.committed(1, 3, 1.0, 1.0, 24)

    assert [(one.lost, one.joined) for one in regrouped(told)] == [([1, 2], [0])]


def test_what_was_told_is_not_told_with_the_next(told: Told, reporter: Reporter) -> None:
    reporter.granted(grant(2, [0, 1], lost=[loss(2)]), 0, 0)
    reporter.committed(1, 2, 1.0, 1.0, 24)
    reporter.granted(grant(3, [0, 1, 2], joined=[2]), 1, 0)
    reporter.committed(2, 3, 1.0, 1.0, 24)

    assert [(one.lost, one.joined) for one in regrouped(told)] == [([2], []), ([], [2])]
