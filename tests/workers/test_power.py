"""Who may switch a node's power: a worker that holds its step, for as long as the call may take."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F
from django.utils import timezone

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import SYSTEM, Actor, AuditEvent
from controlplane.errors import Conflict
from controlplane.fleet.choices import Rung
from controlplane.fleet.models import Command, Lease, Node
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import RunState, StepState
from controlplane.incidents.models import PlaybookRun, PlaybookStep
from controlplane.jobs.models import Placement
from tests.factories import PlaybookStepFactory
from tests.workers.bmc import Bmc
from tests.workers.world import World, drain, run_of, step_of
from workers import engine, losses, power
from workers.playbooks import node_steps
from workers.playbooks.base import Done, Outcome, StepContext, Wait

pytestmark = pytest.mark.django_db
LEASE_S = 60.0
PERSON = Actor(ActorKind.USER, "1")
#: Longer than a step may wait.
LONG = timedelta(hours=1)
#: More looks than anybody takes in a test.
MANY = 1000


@pytest.fixture
def step() -> PlaybookStep:
    """A step that its worker has just claimed."""
    lease_end = timezone.now() + timedelta(seconds=LEASE_S)
    return PlaybookStepFactory(state=StepState.RUNNING, lock_expires_at=lease_end)


def test_the_worker_that_holds_its_step_switches(world: World, step: PlaybookStep) -> None:
    node = Node.objects.get(pk=world.spares[0].pk)

    power.switch(node, "ForceOff", step)

    assert world.bmcs[node.pk].orders == ["ForceOff"]


@pytest.mark.parametrize(
    "meanwhile",
    [
        {"lock_token": "lck_of_another"},
        {"state": StepState.READY, "lock_token": ""},
        {"lock_expires_at": F("lock_expires_at") - timedelta(seconds=LEASE_S)},
        {"lock_expires_at": F("lock_expires_at") - timedelta(seconds=LEASE_S - power.TIMEOUT_S)},
    ],
    ids=["taken over", "released", "lease over", "lease too short"],
)
def test_a_worker_that_does_not_hold_its_step_any_more_switches_nothing(
    world: World, step: PlaybookStep, meanwhile: dict[str, Any]
) -> None:
    node = Node.objects.get(pk=world.spares[0].pk)
    PlaybookStep.objects.filter(pk=step.pk).update(**meanwhile)

    with pytest.raises(Conflict, match="stood still"):
        power.switch(node, "ForceOff", step)

    assert world.bmcs[node.pk].orders == []
    assert not AuditEvent.objects.filter(verb="node.power").exists()


def test_nothing_is_switched_for_a_run_that_was_stopped(world: World, step: PlaybookStep) -> None:
    node = Node.objects.get(pk=world.spares[0].pk)
    PlaybookRun.objects.filter(pk=step.run_id).update(state=RunState.PAUSED)

    with pytest.raises(Conflict, match="stood still"):
        power.switch(node, "ForceOff", step)

    assert world.bmcs[node.pk].orders == []


def test_a_step_that_was_released_while_its_worker_looked_is_looked_at_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker stands still between its look at the node and the order, longer than its lease."""
    may_run_on = losses.may_run_on
    lost = world.placements[1]

    def looks_slowly(node: Node) -> Any:
        monkeypatch.undo()
        engine.release_expired(timezone.now() + timedelta(hours=1))
        return may_run_on(node)

    world.silence(lost.node)
    world.peers_lose(lost)
    monkeypatch.setattr(losses, "may_run_on", looks_slowly)
    drain()

    quarantine = step_of("repair-node", "quarantine")
    assert (quarantine.state, quarantine.attempts) == (StepState.DONE, 2)
    assert world.bmcs[lost.node_id].orders.count("ForceOff") == 1


