"""The guards: what stops a disruptive step, what lets it go, and what a person signs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from unittest.mock import patch

import pytest
from django.apps import apps
from django.utils import timezone
from pytest_django import Settings

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import SYSTEM, Actor, AuditEvent
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Cluster, Lease, Node
from controlplane.incidents import actions as incidents
from controlplane.incidents import limits
from controlplane.incidents.choices import (
    ApprovalState,
    Effect,
    IncidentState,
    Mode,
    RunState,
    Scope,
    StepState,
)
from controlplane.incidents.models import Approval, Breaker, PlaybookMode, PlaybookRun, Reservation
from controlplane.incidents.models import Playbook as PlaybookRow
from controlplane.incidents.modes import modes_of
from controlplane.incidents.plans import plan_of_order
from tests.factories import (
    ApprovalFactory,
    ClusterFactory,
    FailureFactory,
    IncidentFactory,
    NodeFactory,
    PlacementFactory,
    PlaybookRunFactory,
    RackFactory,
    ReservationFactory,
)
from workers import engine
from workers.playbooks import PLAYBOOKS
from workers.playbooks.base import Done, GoTo, Outcome, Playbook, StepContext, StepDefinition, Wait

pytestmark = pytest.mark.django_db
PERSON = Actor(ActorKind.USER, "1")
acted: list[str] = []
goes_back: list[str] = []
#: What a step is to wait for, once each.
waits: list[str] = []


def act(ctx: StepContext) -> Outcome:
    acted.append(ctx.step.key)
    if goes_back and ctx.step.key == "second":
        goes_back.clear()
        return GoTo(to="first", text="it did not help")
    if waits:
        return Wait(text=waits.pop(), wake_s=60)
    return Done(text="done")


def disruptive(key: str) -> StepDefinition:
    return StepDefinition(
        key=key,
        title=key,
        act=act,
        effect=Effect.IDEMPOTENT,
        prose="by hand",
        disruptive=True,
        does=lambda context: (f"break {{node}} in {context.get('how', 'the usual way')}",),
        timeout_s=60,
    )


PLAYBOOK = Playbook(
    name="guarded",
    version=1,
    summary="for tests",
    deadline_s=600,
    steps=(disruptive("first"), disruptive("second")),
)


GENTLE = Playbook(
    name="gentle",
    version=1,
    summary="for tests",
    deadline_s=600,
    steps=tuple(
        StepDefinition(key=key, title=key, act=act, effect=effect, prose="by hand")
        for key, effect in [("look", Effect.NONE), ("do", Effect.IDEMPOTENT)]
    ),
)


@pytest.fixture(autouse=True)
def playbook() -> Iterator[None]:
    acted.clear()
    goes_back.clear()
    waits.clear()
    with patch.dict(PLAYBOOKS, {"guarded": PLAYBOOK, "gentle": GENTLE}):
        incidents.publish_playbooks([playbook.as_row() for playbook in PLAYBOOKS.values()])
        yield


@pytest.fixture
def cluster() -> Cluster:
    return ClusterFactory()


def request(
    cluster: Cluster, code: str = "xid-79", playbook: str = "guarded", **fields: object
) -> PlaybookRun:
    node = fields.pop("node", None) or NodeFactory(cluster=cluster)
    assert isinstance(node, Node)
    incident = IncidentFactory(cluster=cluster, node=node, code=code, subject=f"node/{node.pk}")
    return incidents.request_run(
        SYSTEM,
        playbook,
        node.pk,
        cluster_id=cluster.pk,
        title="Guarded",
        incident=incident,
        node_id=node.pk,
        **fields,  # type: ignore[arg-type]
    )


def node_of(run: PlaybookRun) -> Node:
    assert run.node is not None
    return run.node


def drain(run: PlaybookRun) -> PlaybookRun:
    run.steps.filter(state__in=["ready", "waiting"]).update(wake_at=timezone.now())
    engine.drain("", owner="test")
    run.refresh_from_db()
    return run


def first_words(run: PlaybookRun) -> str:
    return run.steps.order_by("position")[0].outcome


# --- what stops automation ------------------------------------------------------------------------


#: Before the deadline of a run of these playbooks, and after it.
SOON, LATE = timedelta(minutes=5), timedelta(hours=1)
#: A node that went back to its vendor counts for so long where a test sets it so.
RMA_COUNTS_S = 3600


def open_window(cluster_id: str, *, lasts: timedelta = SOON, **where: str | None) -> str:
    now = timezone.now()
    window = fleet.open_maintenance(
        PERSON,
        cluster_id,
        starts_at=now - timedelta(hours=1),
        ends_at=now + lasts,
        reason="hands off",
        **where,
    )
    return window.pk


def hold(node: Node) -> None:
    fleet.set_hold(PERSON, node.pk, "hands off")


def window_of_node(node: Node) -> None:
    open_window(node.cluster_id, node_id=node.pk)


def window_of_rack(node: Node) -> None:
    open_window(node.cluster_id, rack_id=node.rack_id)


def window_of_cluster(node: Node) -> None:
    open_window(node.cluster_id)


def foreign_drain(node: Node) -> None:
    fleet.set_drained_by(PERSON, node.pk, "slurm/admin", "hands off")


@pytest.mark.parametrize(
    "stop", [hold, window_of_node, window_of_rack, window_of_cluster, foreign_drain]
)
def test_a_persons_word_stops_automation(stop: Callable[[Node], None], cluster: Cluster) -> None:
    node = NodeFactory(cluster=cluster, rack=RackFactory(cluster=cluster))
    run = request(cluster, node=node)
    stop(node)
    drain(run)
    assert (acted, run.state) == ([], RunState.RUNNING)
    assert first_words(run).startswith("not now: ")


@pytest.mark.parametrize("stop", [hold, window_of_cluster, foreign_drain])
def test_a_persons_word_does_not_stop_a_persons_order(
    stop: Callable[[Node], None], cluster: Cluster
) -> None:
    run = request(cluster, requested_by="1")
    assert run.node is not None
    stop(run.node)
    assert drain(run).state == RunState.SUCCEEDED


def test_a_window_that_is_over_or_elsewhere_stops_nothing(cluster: Cluster) -> None:
    elsewhere = NodeFactory(cluster=cluster)
    window_of_node(elsewhere)
    fleet.close_maintenance(PERSON, open_window(cluster.pk), "done early")
    assert drain(request(cluster)).state == RunState.SUCCEEDED


def test_our_own_drain_stops_nothing(cluster: Cluster) -> None:
    run = request(cluster)
    fleet.set_drained_by(SYSTEM, str(run.node_id), f"drydock/{run.incident_id}", "ours")
    assert drain(run).state == RunState.SUCCEEDED


def test_automation_never_lifts_a_drain_that_is_not_ours() -> None:
    node = NodeFactory(drained_by="slurm/admin")
    with pytest.raises(Conflict, match="only they give it back"):
        fleet.set_drained_by(SYSTEM, node.pk, "", "it is back")
    fleet.set_drained_by(PERSON, node.pk, "", "I give it back")


def test_a_step_that_the_guards_hold_up_too_long_asks_for_a_person(cluster: Cluster) -> None:
    run = request(cluster)
    fleet.set_hold(PERSON, str(run.node_id), "hands off")
    drain(run)
    run.steps.update(started_at=timezone.now() - timedelta(hours=1))
    assert drain(run).state == RunState.NEEDS_OPERATOR


def lifted(run: PlaybookRun) -> None:
    fleet.set_hold(PERSON, str(run.node_id), "")


def test_the_time_that_the_guards_hold_a_step_up_is_not_its_own(cluster: Cluster) -> None:
    run = request(cluster)
    hold(node_of(run))
    drain(run)
    run.steps.filter(key="first").update(started_at=timezone.now() - timedelta(seconds=55))
    waits.append("the reset is under way")
    lifted(run)
    let_go_at = timezone.now()
    drain(run)

    first = run.steps.get(key="first")
    assert (first.state, first.outcome) == (StepState.WAITING, "the reset is under way")
    assert first.started_at is not None
    assert first.started_at >= let_go_at


def test_a_step_that_the_guards_hold_up_once_it_has_begun_has_its_time_again(
    cluster: Cluster,
) -> None:
    run = request(cluster)
    waits.append("the reset is under way")
    drain(run)
    hold(node_of(run))
    drain(run)
    run.steps.filter(key="first").update(started_at=timezone.now() - timedelta(seconds=55))
    lifted(run)
    waits.append("the reset is under way")
    let_go_at = timezone.now()
    drain(run)

    started_at = run.steps.get(key="first").started_at
    assert started_at is not None
    assert started_at >= let_go_at


def test_the_time_of_a_step_runs_on_while_the_guards_let_it_go(cluster: Cluster) -> None:
    run = request(cluster)
    waits.extend(["the reset is under way"] * 2)
    drain(run)
    run.steps.filter(key="first").update(started_at=timezone.now() - timedelta(seconds=61))
    drain(run)

    assert run.state == RunState.NEEDS_OPERATOR
    assert "the reset is under way" in run.state_reason


def reserve(node: Node, limit: int, state: RunState) -> None:
    """The cluster's limit, and another node that a run in this state has in hand."""
    incidents.set_limit(PERSON, node.cluster_id, Scope.CLUSTER, limit, "few at a time")
    run = PlaybookRunFactory(incident__cluster=node.cluster, state=state)
    other = NodeFactory(cluster=node.cluster, state=NodeState.QUARANTINED)
    Reservation.objects.create(cluster=node.cluster, node=other, run=run)


