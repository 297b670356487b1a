"""What a caller may see of clusters and nodes. Every other selector starts from `clusters_for`.

Whatever lies outside it must look as if it did not exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from django.contrib.auth.models import AnonymousUser
from django.db.models import Count, Exists, Min, OuterRef, Q, QuerySet

from controlplane.accounts.choices import ROLES_INCLUDING, Role
from controlplane.accounts.models import ApiToken, AuditEvent, Grant, User
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Cluster, Gpu, MaintenanceWindow, Node, Rack, RepairRecord


def clusters_for(user: User | AnonymousUser, role: Role = Role.VIEWER) -> QuerySet[Cluster]:
    """The clusters in which `user` holds `role` or one that includes it.

    Where a token stands for the user (`user.token`), its scope and its cluster restrict what the
    user holds at this moment.
    """
    token = _token_of(user)
    if not user.is_active or (token and token.scope not in ROLES_INCLUDING[role]):
        return Cluster.objects.none()
    within = Cluster.objects.all()
    if token and token.cluster_id is not None:
        within = within.filter(pk=token.cluster_id)
    if user.is_superuser:
        return within
    grants = Grant.objects.filter(user_id=user.pk, role__in=ROLES_INCLUDING[role])
    return within.filter(Exists(grants.filter(Q(cluster=None) | Q(cluster=OuterRef("pk")))))


def may(user: User | AnonymousUser, role: Role, cluster_id: str) -> bool:
    """Whether `user` holds `role` in this cluster."""
    return clusters_for(user, role).filter(pk=cluster_id).exists()


def may_everywhere(user: User | AnonymousUser, role: Role) -> bool:
    """Whether `user` holds `role` in every cluster there is or will be."""
    token = _token_of(user)
    if token and (token.cluster_id is not None or token.scope not in ROLES_INCLUDING[role]):
        return False
    if user.is_active and not user.is_superuser:
        return Grant.objects.filter(
            user_id=user.pk, cluster=None, role__in=ROLES_INCLUDING[role]
        ).exists()
    return user.is_active


def may_somewhere(user: User | AnonymousUser, role: Role) -> bool:
    """Whether `user` holds `role` in any cluster, or in all that will be: the first is yet to be
    made."""
    token = _token_of(user)
    if not user.is_active or (token and token.scope not in ROLES_INCLUDING[role]):
        return False
    if user.is_superuser:
        return True
    grants = Grant.objects.filter(user_id=user.pk, role__in=ROLES_INCLUDING[role])
    if token and token.cluster_id is not None:
        grants = grants.filter(Q(cluster=None) | Q(cluster=token.cluster_id))
    return grants.exists()


def is_superuser(user: User | AnonymousUser) -> bool:
    """Whether `user` may do everything: a token only if neither scope nor cluster restricts it."""
    return user.is_superuser and may_everywhere(user, Role.ADMIN)


def audit_for(user: User | AnonymousUser) -> QuerySet[AuditEvent]:
    """What was written in the clusters that `user` sees, newest first.

    Rows that belong to no cluster (users, tokens) are shown to whoever is admin of all of them.
    """
    events = AuditEvent.objects.order_by("-pk")
    if is_superuser(user):
        return events
    # As values, not as a subquery: only then does the planner know how rare a cluster's rows are.
    shown = Q(cluster__in=list(clusters_for(user).values_list("pk", flat=True)))
    if may_everywhere(user, Role.ADMIN):
        shown |= Q(cluster=None)
    return events.filter(shown)


def _token_of(user: User | AnonymousUser) -> ApiToken | None:
    return getattr(user, "token", None)


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
        fleet[node.cluster_id].cells.append(Cell(node, node.reachable))
    return fleet


# --- Lists of the API -----------------------------------------------------------------------------


def nodes_for(user: User | AnonymousUser) -> QuerySet[Node]:
    """Nodes the caller may see, each with its cluster, rack and lease."""
    found = Node.objects.filter(cluster__in=clusters_for(user))
    return found.select_related("cluster", "rack", "lease")


def cards_of(nodes: Sequence[Node]) -> dict[str, tuple[int, str]]:
    """How many cards each of these nodes holds, and of which model, by node id."""
    cards = Gpu.objects.filter(node__in=[node.pk for node in nodes]).values("node_id")
    counted = cards.annotate(count=Count("pk"), model=Min("model"))
    return {row["node_id"]: (row["count"], row["model"]) for row in counted}


def racks_for(user: User | AnonymousUser) -> QuerySet[Rack]:
    """The racks of the user's clusters."""
    return Rack.objects.filter(cluster__in=clusters_for(user)).select_related("cluster")


def gpus_for(user: User | AnonymousUser) -> QuerySet[Gpu]:
    """Cards in nodes that the caller may see. One that sits in none is shown with its repairs."""
    return Gpu.objects.filter(node__cluster__in=clusters_for(user)).select_related("node")


def repairs_for(user: User | AnonymousUser) -> QuerySet[RepairRecord]:
    """All repair records of nodes in the user's clusters."""
    return RepairRecord.objects.filter(node__cluster__in=clusters_for(user)).select_related("node")


def maintenance_for(user: User | AnonymousUser) -> QuerySet[MaintenanceWindow]:
    """All maintenance windows of the user's clusters, past ones too."""
    return MaintenanceWindow.objects.filter(cluster__in=clusters_for(user))
