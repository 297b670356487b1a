"""What the pages of clusters show: nodes counted, filtered, listed and drawn, at any size."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from django.contrib.auth.models import AnonymousUser
from django.db.models import Count, Exists, OuterRef, Q, QuerySet, Value
from django.db.models.functions import Coalesce
from django.http import Http404

from controlplane.accounts.models import User
from controlplane.accounts.selectors import usernames
from controlplane.fleet.choices import COLOURS, NodeState
from controlplane.fleet.models import Cluster, Gpu, Node
from controlplane.fleet.selectors import clusters_for
from controlplane.health.models import Failure
from controlplane.incidents.choices import INCIDENT_UNRESOLVED, CaseState
from controlplane.incidents.models import RmaCase
from controlplane.incidents.selectors import usable
from controlplane.jobs.choices import JOB_UNFINISHED, PlacementState
from controlplane.jobs.models import Job, Placement

#: A node without a lease has only just enrolled and was never expected to beat.
UNREACHABLE = Q(lease__reachable=False)
OPEN_FAULT = Q(incidents__state__in=sorted(INCIDENT_UNRESOLVED))


def ready_spare() -> Q:
    """Of a node: a spare that could take work at this moment."""
    return Q(spare=True) & usable()


def cluster_for(user: User | AnonymousUser, cluster_id: str) -> Cluster:
    """Raises Http404 if there is none, or none the caller may see."""
    cluster = clusters_for(user).filter(pk=cluster_id).first()
    if cluster is None:
        raise Http404("no such cluster")
    return cluster


def nodes_for(user: User | AnonymousUser) -> QuerySet[Node]:
    """Nodes the caller may see, without the bulky inventory that each reported."""
    return (
        Node.objects.filter(cluster__in=clusters_for(user))
        .select_related("cluster", "rack", "lease")
        .defer("report")
    )


def present(clusters: Iterable[Cluster]) -> QuerySet[Node]:
    """The nodes of these clusters that have not left the fleet."""
    return Node.objects.filter(cluster__in=list(clusters)).exclude(state=NodeState.RETIRED)


# --- Counts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tally:
    """The nodes of one cluster, counted."""

    nodes: int
    gpus: int
    states: list[tuple[NodeState, int]]  # those only in which there are any
    spares: int  # that could take work at this moment
    unreachable: int
    held: int


def tallies_of(clusters: Iterable[Cluster]) -> dict[str, Tally]:
    """Counts by cluster id, in three queries however large the fleet."""
    clusters = list(clusters)
    counted: dict[str, dict[str, int]] = {cluster.id: {} for cluster in clusters}
    for cluster_id, state, count in (
        present(clusters).values_list("cluster", "state").annotate(Count("pk")).order_by()
    ):
        counted[cluster_id][state] = count
    flags: dict[str, dict[str, Any]] = {
        row["cluster"]: dict(row)
        for row in present(clusters)
        .values("cluster")
        .annotate(
            spares=Count("pk", filter=ready_spare()),
            unreachable=Count("pk", filter=UNREACHABLE),
            held=Count("pk", filter=~Q(hold_reason="")),
        )
        .order_by()
    }
    cards = dict(
        Gpu.objects.filter(node__cluster__in=list(clusters))
        .exclude(node__state=NodeState.RETIRED)
        .values_list("node__cluster")
        .annotate(Count("pk"))
        .order_by()
    )
    return {
        cluster.id: Tally(
            nodes=sum(counted[cluster.id].values()),
            gpus=cards.get(cluster.id, 0),
            states=[(s, counted[cluster.id][s]) for s in NodeState if s in counted[cluster.id]],
            spares=flags.get(cluster.id, {}).get("spares", 0),
            unreachable=flags.get(cluster.id, {}).get("unreachable", 0),
            held=flags.get(cluster.id, {}).get("held", 0),
        )
        for cluster in clusters
    }


# --- Filters --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeFilter:
    """Which nodes of a cluster are asked for; every part is empty where it does not matter."""

    state: str = ""
    code: str = ""
    job: str = ""
    rack: str = ""
    reachable: str = ""  # "yes" or "no"
    spare: str = ""  # "yes", "no" or "ready"
    held: str = ""  # "yes" or "no"
    text: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> NodeFilter:
        return cls(**{one.name: query.get(one.name, "").strip() for one in fields(cls)})

    def __bool__(self) -> bool:
        return any(getattr(self, one.name) for one in fields(self))

    def apply(self, nodes: QuerySet[Node]) -> QuerySet[Node]:
        if self.state:
            nodes = nodes.filter(state=self.state)
        if self.code:
            nodes = nodes.filter(Exists(_open_faults().filter(code=self.code)))
        if self.job:
            nodes = nodes.filter(Exists(_active_placements().filter(replica__job=self.job)))
        if self.rack:
            nodes = nodes.filter(rack=self.rack)
        if self.text:
            card = Gpu.objects.filter(Q(serial=self.text) | Q(uuid=self.text), node=OuterRef("pk"))
            named = Q(name__icontains=self.text) | Q(address__icontains=self.text)
            nodes = nodes.filter(named | Exists(card))
        return self._flags(nodes)

    def _flags(self, nodes: QuerySet[Node]) -> QuerySet[Node]:
        for word, condition in (
            (self.reachable, ~UNREACHABLE),
            (self.spare, Q(spare=True)),
            (self.held, ~Q(hold_reason="")),
        ):
            if word in ("yes", "no"):
                nodes = nodes.filter(condition if word == "yes" else ~condition)
        return nodes.filter(ready_spare()) if self.spare == "ready" else nodes


#: The words of a `NodeFilter`, where only some have a meaning.
WORDS = {
    "state": NodeState.values,
    "reachable": ("yes", "no"),
    "spare": ("yes", "no", "ready"),
    "held": ("yes", "no"),
}


@dataclass(frozen=True)
class Choices:
    """What the filters of a cluster offer."""

    racks: list[tuple[str, str]]
    jobs: list[tuple[str, str]]
    codes: list[str]


def choices_of(cluster: Cluster) -> Choices:
    """What a cluster's filters offer: racks, unfinished jobs, codes of open failures."""
    open_codes = Failure.objects.filter(OPEN_FAULT, node__cluster=cluster)
    return Choices(
        racks=list(cluster.racks.order_by("name").values_list("pk", "name")),
        jobs=list(
            Job.objects.filter(cluster=cluster, state__in=JOB_UNFINISHED)
            .order_by("name")
            .values_list("pk", "name")
        ),
        codes=list(open_codes.order_by("code").values_list("code", flat=True).distinct()),
    )


