"""Enrolment: by a live join token, once; cards follow their UUID from node to node."""

from __future__ import annotations

import base64
import secrets
from typing import Any

import msgspec
import pytest

from controlplane.accounts.models import SYSTEM, AuditEvent
from controlplane.errors import Refused
from controlplane.fleet import actions
from controlplane.fleet.models import Cluster, Gpu, JoinToken, Node
from node_agent import wire
from tests.factories import ClusterFactory, RepairRecordFactory

pytestmark = pytest.mark.django_db


def card(index: int, uuid: str) -> wire.GpuInfo:
    return wire.GpuInfo(
        index=index, uuid=uuid, serial=uuid, model="H100", pci_address="0:0", memory_bytes=1
    )


def inventory(*cards: wire.GpuInfo) -> wire.Inventory:
    return wire.Inventory(gpus=list(cards), cpus=1, memory_bytes=1, kernel="k", driver_version="d")


def request(token: str, **changes: Any) -> wire.Enroll:
    fields: dict[str, Any] = {
        "join_token": token,
        "name": "node-1",
        "public_key": base64.b64encode(secrets.token_bytes(32)).decode(),
        "boot_id": "boot-1",
        "address": "127.0.0.1",
        "agent_version": "1",
        "inventory": inventory(card(0, "GPU-a"), card(1, "GPU-b")),
        "rack": "r1",
    }
    return wire.Enroll(**{**fields, **changes})


@pytest.fixture
def cluster() -> Cluster:
    made: Cluster = ClusterFactory()
    return made


def refused(message: wire.Enroll) -> Refused:
    nodes = Node.objects.count()
    with pytest.raises(Refused) as refusal:
        actions.enroll(message)
    assert Node.objects.count() == nodes
    return refusal.value


def test_a_join_token_lets_a_node_in_with_its_cards(cluster: Cluster) -> None:
    node = actions.enroll(request(actions.create_join_token(SYSTEM, cluster.pk)))
    assert node.cluster == cluster
    assert node.rack is not None
    assert set(node.gpus.values_list("uuid", flat=True)) == {"GPU-a", "GPU-b"}


def test_the_same_request_again_is_the_same_node_and_no_second_use(cluster: Cluster) -> None:
    message = request(actions.create_join_token(SYSTEM, cluster.pk))
    assert actions.enroll(message).pk == actions.enroll(message).pk
    assert JoinToken.objects.get().uses == 1


def moved(enrolled: wire.Enroll, **changes: Any) -> wire.Enroll:
    """The same node asks again, with another rack and address in its file."""
    return msgspec.structs.replace(enrolled, rack="r2", address="10.0.0.2", **changes)


def test_a_node_that_was_moved_is_known_by_a_fresh_token_where_it_is_now(cluster: Cluster) -> None:
    first = request(actions.create_join_token(SYSTEM, cluster.pk))
    node = actions.enroll(first)
    fresh = actions.create_join_token(SYSTEM, cluster.pk)

    assert actions.enroll(moved(first, join_token=fresh)).pk == node.pk

    node.refresh_from_db()
    event = AuditEvent.objects.get(verb="node.enroll_again")
    assert (str(node.rack), node.address) == ("r2", "10.0.0.2")
    assert event.before == {"rack": "r1", "address": "127.0.0.1"}
    assert (event.after["rack"], event.after["address"]) == ("r2", "10.0.0.2")


@pytest.mark.parametrize("code", ["token_used", "token_unknown"])
def test_where_a_node_is_nobody_says_who_only_knows_its_public_key(
    cluster: Cluster, code: str
) -> None:
    used = actions.create_join_token(SYSTEM, cluster.pk)
    others = actions.create_join_token(SYSTEM, ClusterFactory().pk)
    first = request(used)
    node = actions.enroll(first)

    refusal = refused(moved(first, join_token={"token_used": used, "token_unknown": others}[code]))

    node.refresh_from_db()
    assert (refusal.code, refusal.field) == (code, "join_token")
    assert (str(node.rack), node.address) == ("r1", "127.0.0.1")
    assert JoinToken.objects.filter(uses=1).count() == 1


def test_a_used_token_lets_no_second_node_in(cluster: Cluster) -> None:
    token = actions.create_join_token(SYSTEM, cluster.pk)
    actions.enroll(request(token))
    assert refused(request(token, name="node-2")).code == "token_used"


def test_a_revoked_token_lets_nobody_in(cluster: Cluster) -> None:
    token = actions.create_join_token(SYSTEM, cluster.pk)
    actions.revoke_join_token(SYSTEM, JoinToken.objects.get().pk, "leaked")
    assert refused(request(token)).code == "token_revoked"


def test_an_expired_token_lets_nobody_in(cluster: Cluster) -> None:
    token = actions.create_join_token(SYSTEM, cluster.pk, ttl_s=-1)
    assert refused(request(token)).code == "token_expired"


def test_an_unknown_token_lets_nobody_in() -> None:
    assert refused(request("ddk_guess")).field == "join_token"


def test_a_name_that_is_taken_is_refused_and_the_token_keeps_its_use(cluster: Cluster) -> None:
    token = actions.create_join_token(SYSTEM, cluster.pk, max_uses=2)
    actions.enroll(request(token))
    assert refused(request(token)).field == "name"
    assert JoinToken.objects.get().uses == 1


def test_a_cards_record_follows_the_card(cluster: Cluster) -> None:
    token = actions.create_join_token(SYSTEM, cluster.pk, max_uses=2)
    first = actions.enroll(request(token))
    second = actions.enroll(request(token, name="node-2", inventory=inventory()))
    RepairRecordFactory(gpu=Gpu.objects.get(uuid="GPU-a"), node=first)
    report = wire.Report(
        boot_id="b", at=1, digest="d", agent_version="1", inventory=inventory(card(0, "GPU-a"))
    )

    actions.record_report(second.pk, report)

    moved = Gpu.objects.get(uuid="GPU-a")
    assert moved.node == second
    assert moved.repairs.count() == 1


def test_a_sick_card_that_tells_only_its_uuid_stays_what_it_was(cluster: Cluster) -> None:
    node = actions.enroll(request(actions.create_join_token(SYSTEM, cluster.pk)))
    well = msgspec.structs.replace(card(0, "GPU-a"), serial="1324")
    sick = msgspec.structs.replace(well, serial="GPU-a", model="", memory_bytes=0, pci_address="")
    for told in (well, sick):
        report = wire.Report(
            boot_id="b", at=1, digest="d", agent_version="1", inventory=inventory(told)
        )
        actions.record_report(node.pk, report)

    found = Gpu.objects.get(uuid="GPU-a")
    assert (found.serial, found.model) == ("1324", "H100")
    assert (found.memory_bytes, found.pci_address) == (1, "0:0")


def test_cards_that_change_places_keep_their_identity(cluster: Cluster) -> None:
    node = actions.enroll(request(actions.create_join_token(SYSTEM, cluster.pk)))
    swapped = inventory(card(1, "GPU-a"), card(0, "GPU-b"))
    actions.record_report(
        node.pk,
        wire.Report(boot_id="b", at=1, digest="d", agent_version="1", inventory=swapped),
    )
    assert dict(node.gpus.values_list("index", "uuid")) == {0: "GPU-b", 1: "GPU-a"}
