"""The only writers of signals and failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from django.db.models import Sum, Value
from django.db.models.functions import Greatest, Least
from django.utils.crypto import salted_hmac

from controlplane import doorbell
from controlplane.fleet import actions as fleet
from controlplane.fleet.changes import change
from controlplane.fleet.models import Gpu, Node
from controlplane.health.choices import Action, FaultClass, SignalKind, Urgency
from controlplane.health.models import Baseline, Failure, NodeSample, Signal
from node_agent import wire
from node_agent.collectors.xid import same_card

#: A count of repeats beyond this is none, and no moment is later, in Unix time: as in `wire`.
MAX_COUNT = 2_000_000_000
LAST_MOMENT = 1e11
#: Readings that a card keeps in its own memory, whatever is done to it.
KEPT_BY_CARD = ("remap_failed", "remapped_rows", "exhausted_banks")
#: Events that an agent tells again for as long as what they speak of goes on.
GO_ON = ("kernel_line", "gpu_unreadable")


@change()
def record_events(node_id: str, events: list[wire.Event]) -> list[str]:
    """Keep what an agent observed; an event that is told again is the same row.

    The card that an event names is believed if it is one of the node's own.

    Returns the ids that may be forgotten by the sender: all of them.
    """
    rows = _row_ids(node_id, events)
    own = Gpu.objects.filter(node_id=node_id, uuid__in={e.gpu_uuid for e in events})
    cards = set(own.values_list("uuid", flat=True))
    told_before = set(Signal.objects.filter(pk__in=rows.values()).values_list("pk", flat=True))
    Signal.objects.bulk_create(
        [
            Signal(
                id=rows[event.id],
                kind=SignalKind(event.kind),
                source=event.source,
                node_id=node_id,
                gpu_id=event.gpu_uuid if event.gpu_uuid in cards else None,
                job_id=text_of(event.data.get("job")),
                replica=_index(event.data.get("replica")),
                placement_id=text_of(event.data.get("placement")),
                raw=event.raw,
                data=event.data,
                boot_id=event.boot_id,
                observed_at=_moment(event.at),
            )
            for event in events
        ],
        ignore_conflicts=True,
    )
    for event in events:
        _count_repeats(rows[event.id], event)
        # A boot that is told again must not turn a later one back.
        if event.kind == "boot" and rows[event.id] not in told_before:
            fleet.record_boot(node_id, event.boot_id, _moment(event.at))
    doorbell.ring_after_commit()
    return [event.id for event in events]


def _row_ids(node_id: str, events: Iterable[wire.Event]) -> dict[str, str]:
    """By the ids that the sender gave: who guesses the ids of others must not hide what they tell.

    One that is taken by what another node told is a row of its own all the same, under an id that
    nobody can guess. So is one with a colon: those that we give have one, and those of agents none.
    """
    ids = [event.id for event in events]
    of_others = Signal.objects.filter(pk__in=ids).exclude(node_id=node_id)
    taken = {*of_others.values_list("pk", flat=True), *(one for one in ids if ":" in one)}
    return {one: _own_id(node_id, one) if one in taken else one for one in ids}


def _own_id(node_id: str, event_id: str) -> str:
    return f"ev_{salted_hmac('signal', f'{node_id} {event_id}').hexdigest()[:32]}"


def _count_repeats(row: str, event: wire.Event) -> None:
    """An agent tells of repeats as a count of the first: told late, or twice, it changes nothing.
    They are to be triaged again, for the node may have been repaired in between."""
    count, last_at = event.data.get("count"), event.data.get("last_at")
    if event.kind not in GO_ON or not isinstance(last_at, int | float):
        return
    if isinstance(count, int) and 1 < count < MAX_COUNT and event.at <= last_at < LAST_MOMENT:
        Signal.objects.filter(pk=row, count__lt=count).update(
            count=count, repeated_at=_moment(last_at), triaged_at=None
        )


@change()
def record_signal(
    signal_id: str,
    kind: SignalKind,
    *,
    source: str,
    observed_at: datetime,
    node: Node | None = None,
    gpu: Gpu | None = None,
    job_id: str = "",
    replica: int | None = None,
    placement_id: str = "",
    raw: str = "",
    data: dict[str, Any] | None = None,
) -> None:
    """Keep an observation made by the control plane or a job. The same id again changes nothing.

    An id that can be foreseen has a colon, so that no agent can take it before: see `_row_ids`.
    """
    Signal.objects.bulk_create(
        [
            Signal(
                id=signal_id,
                kind=kind,
                source=source,
                node=node,
                gpu=gpu,
                raw=raw,
                job_id=job_id,
                replica=replica,
                placement_id=placement_id,
                data=data or {},
                boot_id=node.boot_id if node else "",
                observed_at=observed_at,
            )
        ],
        ignore_conflicts=True,
    )
    doorbell.ring_after_commit()


@change()
def record_failure(
    *,
    fault_class: FaultClass,
    code: str,
    summary: str,
    needed: Action,
    rule: str,
    signals: Iterable[Signal],
    observed_at: datetime,
    node_id: str | None = None,
    gpu_id: str | None = None,
    job_id: str = "",
    replica: int | None = None,
    urgency: Urgency = Urgency.NOW,
) -> Failure:
    """Keep what triage made of these signals: one fault, of which several may speak."""
    failure = Failure.objects.create(
        urgency=urgency,
        gpu_id=gpu_id,
        last_seen_at=observed_at,
        count=max((signal.count for signal in signals), default=1),
        fault_class=fault_class,
        code=code,
        summary=summary,
        needed=needed,
        rule=rule,
        node_id=node_id,
        job_id=job_id,
        replica=replica,
        observed_at=observed_at,
    )
    failure.signals.set(signals)
    return failure


@change()
def repeat_failure(failure: Failure, signal: Signal) -> None:
    """Count a signal, with its repeats, as more of the same failure, or as its consequence."""
    failure.signals.add(signal)
    total = failure.signals.aggregate(total=Sum("count"))["total"]
    seen_at = signal.repeated_at or signal.observed_at
    Failure.objects.filter(pk=failure.pk).update(
        count=total,
        observed_at=Least("observed_at", Value(signal.observed_at)),
        last_seen_at=Greatest("last_seen_at", Value(seen_at)),
    )


@change()
def join_failures(failure: Failure, others: Iterable[Failure]) -> None:
    """Let the others go on as parts of one: they turned out to be the same fault."""
    for other in others:
        failure.signals.add(*other.signals.all())
        for incident in other.incidents.all():
            incident.failures.add(failure)
        other.delete()


@change()
def restate_failure(failure: Failure, **said: Any) -> None:
    """Let a failure be what all of its signals together say: `said` by the names of its fields."""
    for name, value in said.items():
        setattr(failure, name, value)
    failure.save(update_fields=[*said])


def record_baselines(nvlink_mb_s: Mapping[str, float]) -> None:
    """Keep the most that these cards' NVLinks have done, by their uuids; unknown cards are none."""
    known = Gpu.objects.filter(pk__in=nvlink_mb_s).values_list("pk", "node")
    Baseline.objects.bulk_create(
        [
            Baseline(gpu_id=uuid, node_id=node, nvlink_mb_s=nvlink_mb_s[uuid])
            for uuid, node in known
        ],
        update_conflicts=True,
        unique_fields=["gpu"],
        update_fields=["nvlink_mb_s", "node"],
    )


