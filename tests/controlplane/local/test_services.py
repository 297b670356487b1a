"""The embedded services start, answer and end."""

from __future__ import annotations

import pytest
from django.conf import settings
from django.db import connection
import redis


@pytest.mark.django_db
def test_database_answers() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        assert cursor.fetchone() == (1,)


def test_redis_answers() -> None:
    assert redis.Redis.from_url(settings.REDIS_URL).ping()
