"""Whether the keeper lives and leads, told over HTTP: /healthz, /readyz and /metrics.

It reports what the keeper's loop says of itself, and never reaches into it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import structlog
from django.core.exceptions import ImproperlyConfigured
from django.db import connection

from controlplane import metrics
from workers.metrics import LAST_TURN, LEADS

log = structlog.get_logger(__name__)

#: A keeper whose loop has not come round for so long is not ready, or even hangs, in seconds.
READY_S = 10.0
ALIVE_S = 60.0
#: A caller has this long to send its request, in seconds.
REQUEST_DEADLINE_S = 5.0


@dataclass
class Pulse:
    """Set by the keeper's loop, read by the listener's threads."""

    leading: bool = False
    database: bool = False
    came_round: float = field(default_factory=time.monotonic)

    def turned(self, leading: bool) -> None:
        """The loop came round with a database that answers: leading, or standing by."""
        self.leading = leading
        self.database = True
        self.came_round = time.monotonic()
        LEADS.set(leading)
        LAST_TURN.set_to_current_time()

    def database_lost(self) -> None:
        """The loop came round, but without a database and hence without the lead."""
        self.leading = self.database = False
        self.came_round = time.monotonic()
        LEADS.set(0)

    def trouble(self, patience_s: float) -> str:
        """Why the loop does not run as it should; empty if it does."""
        silent_s = time.monotonic() - self.came_round
        return f"no pass for {silent_s:.0f} s" if silent_s > patience_s else ""


def listen(address: str, pulse: Pulse) -> Listener:
    """Answer at `address` ("host:port") until closed.

    Raises ImproperlyConfigured if the address is none, OSError if it cannot be had.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise ImproperlyConfigured(
            f"KEEPER_METRICS_ADDRESS must be host:port, as 127.0.0.1:8002, not {address!r}"
        )
    listener = Listener((host.strip("[]"), int(port)), pulse)
    threading.Thread(target=listener.serve_forever, name="keeper-listener", daemon=True).start()
    log.info("keeper.listens", address=address)
    return listener


class Listener(ThreadingHTTPServer):
    """A thread for each request, so that a slow caller keeps nobody else waiting."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], pulse: Pulse) -> None:
        self.pulse = pulse
        super().__init__(address, _Handler)

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Listener
    server_version = "drydock-keeper"
    timeout = REQUEST_DEADLINE_S

    def do_GET(self) -> None:
        pulse = self.server.pulse
        if self.path == "/healthz":
            self._say(pulse.trouble(ALIVE_S))
        elif self.path == "/readyz":
            away = "" if pulse.database else "the database does not answer"
            self._say(away or pulse.trouble(READY_S), "leads" if pulse.leading else "stands by")
        elif self.path == "/metrics":
            self._metrics()
        else:
            self._answer(404, "there are /healthz, /readyz and /metrics here\n")

    def log_message(self, *_args: object) -> None:
        """Nothing: whoever asks here asks all day, and a path may hold anything."""

    def _say(self, trouble: str, fine: str = "ok") -> None:
        self._answer(503 if trouble else 200, f"{trouble or fine}\n")

    def _metrics(self) -> None:
        allowed = metrics.may_read(
            self.client_address[0],
            self.headers.get("Authorization", ""),
            relayed=any(name in self.headers for name in metrics.RELAYED),
        )
        if not allowed:
            self._answer(403, metrics.DENIED)
            return
        try:
            self._answer(200, metrics.exposition().decode(), metrics.CONTENT_TYPE)
        finally:
            connection.close()  # this thread's own

    def _answer(self, status: int, text: str, content_type: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
