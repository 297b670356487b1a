"""After a repair: whose fault it is that a node is not validated, and what is whole."""

from __future__ import annotations

from typing import Any

import pytest
from pytest_django import Settings

from controlplane.accounts.models import SYSTEM
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Command, Gpu, Node
from controlplane.health.models import Failure
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import (
    StepState,
)
from controlplane.incidents.models import RmaCase
from tests.factories import (
    GpuFactory,
)
from tests.workers.world import (
    HEALTHY,
    XID_79,
    World,
    answer,
    come_back,
    comes_back_twice,
    drain,
    never_comes_back,
    pass_validation,
    soaked,
    step_of,
)

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    "output",
    [
        {"tests": [{"name": "disk", "outcome": "failed", "detail": "/checkpoints: No space left"}]},
        {"tests": [{"name": "kernel_log", "outcome": "skipped", "detail": "cannot be read"}]},
        {"tests": []},
    ],
)
def test_no_card_goes_back_for_what_its_host_lacks(world: World, output: dict[str, Any]) -> None:
    node = world.spares[0]
    world.kernel_says(node, XID_79)
    comes_back_twice(world, node, **output)

    node.refresh_from_db()
    step = step_of("repair-node", "validate")
    assert world.bmcs[node.pk].orders == ["ForceRestart", "ForceOff", "On"]
    assert (step.state, node.state) == (StepState.NEEDS_OPERATOR, NodeState.VALIDATION_FAILED)
    assert not RmaCase.objects.exists()

    incidents.retry_run(SYSTEM, step.run_id, "the disk has room again")
    come_back(world, node)
    assert node.state == NodeState.AVAILABLE


def test_no_card_goes_back_for_what_another_one_has(world: World) -> None:
    node = world.spares[0]
    GpuFactory(node=node, index=1, pci_address="00000000:2B:00.0")
    world.kernel_says(node, XID_79)
    drain()
    world.boot(node)
    drain()
    detail = "1 lines on 0000:2b:00, first: NVRM: Xid (PCI:0000:2b:00): 48, ..."
    answer("diagnose", tests=[{"name": "kernel_log", "outcome": "failed", "detail": detail}])
    drain()

    assert step_of("repair-node", "validate").state == StepState.NEEDS_OPERATOR
    assert world.bmcs[node.pk].orders == ["ForceRestart"]
    assert not RmaCase.objects.exists()


def test_a_card_that_is_gone_is_blamed_though_its_peer_complains(world: World) -> None:
    node = world.spares[0]
    card = world.card_of(node)
    GpuFactory(node=node, index=1, pci_address="00000000:2B:00.0")
    world.kernel_says(node, XID_79)
    drain()
    world.boot(node)
    Gpu.objects.filter(pk=card.pk).update(node=None, index=None)
    drain()
    detail = "2 lines on 0000:1b:00, 0000:2b:00, first: NVRM: ..."
    answer("diagnose", tests=[{"name": "kernel_log", "outcome": "failed", "detail": detail}])
    drain()

    assert world.bmcs[node.pk].orders == ["ForceRestart", "ForceOff", "On"]


def test_cards_that_go_together_are_not_each_to_blame(world: World) -> None:
    node = world.spares[0]
    GpuFactory(node=node, index=1, pci_address="00000000:2B:00.0")
    world.kernel_says(node, XID_79)
    for _ in range(2):  # after the reboot, and after the power cycle
        drain()
        world.boot(node)
        Gpu.objects.filter(node=node).update(node=None, index=None)
        drain()
        answer("diagnose", **HEALTHY)
    drain()

    assert step_of("repair-node", "validate").state == StepState.NEEDS_OPERATOR
    assert not RmaCase.objects.exists()


def test_a_node_is_not_judged_by_what_it_listed_before_it_booted(world: World) -> None:
    node = world.spares[0]
    Node.objects.filter(pk=node.pk).update(report={"boot_id": node.boot_id})
    world.kernel_says(node, XID_79)
    drain()
    world.boot(node)
    drain()
    assert not Command.objects.filter(verb="diagnose").exists()
    node.refresh_from_db()
    Node.objects.filter(pk=node.pk).update(report={"boot_id": node.boot_id})
    drain()
    assert Command.objects.filter(verb="diagnose").exists()


