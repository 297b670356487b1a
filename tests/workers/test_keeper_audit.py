"""The keeper and the audit trail: each pass chains what was written, and the log pins the head."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis
from django.conf import settings
from structlog.testing import capture_logs

from controlplane.accounts import chain
from tests.factories import AuditEventFactory
from workers import keeper

pytestmark = pytest.mark.django_db


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    connected: redis.Redis = redis.Redis.from_url(settings.REDIS_URL)
    yield connected
    connected.close()


@pytest.fixture
def memory() -> keeper.Memory:
    return keeper.Memory(heard={}, grace_until=time.monotonic() + 3600.0)


def pins(client: redis.Redis, memory: keeper.Memory) -> list[tuple[int, str]]:
    """The heads that one pass tells the log."""
    with capture_logs() as logs:
        keeper.keep(client, memory)
    return [(line["position"], line["hash"]) for line in logs if line["event"] == "audit.head"]


def test_a_pass_chains_what_was_written_and_pins_the_head(
    client: redis.Redis, memory: keeper.Memory
) -> None:
    AuditEventFactory.create_batch(3)

    assert pins(client, memory) == [(3, chain.head().hash)]
    assert chain.verify().ok


def test_the_head_is_told_once_a_minute_and_only_if_it_moved(
    client: redis.Redis, memory: keeper.Memory
) -> None:
    AuditEventFactory()
    pins(client, memory)
    assert pins(client, memory) == []

    AuditEventFactory()
    assert pins(client, memory) == []

    memory.pinned_at = time.monotonic() - keeper.PIN_S
    assert [position for position, _ in pins(client, memory)] == [2]

    memory.pinned_at = time.monotonic() - keeper.PIN_S
    assert pins(client, memory) == []
