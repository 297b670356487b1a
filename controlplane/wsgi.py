"""The web process's entry: pages and REST."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created
from django.dispatch import receiver


@receiver(connection_created)
def bound_statements(connection: BaseDatabaseWrapper, **_: Any) -> None:
    """One question must not hold a thread of web for long. A file that is exported is many.

    Said on each new connection, not among the options with which it is opened: poolers refuse
    those, and nothing but web imports this module.
    """
    with connection.cursor() as cursor:
        milliseconds = str(round(settings.WEB_STATEMENT_TIMEOUT_S * 1000))
        cursor.execute("SELECT set_config('statement_timeout', %s, false)", [milliseconds])


application = get_wsgi_application()
