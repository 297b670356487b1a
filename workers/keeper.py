"""The one process that keeps time: beats into leases, leases into signals, timers into rings.

It runs under an advisory lock on a connection of its own, so a second keeper waits as a stand-by.
It decides nothing; every pass does the same work from the rows, whenever the last one died.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, cast

import msgspec
import redis
import structlog
from django.conf import settings
from django.contrib.sessions.models import Session
from django.db import InterfaceError, InternalError, OperationalError, connection
from django.utils import timezone

from controlplane import doorbell, redis_keys
from controlplane.accounts import actions as accounts
from controlplane.accounts.models import SYSTEM
from controlplane.fleet import actions as fleet
from controlplane.fleet.changes import change
from controlplane.fleet.models import Node
from controlplane.health import actions as health
from controlplane.health.actions import record_signal
from controlplane.health.choices import SignalKind
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import RUN_UNFINISHED
from controlplane.incidents.models import PlaybookStep
from controlplane.jobs import actions as jobs
from controlplane.rest.idempotency import forget_old_answers
from workers import engine, metrics
from workers.intake import silence
from workers.keeper_http import Pulse
from workers.playbooks import PLAYBOOKS, node_steps, site_silent
from workers.sensor_signals import Sensors

log = structlog.get_logger(__name__)

ADVISORY_LOCK = 0x6472_7964  # "dryd"
PASS_S = 1.0
#: The head of the audit chain is told to the log at most this often.
PIN_S = 60


class _Beat(msgspec.Struct):
    """What ingest keeps of a node's newest beat; the rest of it is not needed here."""

    received_at: float
    boot_id: str = ""
    readings: list[dict[str, Any]] = []
    ports: list[dict[str, Any]] = []


class _Hearing(msgspec.Struct):
    """What ingest says of itself: when it last heard, and since when it does."""

    at: float
    since: float


@dataclass
class Memory:
    """What a pass hands to the next; losing it costs one grace.

    Its own times are of the monotonic clock: the other may be set back.
    """

    #: When each node's newest beat was received, as last written to its lease.
    heard: dict[str, float]
    #: Nobody is declared dead, and no order unanswered, before this moment.
    grace_until: float
    #: When ingest last said that it hears: of what came later nobody can say that it did not come.
    hearing_until: datetime | None = None
    #: Since when the youngest ingest hears.
    hearing_since: float | None = None
    #: When the nodes' readings were last kept for their charts.
    sampled_at: float | None = None
    #: What each node heard since then showed last, and when.
    unsampled: dict[str, tuple[datetime, list[dict[str, Any]]]] = field(default_factory=dict)
    #: Where the audit chain stood when the log was last told, and when that was.
    pinned_position: int = 0
    pinned_at: float | None = None
    sensors: Sensors = field(default_factory=Sensors)


def run(stop: threading.Event, pulse: Pulse) -> None:
    """Keep until `stop` is set; survives a database or Redis that comes and goes.

    A pass that has begun is finished; then the lock is let go, so that a stand-by leads at once.
    """
    client = redis.Redis.from_url(settings.REDIS_URL, socket_timeout=2, socket_connect_timeout=2)
    memory = Memory(heard={}, grace_until=_grace())
    lead: Any = None  # the session that holds the lock
    while not stop.is_set():
        try:
            if lead is None:
                lead = _take_lead()
                if lead is not None:
                    incidents.publish_playbooks([one.as_row() for one in PLAYBOOKS.values()])
                memory = Memory(heard={}, grace_until=_grace())
            if lead is not None:
                with metrics.PASSES.time():
                    keep(client, memory)
            pulse.turned(lead is not None)
        except (OperationalError, InternalError, InterfaceError) as error:
            if _lasts(lead):
                log.warning("keeper.pass_failed", error=str(error))
            else:
                # The lock went with its session: start over as a stand-by.
                log.warning("keeper.database_away", error=str(error))
                connection.close()
                lead = None
                pulse.database_lost()
        stop.wait(PASS_S)
    connection.close()


def keep(client: redis.Redis, memory: Memory) -> None:
    """One pass over everything that has a time."""
    now = timezone.now()
    _flush_beats(client, memory)
    if memory.hearing_until is not None and time.monotonic() >= memory.grace_until:
        heard_until = min(now, memory.hearing_until)
        _declare_lost(heard_until)
        _do(partial(_tell_of_the_let_go, now))
        # Answers too have had time to arrive by now.
        _do(partial(fleet.expire_commands, heard_until))
    for chore in (
        partial(fleet.fail_overdue_nodes, SYSTEM, now),
        partial(incidents.pause_overdue_runs, now),
        partial(engine.release_expired, now),
        site_silent.look_again_once_heard,
        node_steps.look_again_once_heard,
        incidents.admit_enrolled,
        incidents.readmit_replaced,
        incidents.keep_warm_spares,
        incidents.finish_ending_jobs,
        incidents.bring_back_sent_away,
        incidents.resolve_losses,
        partial(jobs.expire_reservations, now),
        partial(forget_old_answers, now),
        partial(_forget_orders, now),
        partial(jobs.forget_directives, now),
        partial(_forget_sessions, now),
        partial(jobs.thin_progress, now),
        partial(_chain_audit, memory),
    ):
        _do(chore)
    if engine.work_is_due(now):
        doorbell.ring()


def _forget_orders(now: datetime) -> int:
    unfinished = PlaybookStep.objects.filter(run__state__in=sorted(RUN_UNFINISHED))
    return fleet.forget_commands(now, unfinished.values_list("pk", flat=True))


def _forget_sessions(now: datetime) -> int:
    return Session.objects.filter(expire_date__lt=now).delete()[0]