def record_samples(readings: dict[str, tuple[datetime, list[dict[str, Any]]]]) -> None:
    """Keep what the nodes' sensors showed, and when; `readings` by node id."""
    NodeSample.objects.bulk_create(
        [NodeSample(node_id=node_id, at=at, gpus=gpus) for node_id, (at, gpus) in readings.items()],
        ignore_conflicts=True,
        batch_size=1000,
    )


def forget_samples(before: datetime) -> int:
    """Delete what the charts show no more. Returns how many rows."""
    return NodeSample.objects.filter(at__lt=before).delete()[0]


def card_at(node_id: str, pci: str) -> Gpu | None:
    """The node's card at this PCI address, as a kernel line gives it."""
    if not pci:
        return None
    cards = Gpu.objects.filter(node_id=node_id)
    return next((card for card in cards if same_card(pci, card.pci_address)), None)


def memory_of(gpu_uuid: str) -> dict[str, float]:
    """What a card last said of its remapped rows, whichever node it sat in; {} if nothing."""
    told = Signal.objects.filter(
        gpu_id=gpu_uuid, kind=SignalKind.READING, data__reading__in=KEPT_BY_CARD
    ).order_by("observed_at")
    return {signal.data["reading"]: float(signal.data["value"]) for signal in told}


def text_of(value: object) -> str:
    """The first 40 characters of what an agent reported; "" if it is no text."""
    return value[:40] if isinstance(value, str) else ""


def _index(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 1_000_000 else None


def _moment(unix_time: float) -> datetime:
    return datetime.fromtimestamp(unix_time, UTC)
