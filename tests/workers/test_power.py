"""Who may switch a node's power: a worker that holds its step, for as long as the call may take."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db.models import F
from django.utils import timezone

from controlplane.accounts.models import SYSTEM, AuditEvent
from controlplane.errors import Conflict
from controlplane.fleet.models import Node
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import RunState, StepState
from controlplane.incidents.models import PlaybookRun, PlaybookStep
from tests.factories import PlaybookStepFactory
from tests.workers.world import World, drain, step_of
from workers import engine, losses, power

pytestmark = pytest.mark.django_db
LEASE_S = 60.0


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


@pytest.mark.parametrize("lingers", [0, 1, 3])
def test_a_node_that_is_to_be_power_cycled_is_off_before_it_is_switched_on(
    world: World, lingers: int
) -> None:
    node = world.spares[0]
    bmc = world.bmcs[node.pk]
    bmc.lingers = lingers
    incidents.repair_node(SYSTEM, node.pk, None, "x", gpu_uuid=world.card_of(node).pk)
    for _look in range(lingers + 1):  # nothing changes while it is going off
        drain(8)

    assert (bmc.state(), bmc.boots) == ("On", 2)
    assert bmc.orders == ["ForceOff", "On"]  # some refuse a second order while one is under way
    assert step_of("repair-node", "repair").outcome in ("restarted through its BMC", "switched on")