def _do(chore: Callable[[], object]) -> None:
    """One chore that fails must not keep the others from being done; but none is done once the
    session is lost, whatever the chore made of it. Raises InterfaceError then."""
    session = connection.connection
    try:
        chore()
    except Exception as error:
        if not _lasts(session):
            raise InterfaceError(f"the session was lost: {error}") from error
        log.exception("keeper.chore_failed", chore=getattr(chore, "func", chore).__name__)


def _lasts(session: Any) -> bool:
    """Whether an error was of one statement only: a deadlock that was broken, say. Then the lock is
    still ours, and what is remembered is still true.

    Not whether there is a connection: where the server ended it, Django makes another at the end of
    the transaction, which holds no lock.
    """
    return session is not None and connection.connection is session and not session.closed


def _chain_audit(memory: Memory) -> None:
    """Chain what was audited, and pin the chain's head in the log, which is kept elsewhere."""
    head = accounts.chain_audit()
    now = time.monotonic()
    pinned_lately = memory.pinned_at is not None and now - memory.pinned_at < PIN_S
    if head.position != memory.pinned_position and not pinned_lately:
        log.info("audit.head", position=head.position, hash=head.hash)
        memory.pinned_position, memory.pinned_at = head.position, now


def _take_lead() -> Any:
    """The session that holds the lock from now on; None while another keeper leads."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [ADVISORY_LOCK])
        leading = bool(cursor.fetchone()[0])
    log.info("keeper.leads" if leading else "keeper.stands_by")
    return connection.connection if leading else None


def _flush_beats(client: redis.Redis, memory: Memory) -> None:
    """Extend the leases of all nodes heard since the last pass, in one statement.

    If Redis or ingest is away, or ingest was begun anew since, we stopped hearing, which says
    nothing about the nodes: a grace begins, so that the nodes have time to be heard again before
    anybody is missed.
    """
    try:
        beats = client.hgetall(redis_keys.BEATS)
        said = cast(bytes | None, client.get(redis_keys.INGEST_ALIVE))
        client.set(redis_keys.KEEPER_ALIVE, timezone.now().isoformat(), ex=10)
    except redis.RedisError as error:
        log.warning("keeper.redis_away", error=str(error))
        memory.grace_until = _grace()
        return
    if said is None:
        log.warning("keeper.ingest_away")
        memory.grace_until = _grace()
    else:
        _hear(msgspec.json.decode(said, type=_Hearing), memory)
    heard: dict[str, float] = {}
    readings: dict[str, list[dict[str, Any]]] = {}
    ports: dict[str, list[dict[str, Any]]] = {}
    for key, value in beats.items():
        beat = msgspec.json.decode(value, type=_Beat)
        node_id = key.decode() if isinstance(key, bytes) else key
        if memory.heard.get(node_id) != beat.received_at:
            heard[node_id] = beat.received_at
            readings[node_id], ports[node_id] = beat.readings, beat.ports
    news = {node_id: datetime.fromtimestamp(at, UTC) for node_id, at in heard.items()}
    known = set(Node.objects.filter(pk__in=news).values_list("pk", flat=True))
    back = fleet.renew_leases({k: v for k, v in news.items() if k in known}, settings.LEASE_S)
    memory.heard |= heard  # only now: what could not be written is heard again in the next pass
    for node_id in back:
        log.info("node.reachable_again", node=node_id)
    cards_of = {
        node: (news[node], cards) for node, cards in readings.items() if node in known and cards
    }
    memory.unsampled.update(cards_of)
    _keep_samples(memory)
    ports_of = {node: (news[node], ports[node]) for node in known}
    _do(partial(memory.sensors.follow, cards_of, ports_of))


def _hear(ingest: _Hearing, memory: Memory) -> None:
    memory.hearing_until = datetime.fromtimestamp(ingest.at, UTC)
    if memory.hearing_since is not None and ingest.since > memory.hearing_since:
        log.warning("keeper.ingest_began_anew")
        memory.grace_until = _grace()
    memory.hearing_since = max(memory.hearing_since or 0.0, ingest.since)


def _keep_samples(memory: Memory) -> None:
    """Keep readings now and then, for the charts; old ones go.

    Nodes beat far less often than we pass, so one pass hears only some of them: of each is kept
    what it showed last since all were kept.
    """
    now = time.monotonic()
    if memory.sampled_at is not None and now - memory.sampled_at < settings.SAMPLE_INTERVAL_S:
        return
    memory.sampled_at = now
    health.record_samples(memory.unsampled)
    memory.unsampled = {}
    health.forget_samples(timezone.now() - timedelta(seconds=settings.SAMPLE_KEEP_S))


@change()
def _declare_lost(now: datetime) -> None:
    """Leases and the signals that tell of them, in one transaction: neither without the other."""
    for node in fleet.lose_leases(now):
        log.warning("node.lease_lost", node=node.name)
        metrics.LEASES_LOST.inc()
        _tell_lost(f"lease:{node.pk}:{node.lease.deadline.timestamp():.3f}", node, now)


@change()
def _tell_of_the_let_go(now: datetime) -> None:
    """Tell again of nodes whose silence led to nothing, since somebody had them in hand."""
    for node, word in silence.unreported_silent_nodes():
        log.warning("node.let_go_silent", node=node.name)
        # Told after the word, by whichever clock, so that it is not told of again.
        _tell_lost(f"lease:{node.pk}:let-go:{word.pk}", node, max(now, word.at))


def _tell_lost(signal_id: str, node: Node, now: datetime) -> None:
    record_signal(
        signal_id,
        SignalKind.LEASE_LOST,
        source="keeper",
        observed_at=now,
        node=node,
        data={"last_beat_at": node.lease.last_beat_at.isoformat()},
    )


def _grace() -> float:
    return time.monotonic() + 2 * settings.LEASE_S
