"""The API's clusters, racks, nodes, cards, repairs and maintenance windows."""

from __future__ import annotations

from typing import Any

from django.db.models import Q, QuerySet

from controlplane.accounts.choices import Role
from controlplane.accounts.models import Actor
from controlplane.fleet import actions, selectors
from controlplane.fleet.choices import NodeState, Rung
from controlplane.fleet.models import (
    Cluster,
    Gpu,
    MaintenanceWindow,
    Node,
    Rack,
    RepairRecord,
)
from controlplane.fleet.serializers import (
    ClusterSerializer,
    GpuSerializer,
    MaintenanceSerializer,
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


class Nodes(Resource):
    noun, plural = "node", "nodes"
    queryset = Node.objects.none()
    serializer_class = NodeSerializer
    detail_serializer_class = NodeDetailSerializer
    filters = (
        IN_CLUSTER,
        Reference("rack", id_prefix="rck_"),
        Exact("state", choices=NodeState),
        Exact("name"),
        Exact("gpu_model", "gpus__model"),
        Flag("spare", Q(spare=True), "Only those kept as spares, or only the others."),
        Flag("reachable", Q(lease__reachable=True), "Only those that are heard, or are not."),
        Flag("held", ~Q(hold_reason=""), "Only those on hold, or only the others."),
        Times("state_since"),
        Search(["name"]),
    )
    sorts = {"name": "name", "state_since": "state_since", "id": "pk"}
    default_sort = "name"
    volatile = ("last_beat_at",)

    def rows(self) -> QuerySet[Node]:
        return selectors.nodes_for(self.request.user)

    @verb()
    def hold(self, actor: Actor, node: Node, order: dict[str, Any]) -> None:
        """Keep automation's hands off a node"""
        actions.set_hold(actor, node.pk, order["reason"])