def _open_faults() -> QuerySet[Failure]:
    return Failure.objects.filter(OPEN_FAULT, node=OuterRef("pk"))


def _active_placements() -> QuerySet[Placement]:
    return Placement.objects.filter(node=OuterRef("pk")).exclude(state=PlacementState.ENDED)


# --- The table ------------------------------------------------------------------------------------

#: Sorting by rack must not lose nodes without one.
SORTS = {"name": "name", "state": "state", "since": "state_since", "rack": "rack_name"}


@dataclass(frozen=True)
class Row:
    """A node as the table shows it."""

    node: Node
    reachable: bool
    cards: int
    faulty: list[tuple[int | None, str]]  # card index (None: the node itself) and code
    job: Placement | None
    drained_by: str  # by name

    @property
    def colour(self) -> str:
        """A node that is not heard is bad news whatever its state says."""
        return self.node.colour if self.reachable or self.node.colour == "quiet" else "bad"


def listed(cluster: Cluster, chosen: NodeFilter) -> QuerySet[Node]:
    """The nodes of a cluster that the filter lets through, ready for `rows_of`."""
    nodes = chosen.apply(cluster.nodes.all())
    if chosen.state != NodeState.RETIRED:
        nodes = nodes.exclude(state=NodeState.RETIRED)
    return (
        nodes.select_related("rack", "lease")
        .defer("report")
        .annotate(rack_name=Coalesce("rack__name", Value("")))
    )


def rows_of(nodes: list[Node]) -> list[Row]:
    """The same nodes with cards, open faults, jobs and who drained them, in four queries."""
    drained = usernames(node.drained_by for node in nodes)
    cards = dict(Gpu.objects.filter(node__in=nodes).values_list("node").annotate(Count("pk")))
    faults = faults_by_node(Failure.objects.filter(node__in=nodes))
    jobs = {
        stay.node_id: stay
        for stay in Placement.objects.filter(node__in=nodes)
        .exclude(state=PlacementState.ENDED)
        .select_related("replica__job")
    }
    return [
        Row(
            node,
            node.reachable,
            cards.get(node.id, 0),
            faults.get(node.id, []),
            jobs.get(node.id),
            drained[node.drained_by],
        )
        for node in nodes
    ]


