"""The one way in which the control plane wakes what acts: "look", never "do this one".

Truth is in Postgres, so a ring that is lost costs latency only: the keeper rings again each second.
"""

from __future__ import annotations

import time

import redis
import structlog
from celery import Celery
from django.conf import settings
from django.db import transaction
from kombu.exceptions import OperationalError

log = structlog.get_logger(__name__)

DRAIN_TASK = "workers.drain"
#: Celery's queue in Redis, and how many rings may wait in it while all workers are away.
QUEUE = "celery"
MAX_RINGS = 1000
COMMANDS_CHANNEL = "drydock:commands"
#: Once Redis did not answer it is left alone for this long, in seconds. One whose host is silent
#: makes whoever calls wait for seconds, and a transaction may ring some hundred times.
PAUSE_S = 2.0


class _Pause:
    """Whether Redis is left alone."""

    def __init__(self) -> None:
        self._until = 0.0

    def begin(self) -> None:
        self._until = time.monotonic() + PAUSE_S

    def __bool__(self) -> bool:
        return time.monotonic() < self._until


_pause = _Pause()
_celery = Celery("drydock-doorbell")
_celery.config_from_object("django.conf:settings", namespace="CELERY")
_redis = redis.Redis.from_url(
    settings.REDIS_URL, socket_timeout=2, socket_connect_timeout=2, decode_responses=True
)


def ring_after_commit(subject: str = "") -> None:
    """Wake the workers once the present transaction is committed."""
    transaction.on_commit(lambda: ring(subject))


def ring(subject: str = "") -> None:
    """Wake the workers: there may be signals to triage or steps to take.

    `subject` ("node/<id>", "job/<id>", "step/<id>") also wakes the steps that wait for its news.
    """
    if _pause:
        return
    try:
        if _redis.llen(QUEUE) >= MAX_RINGS:
            return  # nobody has looked for long, and whoever comes will look at everything
        _celery.send_task(DRAIN_TASK, [subject], ignore_result=True, retry=False)
    except (OperationalError, redis.RedisError, OSError) as error:
        _pause.begin()
        log.warning("doorbell.lost", error=str(error))


def announce_command_after_commit(node_id: str) -> None:
    """Wake the long poll of this node once the present transaction is committed."""
    transaction.on_commit(lambda: announce_command(node_id))


def announce_command(node_id: str) -> None:
    """Wake the long poll of this node now.

    If Redis does not answer, the agent finds its command when its poll comes round.
    """
    if _pause:
        return
    try:
        _redis.publish(COMMANDS_CHANNEL, node_id)
    except redis.RedisError as error:
        _pause.begin()
        log.warning("doorbell.command_announcement_lost", node=node_id, error=str(error))