def no_place_left(node: Node) -> None:
    reserve(node, 1, RunState.RUNNING)


def one_of_many_at_work(node: Node) -> None:
    reserve(node, 2, RunState.NEEDS_OPERATOR)
    reserve(node, 2, RunState.WAITING)


def on_its_way_back(node: Node) -> None:
    """No run has it in hand, but one validates it."""
    incidents.set_limit(PERSON, node.cluster_id, Scope.CLUSTER, 1, "few at a time")
    soon = timezone.now() + timedelta(hours=1)
    other = NodeFactory(cluster=node.cluster, state=NodeState.VALIDATING, state_deadline=soon)
    PlaybookRunFactory(incident__cluster=node.cluster, node=other, playbook="return-node")


def counts_no_longer_soon(node: Node) -> None:
    """One that went back to its vendor counts for an hour, and the hour is nearly over."""
    incidents.set_limit(PERSON, node.cluster_id, Scope.CLUSTER, 1, "few at a time")
    since = timezone.now() - timedelta(seconds=RMA_COUNTS_S) + SOON
    NodeFactory(cluster=node.cluster, state=NodeState.RMA, state_since=since)


def full_and_in_maintenance(node: Node) -> None:
    no_place_left(node)
    window_of_node(node)


def place_left(node: Node) -> None:
    incidents.set_limit(PERSON, node.cluster_id, Scope.CLUSTER, 3, "room again")


