"""One of every kind of object under the API, in one cluster, for tests of all routes."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.db.models import Model
from django.test import Client
from django.utils import timezone

from controlplane.accounts.actions import create_token
from controlplane.accounts.choices import Role
from controlplane.accounts.models import SYSTEM, User
from controlplane.fleet.models import Cluster, MaintenanceWindow
from controlplane.incidents.models import Approval, Breaker, Playbook, RmaCase
from controlplane.incidents.plans import NODE_ORDERS
from controlplane.jobs.models import NodeExclusion, SpareReservation
from tests import factories as make


@dataclass
class World:
    """`objects` holds one row for each list of the API, by its name in the address."""

    cluster: Cluster
    objects: dict[str, Model] = field(default_factory=dict)

    def path(self, name: str) -> str:
        return f"/api/v1/{name}/{self.objects[name].pk}"

    def caller(self, role: str) -> Caller:
        return _caller(Role(role), self.cluster)


class Caller(Client):
    """A signed-in person who speaks JSON; `user` is who it is."""

    user: User

    def order(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> Any:
        """POST a body; a header is named as `if_match`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.post(path, body or {}, content_type="application/json", headers=named)


def a_stranger() -> Caller:
    """An admin of another cluster."""
    return _caller(Role.ADMIN, make.ClusterFactory())


def _caller(role: Role, cluster: Cluster) -> Caller:
    caller = Caller()
    caller.user = make.GrantFactory(role=role, cluster=cluster).user
    caller.force_login(caller.user)
    return caller


def one_of_each() -> World:
    """A cluster in which every list has at least one row."""
    world = World(make.ClusterFactory())
    for name in ROWS:
        world.objects[name] = ROWS[name](world.cluster)
    playbooks()
    return world


def playbooks() -> None:
    """What the keeper publishes of the workers' playbooks, as far as orders need it."""
    step = {"key": "do", "title": "Do it", "disruptive": True, "does": ["power-cycle {node}"]}
    names = {*NODE_ORDERS.values(), "repair-node", "replica-lost", "move-replica"}
    Playbook.objects.bulk_create(
        [
            Playbook(name=name, version=1, summary="Does it", deadline_s=60, steps=[step])
            for name in sorted(names)
        ],
        ignore_conflicts=True,
    )


def _node(cluster: Cluster, **fields: Any) -> Any:
    node = make.NodeFactory(cluster=cluster, rack=make.RackFactory(cluster=cluster), **fields)
    make.GpuFactory(node=node, index=0)
    return node


def _spare_reservation(cluster: Cluster) -> SpareReservation:
    return SpareReservation.objects.create(
        cluster=cluster,
        node=_node(cluster, spare=True),
        holder="slurm",
        reason="for a test",
        expires_at=timezone.now() + timedelta(hours=1),
    )


def _window(cluster: Cluster) -> MaintenanceWindow:
    now = timezone.now()
    return MaintenanceWindow.objects.create(
        cluster=cluster,
        node=_node(cluster),
        starts_at=now - timedelta(hours=1),
        ends_at=now + timedelta(hours=1),
        owner="1",
        reason="cables",
    )


def _replica(cluster: Cluster) -> Any:
    placement = make.PlacementFactory(replica__job__cluster=cluster)
    return placement.replica


def _run(cluster: Cluster, **fields: Any) -> Any:
    return make.PlaybookRunFactory(incident__cluster=cluster, **fields)


def _decision(cluster: Cluster) -> Any:
    return make.PlaybookStepFactory(
        run=_run(cluster), state="done", outcome="done so", finished_at=timezone.now()
    )


def _approval(cluster: Cluster) -> Approval:
    return Approval.objects.create(
        cluster=cluster, run=_run(cluster), plan={"steps": []}, digest="d1"
    )


def _rma_case(cluster: Cluster) -> RmaCase:
    node = _node(cluster)
    card = make.GpuFactory(node=node, index=1)
    return RmaCase.objects.create(cluster=cluster, gpu=card, node=node, reason="again")


def _playbook(_cluster: Cluster) -> Playbook:
    count = Playbook.objects.count()
    return make.PlaybookFactory(name=f"playbook-{count}")


#: How to make one row of each list.
ROWS: dict[str, Any] = {
    "clusters": lambda cluster: cluster,
    "racks": lambda cluster: make.RackFactory(cluster=cluster),
    "nodes": _node,
    "gpus": lambda cluster: make.GpuFactory(node=_node(cluster), index=1),
    "spares": lambda cluster: _node(cluster, spare=True),
    "spare-reservations": _spare_reservation,
    "repairs": lambda cluster: make.RepairRecordFactory(gpu__node=_node(cluster), gpu__index=1),
    "maintenance": _window,
    "jobs": lambda cluster: make.JobFactory(cluster=cluster),
    "replicas": _replica,
    "checkpoints": lambda cluster: make.CheckpointFactory(job__cluster=cluster),
    "exclusions": lambda cluster: NodeExclusion.objects.create(
        job=make.JobFactory(cluster=cluster), node=_node(cluster), reason="slow"
    ),
    "failures": lambda cluster: make.FailureFactory(node=_node(cluster)),
    "incidents": lambda cluster: make.IncidentFactory(
        cluster=cluster, node=_node(cluster), job=make.JobFactory(cluster=cluster)
    ),
    "runs": _run,
    "steps": lambda cluster: make.PlaybookStepFactory(run=_run(cluster)),
    "decisions": _decision,
    "approvals": _approval,
    "playbooks": _playbook,
    "breakers": lambda cluster: Breaker.objects.create(
        cluster=cluster, code=f"xid-{Breaker.objects.count()}", reason="a burst"
    ),
    "rma-cases": _rma_case,
    "audit": lambda cluster: make.AuditEventFactory(cluster=cluster),
}


def token_of(user: User, scope: Role = Role.ADMIN) -> str:
    """The text of a fresh token of this user."""
    _, text = create_token(SYSTEM, user, name="t", scope=scope, cluster_id=None, ttl_s=3600)
    return text
