"""A PostgreSQL and a Redis of one benchmark's own, so that it writes into nobody's product."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import django

from controlplane.local import processes, services

#: What may lead to servers of the caller's: a product's, for all we know.
THEIRS = tuple(
    name + ending
    for name in ("DATABASE_URL", "DATABASE_PASSWORD", "REDIS_URL")
    for ending in ("", "_FILE")
)


@contextmanager
def own_servers() -> Iterator[Path]:
    """A home whose servers answer, and which Django is set up for; deleted with them afterwards.

    Raises ServiceError when this machine cannot run them.
    """
    home = Path(tempfile.mkdtemp(prefix="drydock-bench-"))
    for name in THEIRS:
        os.environ.pop(name, None)
    os.environ["DRYDOCK_HOME"] = str(home)
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.local.settings"
    children: list[processes.Child] = []
    try:
        plan = services.plan(home, {}, print, durable=True)
        children = [processes.Child(home, program) for program in plan.programs]
        for child in children:
            child.start()
        services.wait_ready(plan, children)
        os.environ.update(plan.environment)
        django.setup()
        yield home
    finally:
        for child in reversed(children):
            child.stop()
        shutil.rmtree(home, ignore_errors=True)