def window_over(node: Node) -> None:
    for window in node.cluster.maintenance.all():
        fleet.close_maintenance(PERSON, window.pk, "done")


def both_over(node: Node) -> None:
    place_left(node)
    window_over(node)


@pytest.mark.parametrize(
    ("stop", "over"),
    [
        (no_place_left, place_left),
        (one_of_many_at_work, place_left),
        (on_its_way_back, place_left),
        (counts_no_longer_soon, place_left),
        (window_of_cluster, window_over),
        (full_and_in_maintenance, both_over),
    ],
)
def test_what_passes_by_itself_is_awaited_for_as_long_as_the_run_may_take(
    stop: Callable[[Node], None],
    over: Callable[[Node], None],
    cluster: Cluster,
    settings: Settings,
) -> None:
    settings.RMA_COUNTS_S = RMA_COUNTS_S
    run = request(cluster)
    node = node_of(run)
    stop(node)
    drain(run)
    run.steps.update(started_at=timezone.now() - timedelta(hours=1))
    drain(run)
    words, state = first_words(run), run.state
    over(node)
    drain(run)

    assert words.startswith("not now: ")
    assert (state, run.state) == (RunState.RUNNING, RunState.SUCCEEDED)


def limit_of_zero(node: Node) -> None:
    reserve(node, 0, RunState.RUNNING)


def held_by_one_that_asks(node: Node) -> None:
    reserve(node, 1, RunState.NEEDS_OPERATOR)


def held_by_one_that_is_paused(node: Node) -> None:
    reserve(node, 1, RunState.PAUSED)


def left_for_a_person(node: Node) -> None:
    """Nobody has it in hand, but its replica still looks for another place."""
    incidents.set_limit(PERSON, node.cluster_id, Scope.CLUSTER, 1, "one at a time")
    other = NodeFactory(cluster=node.cluster, state=NodeState.QUARANTINED)
    PlaybookRunFactory(incident__cluster=node.cluster, node=other)


def sent_back_just_now(node: Node) -> None:
    incidents.set_limit(PERSON, node.cluster_id, Scope.CLUSTER, 1, "one at a time")
    NodeFactory(cluster=node.cluster, state=NodeState.RMA, state_since=timezone.now())


def window_beyond_the_deadline(node: Node) -> None:
    open_window(node.cluster_id, lasts=LATE)


def a_second_window_beyond_the_deadline(node: Node) -> None:
    window_beyond_the_deadline(node)
    window_of_node(node)


def full_in_maintenance_beyond_the_deadline(node: Node) -> None:
    no_place_left(node)
    window_beyond_the_deadline(node)


@pytest.mark.parametrize(
    "stop",
    [
        limit_of_zero,
        held_by_one_that_asks,
        held_by_one_that_is_paused,
        left_for_a_person,
        sent_back_just_now,
        window_beyond_the_deadline,
        a_second_window_beyond_the_deadline,
        full_in_maintenance_beyond_the_deadline,
    ],
)
def test_what_does_not_pass_in_the_run_s_time_asks_after_the_step_s(
    stop: Callable[[Node], None], cluster: Cluster, settings: Settings
) -> None:
    settings.RMA_COUNTS_S = RMA_COUNTS_S
    run = request(cluster)
    stop(node_of(run))
    drain(run)
    words, state = first_words(run), run.state
    run.steps.filter(key="first").update(started_at=timezone.now() - timedelta(seconds=61))
    drain(run)

    assert words.startswith("not now: ")
    assert (state, run.state) == (RunState.RUNNING, RunState.NEEDS_OPERATOR)


def test_a_full_budget_asks_once_nobody_who_is_at_work_has_a_place(cluster: Cluster) -> None:
    run = request(cluster)
    no_place_left(node_of(run))
    drain(run)
    PlaybookRun.objects.exclude(pk=run.pk).update(state=RunState.NEEDS_OPERATOR)
    drain(run)
    held = run.state
    run.steps.filter(key="first").update(started_at=timezone.now() - timedelta(seconds=61))

    assert (held, drain(run).state) == (RunState.RUNNING, RunState.NEEDS_OPERATOR)


def test_what_passes_by_itself_is_not_awaited_beyond_the_run_s_deadline(cluster: Cluster) -> None:
    run = request(cluster)
    no_place_left(node_of(run))
    drain(run)
    assert incidents.pause_overdue_runs(timezone.now() + timedelta(minutes=20)) == 1
    run.refresh_from_db()
    assert run.state == RunState.NEEDS_OPERATOR


