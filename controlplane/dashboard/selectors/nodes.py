"""What the page of one node shows: its cards, what runs on it, and all that was done to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.db.models import Count, Q
from django.http import Http404
from django.utils import timezone

from controlplane.accounts.models import AuditEvent, User
from controlplane.accounts.selectors import usernames
from controlplane.dashboard.selectors.fleet import OPEN_FAULT, nodes_for
from controlplane.dashboard.selectors.people import actors
from controlplane.fleet.models import Gpu, MaintenanceWindow, Node, RepairRecord
from controlplane.health.models import Failure, NodeSample
from controlplane.incidents import limits
from controlplane.incidents.choices import CaseState
from controlplane.incidents.models import Incident, PlaybookRun, Reservation, RmaCase
from controlplane.jobs.choices import PlacementState
from controlplane.jobs.models import NodeExclusion, Placement, SpareReservation

LIST_LIMIT = 8


def node_for(user: User | AnonymousUser, node_id: str) -> Node:
    """Raises Http404 if there is none, or none the caller may see."""
    node = nodes_for(user).defer(None).filter(pk=node_id).first()
    if node is None:
        raise Http404("no such node")
    return node


@dataclass(frozen=True)
class Standing:
    """What holds of a node beside its state, and who said so."""

    changed_by: str  # who made the last change of state
    drained_by: str
    windows: list[tuple[MaintenanceWindow, str]]  # with the owner's name
    spare_reservation: SpareReservation | None
    reservation: Reservation | None  # of the budgets, by a run
    exclusions: list[NodeExclusion]


def standing_of(node: Node) -> Standing:
    """Why the node is in its state, and what keeps work off it."""
    last = (
        AuditEvent.objects.filter(object_type="node", object_id=node.id, verb="node.transition")
        .order_by("-id")
        .first()
    )
    windows = list(limits.maintenance_of(node).order_by("ends_at"))
    names = usernames({node.drained_by, *(window.owner for window in windows)})
    spares = node.spare_reservations.filter(released_at=None).select_related("job")
    held = Reservation.objects.filter(node=node, released_at=None)
    return Standing(
        changed_by=actors([last])[last.pk] if last else "",
        drained_by=names[node.drained_by],
        windows=[(window, names[window.owner]) for window in windows],
        spare_reservation=spares.first(),
        reservation=held.select_related("run__incident").first(),
        exclusions=list(node.exclusions.select_related("job")),
    )


# --- Cards ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """A card in its slot, with its record."""

    gpu: Gpu
    repairs_24h: int
    repairs: int
    faults: list[Failure]
    case: RmaCase | None
    reading: dict[str, Any]  # the present one; None for what is not known


def cards_of(node: Node) -> list[Card]:
    """The node's GPUs by index, with repairs, open failures, RMA case and present readings."""
    gpus = list(node.gpus.order_by("index"))
    day_ago = timezone.now() - timedelta(hours=24)
    counts: dict[str, dict[str, Any]] = {
        row["gpu"]: dict(row)
        for row in RepairRecord.objects.filter(gpu__in=gpus)
        .values("gpu")
        .annotate(day=Count("pk", filter=Q(at__gte=day_ago)), ever=Count("pk"))
    }
    faults: dict[str, list[Failure]] = {}
    for failure in Failure.objects.filter(OPEN_FAULT, gpu__in=gpus).distinct():
        faults.setdefault(str(failure.gpu_id), []).append(failure)
    cases = {
        case.gpu_id: case
        for case in RmaCase.objects.filter(gpu__in=gpus).exclude(state=CaseState.CLOSED)
    }
    present = _present(node)
    return [
        Card(
            gpu,
            counts.get(gpu.uuid, {}).get("day", 0),
            counts.get(gpu.uuid, {}).get("ever", 0),
            faults.get(gpu.uuid, []),
            cases.get(gpu.uuid),
            present(gpu.uuid),
        )
        for gpu in gpus
    ]


def faults_of_itself(node: Node) -> list[Failure]:
    """Open failures of the node that no card of it is blamed for."""
    return list(Failure.objects.filter(OPEN_FAULT, node=node, gpu=None).distinct())


# --- What runs on it, what is done about it -------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A node's jobs, runs and incidents, newest first."""

    stays: list[Placement]
    coordinated: list[Any]
    runs: list[PlaybookRun]
    incidents: list[Incident]


