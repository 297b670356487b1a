"""Celery: the doorbell's other end. A message means "look", never "do this one"."""

from __future__ import annotations

import multiprocessing
import os
import socket
from typing import Any

from billiard import pool
from celery import Celery
from celery.signals import setup_logging, worker_init, worker_shutting_down

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.local.settings")

#: Whether this worker was told to end; shared with the processes of its pool.
_stopping = multiprocessing.RawValue("b", 0)

# A process of the pool that ends waits until its parent has read all that it said, in tenths of a
# second; a parent that ends itself may have ceased to read. What ours say nobody needs: a message
# is acknowledged before its task is begun, and results are ignored.
pool.GUARANTEE_MESSAGE_CONSUMPTION_RETRY_LIMIT = 10

app = Celery("drydock")
app.config_from_object("django.conf:settings", namespace="CELERY")


@app.task(name="workers.drain")  # type: ignore[untyped-decorator]
def drain(subject: str = "") -> None:
    """Triage new signals and take every step that is due; first wake those that wait for news."""
    from workers import engine  # Django's models exist only once Celery has set Django up

    owner = f"{socket.gethostname()}/{os.getpid()}"
    engine.drain(subject, owner=owner, stopping=lambda: bool(_stopping.value))


@worker_init.connect  # type: ignore[untyped-decorator]
def _refuse_what_cannot_be_judged(**_: Any) -> None:
    from workers.checks import refuse_what_cannot_be_judged  # once Celery has set Django up

    refuse_what_cannot_be_judged()


@worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _let_the_children_finish(**_: Any) -> None:
    """Told to the pool's processes, which Celery lets finish their task, however long that is."""
    _stopping.value = True


@setup_logging.connect  # type: ignore[untyped-decorator]
def _keep_our_logs(**_: Any) -> None:
    """Django has set them up already; that somebody listens here keeps Celery from its own."""