@pytest.mark.parametrize("stop", [hold, foreign_drain])
def test_what_only_a_person_ends_asks_for_them_whatever_else_there_is(
    stop: Callable[[Node], None], cluster: Cluster
) -> None:
    run = request(cluster)
    stop(node_of(run))
    full_and_in_maintenance(node_of(run))
    drain(run)
    run.steps.update(started_at=timezone.now() - timedelta(hours=1))
    assert drain(run).state == RunState.NEEDS_OPERATOR


def test_a_hold_that_follows_on_a_full_budget_has_its_own_time(cluster: Cluster) -> None:
    run = request(cluster)
    no_place_left(node_of(run))
    drain(run)
    run.steps.update(started_at=timezone.now() - timedelta(hours=1))
    drain(run)
    hold(node_of(run))
    drain(run)
    held = run.state
    run.steps.update(started_at=timezone.now() - timedelta(hours=1))

    assert (held, drain(run).state) == (RunState.RUNNING, RunState.NEEDS_OPERATOR)


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", Scope)
def test_each_limit_holds_up_the_node_beyond_it(scope: Scope, cluster: Cluster) -> None:
    rack = RackFactory(cluster=cluster)
    placements = [
        PlacementFactory(
            node=NodeFactory(cluster=cluster, rack=rack, state=NodeState.ALLOCATED),
            replica__job__cluster=cluster,
        )
        for _ in range(2)
    ]
    job = placements[0].replica.job
    placements[1].replica.job = job
    placements[1].replica.index = 1
    placements[1].replica.save()
    incidents.set_limit(PERSON, cluster.pk, scope, 1, "one at a time")
    for placement in placements:
        request(cluster, node=placement.node)
    runs = [drain(run) for run in PlaybookRun.objects.order_by("created_at")]
    # The first has finished and given its share back before the second asked: hold it open.
    assert [run.state for run in runs] == [RunState.SUCCEEDED, RunState.SUCCEEDED]

    Reservation.objects.create(
        cluster=cluster, node=placements[0].node, run=runs[0], rack=rack, job=job, code="xid-79"
    )
    late = request(cluster, node=placements[1].node)
    drain(late)
    assert "limit 1" in first_words(late)
    Reservation.objects.update(released_at=timezone.now())
    assert drain(late).state == RunState.SUCCEEDED


def test_a_limit_of_zero_stops_automation(cluster: Cluster) -> None:
    incidents.set_limit(PERSON, cluster.pk, Scope.CLUSTER, 0, "stop")
    run = request(cluster)
    drain(run)
    assert "limit 0" in first_words(run)


def test_a_limit_below_zero_is_refused(cluster: Cluster) -> None:
    with pytest.raises(Conflict, match="0 or more"):
        incidents.set_limit(PERSON, cluster.pk, Scope.CLUSTER, -1, "no")


def test_what_pages_show_of_budgets_is_what_the_guards_count(cluster: Cluster) -> None:
    NodeFactory(cluster=cluster, state=NodeState.QUARANTINED)
    use = limits.budgets_of(cluster)[0]
    assert (use.scope, use.used, use.limit) == (Scope.CLUSTER, 1, 2)


def test_a_node_that_is_tested_on_its_way_back_is_still_out(cluster: Cluster) -> None:
    soon = timezone.now() + timedelta(hours=1)
    NodeFactory(cluster=cluster, state=NodeState.VALIDATING, state_deadline=soon)
    NodeFactory(cluster=cluster, state=NodeState.QUARANTINED)
    run = request(cluster)
    drain(run)
    assert (acted, run.state) == ([], RunState.RUNNING)
    assert "limit 2" in first_words(run)


def test_what_looks_like_broken_hardware_empties_no_cluster_in_a_night(
    cluster: Cluster, settings: Settings
) -> None:
    """A node in RMA is away for weeks; until an hour has passed its place is taken by no other."""
    settings.RMA_COUNTS_S = 3600
    lately, before = timezone.now() - timedelta(minutes=59), timezone.now() - timedelta(minutes=61)
    NodeFactory.create_batch(5, cluster=cluster, state=NodeState.RMA, state_since=before)
    assert limits.budgets_of(cluster)[0].used == 0

    NodeFactory.create_batch(2, cluster=cluster, state=NodeState.RMA, state_since=lately)
    run = request(cluster)
    drain(run)

    assert (acted, run.state) == ([], RunState.RUNNING)
    assert "limit 2" in first_words(run)


@pytest.mark.parametrize("state", [NodeState.QUARANTINED, NodeState.RMA])
@pytest.mark.parametrize("scope", [Scope.JOB, Scope.CODE])
def test_a_node_that_is_out_still_when_its_run_has_ended_counts_against_its_job_and_code(
    scope: Scope, state: NodeState, cluster: Cluster, settings: Settings
) -> None:
    settings.RMA_COUNTS_S = RMA_COUNTS_S
    placement = PlacementFactory(replica__job__cluster=cluster)
    ReservationFactory(
        run__incident__cluster=cluster,
        node=NodeFactory(cluster=cluster, state=state),
        job=placement.replica.job,
        code="xid-79",
        released_at=timezone.now(),
    )
    incidents.set_limit(PERSON, cluster.pk, scope, 1, "one at a time")
    run = request(cluster, node=placement.node)
    drain(run)

    assert acted == []
    assert "limit 1" in first_words(run)


