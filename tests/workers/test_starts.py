"""A job is started by the nodes' agents; a replica on several nodes: `test_several_nodes`."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import CommandState, NodeState
from controlplane.fleet.models import Command, Node
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import RunState, StepState
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import JobState
from controlplane.jobs.models import Job, Placement
from node_agent import wire
from runtime import client
from tests.factories import GpuFactory, PlacementFactory, PlaybookRunFactory
from tests.workers.moving import commands, state, told_by
from tests.workers.world import World, answer, drain, quarantine, run_of, step_of, unanswered

pytestmark = pytest.mark.django_db

START = "start-job"


def begin(world: World, name: str, **fields: Any) -> Job:
    """A job of two replicas, or another with these fields, is to start, with one card a node."""
    job = jobs.register(
        SYSTEM,
        cluster_id=world.cluster.pk,
        name=name,
        program="train",
        **{"world_replicas": 2, "gpus_per_replica": fields.get("nodes_per_replica", 1), **fields},
    )
    incidents.start_job(SYSTEM, job.pk)
    return job


def all_free(world: World) -> None:
    """Nothing runs on any node."""
    for one in world.placements:
        jobs.end_placement(SYSTEM, one.pk, "not of this test", free_node=True)


@pytest.fixture
def starting(world: World) -> Job:
    """A job of two replicas whose nodes were told to start them."""
    all_free(world)
    job = begin(world, "wide")
    drain()
    answer("start_coordinator", address="127.0.0.1:4001")
    drain()
    world.job = job
    return job


def nodes_of(job: Job) -> list[Node]:
    """Where its replicas are."""
    return [one.alive.get().node for one in job.replicas.order_by("index")]


def unfinished(verb: str) -> list[str]:
    found = Command.objects.filter(verb=verb, state__in=["queued", "delivered"])
    return sorted(found.values_list("node__name", flat=True))


def test_nodes_that_fall_silent_together_are_awaited_and_told_again(
    world: World, starting: Job
) -> None:
    nodes = nodes_of(starting)
    world.silence_together(*nodes)
    unanswered()
    silent, words = run_of(START).state, step_of(START, "start-ranks").outcome
    world.hear(nodes[0])
    drain()
    half = (run_of(START).state, unfinished("start_rank"))
    world.hear(nodes[1])
    drain()

    assert silent == RunState.WAITING
    assert words == "node-0, node-1 went silent before they started their ranks, and are awaited"
    assert half == (RunState.WAITING, [])
    assert unfinished("start_rank") == ["node-0", "node-1"]
    answer("start_rank", pid=7)
    drain()
    assert step_of(START, "start-ranks").outcome == "2 ranks run"


def test_what_a_node_that_falls_silent_alone_was_to_start_a_run_of_its_own_brings_back(
    world: World, starting: Job
) -> None:
    first, second = nodes_of(starting)
    command = Command.objects.get(verb="start_rank", node=first)
    up = wire.CommandResult(id=command.pk, state="done", at=time.time())
    fleet.record_command_result(first.pk, up)
    lost = Placement.objects.get(replica__job=starting, node=second)
    world.silence(second)
    unanswered()
    world.survivors_commit(lost)
    quarantine(world, second)

    assert run_of("replica-lost").context["lost_placement"] == lost.pk
    assert step_of(START, "start-ranks").outcome == "1 ranks run"
    assert run_of(START).state == RunState.WAITING


def test_ranks_that_run_though_nobody_could_say_so_are_not_told_again(
    world: World, starting: Job
) -> None:
    nodes = nodes_of(starting)
    world.silence_together(*nodes)
    unanswered()
    for one in Placement.objects.filter(replica__job=starting, node__in=nodes):
        world.join(one)
    for node in nodes:
        world.hear(node)
    drain()

    assert unfinished("start_rank") == []
    assert step_of(START, "start-ranks").state == StepState.DONE


def test_what_another_run_brings_back_is_not_started_once_the_others_are_heard(
    world: World, starting: Job
) -> None:
    first, second = nodes_of(starting)
    lost = Placement.objects.get(replica__job=starting, node=second)
    world.silence_together(first, second)
    unanswered()
    jobs.end_placement(SYSTEM, lost.pk, "lost", free_node=True)
    PlaybookRunFactory(job=starting, subject=f"replica-lost/{starting.pk}/1")
    world.hear(first)
    world.hear(second)
    drain()

    assert unfinished("start_rank") == [first.name]
    assert run_of(START).state == RunState.WAITING


@pytest.mark.parametrize("nodes_per_replica", [1, 2])
def test_no_node_is_told_that_went_silent_after_it_was_chosen(
    world: World, nodes_per_replica: int
) -> None:
    all_free(world)
    replicas = 2 // nodes_per_replica
    begin(world, "wide", world_replicas=replicas, nodes_per_replica=nodes_per_replica)
    drain()
    world.silence_together(*Node.objects.filter(name__in=["node-0", "node-1"]))
    answer("start_coordinator", address="127.0.0.1:4001")
    drain()
    stops = unfinished("stop_process")
    answer("start_coordinator", address="127.0.0.1:4002")
    drain()

    assert len(stops) == 1  # of the first coordinator
    assert unfinished("start_rank") == ["spare-0", "spare-1"]


@pytest.mark.parametrize("nodes_per_replica", [1, 2])
def test_nodes_with_too_few_cards_are_not_chosen(world: World, nodes_per_replica: int) -> None:
    all_free(world)
    shape = {"world_replicas": 2 // nodes_per_replica, "nodes_per_replica": nodes_per_replica}
    begin(world, "wide", **shape, gpus_per_replica=2 * nodes_per_replica)
    GpuFactory(node=world.spares[1], index=1)
    drain()
    waiting = step_of(START, "choose-nodes").outcome
    GpuFactory(node=Node.objects.get(name="node-1"), index=1)
    drain()

    few = "3 more have fewer than the 2 cards it needs"
    assert waiting == f"1 of 2 nodes are free; {few}"
    assert "ranks on node-1, spare-1" in step_of(START, "choose-nodes").outcome


@pytest.mark.parametrize("how", ["failed", "refused"])
def test_nodes_that_do_not_start_their_ranks_are_named_to_a_person(starting: Job, how: str) -> None:
    answer("start_rank", how)
    drain()

    assert run_of(START).state == RunState.NEEDS_OPERATOR
    assert run_of(START).state_reason == "did not start their ranks: node-0 (no), node-1 (no)"


def test_a_start_that_a_node_refused_leaves_nothing_once_it_is_cancelled(starting: Job) -> None:
    first, second = nodes_of(starting)
    refused = Command.objects.get(verb="start_rank", node=first)
    no = wire.CommandResult(id=refused.pk, state="refused", at=time.time(), error="no")
    fleet.record_command_result(first.pk, no)
    answer("start_rank", pid=7)
    drain()
    incidents.cancel_run(SYSTEM, run_of(START).pk, "not today")

    assert places_of(starting) == []
    assert unfinished("stop_process") == [first.name, second.name]
    starting.refresh_from_db()
    assert incidents.may_be_started(starting)


def test_ranks_that_are_up_and_do_not_train_end_when_their_start_is_cancelled(
    world: World, starting: Job
) -> None:
    ranks = places_of(starting)
    answer("start_rank", pid=7)
    for rank in ranks:
        told_by(rank, client.Hello(pid=7, at=time.time()))
    incidents.cancel_run(SYSTEM, run_of(START).pk, "they hang")
    killed, nodes = unfinished("stop_process"), [rank.node for rank in ranks]
    held = {state(node)[0] for node in nodes}
    for rank in ranks:
        world.exits(rank, signal=9, requested=True)
    drain()

    assert killed == [node.name for node in nodes]
    assert held == {NodeState.ALLOCATED}  # their cards may be in use still
    assert {state(node)[0] for node in nodes} == {NodeState.AVAILABLE}
    starting.refresh_from_db()
    assert incidents.may_be_started(starting)


def test_what_trains_already_stays_when_its_start_is_cancelled(world: World, starting: Job) -> None:
    first, second = places_of(starting)
    answer("start_rank", pid=7)
    world.join(first)
    incidents.cancel_run(SYSTEM, run_of(START).pk, "not today")

    assert places_of(starting) == [first]
    assert unfinished("stop_process") == [second.node.name]


@pytest.mark.parametrize("nodes_per_replica", [1, 2])
def test_a_start_whose_nodes_another_took_leaves_no_coordinator(
    world: World, nodes_per_replica: int
) -> None:
    all_free(world)
    shape: dict[str, Any] = {
        "world_replicas": 2 // nodes_per_replica,
        "nodes_per_replica": nodes_per_replica,
    }
    first, second = begin(world, "first", **shape), begin(world, "second", **shape)
    drain()
    answer("start_coordinator", address="127.0.0.1:4001")
    began = {one.job: one.placement for one in coordinators()}
    drain()
    stops = commands("stop_process")
    answer("start_coordinator", address="127.0.0.1:4002")
    drain()

    names = [{one.node.name for one in places_of(job)} for job in (first, second)]
    assert sorted(map(sorted, names)) == [["node-0", "node-1"], ["spare-0", "spare-1"]]
    late = Placement.objects.filter(node__name="spare-0").latest("created_at").replica.job
    assert stops == [wire.StopProcess(placement=began[late.pk])]
    late.refresh_from_db()
    assert late.coordinator_placement == coordinators()[-1].placement


def _put_on_hold(job: Job, node: Node) -> None:
    fleet.set_hold(SYSTEM, node.pk, "hands off")


def _excluded(job: Job, node: Node) -> None:
    jobs.exclude_node(SYSTEM, job.pk, node.pk, "a slow link")


def _in_maintenance(job: Job, node: Node) -> None:
    until = timezone.now() + timedelta(hours=1)
    fleet.open_maintenance(
        SYSTEM, job.cluster_id, node_id=node.pk, starts_at=timezone.now(), ends_at=until, reason="x"
    )


@pytest.mark.parametrize("keep", [_put_on_hold, _excluded, _in_maintenance])
def test_a_node_that_is_kept_from_work_after_it_was_chosen_is_given_none(
    world: World, keep: Callable[[Job, Node], None]
) -> None:
    all_free(world)
    job = begin(world, "wide")
    drain()
    chosen = Node.objects.get(pk=run_of(START).context["nodes"][0])
    keep(job, chosen)
    for _ in range(2):
        answer("start_coordinator", address="127.0.0.1:4001")
        drain()

    assert chosen.name not in unfinished("start_rank")
    assert len(unfinished("start_rank")) == 2


def test_a_spare_that_is_reserved_for_another_after_it_was_chosen_stays_so(world: World) -> None:
    all_free(world)
    begin(world, "wide", world_replicas=4)
    drain()
    kept = jobs.reserve_spare(SYSTEM, world.cluster.pk, holder="slurm", ttl_s=900, reason="mine")
    answer("start_coordinator", address="127.0.0.1:4001")
    drain()

    kept.refresh_from_db()
    assert kept.released_at is None
    assert unfinished("start_rank") == []


def test_a_coordinator_that_ranks_know_is_kept_when_the_node_of_another_was_taken(
    world: World, starting: Job
) -> None:
    first, second = nodes_of(starting)
    up, lost = places_of(starting)
    world.silence_together(first, second)
    unanswered()
    world.join(up)
    jobs.end_placement(SYSTEM, lost.pk, "lost", free_node=True)
    PlacementFactory(node=second)
    Node.objects.filter(pk=second.pk).update(state=NodeState.ALLOCATED)
    world.hear(first)
    world.hear(second)
    drain()

    (known,) = coordinators()
    starting.refresh_from_db()
    assert starting.coordinator_placement == known.placement
    assert unfinished("start_rank") == ["spare-1"]


def begun_and_stopped(world: World, nodes_per_replica: int) -> Job:
    """A job on two nodes that was over before its ranks were started."""
    all_free(world)
    replicas = 2 // nodes_per_replica
    job = begin(world, "wide", world_replicas=replicas, nodes_per_replica=nodes_per_replica)
    drain()
    answer("start_coordinator", address="127.0.0.1:4001")
    Job.objects.filter(pk=job.pk).update(state=JobState.STOPPED)
    drain()
    return job


@pytest.mark.parametrize("nodes_per_replica", [1, 2])
def test_a_job_that_is_over_is_not_begun_anew_for_a_start_that_came_too_late(
    world: World, monkeypatch: pytest.MonkeyPatch, nodes_per_replica: int
) -> None:
    monkeypatch.setattr(jobs, "check_active", lambda job: None)  # it was not over yet
    job = begun_and_stopped(world, nodes_per_replica)

    job.refresh_from_db()
    assert job.state == JobState.STOPPED
    assert places_of(job) == []


@pytest.mark.parametrize("nodes_per_replica", [1, 2])
def test_a_start_of_a_job_that_is_over_waits_to_be_called_off(
    world: World, nodes_per_replica: int
) -> None:
    begun_and_stopped(world, nodes_per_replica)

    assert run_of(START).state == RunState.WAITING
    assert step_of(START, "start-ranks").outcome == "wide is stopped; nothing of it is started"


def test_a_coordinator_of_which_nobody_knows_whether_it_started_is_ended(world: World) -> None:
    all_free(world)
    begin(world, "wide")
    drain()
    unanswered()

    first, second = coordinators()
    assert commands("stop_process") == [wire.StopProcess(placement=first.placement)]
    assert first.placement != second.placement


def test_a_coordinator_that_failed_to_start_is_ended(world: World) -> None:
    """It may have come up after its agent gave up on it."""
    all_free(world)
    begin(world, "wide")
    drain()
    answer("start_coordinator", "failed")
    drain()

    assert commands("stop_process") == [wire.StopProcess(placement=coordinators()[0].placement)]


def test_a_node_that_does_not_start_the_coordinator_is_passed_over(world: World) -> None:
    all_free(world)
    begin(world, "wide", world_replicas=1)
    drain()
    answer("start_coordinator", "failed")
    drain()
    answer("start_coordinator", address="127.0.0.1:4001")
    drain()

    told = Command.objects.filter(verb="start_coordinator").order_by("created_at")
    assert [one.node.name for one in told] == ["node-1", "node-0"]
    assert unfinished("start_rank") == ["node-0"]


def test_a_start_that_has_passed_over_the_nodes_it_needs_says_so(poor_world: World) -> None:
    all_free(poor_world)
    begin(poor_world, "wide")
    drain()
    answer("start_coordinator", "failed")
    drain()

    said = step_of(START, "choose-nodes").outcome
    assert said == "1 of 2 nodes are free; passed over, for they did not start their part: node-0"


def test_a_node_that_was_silent_when_it_was_to_start_the_coordinator_is_not_passed_over(
    world: World,
) -> None:
    all_free(world)
    begin(world, "wide", world_replicas=1)
    drain()
    node = Node.objects.get(name="node-1")
    world.silence(node)
    fleet.expire_commands(timezone.now() + timedelta(hours=1))
    world.hear(node)
    drain()

    assert unfinished("start_coordinator") == ["node-1"]


def test_nor_is_it_where_that_it_failed_is_heard_once_its_order_was_over(world: World) -> None:
    all_free(world)
    begin(world, "wide", world_replicas=1)
    drain()
    node = Node.objects.get(name="node-1")
    world.silence(node)
    order = Command.objects.get(verb="start_coordinator")
    fleet.expire_commands(timezone.now() + timedelta(hours=1))
    at = (order.expires_at + timedelta(seconds=5)).timestamp()
    failed = wire.CommandResult(id=order.pk, state="failed", at=at, error="its folder hangs")
    fleet.record_command_result(node.pk, failed)
    world.hear(node)
    drain()

    assert unfinished("start_coordinator") == ["node-1"]


def test_a_silent_node_is_told_for_long_to_end_a_coordinator_that_nobody_knows(
    world: World,
) -> None:
    all_free(world)
    begin(world, "wide")
    drain()
    unanswered()
    unanswered()  # an hour

    stop = Command.objects.get(verb="stop_process", payload__contains=coordinators()[0].placement)
    assert stop.state == CommandState.QUEUED


def test_silent_nodes_are_told_for_long_to_end_what_was_started_in_a_run_that_is_cancelled(
    world: World, starting: Job
) -> None:
    incidents.cancel_run(SYSTEM, run_of(START).pk, "not today")
    unanswered()

    stops = Command.objects.filter(verb="stop_process", requester__contains=".cancel.")
    assert stops.count() == Command.objects.filter(verb="start_rank").count() > 0
    assert {stop.state for stop in stops} == {CommandState.QUEUED}


def coordinators() -> list[wire.StartCoordinator]:
    """Those that nodes were told to start, in turn."""
    payloads = Command.objects.filter(verb="start_coordinator").order_by("created_at")
    decode = msgspec.json.Decoder(wire.Command).decode
    orders = [decode(one).action for one in payloads.values_list("payload", flat=True)]
    return [one for one in orders if isinstance(one, wire.StartCoordinator)]


def places_of(job: Job) -> list[Placement]:
    return [one for replica in job.replicas.all() for one in replica.alive]
