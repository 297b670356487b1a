"""A Redis that does not answer costs whoever rings one wait, however often it rings."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import redis

from controlplane import doorbell


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A Redis whose host takes what it is sent and answers nothing."""
    timeout = redis.TimeoutError("no answer")
    client = Mock(llen=Mock(side_effect=timeout), publish=Mock(side_effect=timeout))
    monkeypatch.setattr(doorbell, "_redis", client)
    monkeypatch.setattr(doorbell, "_pause", doorbell._Pause())
    return client


def test_a_silent_redis_is_waited_for_once_by_all_that_ring_together(silent: Mock) -> None:
    doorbell.ring("node/a")
    doorbell.ring("node/b")
    doorbell.announce_command("nod_a")

    assert (silent.llen.call_count, silent.publish.call_count) == (1, 0)


def test_a_silent_redis_is_waited_for_once_by_all_announcements(silent: Mock) -> None:
    doorbell.announce_command("nod_a")
    doorbell.announce_command("nod_b")
    doorbell.ring("node/a")

    assert (silent.llen.call_count, silent.publish.call_count) == (0, 1)


def test_it_is_asked_again_after_a_pause(silent: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "PAUSE_S", 0.0)
    doorbell.ring()
    doorbell.ring()

    assert silent.llen.call_count == 2