def test_a_node_that_changes_its_state_while_it_is_out_counts_against_what_it_went_for(
    cluster: Cluster,
) -> None:
    node = NodeFactory(cluster=cluster)
    fleet.transition(SYSTEM, node.pk, NodeState.QUARANTINED, reason="xid-79")
    ReservationFactory(
        run__incident__cluster=cluster, node=node, code="xid-79", released_at=timezone.now()
    )
    fleet.transition(SYSTEM, node.pk, NodeState.VALIDATING, reason="returned", deadline_s=600)
    incidents.set_limit(PERSON, cluster.pk, Scope.CODE, 1, "one at a time")
    run = request(cluster, code="xid-79")
    drain(run)

    assert "failure code xid-79 (limit 1)" in first_words(run)


def test_a_node_that_is_out_anew_counts_against_no_code_of_an_earlier_repair(
    cluster: Cluster,
) -> None:
    ReservationFactory(
        run__incident__cluster=cluster,
        node=NodeFactory(cluster=cluster, state=NodeState.QUARANTINED),
        code="xid-79",
        released_at=timezone.now() - timedelta(days=90),
    )
    incidents.set_limit(PERSON, cluster.pk, Scope.CODE, 1, "one at a time")

    assert drain(request(cluster, code="xid-79")).state == RunState.SUCCEEDED


def test_a_person_s_order_to_a_node_that_is_out_does_not_hide_what_it_was_taken_out_for(
    cluster: Cluster,
) -> None:
    out = NodeFactory(cluster=cluster, state=NodeState.QUARANTINED)
    for code in ("xid-79", ""):
        ReservationFactory(
            run__incident__cluster=cluster, node=out, code=code, job=None,
            released_at=timezone.now(),
        )  # fmt: skip
    incidents.set_limit(PERSON, cluster.pk, Scope.CODE, 1, "one at a time")
    run = request(cluster, code="xid-79")
    drain(run)

    assert "failure code xid-79 (limit 1)" in first_words(run)


def test_a_person_s_order_that_has_the_node_in_hand_hides_no_more(cluster: Cluster) -> None:
    out = NodeFactory(cluster=cluster, state=NodeState.QUARANTINED)
    for code, released_at in [("xid-79", timezone.now()), ("", None)]:
        ReservationFactory(
            run__incident__cluster=cluster, node=out, code=code, job=None, released_at=released_at
        )
    incidents.set_limit(PERSON, cluster.pk, Scope.CODE, 1, "one at a time")
    run = request(cluster, code="xid-79")
    drain(run)

    assert limits.budgets_of(cluster)[0].used == 1
    assert "failure code xid-79 (limit 1)" in first_words(run)


def test_a_node_counts_against_the_code_that_it_was_taken_out_for_last(cluster: Cluster) -> None:
    out = NodeFactory(cluster=cluster, state=NodeState.QUARANTINED)
    for code in ("xid-79", "xid-48"):
        ReservationFactory(
            run__incident__cluster=cluster, node=out, code=code, released_at=timezone.now()
        )
    incidents.set_limit(PERSON, cluster.pk, Scope.CODE, 1, "one at a time")

    assert drain(request(cluster, code="xid-79")).state == RunState.SUCCEEDED
    late = request(cluster, code="xid-48")
    drain(late)
    assert "failure code xid-48 (limit 1)" in first_words(late)


def test_new_nodes_that_fail_their_first_diagnostics_stop_no_repair(cluster: Cluster) -> None:
    soon = timezone.now() + timedelta(hours=1)
    new = {"cluster": cluster, "admitted_at": None}
    NodeFactory(**new, state=NodeState.VALIDATING, state_deadline=soon)
    NodeFactory.create_batch(2, **new, state=NodeState.VALIDATION_FAILED)
    assert drain(request(cluster)).state == RunState.SUCCEEDED


# --- breakers -------------------------------------------------------------------------------------


def burst(cluster: Cluster, nodes: int) -> Breaker | None:
    for _ in range(nodes):
        FailureFactory(node=NodeFactory(cluster=cluster), code="xid-79")
    return incidents.open_breaker_on_burst(cluster.pk, "xid-79")


def test_one_code_on_many_nodes_opens_its_breaker(cluster: Cluster, settings: Settings) -> None:
    settings.BREAKER_NODES = 3
    assert burst(cluster, 2) is None
    assert burst(cluster, 1) is not None
    run = request(cluster)
    drain(run)
    assert (acted, run.state) == ([], RunState.NEEDS_OPERATOR)
    assert "the breaker is open" in run.state_reason


def test_another_code_goes_on(cluster: Cluster, settings: Settings) -> None:
    settings.BREAKER_NODES = 1
    burst(cluster, 1)
    assert drain(request(cluster, code="xid-48")).state == RunState.SUCCEEDED


