"""The dot in the header: green only while there is a keeper, and workers that keep up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import redis
from django.conf import settings
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane import redis_keys
from controlplane.health.models import Signal
from controlplane.incidents.models import PlaybookRun, PlaybookStep
from tests.controlplane.dashboard.world import Fleet

MINUTE_AGO = timezone.now() - timedelta(minutes=1)


@pytest.fixture
def keeper() -> Iterator[redis.Redis]:
    """One that was heard a moment ago."""
    client = redis.Redis.from_url(settings.REDIS_URL)
    client.set(redis_keys.KEEPER_ALIVE, timezone.now().isoformat())
    yield client
    client.delete(redis_keys.KEEPER_ALIVE)


@pytest.fixture
def caught_up(fleet: Fleet) -> Fleet:
    """All is done that there was to do."""
    Signal.objects.update(triaged_at=timezone.now(), recorded_at=MINUTE_AGO)
    PlaybookRun.objects.update(created_at=MINUTE_AGO)
    PlaybookStep.objects.update(state="waiting", wake_at=timezone.now())
    return fleet


def _dot(client: Client) -> str:
    return client.get(reverse("automation")).content.decode()


def test_it_is_on_while_all_that_is_due_is_done(
    viewer: Client, caught_up: Fleet, keeper: redis.Redis
) -> None:
    assert "Automation on" in _dot(viewer)


def test_it_is_silent_without_a_keeper(
    viewer: Client, caught_up: Fleet, keeper: redis.Redis
) -> None:
    keeper.delete(redis_keys.KEEPER_ALIVE)

    assert "Automation silent" in _dot(viewer)


@pytest.mark.parametrize(
    "leave",
    [
        lambda: PlaybookStep.objects.update(state="waiting", wake_at=MINUTE_AGO),
        lambda: PlaybookStep.objects.update(state="ready", wake_at=MINUTE_AGO),
        lambda: PlaybookRun.objects.update(state="pending"),
        lambda: Signal.objects.update(triaged_at=None),
    ],
    ids=["a step's time has come", "a step is ready", "a run has not begun", "nobody triaged"],
)
def test_it_is_behind_while_what_is_due_waits_for_a_worker(
    leave: Callable[[], int], viewer: Client, caught_up: Fleet, keeper: redis.Redis
) -> None:
    leave()

    dot = _dot(viewer)
    assert "Automation behind" in dot
    assert "automation--bad" in dot


@pytest.mark.parametrize(
    "leave",
    [
        lambda: PlaybookStep.objects.update(state="waiting", wake_at=None),
        lambda: (
            PlaybookStep.objects.update(wake_at=MINUTE_AGO),
            PlaybookRun.objects.update(state="paused"),
        ),
        lambda: Signal.objects.update(triaged_at=None, repeated_at=timezone.now()),
    ],
    ids=["for an event", "for a person", "a moment"],
)
def test_it_is_on_while_nothing_waits_for_a_worker(
    leave: Callable[[], object], viewer: Client, caught_up: Fleet, keeper: redis.Redis
) -> None:
    leave()

    assert "Automation on" in _dot(viewer)
