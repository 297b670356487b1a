"""How a scenario learns what came of it, and what it says where it does not come to its end."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from controlplane.fleet.choices import NodeState
from controlplane.health.choices import SignalKind
from controlplane.incidents.choices import RunState, StepState
from controlplane.jobs.choices import JobState, ReplicaState
from controlplane.jobs.models import Directive
from controlplane.local.scenarios.base import ScenarioError, await_rows
from controlplane.local.scenarios.replicas import saved_as_asked
from controlplane.local.scenarios.whole import (
    Beginning,
    begun_again,
    first_steps,
    in_order,
    refused,
)
from runtime.replica.record import Record, RecordFile
from tests.factories import (
    CheckpointFactory,
    DirectiveFactory,
    IncidentFactory,
    JobFactory,
    LedgerRangeFactory,
    NodeFactory,
    PlaybookRunFactory,
    PlaybookStepFactory,
    ReplicaFactory,
    SignalFactory,
)

pytestmark = pytest.mark.django_db


def never() -> None:
    return None


def test_what_is_awaited_is_returned() -> None:
    assert await_rows(lambda: 7, 0, "it did not come") == 7


def test_where_all_is_well_nothing_is_added() -> None:
    JobFactory(state=JobState.RUNNING)
    NodeFactory(state=NodeState.ALLOCATED)
    with pytest.raises(ScenarioError, match=r"^it did not come after 0 s$"):
        await_rows(never, 0, "it did not come")


def test_what_is_unfinished_is_named() -> None:
    run = PlaybookRunFactory(state=RunState.WAITING, title="Repair node-7")
    PlaybookStepFactory(run=run, title="Empty it", state=StepState.WAITING, outcome="not now")
    PlaybookStepFactory(run=run, position=1, title="Repair it", state=StepState.BLOCKED)
    IncidentFactory(title="nobody is at it")
    job = JobFactory(state=JobState.RUNNING, name="llama")
    ReplicaFactory(job=job, index=2, state=ReplicaState.LOST)
    NodeFactory(name="node-9", state=NodeState.REPAIR_FAILED)
    with pytest.raises(ScenarioError) as error:
        await_rows(never, 0, "it did not come")
    text = str(error.value)
    assert text.startswith("it did not come after 0 s; Repair node-7, Empty it: waiting, not now;")
    assert "has no run: nobody is at it" in text
    assert "replica 2 of llama is lost; node-9 is repair_failed" in text
    assert "Repair it" not in text


def test_what_the_killed_made_last_and_is_told_later_is_no_step_of_a_job_that_goes_on() -> None:
    job = JobFactory()
    LedgerRangeFactory(job=job, step_from=900, step_to=903, epoch=3)  # it goes back to these
    LedgerRangeFactory(job=job, step_from=904, step_to=949, epoch=5)
    assert first_steps(job, 5) is None

    first = LedgerRangeFactory(job=job, step_from=950, step_to=951, epoch=6)
    assert first_steps(job, 5) == first


def test_a_killed_job_has_begun_again_once_none_of_the_killed_is_a_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRYDOCK_HOME", str(tmp_path))
    file = RecordFile(tmp_path / "shared" / "job-1" / "coordinator", "job-1")
    killed = {"old-0", "old-1"}
    assert begun_again("job-1", killed) is None
    before = {"began": {"epoch": 3, "step": 40}}
    file.advance(0, Record(job="job-1", epoch=7, members={0: "old-0", 1: "old-1"}, grant=before))
    assert begun_again("job-1", killed) is None
    after = {"began": {"epoch": 7, "step": 52}}
    file.advance(7, Record(job="job-1", epoch=8, members={1: "new-1"}, step=52, grant=after))
    assert begun_again("job-1", killed) == Beginning(7, 52, [1])


@pytest.mark.parametrize(
    ("peer", "local", "shared", "freshest", "following"),
    [
        (9, 7, 5, ["peer"], "local"),
        (9, 5, 7, ["peer"], "shared"),
        (8, 9, 8, ["local"], "peer"),  # of one step the quicker
        (5, 9, 9, ["local", "shared"], "peer"),  # either of which hides that the other was taken
        (9, 9, 9, ["peer", "local", "shared"], None),
    ],
)
def test_what_is_newest_and_what_comes_then(
    peer: int, local: int, shared: int, freshest: list[str], following: str | None
) -> None:
    assert in_order({"peer": peer, "local": local, "shared": shared}) == (freshest, following)


def test_a_tier_was_refused_if_the_job_said_so_since() -> None:
    job, since = JobFactory(), timezone.now()
    told = {"kind": "checkpoint_refused", "subject": "peer"}
    trouble = {"kind": SignalKind.JOB_TROUBLE, "job_id": job.pk, "observed_at": since}
    SignalFactory(**trouble | {"observed_at": since - timedelta(seconds=1)}, data=told)
    SignalFactory(**trouble | {"job_id": JobFactory().pk}, data=told)
    SignalFactory(**trouble, data=told | {"kind": "checkpoint_late"})
    assert refused(job, since) == set()

    SignalFactory(**trouble, data=told)
    SignalFactory(**trouble, data=told)
    assert refused(job, since) == {"peer"}


#: Saves by tier, step, and when each began, in seconds after the order; each tier's interval.
BEFORE = [("peer", 10, -1.0), ("local", 10, -1.0), ("shared", 10, -11.0)]
EVERY_S = {"peer": 2.0, "local": 5.0, "shared": 20.0}
TOOK = timedelta(seconds=0.4)


@pytest.mark.parametrize(
    ("saves", "asked"),
    [
        ([("peer", 20, 1.0), ("peer", 30, 3.1), ("local", 40, 4.1), ("shared", 50, 9.2)], []),
        ([("peer", 20, -0.1), ("peer", 30, 0.6), ("local", 30, 0.6)], [0.6]),  # before it is due
        ([("peer", 20, 1.0), ("peer", 30, 3.0), ("shared", 20, 1.5)], [1.5]),
        ([("peer", 20, 1.1), ("local", 20, 4.2), ("shared", 20, 9.5)], [1.1]),  # all due just then
        ([("peer", 20, 1.1), ("local", 20, 4.2), ("shared", 30, 9.5)], []),
    ],
)
def test_a_save_that_was_asked_for_is_told_from_those_that_were_due(
    saves: list[tuple[str, int, float]], asked: list[float]
) -> None:
    order = DirectiveFactory()
    save(order, *BEFORE, *saves)
    found = saved_as_asked(order.job, order.created_at - timedelta(seconds=5))
    assert {found} - {None} == {order.created_at + timedelta(seconds=at) + TOOK for at in asked}


def test_without_an_order_no_save_was_asked_for() -> None:
    order = DirectiveFactory()
    save(order, ("shared", 10, 1.0), ("shared", 20, 2.0))
    assert saved_as_asked(order.job, timezone.now()) is None


def save(order: Directive, *saves: tuple[str, int, float]) -> None:
    for tier, step, after_s in saves:
        durable = order.created_at + timedelta(seconds=after_s) + TOOK
        CheckpointFactory(
            job=order.job, tier=tier, step=step, at=durable, seconds=TOOK.total_seconds(),
            every_s=EVERY_S[tier],
        )  # fmt: skip