def test_many_failures_of_one_node_open_nothing(cluster: Cluster, settings: Settings) -> None:
    settings.BREAKER_NODES = 2
    node = NodeFactory(cluster=cluster)
    FailureFactory.create_batch(5, node=node, code="xid-79")
    assert incidents.open_breaker_on_burst(cluster.pk, "xid-79") is None


def test_closing_a_breaker_replays_nothing_but_lets_new_faults_through(
    cluster: Cluster, settings: Settings
) -> None:
    settings.BREAKER_NODES = 2
    breaker = burst(cluster, 2)
    assert breaker is not None
    stale = request(cluster)
    drain(stale)
    incidents.close_breaker(PERSON, breaker.pk, "it was the driver")
    assert drain(stale).state == RunState.NEEDS_OPERATOR
    assert incidents.open_breaker_on_burst(cluster.pk, "xid-79") is None
    assert drain(request(cluster)).state == RunState.SUCCEEDED
    with pytest.raises(Conflict, match="closed already"):
        incidents.close_breaker(PERSON, breaker.pk, "again")


# --- silence --------------------------------------------------------------------------------------


def silence(*nodes: Node, ago: float = 25.0) -> None:
    Lease.objects.filter(pk__in=[node.pk for node in nodes]).update(
        reachable=False, last_beat_at=timezone.now() - timedelta(seconds=ago)
    )


def test_a_node_whose_whole_site_is_silent_is_left_alone(cluster: Cluster) -> None:
    nodes = NodeFactory.create_batch(4, cluster=cluster)
    silence(*nodes[:3])
    run = request(cluster, node=nodes[0])
    drain(run)
    assert acted == []
    assert "went quiet together" in first_words(run)


def test_a_node_that_is_silent_alone_is_taken_out(cluster: Cluster) -> None:
    nodes = NodeFactory.create_batch(4, cluster=cluster)
    silence(nodes[0])
    assert drain(request(cluster, node=nodes[0])).state == RunState.SUCCEEDED


def test_nodes_that_were_silent_long_before_are_no_part_of_it(cluster: Cluster) -> None:
    nodes = NodeFactory.create_batch(4, cluster=cluster)
    silence(*nodes[1:3], ago=3600)
    silence(nodes[0])
    nodes[0].refresh_from_db()
    assert limits.silence_around(nodes[0]) is None


def test_a_silent_rack_is_found_within_a_cluster_that_is_heard(cluster: Cluster) -> None:
    rack = RackFactory(cluster=cluster, name="r7")
    quiet = NodeFactory.create_batch(3, cluster=cluster, rack=rack)
    NodeFactory.create_batch(9, cluster=cluster)
    silence(*quiet)
    quiet[0].refresh_from_db()
    assert str(limits.silence_around(quiet[0])) == "3 of 3 nodes of rack r7 went quiet together"


def test_a_silent_switch_is_found_across_racks(cluster: Cluster) -> None:
    quiet = [
        NodeFactory(cluster=cluster, rack=RackFactory(cluster=cluster), switch="leaf-3")
        for _ in range(3)
    ]
    for one in quiet:
        NodeFactory.create_batch(3, cluster=cluster, rack=one.rack, switch="leaf-4")
    silence(*quiet)
    quiet[0].refresh_from_db()
    found = limits.silence_around(quiet[0])
    assert str(found) == "3 of 3 nodes of switch leaf-3 went quiet together"


# --- modes ----------------------------------------------------------------------------------------


def test_a_dry_run_shows_everything_and_does_nothing(cluster: Cluster) -> None:
    incidents.set_mode(PERSON, cluster.pk, "guarded", Mode.DRY_RUN, "first weeks")
    run = request(cluster)
    drain(run)
    assert run.node is not None
    plan = run.steps.order_by("position")[0].evidence["plan"]
    assert (acted, run.state) == ([], RunState.SUCCEEDED)
    assert [step["does"] for step in plan["steps"]] == [
        [f"break {run.node.name} in the usual way"],
        [f"break {run.node.name} in the usual way"],
    ]
    assert not Reservation.objects.exists()
    assert run.incident is not None
    assert run.incident.state == IncidentState.OPEN


def test_a_playbook_that_is_off_asks_for_a_person(cluster: Cluster) -> None:
    incidents.set_mode(PERSON, cluster.pk, "guarded", Mode.OFF, "not here")
    assert drain(request(cluster)).state == RunState.NEEDS_OPERATOR
    assert acted == []


def test_one_that_disrupts_nothing_and_is_off_asks_before_it_acts(cluster: Cluster) -> None:
    incidents.set_mode(PERSON, cluster.pk, "gentle", Mode.OFF, "not here")
    run = drain(request(cluster, playbook="gentle"))
    assert (acted, run.state) == (["look"], RunState.NEEDS_OPERATOR)
    assert run.state_reason == f"not done: the playbook is switched off in {cluster.name}"


def test_one_that_disrupts_nothing_and_is_not_off_asks_nobody(cluster: Cluster) -> None:
    incidents.set_mode(PERSON, cluster.pk, "gentle", Mode.OFF, "not here")
    run = drain(request(cluster, playbook="gentle"))
    incidents.set_mode(PERSON, cluster.pk, "gentle", Mode.AUTOMATIC, "here too")
    incidents.retry_run(PERSON, run.pk, "now")
    assert drain(run).state == RunState.SUCCEEDED