@pytest.mark.parametrize("meanwhile", ["On", "PoweringOff", "Paused"])
@pytest.mark.parametrize("lingers", [0, 1, 3])
def test_a_node_that_is_to_be_power_cycled_is_off_before_it_is_switched_on(
    world: World, lingers: int, meanwhile: str
) -> None:
    node = world.spares[0]
    bmc = world.bmcs[node.pk]
    bmc.lingers, bmc.meanwhile = lingers, meanwhile
    incidents.repair_node(SYSTEM, node.pk, None, "x", gpu_uuid=world.card_of(node).pk)
    for _look in range(lingers + 1):  # nothing changes while it is going off
        drain(8)

    assert (bmc.state(), bmc.boots) == ("On", 2)
    assert bmc.orders == ["ForceOff", "On"]  # some refuse a second order while one is under way
    assert step_of("repair-node", "repair").outcome in (
        f"{node.name} was restarted through its BMC",
        f"{node.name} was switched on",
    )


@pytest.mark.parametrize(
    ("says", "on_off"),
    [
        ("On", (True, False)),
        ("Off", (False, True)),
        ("PoweringOn", (False, False)),
        ("PoweringOff", (False, False)),
        ("Paused", (False, False)),
    ],
)
def test_a_node_is_off_only_where_its_bmc_says_just_that(
    world: World, says: str, on_off: tuple[bool, bool]
) -> None:
    node = Node.objects.get(pk=world.spares[0].pk)
    world.bmcs[node.pk].answers = {"PowerState": says}

    state = power.read(node)

    assert (state.on, state.off) == on_off


@pytest.mark.parametrize(
    ("answers", "named"),
    [({}, "None"), ({"PowerState": None}, "None"), ({"PowerState": "Asleep"}, "'Asleep'")],
)
def test_a_bmc_that_does_not_say_whether_its_node_is_on_has_told_nothing(
    world: World, answers: dict[str, object], named: str
) -> None:
    node = Node.objects.get(pk=world.spares[0].pk)
    world.bmcs[node.pk].answers = answers

    with pytest.raises(power.PowerError, match=f"names no power state: {named}"):
        power.read(node)


@pytest.mark.parametrize("body", [b"<html>Log in</html>", b"\xff", b"[]", b"null", b'"On"', b""])
def test_a_bmc_that_answers_no_json_object_has_told_nothing(world: World, body: bytes) -> None:
    node = Node.objects.get(pk=world.spares[0].pk)
    world.bmcs[node.pk].body = body

    with pytest.raises(power.PowerError, match="names no power state: None"):
        power.read(node)


@pytest.mark.parametrize(
    "oem", ["null", "[]", '{"Drydock": null}', '{"Drydock": {"BootId": null}}']
)
def test_a_bmc_that_names_no_boot_tells_of_the_power_all_the_same(world: World, oem: str) -> None:
    node = Node.objects.get(pk=world.spares[0].pk)
    world.bmcs[node.pk].body = f'{{"PowerState": "On", "Oem": {oem}}}'.encode()

    assert power.read(node) == power.Power(state="On", boot_id="")


def test_an_order_was_taken_whatever_its_bmc_answers_to_it(world: World) -> None:
    node = Node.objects.get(pk=world.spares[0].pk)
    world.bmcs[node.pk].body = b"OK"

    power.switch(node, "ForceOff", None)

    assert world.bmcs[node.pk].orders == ["ForceOff"]


@pytest.mark.parametrize(("heard", "orders"), [(0.5, []), (1.5, ["ForceOff"])])
def test_an_agent_that_was_not_heard_since_may_have_answered(
    world: World, heard: float, orders: list[str]
) -> None:
    """`heard`: how long after its order it was heard last, by the time that it has for that."""
    node = world.placements[1].node
    incidents.order_node(PERSON, node.pk, "quarantine", "because")
    drain()
    told = timezone.now() - LONG
    Command.objects.filter(verb="stop_process").update(created_at=told)
    last = told + heard * timedelta(seconds=node_steps.KILL_S)
    Lease.objects.filter(node=node).update(last_beat_at=last)
    look_once_more()

    assert world.bmcs[node.pk].orders == orders


def lose(world: World) -> Bmc:
    """A node falls silent and its replica's peers lost it; its controller."""
    lost = world.placements[1]
    world.silence(lost.node)
    world.peers_lose(lost)
    return world.bmcs[lost.node_id]


def look_once_more() -> None:
    """At the power of a node that is to be off: this step alone, and once."""
    PlaybookStep.objects.filter(key="quarantine").update(wake_at=timezone.now() - LONG)
    engine.take_step("test")