def faults_by_node(failures: QuerySet[Failure]) -> dict[str, list[tuple[int | None, str]]]:
    """Open faults as card index and code, by node id. A card that moved takes its fault along."""
    found: dict[str, set[tuple[int | None, str]]] = defaultdict(set)
    rows = failures.filter(OPEN_FAULT).values_list("node", "gpu__node", "gpu__index", "code")
    for node_id, card_node_id, index, code in rows.distinct():
        found[card_node_id or node_id].add((index, code))
    return {
        node_id: sorted(faults, key=lambda fault: (fault[0] is None, fault))
        for node_id, faults in found.items()
    }


# --- The map --------------------------------------------------------------------------------------

#: What one character of a rack's `flags` says, as bits of a hexadecimal digit.
MATCHES, HEARD, SPARE, HELD = 1, 2, 4, 8


def map_of(cluster: Cluster, chosen: NodeFilter) -> dict[str, Any]:
    """Every node and card of a cluster, packed: one character per fact and node.

    By rack: `names` (what follows the shared `prefix`, joined by spaces), `states` (letters, see
    `states`), `flags` (hexadecimal digits of the bits above), `cards` (base 36), `jobs` (places in
    the list of jobs, -1 for none) and `faults` ([node, card or -1, code], places again).
    """
    nodes = list(
        present([cluster])
        .order_by(Coalesce("rack__name", Value("")), "name")
        .values_list(
            "pk", "name", "rack__name", "state", "spare", "hold_reason", "lease__reachable"
        )
    )
    matching = _matching(cluster, chosen)
    cards = dict(
        Gpu.objects.filter(node__cluster=cluster)
        .exclude(node__state=NodeState.RETIRED)
        .values_list("node")
        .annotate(Count("pk"))
    )
    faults = _faults_of(cluster)
    jobs = dict(
        Placement.objects.filter(node__cluster=cluster)
        .exclude(state=PlacementState.ENDED)
        .values_list("node", "replica__job__name")
    )
    job_names = sorted(set(jobs.values()))
    places = {name: place for place, name in enumerate(job_names)}
    racks: dict[str, list[tuple[Any, ...]]] = {}
    for row in nodes:
        racks.setdefault(row[2] or "no rack", []).append(row)
    return {
        "states": [[state.label, COLOURS[state]] for state in NodeState],
        "jobs": job_names,
        "racks": [
            {
                "name": rack,
                **_names([row[1] for row in rows]),
                "states": "".join(_LETTERS[row[3]] for row in rows),
                "flags": "".join(_flag(row, matching) for row in rows),
                "cards": "".join(_base36(cards.get(row[0], 0)) for row in rows),
                "jobs": [places[jobs[row[0]]] if row[0] in jobs else -1 for row in rows],
                "faults": [
                    [place, -1 if index is None else index, code]
                    for place, row in enumerate(rows)
                    for index, code in faults.get(row[0], [])
                ],
            }
            for rack, rows in racks.items()
        ],
    }


_LETTERS = {state: chr(ord("a") + place) for place, state in enumerate(NodeState)}


def _matching(cluster: Cluster, chosen: NodeFilter) -> set[str] | None:
    """The ids the filter lets through; None: all."""
    return set(chosen.apply(cluster.nodes.all()).values_list("pk", flat=True)) if chosen else None


def _faults_of(cluster: Cluster) -> dict[str, list[tuple[int | None, str]]]:
    faults = faults_by_node(Failure.objects.filter(node__cluster=cluster))
    out = RmaCase.objects.filter(cluster=cluster).exclude(state=CaseState.CLOSED)
    for node_id, index in out.values_list("gpu__node", "gpu__index"):
        if node_id is not None:
            faults.setdefault(node_id, []).append((index, "RMA"))
    return faults


def _names(names: list[str]) -> dict[str, str]:
    prefix = os.path.commonprefix(names) if len(names) > 1 else ""  # noqa: RUF071 - names, no paths
    return {"prefix": prefix, "names": " ".join(name[len(prefix) :] for name in names)}


def _flag(row: tuple[Any, ...], matching: set[str] | None) -> str:
    node_id, _, _, _, spare, hold_reason, reachable = row
    bits = MATCHES if matching is None or node_id in matching else 0
    bits |= 0 if reachable is False else HEARD
    bits |= SPARE if spare else 0
    bits |= HELD if hold_reason else 0
    return f"{bits:x}"


def _base36(count: int) -> str:
    return "0123456789abcdefghijklmnopqrstuvwxyz"[min(count, 35)]