def test_what_a_person_orders_is_done_where_its_playbook_is_off(cluster: Cluster) -> None:
    incidents.set_mode(PERSON, cluster.pk, "gentle", Mode.OFF, "not here")
    run = request(cluster, playbook="gentle", requested_by="1")
    assert drain(run).state == RunState.SUCCEEDED


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("repair-node", set(Mode)),
        ("replica-lost", {Mode.AUTOMATIC, Mode.OFF}),
        ("warm-spare", {Mode.AUTOMATIC, Mode.OFF}),
        ("restore-coordinator", {Mode.AUTOMATIC, Mode.OFF}),
        ("return-node", {Mode.AUTOMATIC, Mode.OFF}),
        ("drain-node", {Mode.AUTOMATIC}),  # people order it
        ("move-replica", {Mode.AUTOMATIC}),
        ("start-job", {Mode.AUTOMATIC}),
        ("site-silent", {Mode.AUTOMATIC}),  # looks on
    ],
)
def test_each_playbook_is_offered_the_modes_that_mean_something(
    name: str, allowed: set[Mode]
) -> None:
    assert set(modes_of(PlaybookRow.objects.get(pk=name)).allowed) == allowed


@pytest.mark.parametrize(
    ("name", "mode", "why"),
    [
        ("replica-lost", Mode.APPROVE, "no disruptive step"),
        ("gentle", Mode.DRY_RUN, "no disruptive step"),
        ("drain-node", Mode.OFF, "only when somebody asks"),
        ("site-silent", Mode.OFF, "only looks on"),
    ],
)
def test_a_mode_that_means_nothing_is_refused(
    name: str, mode: Mode, why: str, cluster: Cluster
) -> None:
    with pytest.raises(Conflict, match=why):
        incidents.set_mode(PERSON, cluster.pk, name, mode, "to be safe")
    assert not PlaybookMode.objects.exists()


def test_a_mode_holds_in_its_cluster_only(cluster: Cluster) -> None:
    incidents.set_mode(PERSON, cluster.pk, "guarded", Mode.OFF, "not here")
    assert drain(request(ClusterFactory())).state == RunState.SUCCEEDED


def test_a_playbook_that_nobody_knows_has_no_mode(cluster: Cluster) -> None:
    with pytest.raises(Conflict, match="no playbook"):
        incidents.set_mode(PERSON, cluster.pk, "guess", Mode.OFF, "x")


def asked(cluster: Cluster) -> tuple[PlaybookRun, Approval]:
    """A run that waits for its plan to be signed."""
    incidents.set_mode(PERSON, cluster.pk, "guarded", Mode.APPROVE, "we look first")
    run = drain(request(cluster))
    return run, Approval.objects.get(run=run, state=ApprovalState.WAITING)


def test_nothing_is_done_before_a_person_has_signed_the_plan(cluster: Cluster) -> None:
    run, approval = asked(cluster)
    drain(run)
    assert acted == []
    incidents.approve(PERSON, approval.pk, approval.digest, "go")
    assert drain(run).state == RunState.SUCCEEDED
    assert acted == ["first", "second"]


def test_a_run_says_that_it_waits_for_a_signature_only_while_it_does(cluster: Cluster) -> None:
    run, approval = asked(cluster)
    says = run.state_reason
    waits.append("it boots")
    incidents.approve(PERSON, approval.pk, approval.digest, "go")
    drain(run)

    assert says == "waits until a person approves the plan"
    assert (run.state, run.state_reason) == (RunState.WAITING, "")


def test_a_signed_run_that_is_held_up_by_another_guard_says_so_alone(cluster: Cluster) -> None:
    run, approval = asked(cluster)
    incidents.approve(PERSON, approval.pk, approval.digest, "go")
    fleet.set_hold(PERSON, str(run.node_id), "hands off")
    drain(run)

    assert (acted, run.state_reason) == ([], "")
    assert run.steps.get(key="first").outcome.startswith(engine.NOT_NOW)


def test_a_plan_that_was_not_read_cannot_be_signed(cluster: Cluster) -> None:
    run, approval = asked(cluster)
    with pytest.raises(Conflict, match="has changed since you read it"):
        incidents.approve(PERSON, approval.pk, "0" * 64, "go")
    drain(run)
    assert acted == []


def test_a_changed_world_voids_the_signature(cluster: Cluster) -> None:
    run, approval = asked(cluster)
    incidents.approve(PERSON, approval.pk, approval.digest, "go")
    PlacementFactory(node=run.node)  # a replica landed there meanwhile
    drain(run)
    approval.refresh_from_db()
    assert (acted, approval.state) == ([], ApprovalState.VOID)
    fresh = Approval.objects.get(run=run, state=ApprovalState.WAITING)
    assert fresh.plan["jobs"] != approval.plan["jobs"]


