"""The engine: claimed once, applied only by the holder of the lock, never stuck, budgets kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from unittest.mock import patch

import pytest
from django.db import connection
from django.utils import timezone

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import SYSTEM, Actor
from controlplane.errors import Conflict
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import Effect, IncidentState, RunState, StepState
from controlplane.incidents.models import PlaybookRun, PlaybookStep, Reservation
from tests.factories import ClusterFactory, IncidentFactory, NodeFactory, PlaybookRunFactory
from workers import engine
from workers.playbooks import PLAYBOOKS
from workers.playbooks.base import (
    Done,
    End,
    GoTo,
    NeedsOperator,
    Outcome,
    Playbook,
    Skip,
    StepContext,
    StepDefinition,
    Wait,
)

PERSON = Actor(ActorKind.USER, "1")
#: What each step of the test playbook does next, by key; and what it did.
script: dict[str, list[Outcome | Exception]] = {}
acted: list[str] = []
#: What a disruptive step says of whether it is still wanted, by key; wanted once that is used up.
moot_script: dict[str, list[str | Exception]] = {}


def act(ctx: StepContext) -> Outcome:
    acted.append(ctx.step.key)
    answers = script.get(ctx.step.key, [])
    answer = answers.pop(0) if answers else Done(text=f"{ctx.step.key} done")
    if isinstance(answer, Exception):
        raise answer
    return answer


def obsolete_reason(ctx: StepContext) -> str:
    answers = moot_script.get(ctx.step.key, [])
    answer = answers.pop(0) if answers else ""
    if isinstance(answer, Exception):
        raise answer
    return answer


def definition(key: str, *, disruptive: bool = False) -> StepDefinition:
    return StepDefinition(
        key=key,
        title=key,
        act=act,
        effect=Effect.IDEMPOTENT,
        prose="by hand",
        disruptive=disruptive,
        obsolete_reason=obsolete_reason,
        timeout_s=60,
    )


PLAYBOOK = Playbook(
    name="test",
    version=3,
    summary="for tests",
    deadline_s=600,
    steps=(definition("one"), definition("two", disruptive=True), definition("three")),
)


@pytest.fixture(autouse=True)
def playbook() -> Iterator[None]:
    script.clear()
    acted.clear()
    moot_script.clear()
    with patch.dict(PLAYBOOKS, {"test": PLAYBOOK}):
        yield


def request(**fields: object) -> PlaybookRun:
    incident = IncidentFactory(cluster=fields.pop("cluster", None) or ClusterFactory())
    node = NodeFactory(cluster=incident.cluster)
    return incidents.request_run(
        SYSTEM,
        "test",
        str(fields.pop("subject", node.pk)),
        cluster_id=incident.cluster_id,
        title="Test",
        incident=incident,
        node_id=node.pk,
    )


def drain() -> None:
    engine.drain("", owner="test")


def steps(run: PlaybookRun) -> dict[str, str]:
    return dict(run.steps.values_list("key", "state"))


def due_now(run: PlaybookRun) -> None:
    run.steps.filter(state__in=[StepState.READY, StepState.WAITING]).update(wake_at=timezone.now())


def looks(run: PlaybookRun, outcome: Outcome, *, news: bool = True, late: bool = False) -> None:
    """The first step comes to this, and hears something while it does; `late`: past its time."""
    engine.create_steps()
    step = engine.claim("test")
    assert step is not None
    if late:
        run.steps.filter(key="one").update(started_at=timezone.now() - timedelta(hours=1))
    if news:
        engine.wake(f"node/{run.node_id}")
    engine._apply(step, outcome)


def merged_meanwhile(
    run: PlaybookRun, outcome: Outcome, *, effect: Effect = Effect.IDEMPOTENT
) -> None:
    """The first step comes to this while its incident is merged into another."""
    engine.create_steps()
    run.steps.update(effect=effect)
    step = engine.claim("test")
    assert step is not None
    other = IncidentFactory(cluster=run.cluster)
    PlaybookRun.objects.filter(pk=run.pk).update(incident=other)
    engine._apply(step, outcome)


@pytest.mark.django_db
class TestOneWorker:
    def test_a_run_goes_through_its_steps_and_resolves_its_incident(self) -> None:
        run = request()
        drain()
        run.refresh_from_db()
        assert acted == ["one", "two", "three"]
        assert (run.state, run.version) == (RunState.SUCCEEDED, 3)
        assert run.incident is not None
        run.incident.refresh_from_db()
        assert run.incident.state == IncidentState.RESOLVED
        assert "three done" in run.incident.postmortem
        assert not Reservation.objects.filter(released_at=None).exists()

    def test_the_same_subject_has_one_unfinished_run(self) -> None:
        run = request(subject="x")
        assert request(subject="x").pk == run.pk

    def test_what_a_step_writes_is_applied_with_its_outcome_or_not_at_all(self) -> None:
        run = request()

        def refuse() -> None:
            PlaybookRun.objects.filter(pk=run.pk).update(title="half done")
            raise Conflict("the world changed")

        script["one"] = [Done(text="done", apply=refuse)]
        drain()
        run.refresh_from_db()
        assert run.title == "Test"
        assert steps(run)["one"] == StepState.WAITING
        assert run.steps.get(key="one").outcome == "the world changed"

    def test_a_waiting_step_looks_again_when_its_subject_has_news(self) -> None:
        run = request()
        script["one"] = [Wait(text="not yet", wake_s=3600)]
        drain()
        assert steps(run)["one"] == StepState.WAITING
        engine.drain(f"node/{run.node_id}", owner="test")
        assert steps(run)["one"] == StepState.DONE

    def test_news_that_comes_while_a_step_is_at_work_is_not_missed(self) -> None:
        run = request()
        engine.create_steps()
        step = engine.claim("test")
        assert step is not None
        engine.wake(f"node/{run.node_id}")
        engine._apply(step, Wait(text="not yet", wake_s=3600))
        wake_at = run.steps.get(key="one").wake_at
        assert wake_at is not None
        assert wake_at <= timezone.now()

    def test_nothing_is_applied_before_a_last_step_has_seen_the_news(self) -> None:
        """What it does may not be possible twice: a node that is out for RMA cannot go there."""
        run = request()
        applied: list[str] = []
        script["three"] = [End(text="first look", apply=lambda: applied.append("first look"))]
        engine.create_steps()
        engine.take_step("test")
        engine.take_step("test")
        step = engine.claim("test")
        assert step is not None
        outcome = engine._act(step)
        engine.wake(f"node/{run.node_id}")
        engine._apply(step, outcome)
        assert (steps(run)["three"], applied) == (StepState.WAITING, [])
        script["three"] = [End(text="again", apply=lambda: applied.append("second look"))]
        drain()
        run.refresh_from_db()
        assert (run.state, applied) == (RunState.SUCCEEDED, ["second look"])

    def test_a_step_asks_nobody_what_it_was_told_meanwhile(self) -> None:
        run = request()
        applied: list[str] = []
        asks = NeedsOperator(text="is it gone?", apply=lambda: applied.append("asked"))
        looks(run, asks)
        assert (steps(run)["one"], applied) == (StepState.WAITING, [])
        drain()
        run.refresh_from_db()
        assert (run.state, applied) == (RunState.SUCCEEDED, [])

    def test_a_step_that_asks_was_told_nothing_new(self) -> None:
        run = request()
        looks(run, NeedsOperator(text="is it gone?"), news=False)
        run.refresh_from_db()
        assert (run.state, run.state_reason) == (RunState.NEEDS_OPERATOR, "is it gone?")

    def test_a_step_that_waited_too_long_looks_at_the_news_before_it_asks(self) -> None:
        run = request()
        applied: list[str] = []
        waits = Wait(text="nothing heard", context={"told": 1}, apply=lambda: applied.append("it"))
        looks(run, waits, late=True)
        run.refresh_from_db()
        assert (steps(run)["one"], applied) == (StepState.WAITING, ["it"])
        assert run.context["told"] == 1
        drain()
        run.refresh_from_db()
        assert run.state == RunState.SUCCEEDED

    @pytest.mark.parametrize(
        ("outcome", "late", "reason"),
        [
            (NeedsOperator(text="is it gone?"), False, "is it gone?"),
            (Wait(text="nothing heard"), True, "nothing heard"),
        ],
    )
    def test_news_that_keep_coming_put_a_question_off_once(
        self, outcome: Outcome, late: bool, reason: str
    ) -> None:
        run = request()
        looks(run, outcome, late=late)
        looks(run, outcome, late=late)
        run.refresh_from_db()
        assert run.state == RunState.NEEDS_OPERATOR
        assert run.state_reason.endswith(reason)

    def test_a_step_that_must_not_be_done_twice_asks_whatever_it_was_told(self) -> None:
        """It may ask because it cannot tell what it has done."""
        run = request()
        engine.create_steps()
        run.steps.update(effect=Effect.NON_REPEATABLE)
        looks(run, NeedsOperator(text="was it restarted?"))
        run.refresh_from_db()
        assert run.state == RunState.NEEDS_OPERATOR

    @pytest.mark.parametrize(
        ("outcome", "state"),
        [
            (Done(text="restarted"), StepState.DONE),
            (NeedsOperator(text="was it?"), StepState.NEEDS_OPERATOR),
        ],
    )
    def test_what_a_step_did_stands_whatever_became_of_its_incident(
        self, outcome: Outcome, state: StepState
    ) -> None:
        run = request()
        merged_meanwhile(run, outcome)
        assert steps(run)["one"] == state

    def test_a_step_looks_again_before_it_writes_for_an_incident_that_was_merged(self) -> None:
        run = request()
        applied: list[str] = []
        merged_meanwhile(run, Done(text="one", apply=lambda: applied.append("it")))
        step = run.steps.get(key="one")
        assert (step.state, step.attempts, applied) == (StepState.WAITING, 1, [])

    @pytest.mark.parametrize(
        ("outcome", "attempts"),
        [
            (NeedsOperator(text="no answer", apply=lambda: None), 2),
            (Wait(text="about to", apply=lambda: None), 1),
        ],
    )
    def test_that_a_step_looks_again_which_may_have_acted_counts(
        self, outcome: Outcome, attempts: int
    ) -> None:
        """A step that waits writes down first what it is about to do."""
        run = request()
        merged_meanwhile(run, outcome, effect=Effect.NON_REPEATABLE)
        assert run.steps.get(key="one").attempts == attempts

    def test_a_skipped_step_lets_the_next_begin(self) -> None:
        run = request()
        script["one"] = [Skip(text="not needed")]
        drain()
        assert steps(run) == {"one": "skipped", "two": "done", "three": "done"}

    def test_going_back_runs_the_steps_between_again(self) -> None:
        run = request()
        script["three"] = [GoTo(to="one", text="it was lost again")]
        drain()
        run.refresh_from_db()
        assert acted == ["one", "two", "three", "one", "two", "three"]
        assert run.state == RunState.SUCCEEDED

    def test_a_run_that_goes_back_for_ever_asks_for_a_person(self) -> None:
        run = request()
        script["three"] = [GoTo(to="one", text="again")] * 20
        drain()
        run.refresh_from_db()
        assert run.state == RunState.NEEDS_OPERATOR

    def test_going_back_for_each_of_many_nodes_is_not_for_ever(self) -> None:
        run = request()
        script["three"] = [GoTo(to="one", node_id=f"nod_{n}", text="silent") for n in range(9)]
        drain()
        run.refresh_from_db()
        assert run.state == RunState.SUCCEEDED
        assert run.context["round"] == 9  # what each round orders is told apart

    def test_going_back_for_the_same_node_for_ever_asks_for_a_person(self) -> None:
        run = request()
        script["three"] = [GoTo(to="one", node_id="nod_1", text="silent")] * 20
        drain()
        run.refresh_from_db()
        assert run.state == RunState.NEEDS_OPERATOR
        assert acted.count("three") == engine.MAX_ROUNDS + 2

    def test_the_rounds_count_from_a_person_s_word_whatever_nodes_there_were(self) -> None:
        run = request()
        nodes = [GoTo(to="one", node_id=f"nod_{n}", text="silent") for n in range(3)]
        script["three"] = [*nodes, *[GoTo(to="one", text="again")] * 20]
        drain()
        acted.clear()
        incidents.retry_run(PERSON, run.pk, "try again")
        drain()
        assert acted.count("three") == engine.MAX_ROUNDS + 1

    def test_a_step_that_raises_is_tried_again_and_then_asks(self) -> None:
        run = request()
        script["one"] = [RuntimeError("boom")] * 20
        for _ in range(engine.MAX_ATTEMPTS + 1):
            drain()
            due_now(run)
        run.refresh_from_db()
        assert run.state == RunState.NEEDS_OPERATOR
        assert len(acted) == engine.MAX_ATTEMPTS
        assert "boom" in run.state_reason

    def test_an_error_in_finding_whether_a_step_is_wanted_is_an_attempt_too(self) -> None:
        run = request()
        moot_script["two"] = [KeyError("boom")] * 20
        for _ in range(engine.MAX_ATTEMPTS + 1):
            drain()
            due_now(run)
        run.refresh_from_db()
        assert (run.state, acted) == (RunState.NEEDS_OPERATOR, ["one"])
        assert "boom" in run.state_reason
        assert not Reservation.objects.filter(released_at=None).exists()

    def test_a_step_that_is_wanted_again_by_the_time_it_acts_passes_the_guards(self) -> None:
        run = request()
        moot_script["two"] = ["it beats again", ""]
        drain()
        run.refresh_from_db()
        assert (run.state, acted) == (RunState.SUCCEEDED, ["one", "two", "three"])
        assert Reservation.objects.filter(run=run).count() == 1

    def test_a_person_lets_it_try_again(self) -> None:
        run = request()
        script["one"] = [NeedsOperator(text="may I?")]
        drain()
        incidents.retry_run(PERSON, run.pk, "yes")
        drain()
        run.refresh_from_db()
        assert run.state == RunState.SUCCEEDED

    def test_a_run_that_waits_for_nobody_cannot_be_retried(self) -> None:
        run = request()
        with pytest.raises(Conflict, match="waits for nobody"):
            incidents.retry_run(PERSON, run.pk, "")

    def test_a_cancelled_run_takes_no_further_step_and_frees_its_budget(self) -> None:
        run = request()
        script["three"] = [Wait(text="later", wake_s=0)]
        script["two"] = [Wait(text="later", wake_s=3600)]
        drain()
        incidents.cancel_run(PERSON, run.pk, "enough")
        acted.clear()
        drain()
        assert acted == []
        assert not Reservation.objects.filter(released_at=None).exists()

    def test_a_step_that_waits_too_long_asks_for_a_person(self) -> None:
        run = request()
        script["one"] = [Wait(text="nothing heard", wake_s=0)] * 2
        engine.create_steps()
        engine.take_step("test")
        run.steps.filter(key="one").update(started_at=timezone.now() - timedelta(hours=1))
        drain()
        run.refresh_from_db()
        assert run.state == RunState.NEEDS_OPERATOR
        assert "nothing heard" in run.state_reason

    def test_a_run_past_its_deadline_asks_for_a_person(self) -> None:
        run = request()
        script["one"] = [Wait(text="later", wake_s=3600)]
        drain()
        assert incidents.pause_overdue_runs(timezone.now() + timedelta(days=1)) == 1
        run.refresh_from_db()
        assert run.state == RunState.NEEDS_OPERATOR


@pytest.mark.django_db
class TestDeathAndFencing:
    def test_a_step_whose_worker_died_is_taken_by_another(self) -> None:
        run = request()
        engine.create_steps()
        assert engine.claim("dead") is not None
        assert engine.release_expired(timezone.now() + timedelta(hours=1)) == 1
        drain()
        run.refresh_from_db()
        assert run.state == RunState.SUCCEEDED
        assert run.steps.get(key="one").attempts == 2

    def test_the_late_outcome_of_a_worker_that_lost_its_lease_is_dropped(self) -> None:
        run = request()
        engine.create_steps()
        late = engine.claim("slow")
        assert late is not None
        engine.release_expired(timezone.now() + timedelta(hours=1))
        engine._apply(late, NeedsOperator(text="too late"))
        assert steps(run)["one"] == StepState.READY

    def test_an_outcome_of_a_cancelled_run_is_dropped(self) -> None:
        run = request()
        engine.create_steps()
        step = engine.claim("test")
        assert step is not None
        incidents.cancel_run(PERSON, run.pk, "enough")
        engine._apply(step, Done(text="done"))
        assert steps(run)["one"] == StepState.SKIPPED


@pytest.mark.django_db
class TestGuards:
    def test_a_node_on_hold_is_not_touched(self) -> None:
        run = request()
        assert run.node is not None
        type(run.node).objects.filter(pk=run.node_id).update(hold_reason="mine")
        drain()
        assert acted == ["one"]
        assert "on hold" in run.steps.get(key="two").outcome

    def test_the_budget_of_a_cluster_is_not_exceeded(self, settings: object) -> None:
        settings.BUDGET_NODES_PER_CLUSTER = 1  # type: ignore[attr-defined]
        cluster = ClusterFactory()
        first, second = request(cluster=cluster), request(cluster=cluster)
        script["three"] = [Wait(text="holding it", wake_s=3600)] * 2
        drain()
        assert steps(first)["two"] == StepState.DONE
        assert steps(second)["two"] == StepState.WAITING
        assert "out for repair" in second.steps.get(key="two").outcome


@pytest.mark.django_db(transaction=True)
def test_workers_that_drain_at_once_act_once_and_keep_the_budget(settings: object) -> None:
    settings.BUDGET_NODES_PER_CLUSTER = 2  # type: ignore[attr-defined]
    cluster = ClusterFactory()
    runs = [request(cluster=cluster) for _ in range(6)]
    script["three"] = [Wait(text="holding it", wake_s=3600) for _ in runs]

    def work() -> None:
        try:
            drain()
        finally:
            connection.close()

    workers = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)

    assert Reservation.objects.filter(released_at=None).count() == 2
    assert acted.count("one") == len(runs)
    assert acted.count("two") == 2
    assert PlaybookStep.objects.filter(state=StepState.RUNNING).count() == 0


@pytest.mark.django_db
def test_runs_of_other_playbooks_do_not_stand_in_the_way() -> None:
    PlaybookRunFactory(playbook="admit-node", state=RunState.NEEDS_OPERATOR)
    run = request()
    drain()
    run.refresh_from_db()
    assert run.state == RunState.SUCCEEDED
