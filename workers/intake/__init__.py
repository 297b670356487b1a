"""From signal to playbook: each new signal becomes a failure, merged into an incident, with a run.

Signals are taken with SKIP LOCKED and marked in the transaction that writes what they led to, so
each is handled once, whoever dies.
"""

from __future__ import annotations

import structlog
from django.db import OperationalError
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.errors import Conflict
from controlplane.fleet.changes import change
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from controlplane.jobs import actions as jobs
from controlplane.jobs.models import Job
from workers.intake.coordinators import coordinators_went_with, is_coordinator_gone
from workers.intake.hardware import (
    blamed,
    blames_its_node,
    hardware_spoke,
    job_blamed_a_replica,
    job_blamed_its_node,
)
from workers.intake.lost_replicas import (
    ended_warm_spare,
    ended_while_stopping,
    free_what_it_left,
    is_unasked_end_of_rank,
    replica_was_lost,
    replica_was_stopped,
    stopped_by_order,
)
from workers.intake.silence import node_went_silent
from workers.intake.timeline import add_to_node_incident
from workers.signal_triage import HARDWARE_SPEAKS

log = structlog.get_logger(__name__)

#: Few, because what they touch stays locked until all are done.
BATCH = 20


def untriaged() -> QuerySet[Signal]:
    """Signals that nobody has handled."""
    return Signal.objects.filter(triaged_at=None)


@change()
def triage_signals() -> int:
    """Handle the oldest signals that nobody has handled. Returns how many."""
    # Placements in a fixed order of locks with ingest: signals first, then what they speak of.
    batch = list(
        untriaged()
        .select_for_update(skip_locked=True, no_key=True, of=("self",))
        .select_related("node__lease", "node__cluster", "node__rack", "gpu")
        .order_by("recorded_at", "observed_at")[:BATCH]
    )
    handled = [signal.pk for signal in batch if _handle_alone(signal)]
    Signal.objects.filter(pk__in=handled).update(triaged_at=timezone.now())
    return len(batch)


def _handle_alone(signal: Signal) -> bool:
    """Handle one signal in a savepoint, so that one that cannot be handled stops no other.

    False: what it belongs to ended in this very moment; it is to be handled again.
    """
    try:
        _handle_twice(signal)
    except Conflict as conflict:
        log.info("intake.again", signal=signal.pk, reason=conflict.detail)
        return False
    except OperationalError:
        raise  # a deadlock or a lost connection says nothing of the signal: all are taken again
    except Exception:
        log.exception("intake.signal_not_handled", signal=signal.pk)
    return True


def _handle_twice(signal: Signal) -> None:
    """Another worker may have changed what the signal speaks of between two of our looks at it, as
    by making one failure of two. It has committed by now: a second look sees what it left."""
    try:
        with change():
            _handle(signal)
    except (Conflict, OperationalError):
        raise
    except Exception as error:
        log.warning("intake.second_look", signal=signal.pk, error=repr(error))
        with change():
            _handle(signal)


def _handle(signal: Signal) -> None:
    if signal.kind == SignalKind.PROCESS_EXITED:
        free_what_it_left(signal)
    if signal.kind == SignalKind.LEASE_LOST:
        node_went_silent(signal)
    elif signal.kind in HARDWARE_SPEAKS:
        hardware_spoke(signal)
    elif (spare := ended_warm_spare(signal)) is not None:
        jobs.end_warm_spare(SYSTEM, spare.pk, "its process has ended")
    elif (leaving := ended_while_stopping(signal)) is not None:
        jobs.end_placement(SYSTEM, leaving.pk, "its process has ended", free_node=True)
    elif signal.kind == SignalKind.PEER_LOST or is_unasked_end_of_rank(signal):
        replica_was_lost(signal)
    elif (stopped := stopped_by_order(signal)) is not None:
        replica_was_stopped(signal, stopped)
    elif (index := blamed(signal)) is not None:
        job_blamed_a_replica(signal, index)
    elif blames_its_node(signal):
        job_blamed_its_node(signal)
    elif signal.node is not None and is_coordinator_gone(signal):
        led = Job.objects.filter(coordinator_placement=signal.placement_id)
        coordinators_went_with(signal.node, signal, led)
    elif signal.node is not None:
        add_to_node_incident(signal)
