"""What stands between automation and a node: holds, windows, drains, breakers, budgets, silence.

Reads only. The workers' guards ask here inside the transaction that claims a disruptive step; pages
and dry runs ask the same, so that what is shown is what will be decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from django.conf import settings
from django.db.models import F, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.utils import timezone

from controlplane.accounts.models import AuditEvent
from controlplane.accounts.selectors import username
from controlplane.fleet.actions.nodes import OUR_DRAIN
from controlplane.fleet.choices import IN_SERVICE, TAKEN_OUT, NodeState
from controlplane.fleet.models import Cluster, MaintenanceWindow, Node
from controlplane.incidents.choices import RUN_ACTIVE, Mode, Scope
from controlplane.incidents.models import (
    Breaker,
    BudgetLimit,
    PlaybookMode,
    PlaybookRun,
    Reservation,
)

#: States of a node that is out for repair, its test on the way back included: it may fail that.
OUT = sorted(TAKEN_OUT | {NodeState.VALIDATING})

#: Where no limit is set for a cluster, these settings hold.
DEFAULT_LIMITS: dict[Scope, str] = {
    Scope.CLUSTER: "BUDGET_NODES_PER_CLUSTER",
    Scope.RACK: "BUDGET_NODES_PER_RACK",
    Scope.JOB: "BUDGET_NODES_PER_JOB",
    Scope.CODE: "BUDGET_NODES_PER_CODE",
}


@dataclass(frozen=True)
class BudgetUse:
    """How much of one limit is in use. `label` names the rack, job or code it is counted over."""

    scope: Scope
    label: str
    limit: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class Objection:
    """One thing that speaks against taking a node out, in words.

    `passes`: it ends without anybody's doing, within the time of the run that asks. `breaker`: what
    it stops is stale once it is over. `stays`: nobody knows when it ends, or only a person ends it.
    """

    text: str
    kind: Literal["passes", "breaker", "stays"] = "stays"


@dataclass(frozen=True)
class Silence:
    """A large share of a rack or cluster that went quiet together: nobody knows its nodes."""

    where: str
    quiet: int
    members: int

    def __str__(self) -> str:
        return f"{self.quiet} of {self.members} nodes of {self.where} went quiet together"


@dataclass(frozen=True)
class Out:
    """A node that is out for repair, and what it counts against."""

    node_id: str
    rack_id: str | None
    job_id: str | None
    code: str


def mode_of(cluster_id: str, playbook: str) -> Mode:
    """How far this playbook may go by itself in this cluster."""
    row = PlaybookMode.objects.filter(cluster_id=cluster_id, playbook=playbook).first()
    return Mode(row.mode) if row else Mode.AUTOMATIC


def open_breakers(cluster_ids: Iterable[str]) -> QuerySet[Breaker]:
    """The breakers that are open in these clusters."""
    return Breaker.objects.filter(cluster_id__in=list(cluster_ids), closed_at=None)


def objections(
    node: Node, *, code: str = "", job_id: str | None = None, run: PlaybookRun | None = None
) -> list[str]:
    """The same as `blockers_of`, in words alone."""
    return [found.text for found in blockers_of(node, code=code, job_id=job_id, run=run)]


def blockers_of(
    node: Node, *, code: str = "", job_id: str | None = None, run: PlaybookRun | None = None
) -> list[Objection]:
    """Why automation may not take this node out now; empty if it may.

    `code` and `job_id` name the failure and the job that it would count against; `run` is the one
    that asks, whose own reservation is no objection. Without it nothing counts as passing.
    """
    deadline = run.deadline if run is not None else None
    found = [
        *_peoples_words(node, deadline),
        *_open_breaker(node, code),
        *_silence(node),
    ]
    held = Reservation.objects.filter(node=node, released_at=None)
    if run is not None:
        if held.filter(run=run).exists():
            return found  # its share is reserved already
        held = held.exclude(run=run)
    if held.exists():
        return [*found, Objection(f"another run has {node.name} in hand")]
    return [*found, *_full_budgets(node, code, job_id, deadline)]


def budgets_of(cluster: Cluster, out: Sequence[Out] | None = None) -> list[BudgetUse]:
    """The cluster's limits with what is used: of racks, jobs and codes the fullest is shown.

    `out` are its `out_nodes`, where they are known already.
    """
    out = out_nodes(cluster.pk) if out is None else out
    limits = limits_of(cluster.pk)
    racks = dict(cluster.racks.values_list("pk", "name"))
    uses = [BudgetUse(Scope.CLUSTER, cluster.name, limits[Scope.CLUSTER], len(out))]
    for scope, keys, names in (
        (Scope.RACK, [o.rack_id for o in out], racks),
        (Scope.JOB, [o.job_id for o in out], dict(cluster.jobs.values_list("pk", "name"))),
        (Scope.CODE, [o.code for o in out], {}),
    ):
        counted = {key: keys.count(key) for key in keys if key}
        fullest = max(counted, key=lambda key: (counted[key], key), default="")
        label = names.get(fullest, fullest) or f"any {scope.value}"
        uses.append(BudgetUse(scope, label, limits[scope], counted.get(fullest, 0)))
    return uses


def out_nodes(cluster_id: str) -> list[Out]:
    """Nodes that automation has in hand or that are out for repair already, each once.

    One that was never in service is missed nowhere: new nodes that fail their first diagnostics
    must not stop the repair of others.
    """
    lately = timezone.now() - timedelta(seconds=settings.RMA_COUNTS_S)
    taken = Node.objects.filter(
        Q(state__in=OUT) | Q(state=NodeState.RMA, state_since__gte=lately),
        cluster_id=cluster_id,
        admitted_at__isnull=False,
    )
    # Of a node whose run has ended, and that is out still, the last one that was for a fault says
    # for what it was taken, also while somebody's order has the node in hand, which is for none.
    # (A run releases as it ends, after it has taken the node out.)
    of_now = Q(node__in=taken.values("pk"), released_at__gte=F("left_at"))
    held = Reservation.objects.alias(
        left_at=_left_service_at(), for_none=Q(job=None, code="")
    ).filter(Q(released_at=None) | of_now & Q(for_none=False), cluster_id=cluster_id)
    newest = held.order_by("node", "for_none", "-reserved_at").distinct("node")
    out = {
        node_id: Out(node_id, rack_id, job_id, code)
        for node_id, rack_id, job_id, code in newest.values_list("node", "rack", "job", "code")
    }
    for node_id, rack_id in taken.values_list("pk", "rack"):
        out.setdefault(node_id, Out(node_id, rack_id, None, ""))
    return list(out.values())


def limits_of(cluster_id: str) -> dict[Scope, int]:
    """The limit of each scope in this cluster, in nodes."""
    own = {
        Scope(scope): nodes
        for scope, nodes in BudgetLimit.objects.filter(cluster_id=cluster_id).values_list(
            "scope", "nodes"
        )
    }
    return {
        scope: own.get(scope, int(getattr(settings, name)))
        for scope, name in DEFAULT_LIMITS.items()
    }


def silence_around(node: Node) -> Silence | None:
    """Whether the node's silence is shared by so many neighbours that the cause must be shared too.

    A share of SILENCE_SHARE of its cluster, rack or switch, two nodes at least, whose last beats
    all fell within SILENCE_WINDOW_S: then that, a link or our own intake is the likelier culprit.
    """
    now = timezone.now()
    quiet_since = now - timedelta(seconds=2 * settings.BEAT_INTERVAL_S)
    together = timedelta(seconds=settings.SILENCE_WINDOW_S)
    in_service = Node.objects.filter(
        Q(state__in=sorted(IN_SERVICE)) | Q(pk=node.pk), cluster_id=node.cluster_id, hold_reason=""
    )
    for where, members in (
        (f"cluster {node.cluster.name}", in_service),
        (f"rack {node.rack}", in_service.filter(rack=node.rack_id, rack__isnull=False)),
        (f"switch {node.switch}", in_service.filter(switch=node.switch).exclude(switch="")),
    ):
        # Whoever was silent long before this node is no part of this silence.
        heard = members.filter(lease__last_beat_at__gte=node.lease.last_beat_at - together)
        quiet = heard.filter(lease__last_beat_at__lt=quiet_since).count()
        total = heard.count()
        if quiet >= 2 and quiet >= settings.SILENCE_SHARE * total:
            return Silence(where, quiet, total)
    return None


def maintenance_of(node: Node) -> QuerySet[MaintenanceWindow]:
    """The windows that cover the node at this moment."""
    now = timezone.now()
    covers = Q(node=node) | Q(node=None, rack=None)
    if node.rack_id is not None:
        covers |= Q(rack_id=node.rack_id)
    return MaintenanceWindow.objects.filter(
        covers, cluster_id=node.cluster_id, starts_at__lte=now, ends_at__gt=now, closed_at=None
    )


# --- single objections ----------------------------------------------------------------------------


def _peoples_words(node: Node, deadline: datetime | None) -> list[Objection]:
    found = []
    if node.hold_reason:
        found.append(Objection(f"{node.name} is on hold: {node.hold_reason}"))
    window = maintenance_of(node).order_by("ends_at").last()
    if window is not None:
        owner = username(window.owner)
        words = f"maintenance until {window.ends_at:%Y-%m-%d %H:%M} UTC by {owner}: {window.reason}"
        in_time = deadline is not None and window.ends_at < deadline
        found.append(Objection(words, "passes" if in_time else "stays"))
    if node.drained_by and not node.drained_by.startswith(OUR_DRAIN):
        owner = username(node.drained_by)
        found.append(Objection(f"{node.name} was drained by {owner}: theirs to give back"))
    return found


def _open_breaker(node: Node, code: str) -> list[Objection]:
    breaker = open_breakers([node.cluster_id]).filter(code__in=["", code]).first()
    return [Objection(f"the breaker is open: {breaker.reason}", "breaker")] if breaker else []


def _silence(node: Node) -> list[Objection]:
    if node.reachable:
        return []
    silence = silence_around(node)
    return [Objection(f"{silence}: its state is unknown")] if silence else []


# --- counting -------------------------------------------------------------------------------------


def _full_budgets(
    node: Node, code: str, job_id: str | None, deadline: datetime | None
) -> list[Objection]:
    """The limits that others have used up, of those that taking this node out would count against.

    A limit of 0 is a person's word: nobody gives a place of it back.
    """
    limits = limits_of(node.cluster_id)
    out = [o for o in out_nodes(node.cluster_id) if o.node_id != node.pk]
    counted = [(Scope.CLUSTER, "this cluster", out)]
    if node.rack_id is not None:
        of_rack = [o for o in out if o.rack_id == node.rack_id]
        counted.append((Scope.RACK, "its rack", of_rack))
    if job_id:
        counted.append((Scope.JOB, "its job", [o for o in out if o.job_id == job_id]))
    if code:
        of_code = [o for o in out if o.code == code]
        counted.append((Scope.CODE, f"failure code {code}", of_code))
    found = []
    for scope, label, used in counted:
        limit = limits[scope]
        if len(used) >= limit:
            words = f"{len(used)} nodes are out for repair already, of {label} (limit {limit})"
            passes = limit > 0 and _comes_free([o.node_id for o in used], deadline)
            found.append(Objection(words, "passes" if passes else "stays"))
    return found


def _comes_free(node_ids: list[str], deadline: datetime | None) -> bool:
    """Whether any of these nodes that are out gives its place back by then, without a person's
    doing: a run at work has it in hand or validates it, or it went to its vendor long enough ago.

    Another run that is merely about it gives nothing back: it may wait for a place itself.
    """
    if deadline is None:
        return False
    held = Reservation.objects.filter(node__in=node_ids, released_at=None)
    if held.filter(run__state__in=sorted(RUN_ACTIVE)).exists():
        return True
    counted_since = deadline - timedelta(seconds=settings.RMA_COUNTS_S)
    others = Node.objects.filter(pk__in=node_ids).exclude(pk__in=held.values("node"))
    return others.filter(
        Q(state=NodeState.VALIDATING, runs__state__in=sorted(RUN_ACTIVE))
        | Q(state=NodeState.RMA, state_since__lt=counted_since)
    ).exists()


def _left_service_at() -> Coalesce:
    """Of a reservation's node that is out, when it was in service last: by its history."""
    left = AuditEvent.objects.filter(
        object_type="node",
        object_id=OuterRef("node"),
        verb="node.transition",
        before__state__in=sorted(IN_SERVICE),
    )
    return Coalesce(Subquery(left.order_by("-id").values("at")[:1]), F("node__state_since"))
