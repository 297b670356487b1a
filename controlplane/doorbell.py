"""The one way in which the control plane wakes what acts: "look", never "do this one".

Truth is in Postgres, so a ring that is lost costs latency only: the keeper rings again each second.
"""

from __future__ import annotations

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
    try:
        if _redis.llen(QUEUE) >= MAX_RINGS:
            return  # nobody has looked for long, and whoever comes will look at everything
        _celery.send_task(DRAIN_TASK, [subject], ignore_result=True, retry=False)
    except (OperationalError, redis.RedisError, OSError) as error:
        log.warning("doorbell.lost", error=str(error))


def announce_command_after_commit(node_id: str) -> None:
    """Wake the long poll of this node once the present transaction is committed."""
    transaction.on_commit(lambda: announce_command(node_id))


def announce_command(node_id: str) -> None:
    try:
        _redis.publish(COMMANDS_CHANNEL, node_id)
    except redis.RedisError as error:
        log.warning("doorbell.command_announcement_lost", node=node_id, error=str(error))
