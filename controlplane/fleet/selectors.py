"""What a caller may see of clusters and nodes. Every other selector starts from `clusters_for`.

Whatever lies outside it must look as if it did not exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from django.contrib.auth.models import AnonymousUser
from django.db.models import Exists, OuterRef, Q, QuerySet

from controlplane.accounts.choices import ROLES_INCLUDING, Role
from controlplane.accounts.models import Grant, User
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Cluster, Node


def clusters_for(user: User | AnonymousUser, role: Role = Role.VIEWER) -> QuerySet[Cluster]:
    """The clusters in which `user` holds `role` or one that includes it."""
    if not user.is_active:
        return Cluster.objects.none()
    if user.is_superuser:
        return Cluster.objects.all()
    grants = Grant.objects.filter(user_id=user.pk, role__in=ROLES_INCLUDING[role])
    return Cluster.objects.filter(
        Exists(grants.filter(Q(cluster=None) | Q(cluster=OuterRef("pk"))))
    )


def may(user: User | AnonymousUser, role: Role, cluster_id: str) -> bool:
    """Whether `user` holds `role` in this cluster."""
    return clusters_for(user, role).filter(pk=cluster_id).exists()


@dataclass(frozen=True)
class Cell:
    """A node as it is shown: what is believed of it, and whether it is heard at all."""

    node: Node
    reachable: bool

    @property
    def colour(self) -> str:
        """A node that is not heard is bad news whatever its state says."""
        return self.node.colour if self.reachable or self.node.colour == "quiet" else "bad"


@dataclass
class FleetOfCluster:
    """One cluster's nodes, counted the way the overview shows them."""

    cluster: Cluster
    cells: list[Cell] = field(default_factory=list)

    @property
    def counts(self) -> list[tuple[NodeState, int]]:
        """How many nodes are in each state, those states only in which there are any."""
        counted = Counter(cell.node.state for cell in self.cells)
        return [(state, counted[state]) for state in NodeState if counted[state]]

    @property
    def spares(self) -> int:
        """Spare nodes that could take work at this moment."""
        return sum(
            cell.reachable and cell.node.spare and cell.node.state == NodeState.AVAILABLE
            for cell in self.cells
        )

    @property
    def unreachable(self) -> int:
        return sum(not cell.reachable for cell in self.cells)


def fleet_of(clusters: Iterable[Cluster]) -> dict[str, FleetOfCluster]:
    """Nodes by cluster id, in one query; `clusters` are those the caller may see."""
    fleet = {cluster.id: FleetOfCluster(cluster) for cluster in clusters}
    nodes = Node.objects.filter(cluster_id__in=fleet).exclude(state=NodeState.RETIRED)
    for node in nodes.select_related("lease").order_by("name"):
        # A node without a lease has only just enrolled and was never expected to beat.
        reachable = not hasattr(node, "lease") or node.lease.reachable
        fleet[node.cluster_id].cells.append(Cell(node, reachable))
    return fleet
