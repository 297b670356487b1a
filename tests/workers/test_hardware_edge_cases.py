"""The fault loop where things come late, twice, together, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
from django.db import connection, transaction
from django.utils import timezone
from pytest_django import Settings

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import SYSTEM, Actor, AuditEvent
from controlplane.fleet import actions as fleet
from controlplane.fleet.changes import change
from controlplane.fleet.choices import NodeState, Rung
from controlplane.fleet.models import Cluster, Command, Lease, Node, RepairRecord
from controlplane.health.choices import Action, Urgency
from controlplane.health.models import Failure
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import IncidentState, Mode, RunState, StepState
from controlplane.incidents.models import (
    Approval,
    Breaker,
    Incident,
    PlaybookRun,
    PlaybookStep,
    Reservation,
)
from controlplane.jobs import actions as jobs
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import Checkpoint, Job, Placement
from node_agent import wire
from tests.controlplane.ingest.door import wait_until
from tests.factories import CheckpointFactory, FailureFactory, GpuFactory, ReplicaFactory
from tests.workers.moving import commands
from tests.workers.world import (
    World,
    answer,
    drain,
    pass_validation,
    reset_and_watched,
    run_of,
    saves_checkpoint,
    step_of,
)
from workers import engine, intake, power
from workers.playbooks import PLAYBOOKS

# Commits for real, so that other connections see it.
pytestmark = pytest.mark.django_db(transaction=True)
PERSON = Actor(ActorKind.USER, "1")
#: Two connections meet in milliseconds; where all is slow, in far more.
PATIENCE_S = 120.0
LOST = "[ 12.4] NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus."


def xid(code: int, bus: str = "1b") -> str:
    return f"[ 12.3] NVRM: Xid (PCI:0000:{bus}:00): {code}, pid=7, name=python3, x."


@pytest.fixture(autouse=True)
def catalogue(transactional_db: None) -> None:
    incidents.publish_playbooks([playbook.as_row() for playbook in PLAYBOOKS.values()])


def repair(world: World, node: Node, **fields: Any) -> PlaybookRun:
    told: dict[str, Any] = {"action": Action.REBOOT, "code": "xid-79", **fields}
    return incidents.repair_node(
        SYSTEM, node.pk, None, "its card", gpu_uuid=world.card_of(node).pk, **told
    )


def test_a_loss_that_is_told_after_the_order_was_carried_out_is_mended_too(world: World) -> None:
    lost = world.placements[1]
    incidents.order_node(PERSON, lost.node.pk, "drain", "because")
    drain()
    world.kill(lost, requested=True)
    answer("stop_process", stopped=True)
    drain()
    world.peers_lose(lost)
    drain()
    assert PlaybookRun.objects.filter(playbook="replica-lost").exists()


def test_what_only_people_can_do_hides_nothing_that_automation_has_to_do(world: World) -> None:
    node = world.spares[0]
    world.kernel_says(node, xid(54))
    drain()
    world.kernel_says(node, xid(79))
    drain()
    assert PlaybookRun.objects.filter(playbook="repair-node").exists()


@pytest.mark.parametrize("code", [54, 999])
def test_a_code_for_people_on_a_node_at_work_is_an_incident_without_a_playbook(
    world: World, code: int
) -> None:
    world.kernel_says(world.placements[1].node, xid(code))
    drain()
    assert Incident.objects.get().state != IncidentState.RESOLVED
    assert not PlaybookRun.objects.exists()


@pytest.mark.parametrize("ends", ["seen", "unseen"])
def test_a_node_that_only_people_can_mend_is_emptied_before_they_are_asked(
    world: World, ends: str
) -> None:
    lost = world.placements[1]
    told = {"seen": world.kill, "unseen": world.peers_lose}
    world.kernel_says(lost.node, xid(54))
    told[ends](lost)
    drain()
    answer("stop_process", stopped=True)
    drain()

    lost.node.refresh_from_db()
    run = run_of("repair-node")
    assert (lost.node.state, run.state) == (NodeState.QUARANTINED, RunState.NEEDS_OPERATOR)
    assert "only people can mend it (check seating and cables)" in run.state_reason
    assert world.placement_of(1).node == world.spares[0]
    assert not world.bmcs[lost.node_id].orders


def test_what_people_are_asked_about_an_emptied_node_is_decided_anew_when_it_is_tried_again(
    world: World,
) -> None:
    lost = world.placements[1]
    world.kernel_says(lost.node, xid(54))
    world.kill(lost)
    drain()
    incidents.retry_run(PERSON, run_of("repair-node").pk, "its cable is in")
    drain()

    lost.node.refresh_from_db()
    run = run_of("repair-node")
    assert (lost.node.state, run.state) == (NodeState.QUARANTINED, RunState.NEEDS_OPERATOR)
    assert step_of("repair-node", "decide").state == "needs_operator"


def test_what_can_wait_and_has_no_rung_left_takes_no_node_out(world: World) -> None:
    node = world.spares[0]
    for attempt in range(2):
        for rung in (Rung.RESET_GPU, Rung.REBOOT, Rung.POWER_CYCLE):
            fleet.record_repair(node.pk, rung, f"stp_{attempt}")
    incidents.repair_node(
        SYSTEM, node.pk, None, "its fabric", action=Action.RESET_GPU, urgency=Urgency.IDLE
    )
    drain()

    node.refresh_from_db()
    assert (node.state, run_of("repair-node").state) == ("available", RunState.NEEDS_OPERATOR)


def emptied_long_after_it_saved(world: World, settings: Settings) -> None:
    """A card of replica 1 drifts; its job saved a checkpoint ten minutes before the guards let its
    repair go."""
    settings.BUDGET_NODES_PER_CLUSTER = 0
    world.errors_accelerate(world.placements[1].node)
    drain()
    saves_checkpoint(world)
    drain()
    assert "out for repair" in step_of("repair-node", "quarantine").outcome
    run, ago = run_of("repair-node"), timezone.now() - timedelta(minutes=10)
    asked = (ago - timedelta(minutes=1)).isoformat()
    PlaybookRun.objects.filter(pk=run.pk).update(context={**run.context, "checkpoint_asked": asked})
    Checkpoint.objects.update(at=ago)
    settings.BUDGET_NODES_PER_CLUSTER = 2
    drain()


def test_a_job_that_saved_long_before_the_guards_let_go_saves_once_more(
    world: World, settings: Settings
) -> None:
    emptied_long_after_it_saved(world, settings)
    asked = world.job.directives.filter(verb="checkpoint").count()
    before = Command.objects.exists()
    CheckpointFactory(job=world.job, tier="local", at=timezone.now())
    drain()

    assert (asked, before) == (2, False)
    assert Command.objects.get().verb == "stop_process"


def test_a_job_that_does_not_save_once_more_is_waited_for_no_longer_than_allowed(
    world: World, settings: Settings
) -> None:
    emptied_long_after_it_saved(world, settings)
    settings.CHECKPOINT_WAIT_S = 0
    drain()

    assert Command.objects.get().verb == "stop_process"


def test_a_node_that_booted_anew_is_reset_validated_and_returned(world: World) -> None:
    lost = world.placements[1]
    world.exits(lost, reason="reboot")
    world.survivors_commit(lost)
    drain()
    reset_and_watched(world, lost.node)

    lost.node.refresh_from_db()
    assert (lost.node.state, lost.node.spare) == (NodeState.AVAILABLE, True)
    assert world.placement_of(1).node == world.spares[0]


def dies_of_its_card(world: World) -> Node:
    """The node of replica 1, whose process was seen to end."""
    lost = world.placements[1]
    world.kernel_says(lost.node, xid(79))
    world.kill(lost)
    drain()
    return lost.node


def went_on_and_left_suspect(world: World, node: Node) -> None:
    node.refresh_from_db()
    assert world.placement_of(1).node == world.spares[0]
    assert node.state == NodeState.SUSPECT


def test_a_replica_whose_process_was_seen_to_end_waits_for_no_repair_that_is_held_up(
    world: World,
) -> None:
    fleet.set_hold(PERSON, world.placements[1].node_id, "hands off")
    node = dies_of_its_card(world)

    assert "on hold" in step_of("repair-node", "quarantine").outcome
    assert not Command.objects.exclude(verb="start_rank").exists()
    went_on_and_left_suspect(world, node)


def test_an_unfit_node_whose_repair_is_called_off_once_its_replica_has_gone_takes_no_work(
    world: World,
) -> None:
    fleet.set_hold(PERSON, world.placements[1].node_id, "hands off")
    node = dies_of_its_card(world)
    incidents.cancel_run(PERSON, run_of("repair-node").pk, "I look myself")
    fleet.set_hold(PERSON, node.pk, "")
    drain()

    went_on_and_left_suspect(world, node)


def test_a_replica_whose_process_ended_waits_for_no_repair_that_is_only_shown(
    world: World,
) -> None:
    incidents.set_mode(PERSON, world.cluster.pk, "repair-node", Mode.DRY_RUN, "we look")
    node = dies_of_its_card(world)

    went_on_and_left_suspect(world, node)


def test_a_lesser_fault_does_not_take_the_headline(world: World) -> None:
    node = world.placements[1].node
    GpuFactory(node=node, index=1, pci_address="00000000:2B:00.0")
    world.kernel_says(node, xid(79), xid(31, "2b"))
    intake.triage_signals()
    assert Incident.objects.get().code == "xid-79"


def test_a_repair_that_waited_obeys_the_breaker_of_its_own_code(world: World) -> None:
    Breaker.objects.create(cluster=world.cluster, code="xid-94", reason="burst")
    node = world.spares[0]
    repair(world, node, action=Action.RESET_GPU, code="xid-94", urgency=Urgency.IDLE)
    drain()
    node.refresh_from_db()
    assert (node.state, run_of("repair-node").state) == (
        NodeState.AVAILABLE,
        RunState.NEEDS_OPERATOR,
    )


def test_a_signature_does_not_outlive_a_new_try(world: World) -> None:
    incidents.set_mode(PERSON, world.cluster.pk, "repair-node", Mode.APPROVE, "we look first")
    node = world.spares[0]
    run = repair(world, node, action=Action.RESET_GPU, code="xid-95")
    drain()
    approval = Approval.objects.get(state="waiting")
    incidents.approve(PERSON, approval.pk, approval.digest, "go")
    drain()
    answer("reset_gpus", state="failed")
    drain()
    incidents.pause_run(PERSON, run.pk, "look")
    incidents.retry_run(PERSON, run.pk, "go on")
    drain()
    assert not world.bmcs[node.pk].orders
    assert Approval.objects.filter(state="waiting").count() == 1


def lossy(*, answers_with_boot_id: bool) -> Any:
    """A management controller that does what it is told, and whose answer is lost."""
    real = power._call

    def call(node: Node, method: str, path: str, body: Any) -> dict[str, Any]:
        answered = real(node, method, path, body)
        if method == "POST":
            raise power.PowerError("no answer in time")
        return answered if answers_with_boot_id else {**answered, "Oem": {}}

    return patch.object(power, "_call", call)


@pytest.mark.parametrize("answers_with_boot_id", [True, False])
def test_a_restart_whose_answer_was_lost_is_not_done_twice(
    world: World, answers_with_boot_id: bool
) -> None:
    node = world.spares[0]
    repair(world, node)
    with lossy(answers_with_boot_id=answers_with_boot_id):
        drain()
    assert world.bmcs[node.pk].orders == ["ForceRestart"]


def test_a_restart_that_is_tried_again_after_its_time_is_done_once(world: World) -> None:
    node = world.spares[0]
    run = repair(world, node)
    with patch.object(power, "switch", side_effect=power.PowerError("away")):
        drain()
        long_ago = timezone.now() - timedelta(hours=1)
        PlaybookStep.objects.filter(key="repair").update(started_at=long_ago)
        drain()
    Node.objects.filter(pk=node.pk).update(state_deadline=timezone.now() - timedelta(seconds=1))
    fleet.fail_overdue_nodes(SYSTEM, timezone.now())
    incidents.retry_run(PERSON, run.pk, "its BMC is back")
    drain()
    assert world.bmcs[node.pk].orders == ["ForceRestart"]


def test_a_repair_that_becomes_a_dry_run_gives_its_share_back(world: World) -> None:
    repair(world, world.spares[0], action=Action.RESET_GPU, code="xid-95")
    engine.create_steps()
    engine.take_step("test")
    engine.take_step("test")
    incidents.set_mode(PERSON, world.cluster.pk, "repair-node", Mode.DRY_RUN, "wait")
    drain()
    assert not Reservation.objects.filter(released_at=None).exists()


def test_a_second_card_that_fails_meanwhile_is_reset_too(world: World) -> None:
    node = world.spares[0]
    GpuFactory(node=node, index=1, pci_address="00000000:2B:00.0")
    world.kernel_says(node, xid(95))
    drain()
    world.kernel_says(node, xid(95, "2b"))
    drain()
    assert '"uuids":[]' in Command.objects.get(verb="reset_gpus").payload  # all of them


def test_a_graver_fault_before_the_repair_decides_it_anew(world: World) -> None:
    node = world.placements[1].node
    world.kernel_says(node, xid(95))
    drain()
    world.kernel_says(node, xid(79))
    drain()
    answer("stop_process", stopped=True)
    drain()
    assert world.bmcs[node.pk].orders == ["ForceRestart"]
    assert not Command.objects.filter(verb="reset_gpus").exists()


def test_a_silent_node_of_a_job_that_ends_brings_nothing_back(world: World) -> None:
    jobs.request_stop(PERSON, world.job.pk, "enough")
    world.silence(world.placements[1].node)
    drain()
    assert not PlaybookRun.objects.filter(playbook="replica-lost").exists()


def test_a_card_whose_loss_was_named_late_is_known_the_second_time(world: World) -> None:
    node = world.spares[0]
    world.kernel_says(node, LOST, xid(79))
    drain()
    world.boot(node)
    drain()
    pass_validation()
    hour_ago = timezone.now() - timedelta(hours=1)
    Failure.objects.update(last_seen_at=hour_ago, observed_at=hour_ago)
    RepairRecord.objects.update(at=hour_ago + timedelta(minutes=10))
    world.kernel_says(node, LOST, xid(79))
    drain()
    node.refresh_from_db()
    assert node.state == NodeState.RMA


def test_a_silent_node_without_a_controller_asks_at_once(world: World) -> None:
    node = world.placements[1].node
    Node.objects.filter(pk=node.pk).update(bmc_url="")
    world.silence(node)
    world.peers_lose(world.placements[1])
    drain()
    assert run_of("repair-node").state == RunState.NEEDS_OPERATOR
    assert "no BMC on record" in run_of("repair-node").state_reason


# --- two at once ----------------------------------------------------------------------------------

Ended = list[tuple[str, str]]


def beside(deed: Callable[[], object], ended: Ended) -> threading.Thread:
    """Do it on another connection; `ended` takes how it went."""

    def run() -> None:
        try:
            deed()
            ended.append(("ok", ""))
        except Exception as error:
            ended.append((type(error).__name__, str(error)))
        finally:
            connection.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def finish(*threads: threading.Thread) -> None:
    """Wait for them: not for ever, since they may wait for a lock that this test holds."""
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [thread for thread in threads if thread.is_alive()] == []


def await_lock(count: int = 1) -> None:
    """Until so many other connections wait for a lock."""
    waiting = "SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted"
    with connection.cursor() as cursor:

        def enough() -> bool:
            cursor.execute(waiting)
            return bool(cursor.fetchone()[0] >= count)

        wait_until(enough, PATIENCE_S)


@contextmanager
def cluster_locked(world: World) -> Any:
    with transaction.atomic():
        Cluster.objects.select_for_update(no_key=True).get(pk=world.cluster.pk)
        yield


def triage_as_the_victim() -> None:
    """A wait is looked at once, so long after it began: until then the other must wait too."""
    with connection.cursor() as cursor:
        cursor.execute("SET deadlock_timeout = '5s'")
    intake.triage_signals()


def test_a_deadlock_loses_no_signal(world: World) -> None:
    for placement in world.placements[:2]:
        world.peers_lose(placement)
        intake.triage_signals()
        # What is lost together is one incident: these were not.
        Incident.objects.update(occurred_at=timezone.now() - timedelta(minutes=5))
    for placement in world.placements[:2]:
        world.peers_lose(placement)
    first, second = (Incident.objects.get(replica=index) for index in (0, 1))
    ended: Ended = []
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL deadlock_timeout = '60s'")
        Incident.objects.select_for_update(no_key=True, of=("self",)).get(pk=second.pk)
        thread = beside(triage_as_the_victim, ended)
        await_lock()
        Incident.objects.select_for_update(no_key=True, of=("self",)).get(pk=first.pk)
    finish(thread)
    drain()
    told = [one.timeline.filter(kind="signal").count() for one in (first, second)]
    assert (told, intake.untriaged().count()) == ([2, 2], 0)


def test_what_ends_while_its_run_is_being_called_off_is_brought_back(world: World) -> None:
    """Who calls it off has not seen it end, and who hears of its end sees the run still there."""
    world.placements[1].replica.delete()
    Job.objects.update(world_replicas=1)
    killed = world.placements[0]
    run = incidents.order_node(PERSON, killed.node_id, "quarantine", "because")
    drain()
    fleet.take_commands([killed.node_id])
    ended: Ended = []
    with transaction.atomic():
        incidents.call_off(PERSON, run.pk, "another time")
        finish(beside(lambda: world.exits(killed, signal=9, requested=True), ended))
        thread = beside(intake.triage_signals, ended)
        await_lock()
    finish(thread)
    drain()

    assert [how for how, _ in ended] == ["ok", "ok"], ended
    assert run_of("replica-lost").context["lost_placement"] == killed.pk


def test_a_breaker_that_two_open_at_once_is_opened_once(world: World, settings: Settings) -> None:
    settings.BREAKER_NODES = 1
    FailureFactory(node=world.spares[0], code="xid-79")
    found: list[Breaker | None] = []

    def open_it() -> None:
        found.append(incidents.open_breaker_on_burst(world.cluster.pk, "xid-79"))

    ended: Ended = []
    with change():
        open_it()
        other = beside(open_it, ended)
        await_lock()
    finish(other)

    breaker = Breaker.objects.get()
    assert (found, ended) == ([breaker, breaker], [("ok", "")])
    audited = AuditEvent.objects.filter(verb="breaker.open")
    assert list(audited.values_list("object_id", flat=True)) == [breaker.pk]


def waiting_run(world: World) -> PlaybookRun:
    incidents.set_mode(PERSON, world.cluster.pk, "repair-node", Mode.APPROVE, "we look first")
    run = repair(world, world.spares[0], action=Action.RESET_GPU, code="xid-95")
    drain()
    PlaybookStep.objects.filter(state="waiting").update(wake_at=timezone.now())
    return run


def test_a_person_and_a_worker_do_not_lock_each_other_out(world: World) -> None:
    waiting_run(world)
    approval = Approval.objects.get(state="waiting")
    ended: Ended = []
    with cluster_locked(world):
        worker = beside(lambda: engine.claim("worker"), ended)
        await_lock()
        person = beside(lambda: incidents.reject(PERSON, approval.pk, "no"), ended)
        await_lock(2)
    finish(worker, person)
    assert [how for how, _ in ended] == ["ok", "ok"], ended


def test_a_pause_is_not_undone_by_a_worker_that_was_about_to_look(world: World) -> None:
    run = waiting_run(world)
    ended: Ended = []
    with cluster_locked(world):
        worker = beside(lambda: engine.claim("worker"), ended)
        await_lock()
        person = beside(lambda: incidents.pause_run(PERSON, run.pk, "stop"), ended)
        await_lock(2)
    finish(worker, person)
    run.refresh_from_db()
    assert (run.state, [how for how, _ in ended]) == (RunState.PAUSED, ["ok", "ok"])


def about_to_quarantine(world: World, node: Node) -> PlaybookStep:
    """The step of a repair that quarantines its node next, which holds nothing."""
    run = repair(world, node, action=Action.RESET_GPU, code="xid-95")
    engine.create_steps()
    engine.take_step("test")
    return run.steps.get(key="quarantine", state=StepState.READY)


def place_another(world: World, node: Node) -> Placement:
    """One more replica of the job is given this node."""
    replica = ReplicaFactory(job=world.job, index=2)
    return jobs.place(SYSTEM, replica.pk, node.pk, placement_id="plc_late")


def test_what_is_placed_on_a_node_in_the_moment_that_it_is_taken_out_is_killed_first(
    world: World,
) -> None:
    node = world.spares[0]
    step = about_to_quarantine(world, node)
    ended: Ended = []
    with change():
        late = place_another(world, node)
        worker = beside(lambda: engine.take_step("worker"), ended)
        await_lock()
    finish(worker)
    node.refresh_from_db()
    still = node.state
    drain()
    told = commands("stop_process")
    answer("stop_process", stopped=True)
    drain()

    assert (still, [how for how, _ in ended]) == (NodeState.ALLOCATED, ["ok"])
    assert told == [wire.StopProcess(placement=late.pk, grace_s=0)]
    late.refresh_from_db()
    step.refresh_from_db()
    assert (late.state, step.state) == (PlacementState.ENDED, StepState.DONE)


def test_what_returns_to_its_node_in_the_moment_that_its_power_was_cut_is_brought_back(
    world: World,
) -> None:
    lost = world.placements[1]
    jobs.end_placement(SYSTEM, lost.pk, "its process ended", free_node=False)
    about_to_quarantine(world, lost.node)
    Lease.objects.filter(pk=lost.node_id).update(reachable=False)
    ended: Ended = []
    with change():
        late = jobs.place(SYSTEM, lost.replica_id, lost.node_id, placement_id="plc_late")
        worker = beside(lambda: engine.take_step("worker"), ended)
        await_lock()
    finish(worker)
    drain()

    late.refresh_from_db()
    assert late.state == PlacementState.ENDED
    assert run_of("replica-lost").context["lost_placement"] == late.pk


def test_what_runs_on_a_node_that_is_out_already_is_killed_before_anything_is_done_to_it(
    world: World,
) -> None:
    node = world.spares[0]
    about_to_quarantine(world, node)
    late = place_another(world, node)
    fleet.transition(SYSTEM, node.pk, NodeState.QUARANTINED, reason="by hand")
    drain()
    told = commands("stop_process")
    reset = Command.objects.filter(verb="reset_gpus")
    early = reset.exists()
    answer("stop_process", stopped=True)
    drain()

    late.refresh_from_db()
    assert told == [wire.StopProcess(placement=late.pk, grace_s=0)]
    assert (late.state, early, reset.count()) == (PlacementState.ENDED, False, 1)