def watched(world: World, node: Node) -> None:
    """It has failed, was restarted, and has passed its diagnostic."""
    world.kernel_says(node, XID_79)
    drain()
    world.boot(node)
    drain()
    answer("diagnose", **HEALTHY)
    drain()
    node.refresh_from_db()


def loses_a_card_while_watched(world: World, settings: Settings) -> tuple[Node, Gpu]:
    settings.SOAK_S = 600
    node = world.spares[0]
    card = world.card_of(node)
    watched(world, node)
    Gpu.objects.filter(pk=card.pk).update(node=None, index=None)
    soaked()
    drain()
    return node, card


def test_a_card_that_goes_while_the_node_is_watched_keeps_it_out(
    world: World, settings: Settings
) -> None:
    node, _card = loses_a_card_while_watched(world, settings)

    node.refresh_from_db()
    assert step_of("repair-node", "return").state == StepState.NEEDS_OPERATOR
    assert (node.state, node.state_deadline) == (NodeState.VALIDATION_FAILED, None)


def test_a_node_whose_card_was_put_back_is_tested_again(world: World, settings: Settings) -> None:
    node, card = loses_a_card_while_watched(world, settings)
    Gpu.objects.filter(pk=card.pk).update(node=node, index=0)
    incidents.retry_run(SYSTEM, step_of("repair-node", "return").run_id, "it sits well now")
    drain()
    node.refresh_from_db()
    before = (node.state, Command.objects.filter(verb="diagnose").count())
    pass_validation()
    node.refresh_from_db()

    assert before == (NodeState.VALIDATING, 2)
    assert node.state == NodeState.AVAILABLE


def test_what_can_wait_and_was_shown_while_the_node_was_watched_is_acted_on_once_it_is_back(
    world: World, settings: Settings
) -> None:
    settings.SOAK_S = 600
    node = world.spares[0]
    watched(world, node)
    world.shows(node, "pcie_lanes", 8.0)
    drain()
    assert not Failure.objects.get(code="pcie-downgrade").incidents.exists()
    soaked()
    drain()

    node.refresh_from_db()
    assert node.state == NodeState.AVAILABLE
    assert Failure.objects.get(code="pcie-downgrade").incidents.get().unresolved


def test_a_remap_that_is_pending_on_the_way_back_is_reset_for(
    world: World, settings: Settings
) -> None:
    settings.SOAK_S = 600
    node = world.spares[0]
    watched(world, node)
    world.shows(node, "remap_pending")
    soaked()
    drain()

    assert Command.objects.filter(verb="reset_gpus", node=node).count() == 1


def test_what_was_shown_before_the_node_booted_is_over(world: World, settings: Settings) -> None:
    settings.SOAK_S = 600
    node = world.spares[0]
    world.kernel_says(node, XID_79)
    drain()
    world.shows(node, "pcie_lanes", 8.0)
    drain()
    come_back(world, node)
    drain()

    assert node.state == NodeState.AVAILABLE
    assert not Failure.objects.get(code="pcie-downgrade").incidents.exists()


def test_a_node_that_comes_back_late_goes_on_once_a_person_says_so(world: World) -> None:
    node = world.spares[0]
    world.kernel_says(node, XID_79)
    never_comes_back(node)
    step = step_of("repair-node", "await-boot")
    assert step.state == StepState.NEEDS_OPERATOR

    incidents.retry_run(SYSTEM, step.run_id, "its cable is back")
    come_back(world, node)
    assert node.state == NodeState.AVAILABLE


def test_a_node_that_lists_a_card_less_is_not_whole(world: World) -> None:
    """Its diagnostic passes on all that the driver still lists."""
    node = world.spares[0]
    card = world.card_of(node)
    GpuFactory(node=node, index=1, pci_address="00000000:2B:00.0")
    world.kernel_says(node, XID_79)
    for _ in range(2):  # after the reboot, and after the power cycle
        drain()
        world.boot(node)
        Gpu.objects.filter(pk=card.pk).update(node=None, index=None)
        drain()
        answer("diagnose", **HEALTHY)
    drain()

    node.refresh_from_db()
    case = RmaCase.objects.get()
    assert (node.state, case.gpu) == (NodeState.RMA, card)
    assert f"card {card.serial} is no longer listed" in case.reason
    assert incidents.readmit_replaced() == 0
