"""Celery: the doorbell's other end. A message means "look", never "do this one"."""

from __future__ import annotations

import os
import socket
from typing import Any

from celery import Celery
from celery.signals import setup_logging

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.local.settings")

app = Celery("drydock")
app.config_from_object("django.conf:settings", namespace="CELERY")


@app.task(name="workers.drain")  # type: ignore[untyped-decorator]
def drain(subject: str = "") -> None:
    """Triage new signals and take every step that is due; first wake those that wait for news."""
    from workers import engine  # Django's models exist only once Celery has set Django up

    engine.drain(subject, owner=f"{socket.gethostname()}/{os.getpid()}")


@setup_logging.connect  # type: ignore[untyped-decorator]
def _keep_our_logs(**_: Any) -> None:
    """Django has set them up already; that somebody listens here keeps Celery from its own."""
