"""What the pages are made of: what an incident asks of a person, and how figures are told."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from controlplane.dashboard.templatetags.drydock import (
    clock,
    clock_ms,
    coarse,
    evidence,
    number,
    offset,
    prose,
    seconds,
)
from controlplane.fleet.selectors import fleet_of
from controlplane.incidents.selectors import (
    RequiredAction,
    ask_of,
    failures_of,
    finished_steps_of,
    runs_of,
)
from controlplane.jobs.durability import last_checkpoints, tiers_of
from controlplane.jobs.models import Placement
from controlplane.jobs.selectors import marks, sample_ledger, slots
from tests.factories import (
    CheckpointFactory,
    FailureFactory,
    IncidentFactory,
    InterruptionFactory,
    JobFactory,
    LedgerRangeFactory,
    NodeFactory,
    PlacementFactory,
    PlaybookRunFactory,
    PlaybookStepFactory,
    ReplicaFactory,
    SignalFactory,
)


@pytest.mark.django_db
def test_a_run_that_waits_for_a_person_comes_before_one_at_work() -> None:
    incident = IncidentFactory()
    PlaybookRunFactory(incident=incident, state="running")
    waiting = PlaybookRunFactory(
        incident=incident, state="needs_operator", state_reason="Stuck.", title="Repair it"
    )

    expected = RequiredAction("decide", "“Repair it” waits for a person: Stuck.", waiting)
    assert ask_of(incident, runs_of(incident)) == expected


@pytest.mark.django_db
def test_a_run_at_work_is_told_by_its_present_step() -> None:
    incident = IncidentFactory()
    run = PlaybookRunFactory(incident=incident, state="running")
    PlaybookStepFactory(run=run, position=0, state="done")
    PlaybookStepFactory(run=run, position=1, state="running", title="Power cycle it")

    ask = ask_of(incident, runs_of(incident))

    assert ask.kind == "watch"
    assert ask.text == "Nothing now. The playbook is at step 2: Power cycle it."


@pytest.mark.django_db
def test_a_paused_run_is_to_go_on_or_to_be_cancelled() -> None:
    incident = IncidentFactory()
    PlaybookRunFactory(incident=incident, state="running")
    paused = PlaybookRunFactory(
        incident=incident, state="paused", state_reason="wait for the vendor", title="Repair it"
    )

    ask = ask_of(incident, runs_of(incident))

    assert (ask.kind, ask.run, ask.waits) == ("resume", paused, True)
    assert "“Repair it” was paused by a person (wait for the vendor)" in ask.text


@pytest.mark.django_db
@pytest.mark.parametrize(("state", "kind"), [("resolved", "close"), ("closed", "nothing")])
def test_what_is_over_asks_for_no_decision(state: str, kind: str) -> None:
    incident = IncidentFactory(state=state)

    ask = ask_of(incident, runs_of(incident))

    assert (ask.kind, ask.waits) == (kind, False)


@pytest.mark.django_db
def test_deeds_are_told_in_the_order_in_which_they_finished() -> None:
    incident = IncidentFactory()
    now = timezone.now()
    first, second = PlaybookRunFactory(incident=incident), PlaybookRunFactory(incident=incident)
    late = {"state": "done", "finished_at": now, "outcome": "late"}
    early = {"state": "done", "finished_at": now - timedelta(seconds=5), "outcome": "early"}
    PlaybookStepFactory(run=first, **late)
    PlaybookStepFactory(run=second, **early)
    PlaybookStepFactory(run=second, state="blocked", outcome="not yet")

    assert [step.outcome for step in finished_steps_of(runs_of(incident))] == ["early", "late"]


@pytest.mark.django_db
def test_of_the_signals_of_a_failure_only_the_first_are_read() -> None:
    incident, failure = IncidentFactory(), FailureFactory()
    incident.failures.add(failure)
    now = timezone.now()
    for age in range(8):
        seen = now - timedelta(seconds=age)
        failure.signals.add(SignalFactory(node=failure.node, raw=str(age), observed_at=seen))

    (found,) = failures_of(incident).rows

    read = found.first_signals  # type: ignore[attr-defined]
    assert [signal.raw for signal in read] == ["7", "6", "5", "4", "3"]


@pytest.mark.django_db
def test_of_a_seats_history_only_what_is_shown_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    node, replica = NodeFactory(), ReplicaFactory()
    for age in range(30):
        stay = PlacementFactory(replica=replica, node=node, state="ended", pid=age)
        before = timezone.now() - timedelta(hours=1, minutes=age)
        Placement.objects.filter(pk=stay.pk).update(created_at=before)
    living = PlacementFactory(replica=replica, node=node)
    read: list[object] = []
    from_db = Placement.from_db

    def counted(*row: Any) -> Placement:
        read.append(row)
        return from_db(*row)

    monkeypatch.setattr(Placement, "from_db", counted)

    (slot,) = slots(replica.job)

    assert slot.now == living
    assert [stay.pid for stay in slot.before] == [*range(20)]
    assert len(read) == 21
    assert slot.now.node.get_deferred_fields() == {"report"}


@pytest.mark.django_db
def test_an_interruption_is_explained_by_the_nearest_incident_of_its_replica() -> None:
    job = JobFactory()
    now = timezone.now()
    near = IncidentFactory(job=job, replica=1, occurred_at=now)
    IncidentFactory(job=job, replica=1, occurred_at=now - timedelta(seconds=60))
    IncidentFactory(job=job, replica=2, occurred_at=now)
    InterruptionFactory(job=job, lost=[1], started_at=now)

    (mark,) = marks(job)

    assert mark.incident == near


@pytest.mark.django_db
def test_a_replica_that_comes_back_is_told_by_the_incident_it_ends() -> None:
    job = JobFactory()
    now = timezone.now()
    ended = IncidentFactory(
        job=job, replica=1, occurred_at=now - timedelta(minutes=10), restored_at=now
    )
    InterruptionFactory(job=job, joined=[1], started_at=now)

    (mark,) = marks(job)

    assert mark.incident == ended


@pytest.mark.django_db
def test_an_incident_long_past_explains_nothing() -> None:
    job = JobFactory()
    now = timezone.now()
    IncidentFactory(job=job, replica=1, occurred_at=now - timedelta(hours=1))
    InterruptionFactory(job=job, lost=[1], started_at=now)

    (mark,) = marks(job)

    assert mark.incident is None


@pytest.mark.django_db
def test_the_sample_ledger_is_whole_until_a_sample_is_missing() -> None:
    job = JobFactory()
    LedgerRangeFactory(job=job, step_from=0, step_to=99, samples=4800)
    whole = sample_ledger(job)
    LedgerRangeFactory(job=job, step_from=100, step_to=199, duplicated=[[150, 3]])

    assert whole.whole
    assert (whole.step_from, whole.step_to, whole.samples) == (0, 99, 4800)
    assert not sample_ledger(job).whole


@pytest.mark.django_db
def test_a_spare_that_is_not_heard_is_not_ready() -> None:
    node = NodeFactory(spare=True)
    heard = fleet_of([node.cluster])[node.cluster_id].spares
    node.lease.reachable = False
    node.lease.save()

    assert heard == 1
    assert fleet_of([node.cluster])[node.cluster_id].spares == 0


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.0, "0 s"),
        (0.084, "84 ms"),
        (0.312, "0.31 s"),
        (12.44, "12.4 s"),
        (59.97, "1 m 00 s"),
        (184.0, "3 m 04 s"),
        (7500.0, "2 h 05 m"),
        (-0.0001, "0 s"),
        (-0.084, "\N{MINUS SIGN}84 ms"),
        (-184.0, "\N{MINUS SIGN}3 m 04 s"),
    ],
)
def test_durations_are_told_as_precisely_as_they_matter(value: float, told: str) -> None:
    assert seconds(value) == told


@pytest.mark.parametrize(
    ("after_s", "told"), [(0.31, "+0.31 s"), (0.0, "+0 s"), (-90.0, "\N{MINUS SIGN}1 m 30 s")]
)
def test_how_long_after_something_is_told_with_its_sign(after_s: float, told: str) -> None:
    start = timezone.now()

    assert f">{told}<" in offset(start + timedelta(seconds=after_s), start)


@pytest.mark.parametrize(
    ("moment", "told"),
    [
        (datetime(2032, 3, 1, 0, 10, 7, tzinfo=UTC), "00:10:07"),
        (datetime(2032, 2, 29, 23, 30, tzinfo=UTC), "29 Feb, 23:30:00"),
        (datetime.fromisoformat("2032-03-02T01:00:00+02:00"), "23:00:00"),
    ],
)
def test_a_moment_of_another_day_is_told_with_its_day(
    moment: datetime, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timezone, "now", lambda: datetime(2032, 3, 1, 0, 30, tzinfo=UTC))

    assert f">{told}<" in clock(moment)
    assert f">{told}.000<" in clock_ms(moment)


@pytest.mark.parametrize(
    ("value", "told"),
    [(0, "0 s"), (59.9, "59 s"), (240, "4 min"), (11_100, "3 h 05 min"), (600_000, "6 d")],
)
def test_ages_are_coarse(value: float, told: str) -> None:
    assert coarse(value) == told


def test_numbers_are_grouped_by_thin_spaces() -> None:
    assert number(1_234_567) == "1\u202f234\u202f567"


def test_evidence_is_told_in_words() -> None:
    told = evidence({"boot_id": None, "reachable": False, "shards": [6, 7], "gap_s": 0.31})

    assert told == [
        ("boot id", "\N{EN DASH}"),
        ("reachable", "no"),
        ("shards", "6, 7"),
        ("gap s", "0.31"),
    ]


def test_prose_knows_headings_lists_and_emphasis() -> None:
    html = prose("# Title\n- one\n- **two**\n\n1. first\n\n_why_ `a_b_c`")

    assert "<h3>Title</h3>" in html
    assert "<ul><li>one</li><li><strong>two</strong></li></ul>" in html
    assert "<ol><li>first</li></ol>" in html
    assert "<p><em>why</em> <code>a_b_c</code></p>" in html


@pytest.mark.django_db
def test_a_tier_is_late_once_its_usual_time_has_long_passed() -> None:
    job = JobFactory(state="running")
    now = timezone.now()
    for tier, last_s in (("local", 30), ("shared", 60)):
        for age in (0, 20, 40):
            at = now - timedelta(seconds=last_s + age)
            CheckpointFactory(job=job, tier=tier, step=1000 - last_s - age, at=at)

    local, shared = tiers_of(job, last_checkpoints(job))

    assert local.newest is not None
    assert shared.newest is not None
    assert (local.newest.step, local.usual_s, local.late) == (970, 20.0, False)
    assert (shared.newest.step, shared.usual_s, shared.late) == (940, 20.0, False)
    CheckpointFactory(job=job, tier="peer", at=now)
    one, *_ = tiers_of(job, last_checkpoints(job))
    assert (one.tier, one.usual_s, one.late) == ("peer", None, False)


@pytest.mark.django_db
@pytest.mark.parametrize(("state", "late"), [("running", True), ("stopped", False)])
def test_a_job_that_does_not_run_is_late_with_nothing(state: str, late: bool) -> None:
    job = JobFactory(state=state)
    now = timezone.now()
    for age in (120, 140):
        CheckpointFactory(job=job, at=now - timedelta(seconds=age))

    assert [tier.late for tier in tiers_of(job, last_checkpoints(job))] == [late]
