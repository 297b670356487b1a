"""What the automation page shows of one cluster: how far automation may go, and what stops it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.contrib.auth.models import AnonymousUser
from django.http import Http404
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.accounts.selectors import usernames
from controlplane.fleet.models import Cluster, MaintenanceWindow, Node
from controlplane.fleet.selectors import clusters_for
from controlplane.incidents import limits
from controlplane.incidents.choices import Mode
from controlplane.incidents.limits import BudgetUse, Out
from controlplane.incidents.models import Breaker, Playbook, PlaybookMode, PlaybookRun, Reservation
from controlplane.incidents.modes import Modes, modes_of
from controlplane.paging import Top

RECENTLY = 8
#: So many nodes that are out, and maintenance windows, are listed.
SHOWN = 100
#: Colour is kept for what a person should know of: here, that automation does not act by itself.
MODE_COLOURS: dict[Mode, str] = {
    Mode.AUTOMATIC: "good",
    Mode.APPROVE: "busy",
    Mode.DRY_RUN: "warn",
    Mode.OFF: "warn",
}


@dataclass(frozen=True)
class PlaybookRow:
    """A playbook and how far it may go in a cluster."""

    playbook: Playbook
    mode: Mode
    modes: Modes

    @property
    def colour(self) -> str:
        return MODE_COLOURS[self.mode]


def playbooks_in(cluster: Cluster) -> list[PlaybookRow]:
    """All playbooks with the mode that each has in this cluster."""
    chosen = dict(PlaybookMode.objects.filter(cluster=cluster).values_list("playbook", "mode"))
    return [
        PlaybookRow(one, modes.in_force(chosen.get(one.name)), modes)
        for one in Playbook.objects.all()
        for modes in [modes_of(one)]
    ]


@dataclass(frozen=True)
class Budget:
    """One limit of the blast radius, as a bar."""

    use: BudgetUse

    @property
    def colour(self) -> str:
        return "warn" if self.use.left == 0 else "busy" if self.use.used else "quiet"

    @property
    def share(self) -> float:
        """How much of the limit is used, of 100."""
        return min(100.0, 100 * self.use.used / self.use.limit) if self.use.limit else 100.0


def budgets_in(cluster: Cluster, out: Sequence[Out]) -> list[Budget]:
    """The limits of a cluster whose `out_nodes` are `out`."""
    return [Budget(use) for use in limits.budgets_of(cluster, out)]


@dataclass(frozen=True)
class OutNode:
    """A node that counts against the budgets, and for what; `run` has it in hand, if any has."""

    node: Node
    code: str
    run: PlaybookRun | None
    since: datetime


def with_runs(out: Sequence[Out]) -> list[OutNode]:
    """The first SHOWN of the nodes that use up the budgets, by name."""
    codes = {one.node_id: one.code for one in out}
    nodes = Node.objects.filter(pk__in=codes).defer("report").order_by("name")[:SHOWN]
    held = Reservation.objects.filter(node__in=codes, released_at=None).select_related("run")
    in_hand = {one.node_id: one for one in held}
    return [_out(node, codes[node.pk], in_hand.get(node.pk)) for node in nodes]


def _out(node: Node, code: str, held: Reservation | None) -> OutNode:
    if held is None:
        return OutNode(node, code, None, node.state_since)
    return OutNode(node, code, held.run, held.reserved_at)


@dataclass(frozen=True)
class Closed:
    """A breaker that a person closed, and who that was."""

    breaker: Breaker
    by: str


def closed_breakers(cluster: Cluster) -> list[Closed]:
    """The breakers of this cluster that were closed last, each with who closed it."""
    closed = cluster.breakers.exclude(closed_at=None).order_by("-closed_at")
    found = list(closed[:RECENTLY])
    names = usernames(one.closed_by for one in found)
    return [Closed(one, names[one.closed_by]) for one in found]


@dataclass(frozen=True)
class Window:
    """A maintenance window, whose it is, and whether it holds now."""

    window: MaintenanceWindow
    owner: str
    now: bool


def windows_in(cluster: Cluster) -> tuple[list[Window], int]:
    """Windows that hold now or are to come, the first SHOWN to end; and how many there are."""
    now = timezone.now()
    open_yet = cluster.maintenance.filter(ends_at__gt=now, closed_at=None)
    top = Top.of(open_yet.select_related("rack", "node").order_by("ends_at"), SHOWN)
    names = usernames(one.owner for one in top.rows)
    return [Window(one, names[one.owner], one.starts_at <= now) for one in top.rows], top.total


def window_for(user: User | AnonymousUser, window_id: str) -> MaintenanceWindow:
    """Raises Http404 if there is none, or none the caller may see."""
    found = MaintenanceWindow.objects.filter(pk=window_id, cluster__in=clusters_for(user))
    window = found.select_related("cluster").first()
    if window is None:
        raise Http404("no such maintenance window")
    return window


def breaker_for(user: User | AnonymousUser, breaker_id: str) -> Breaker:
    """Raises Http404 if there is none, or none the caller may see."""
    found = Breaker.objects.filter(pk=breaker_id, cluster__in=clusters_for(user))
    breaker = found.select_related("cluster").first()
    if breaker is None:
        raise Http404("no such breaker")
    return breaker