def emptied(world: World) -> bool:
    """Whether the lost replica may start elsewhere, and does."""
    started = Placement.objects.filter(replica=world.placements[1].replica, state="starting")
    return step_of("repair-node", "quarantine").state == StepState.DONE and started.exists()


def test_a_step_waits_for_a_bmc_that_answers_no_json_object(world: World) -> None:
    lose(world).body = b"<html>Log in</html>"
    drain()

    quarantine = step_of("repair-node", "quarantine")
    assert (quarantine.state, quarantine.attempts) == (StepState.WAITING, 1)
    assert not emptied(world)


@pytest.mark.parametrize("meanwhile", ["On", "PoweringOff", "PoweringOn", "Paused"])
def test_nothing_starts_elsewhere_before_the_node_is_off(world: World, meanwhile: str) -> None:
    bmc = lose(world)
    bmc.lingers, bmc.meanwhile = MANY, meanwhile
    drain()
    too_soon, orders = emptied(world), list(bmc.orders)
    bmc.lingers = 0
    drain()

    assert (too_soon, orders) == (False, ["ForceOff"])
    assert emptied(world)


@pytest.mark.parametrize("answers", [{}, {"PowerState": "Asleep"}])
def test_nothing_starts_elsewhere_while_nobody_knows_whether_the_node_is_off(
    world: World, answers: dict[str, object]
) -> None:
    lose(world).answers = answers
    drain()

    assert not emptied(world)
    assert "names no power state" in step_of("repair-node", "quarantine").outcome


def test_a_node_that_is_told_to_go_off_is_told_once(world: World) -> None:
    bmc = lose(world)
    bmc.lingers, bmc.strict = MANY, True
    drain()
    bmc.lingers = 0
    drain()

    assert bmc.orders[:2] == ["ForceOff", "On"]
    assert emptied(world)


def test_a_node_that_does_not_go_off_is_told_again_after_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bmc = lose(world)
    bmc.lingers = MANY
    drain()
    monkeypatch.setattr(node_steps, "GOES_OFF_S", 0.0)
    look_once_more()

    assert bmc.orders == ["ForceOff", "ForceOff"]


def test_a_node_that_was_told_by_a_clock_that_was_ahead_is_told_again(world: World) -> None:
    bmc = lose(world)
    bmc.lingers = MANY
    drain()
    run = run_of("repair-node")
    ahead = {**run.context, "told_off": time.time() + LONG.total_seconds()}
    PlaybookRun.objects.filter(pk=run.pk).update(context=ahead)
    look_once_more()

    assert bmc.orders == ["ForceOff", "ForceOff"]


def test_a_node_that_a_person_switched_off_by_hand_is_found_off(world: World) -> None:
    bmc = lose(world)
    bmc.broken = True
    drain()
    PlaybookStep.objects.filter(key="quarantine").update(started_at=timezone.now() - LONG)
    drain()
    run = run_of("repair-node")
    bmc.on = False
    bmc.orders.clear()
    incidents.resume_run(PERSON, run.pk, "switched off by hand")
    drain()

    assert run.state == RunState.NEEDS_OPERATOR
    assert "ForceOff" not in bmc.orders
    assert emptied(world)


@pytest.mark.parametrize(
    ("says", "orders", "expected"),
    [("Off", ["On"], Done), ("PoweringOff", [], Wait), ("PoweringOn", [], Wait), ("On", [], Done)],
)
def test_a_node_that_is_to_be_examined_is_switched_on_once_it_is_off(
    world: World, says: str, orders: list[str], expected: type[Outcome]
) -> None:
    node = world.spares[0]
    step = PlaybookStepFactory(
        run__node=node,
        run__context={"rung": Rung.FIELD_DIAGNOSTIC},
        state=StepState.RUNNING,
        lock_expires_at=timezone.now() + timedelta(seconds=LEASE_S),
    )
    world.bmcs[node.pk].answers = {"PowerState": says}

    outcome = node_steps.examine(StepContext(step))

    assert world.bmcs[node.pk].orders == orders
    assert type(outcome) is expected
