"""Slows down whoever guesses passwords: so many failures per name and address, then a pause.

Kept in Redis, so a lost Redis forgets the count; it never keeps people out.
"""

from __future__ import annotations

import hashlib

import redis
import structlog
from django.conf import settings

log = structlog.get_logger(__name__)

FAILURES_ALLOWED = 10
WINDOW_S = 300

_redis = redis.Redis.from_url(settings.REDIS_URL, socket_timeout=1, socket_connect_timeout=1)


def is_blocked(username: str, address: str) -> bool:
    """Whether this name has failed too often from this address within the last five minutes."""
    try:
        count = _redis.get(_key(username, address))
    except redis.RedisError as error:
        log.warning("login.throttle_unavailable", error=str(error))
        return False
    return int(count or 0) >= FAILURES_ALLOWED


def record_failure(username: str, address: str) -> None:
    """Count one refused login."""
    key = _key(username, address)
    try:
        with _redis.pipeline(transaction=True) as pipeline:
            pipeline.incr(key)
            pipeline.expire(key, WINDOW_S)
            pipeline.execute()
    except redis.RedisError as error:
        log.warning("login.throttle_unavailable", error=str(error))


def _key(username: str, address: str) -> str:
    digest = hashlib.sha256(f"{username.lower()}\0{address}".encode()).hexdigest()
    return f"drydock:login:{digest}"
