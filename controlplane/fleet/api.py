"""The API's clusters, racks, nodes, cards, spares, repairs and maintenance windows.

What automation does to nodes and clusters is added by `incidents.api`, which comes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from django.db.models import Prefetch, Q, QuerySet
from django.utils import timezone

from controlplane.accounts.access import Access
from controlplane.accounts.models import Actor
from controlplane.fleet import actions, selectors
from controlplane.fleet.choices import NodeState, Rung
from controlplane.fleet.models import Cluster, Gpu, MaintenanceWindow, Node, Rack, RepairRecord
from controlplane.fleet.serializers import (
    ClusterDetailSerializer,
    ClusterSerializer,
    GpuSerializer,
    MaintenanceSerializer,
    NewWindow,
    NodeDetailSerializer,
    NodeSerializer,
    RackSerializer,
    RepairSerializer,
)
from controlplane.rest.filters import Exact, Flag, Reference, Search, Times
from controlplane.rest.resource import Resource
from controlplane.rest.verbs import verb

IN_CLUSTER = Reference("cluster", id_prefix="clu_")
OF_NODE = Reference("node", id_prefix="nod_")


class Clusters(Resource):
    noun, plural = "cluster", "clusters"
    queryset = Cluster.objects.none()
    serializer_class = ClusterSerializer
    detail_serializer_class = ClusterDetailSerializer
    filters = (Exact("name"), Search(["name"]))
    sorts = {"name": "name", "id": "pk"}
    default_sort = "name"
    cluster_path = "pk"
    volatile = ("change_seq",)

    def rows(self) -> QuerySet[Cluster]:
        return selectors.clusters_for(self.request.user)


class Racks(Resource):
    noun, plural = "rack", "racks"
    queryset = Rack.objects.none()
    serializer_class = RackSerializer
    filters = (IN_CLUSTER, Exact("name"), Search(["name"]))
    sorts = {"name": "name", "id": "pk"}
    default_sort = "name"

    def rows(self) -> QuerySet[Rack]:
        return selectors.racks_for(self.request.user)


class NodeList(Resource):
    """How nodes are listed, whichever of them."""

    queryset = Node.objects.none()
    serializer_class = NodeSerializer
    detail_serializer_class = NodeDetailSerializer
    filters = (
        IN_CLUSTER,
        Reference("rack", id_prefix="rck_"),
        Exact("state", choices=NodeState),
        Exact("name"),
        Flag("spare", Q(spare=True), "Only those kept as spares, or only the others."),
        Flag("reachable", Q(lease__reachable=True), "Only those that are heard, or are not."),
        Flag("held", ~Q(hold_reason=""), "Only those on hold, or only the others."),
        Times("state_since"),
        Search(["name"]),
    )
    sorts = {"name": "name", "state_since": "state_since", "id": "pk"}
    default_sort = "name"
    #: An agent that starts reports anew; processes come and go, and the digest is of them too.
    volatile = ("last_beat_at", "report.at", "report.digest", "report.processes")

    def rows(self) -> QuerySet[Node]:
        return selectors.nodes_for(self.request.user)

    def detailed(self, rows: QuerySet[Node]) -> QuerySet[Node]:
        return rows.prefetch_related(Prefetch("gpus", Gpu.objects.order_by("index")))

    def context_of(self, rows: Sequence[Node]) -> dict[str, Any]:
        return {"cards": selectors.cards_of(rows)}


class Nodes(NodeList):
    noun, plural = "node", "nodes"

    @verb()
    def hold(self, actor: Actor, node: Node, order: dict[str, Any]) -> None:
        """Keep automation's hands off a node"""
        actions.set_hold(actor, node.pk, order["reason"])

    @verb()
    def release(self, actor: Actor, node: Node, order: dict[str, Any]) -> None:
        """Lift the hold of a node"""
        actions.set_hold(actor, node.pk, "", lifted_because=order["reason"])

    @verb(access=Access.ADMIN, path="revoke-key")
    def revoke_key(self, actor: Actor, node: Node, order: dict[str, Any]) -> None:
        """Revoke a node's key

        Nothing that it says is taken any more, and it is given no orders. It comes back only under
        another key and another name.
        """
        actions.revoke_node_key(actor, node.pk, order["reason"])


class Spares(NodeList):
    """The nodes that are kept for replicas that lose theirs."""

    noun, plural = "spare", "spares"

    def rows(self) -> QuerySet[Node]:
        return super().rows().filter(spare=True)


class Gpus(Resource):
    noun, plural = "GPU", "GPUs"
    queryset = Gpu.objects.none()
    serializer_class = GpuSerializer
    filters = (
        Reference("cluster", "node__cluster", id_prefix="clu_"),
        OF_NODE,
        Exact("model"),
        Exact("serial"),
        Search(["serial", "uuid"]),
    )
    sorts = {"uuid": "pk", "serial": "serial", "first_seen_at": "first_seen_at"}
    default_sort = "uuid"
    cluster_path = "node.cluster_id"

    def rows(self) -> QuerySet[Gpu]:
        return selectors.gpus_for(self.request.user)


class Repairs(Resource):
    noun, plural = "repair", "repairs"
    queryset = RepairRecord.objects.none()
    serializer_class = RepairSerializer
    filters = (
        Reference("cluster", "node__cluster", id_prefix="clu_"),
        OF_NODE,
        Exact("gpu", "gpu_id"),
        Exact("rung", choices=Rung),
        Times("at"),
    )
    sorts = {"id": "pk", "at": "at"}
    cluster_path = "node.cluster_id"

    def rows(self) -> QuerySet[RepairRecord]:
        return selectors.repairs_for(self.request.user)


class MaintenanceWindows(Resource):
    noun, plural = "maintenance window", "maintenance windows"
    queryset = MaintenanceWindow.objects.none()
    serializer_class = MaintenanceSerializer
    filters = (
        IN_CLUSTER,
        Reference("rack", id_prefix="rck_"),
        OF_NODE,
        Flag("closed", ~Q(closed_at=None), "Only those ended before their time, or the others."),
        Times("starts_at"),
        Times("ends_at"),
    )
    sorts = {"id": "pk", "starts_at": "starts_at", "ends_at": "ends_at"}

    def rows(self) -> QuerySet[MaintenanceWindow]:
        return selectors.maintenance_for(self.request.user)

    @verb(detail=False, takes=NewWindow, status=HTTPStatus.CREATED)
    def create(self, actor: Actor, cluster: Cluster, order: dict[str, Any]) -> MaintenanceWindow:
        """Open a maintenance window

        Automation keeps its hands off the cluster, the rack or the node while it lasts.
        """
        user = self.request.user
        rack, node = order["rack"], order["node"]
        if rack is not None:
            rack = self.referred(selectors.racks_for(user).filter(cluster=cluster), rack, "rack").pk
        if node is not None:
            node = self.referred(selectors.nodes_for(user).filter(cluster=cluster), node, "node").pk
        return actions.open_maintenance(
            actor,
            cluster.pk,
            starts_at=order["starts_at"] or timezone.now(),
            ends_at=order["ends_at"],
            reason=order["reason"],
            rack_id=rack,
            node_id=node,
        )

    @verb()
    def close(self, actor: Actor, window: MaintenanceWindow, order: dict[str, Any]) -> None:
        """End a maintenance window before its time"""
        actions.close_maintenance(actor, window.pk, order["reason"])