def test_a_signature_that_is_void_by_now_tells_who_gave_it_and_when(cluster: Cluster) -> None:
    run, approval = asked(cluster)
    incidents.approve(PERSON, approval.pk, approval.digest, "go")
    signed_at = Approval.objects.get(pk=approval.pk).decided_at
    PlacementFactory(node=run.node)
    drain(run)

    approval.refresh_from_db()
    assert (approval.state, approval.decided_at) == (ApprovalState.VOID, signed_at)
    assert (approval.decided_by, approval.reason) == (PERSON.id, "go")


def test_that_a_plan_is_void_is_told_and_on_record(cluster: Cluster) -> None:
    run, approval = asked(cluster)
    incidents.set_mode(PERSON, cluster.pk, "guarded", Mode.AUTOMATIC, "we trust it")

    audited = AuditEvent.objects.get(verb="approval.void", object_id=approval.pk)
    assert (audited.actor_id, audited.before, audited.after["state"]) == (
        PERSON.id,
        {"state": ApprovalState.WAITING},
        ApprovalState.VOID,
    )
    assert run.incident is not None
    assert run.incident.timeline.filter(text__endswith=audited.reason).exists()


def test_what_waited_to_be_signed_when_its_run_had_ended_is_void_since(cluster: Cluster) -> None:
    ended_at = timezone.now() - timedelta(days=1)
    ended, at_work = (
        ApprovalFactory(run__state=state, run__finished_at=finished_at)
        for state, finished_at in ((RunState.SUCCEEDED, ended_at), (RunState.WAITING, None))
    )
    migration = import_module("controlplane.incidents.migrations.0004_plans_of_ended_runs")
    migration.void_plans_of_ended_runs(apps, None)

    ended.refresh_from_db()
    at_work.refresh_from_db()
    assert (ended.state, ended.decided_at) == (ApprovalState.VOID, ended_at)
    assert at_work.state == ApprovalState.WAITING


def test_the_plan_of_a_later_turn_is_not_spoken_against_by_its_own_run(cluster: Cluster) -> None:
    run, approval = asked(cluster)
    goes_back.append("once")
    incidents.approve(PERSON, approval.pk, approval.digest, "go")
    drain(run)

    assert Reservation.objects.filter(run=run, released_at=None).exists()
    fresh = Approval.objects.get(run=run, state=ApprovalState.WAITING)
    assert (fresh.plan["turn"], fresh.plan["objections"]) == (1, [])


def test_a_plan_says_that_its_job_has_as_many_nodes_out_as_it_may(cluster: Cluster) -> None:
    placement = PlacementFactory(replica__job__cluster=cluster)
    ReservationFactory(run__incident__cluster=cluster, job=placement.replica.job)
    incidents.set_limit(PERSON, cluster.pk, Scope.JOB, 1, "one at a time")
    incidents.set_mode(PERSON, cluster.pk, "guarded", Mode.APPROVE, "we look first")
    run = drain(request(cluster, node=placement.node))

    says = ["1 nodes are out for repair already, of its job (limit 1)"]
    assert Approval.objects.get(run=run).plan["objections"] == says
    assert plan_of_order(placement.node, "reboot").objections == says


def test_going_back_to_an_earlier_step_asks_anew(cluster: Cluster) -> None:
    run, approval = asked(cluster)
    goes_back.append("once")
    incidents.approve(PERSON, approval.pk, approval.digest, "go")
    drain(run)
    assert acted == ["first", "second"]
    assert Approval.objects.filter(run=run, state=ApprovalState.WAITING).exists()


def test_a_rejected_plan_ends_its_run_and_leaves_the_incident_to_people(cluster: Cluster) -> None:
    run, approval = asked(cluster)
    incidents.reject(PERSON, approval.pk, "it is on fire, leave it")
    drain(run)
    assert (acted, run.state) == ([], RunState.CANCELLED)
    with pytest.raises(Conflict, match="rejected"):
        incidents.approve(PERSON, approval.pk, approval.digest, "go")


def test_waiting_for_a_signature_does_not_use_up_the_steps_time(cluster: Cluster) -> None:
    run, approval = asked(cluster)
    run.steps.filter(state=StepState.WAITING).update(started_at=timezone.now() - timedelta(days=1))
    drain(run)
    incidents.approve(PERSON, approval.pk, approval.digest, "go")
    assert drain(run).state == RunState.SUCCEEDED


def test_switching_to_automatic_lets_a_waiting_run_go(cluster: Cluster) -> None:
    run, _ = asked(cluster)
    incidents.set_mode(PERSON, cluster.pk, "guarded", Mode.AUTOMATIC, "we trust it")
    assert drain(run).state == RunState.SUCCEEDED


# --- what people do to a run ----------------------------------------------------------------------


def test_a_paused_run_takes_no_step_until_it_is_let_go_on(cluster: Cluster) -> None:
    run = request(cluster)
    engine.create_steps()
    incidents.pause_run(PERSON, run.pk, "wait a moment")
    assert drain(run).state == RunState.PAUSED
    assert acted == []
    incidents.resume_run(PERSON, run.pk, "go on")
    assert drain(run).state == RunState.SUCCEEDED


def test_a_finished_run_cannot_be_paused(cluster: Cluster) -> None:
    run = drain(request(cluster))
    with pytest.raises(Conflict, match="nothing to pause"):
        incidents.pause_run(PERSON, run.pk, "too late")