def work_of(node: Node) -> Work:
    """What runs on the node and what is done about it; at most LIST_LIMIT of each, newest first."""
    stays = node.placements.select_related("replica__job").order_by("-created_at")
    about = Incident.objects.filter(Q(node=node) | Q(failures__node=node)).distinct()
    return Work(
        stays=sorted(stays[:LIST_LIMIT], key=lambda one: one.state == PlacementState.ENDED),
        coordinated=list(node.coordinated_jobs.filter(ended_at=None)),
        runs=list(
            node.runs.select_related("incident")
            .prefetch_related("steps", "approvals")
            .order_by("-created_at")[:LIST_LIMIT]
        ),
        incidents=list(about.order_by("-id")[:LIST_LIMIT]),
    )


# --- Readings -------------------------------------------------------------------------------------

#: How far back the charts may be asked to reach, by the word in the address.
WINDOWS: dict[str, tuple[str, float]] = {
    "10m": ("10 min", 600.0),
    "1h": ("1 h", 3600.0),
    "1d": ("1 d", 86_400.0),
}
#: A chart has at most this many points; each is the highest (of clocks: the lowest) it stands for.
MAX_POINTS = 160
#: A reading is told as the present one for so many intervals of sampling; then none is known.
FRESH_FOR = 3
METRICS = (
    "temperature_c",
    "power_w",
    "sm_clock_mhz",
    "utilization",
    "memory_used_bytes",
    "ecc_corrected",
    "ecc_uncorrected",
    "pcie_replays",
)
_LOWEST = frozenset({"sm_clock_mhz"})


def readings_of(node: Node, window_s: float) -> dict[str, Any]:
    """The readings of every card as columns: `at`, and by card one list for each metric.

    `present` is what each card's newest reading says, as long as that tells of the present.
    A missing reading is null: never the same as zero.
    """
    now = timezone.now()
    since = now - timedelta(seconds=window_s)
    samples = node.samples.filter(at__gte=since).order_by("at")
    width = window_s / MAX_POINTS
    stretches: dict[int, list[NodeSample]] = {}
    for sample in samples.iterator(chunk_size=500):
        place = int((sample.at - since).total_seconds() / width)
        stretches.setdefault(place, []).append(sample)
    columns = list(stretches.values())
    gpus = list(node.gpus.order_by("index").values_list("uuid", "index", "serial"))
    by_card = [[_readings(sample) for sample in stretch] for stretch in columns]
    present = _present(node)
    return {
        "at": [round(stretch[-1].at.timestamp(), 3) for stretch in columns],
        "from": since.timestamp(),
        "to": now.timestamp(),
        "cards": [
            {
                "index": index,
                "serial": serial,
                "present": present(uuid),
                **{metric: [_worst(one, uuid, metric) for one in by_card] for metric in METRICS},
            }
            for uuid, index, serial in gpus
        ],
    }


def _present(node: Node) -> Callable[[str], dict[str, float | None]]:
    """What is known of a card at present, by metric."""
    fresh = timedelta(seconds=FRESH_FOR * settings.SAMPLE_INTERVAL_S)
    newest = node.samples.filter(at__gte=timezone.now() - fresh).order_by("-at").first()
    readings = _readings(newest) if newest else {}
    return lambda uuid: {metric: readings.get(uuid, {}).get(metric) for metric in METRICS}


def _readings(sample: NodeSample) -> dict[str, dict[str, Any]]:
    return {one.get("uuid", ""): one for one in sample.gpus}


def _worst(stretch: list[dict[str, dict[str, Any]]], uuid: str, metric: str) -> float | None:
    values = [one[uuid][metric] for one in stretch if one.get(uuid, {}).get(metric) is not None]
    if not values:
        return None
    return float(f"{(min if metric in _LOWEST else max)(values):.6g}")


# --- Counts that the page's headings show ---------------------------------------------------------


@dataclass(frozen=True)
class Health:
    """What the cards of a node add up to."""

    cards: int = 0
    faulty: int = 0
    out: int = 0  # with an open RMA case
    codes: list[tuple[str, int]] = field(default_factory=list)


def health_of(cards: list[Card], own: list[Failure]) -> Health:
    """The node's GPUs and open failures, counted."""
    codes = Counter(failure.code for card in cards for failure in card.faults)
    codes.update(failure.code for failure in own)
    return Health(
        cards=len(cards),
        faulty=sum(bool(card.faults) for card in cards),
        out=sum(card.case is not None for card in cards),
        codes=sorted(codes.items()),
    )
