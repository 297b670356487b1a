"""`manage.py keeper`: the process that keeps time, see `workers.keeper`."""

from __future__ import annotations

import signal
import threading
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from workers import checks, keeper, keeper_http, metrics


class Command(BaseCommand):
    help = "Run the keeper: leases, timers, deadlines. One leads; others stand by."

    def handle(self, *_args: Any, **_options: Any) -> None:
        checks.refuse_what_cannot_be_judged()
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        state = keeper_http.Pulse()
        listener = None
        if settings.KEEPER_METRICS_ADDRESS:
            metrics.publish_fleet_figures(lambda: state.leading)
            listener = keeper_http.listen(settings.KEEPER_METRICS_ADDRESS, state)
        keeper.run(stop, state)
        if listener is not None:
            listener.close()
