"""What a caller may see of clusters and nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Cluster, Node


@dataclass
class FleetOfCluster:
    """One cluster's nodes, counted the way the overview shows them."""

    cluster: Cluster
    nodes: list[Node] = field(default_factory=list)

    @property
    def counts(self) -> list[tuple[NodeState, int]]:
        """How many nodes are in each state, those states only in which there are any."""
        counted = Counter(node.state for node in self.nodes)
        return [(state, counted[state]) for state in NodeState if counted[state]]

    @property
    def spares(self) -> int:
        """Spare nodes that could take work at this moment."""
        return sum(
            node.spare and node.state == NodeState.AVAILABLE and node.lease_ok
            for node in self.nodes
        )

    @property
    def unreachable(self) -> int:
        return sum(not node.lease_ok for node in self.nodes)


def fleet_of(clusters: Iterable[Cluster]) -> dict[str, FleetOfCluster]:
    """Nodes by cluster id, in one query; `clusters` are those the caller may see."""
    fleet = {cluster.id: FleetOfCluster(cluster) for cluster in clusters}
    nodes = Node.objects.filter(cluster_id__in=fleet).exclude(state=NodeState.RETIRED)
    for node in nodes.select_related("lease").order_by("name"):
        node.lease_ok = not hasattr(node, "lease") or node.lease.reachable
        fleet[node.cluster_id].nodes.append(node)
    return fleet
