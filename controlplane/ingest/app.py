"""The ASGI application of ingest: routes, limits, and every answer to a request.

    granian --interface asgi controlplane.ingest.app:app --workers 1 --backpressure 20000

It must never answer a message with anything but JSON, nor let an exception reach the server.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import django
import structlog

django.setup()  # before anything that imports a model

from controlplane.errors import Refused  # noqa: E402
from controlplane.ids import new_id  # noqa: E402
from controlplane.ingest import metrics  # noqa: E402
from controlplane.ingest.http import (  # noqa: E402
    Budget,
    DisconnectedError,
    Receive,
    Request,
    Response,
    Scope,
    Send,
    problem,
    respond,
    unavailable,
)
from controlplane.ingest.service import Service  # noqa: E402

log = structlog.get_logger(__name__)

#: Above this many requests at once a new one is refused. Waiting polls are counted, so this
#: bounds the nodes of one process as well.
MAX_IN_FLIGHT = 20_000
#: Bodies of all requests under way together, in bytes.
MAX_BYTES_IN_FLIGHT = 128 * 1024 * 1024
#: What a request for a path that there is not is counted as.
UNKNOWN = "unknown"


class App:
    """One ASGI callable; its service lives from the server's startup to its shutdown."""

    def __init__(self) -> None:
        self._service: Service | None = None
        self._in_flight = 0
        self._budget = Budget(MAX_BYTES_IN_FLIGHT)
        metrics.REQUESTS_IN_FLIGHT.set_function(lambda: self._in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(Request(scope, receive, self._budget), send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()  # lifespan.startup
        self._service = Service()
        metrics.begin([UNKNOWN, *map(_kind_at, self._service.routes)])
        _before_stopping(self._service.release_polls)
        await send({"type": "lifespan.startup.complete"})
        await receive()  # lifespan.shutdown
        await self._service.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, request: Request, send: Send) -> None:
        self._in_flight += 1
        outcome = "sender_gone"
        try:
            response = await self._response(request)
            outcome = response.outcome
            await respond(send, response)
        except DisconnectedError:
            log.debug("ingest.sender_gone", kind=self._kind(request))
        finally:
            request.close()
            self._in_flight -= 1
            metrics.MESSAGES.labels(self._kind(request), outcome).inc()

    async def _response(self, request: Request) -> Response:
        try:
            if self._in_flight > MAX_IN_FLIGHT:
                raise unavailable("too many requests at once; try again")
            return await self._route(request)
        except Refused as refused:
            log.debug(
                "ingest.refused", kind=self._kind(request), code=refused.code, field=refused.field
            )
            await request.discard()
            return problem(refused)
        except DisconnectedError:
            raise
        except Exception:
            request_id = new_id("req")
            log.exception("ingest.failed", kind=self._kind(request), request=request_id)
            return problem(
                Refused(500, "internal_error", "", f"our mistake; our log has it as {request_id}")
            )

    def _kind(self, request: Request) -> str:
        """A route's name, never the path that a sender chose."""
        known = self._service is not None and request.path in self._service.routes
        return _kind_at(request.path) if known else UNKNOWN

    async def _route(self, request: Request) -> Response:
        if self._service is None:
            raise unavailable("the server is still starting")
        route = self._service.routes.get(request.path)
        if route is None:
            raise Refused(404, "unknown_path", "", "there is nothing at this path")
        method, handler = route
        if request.method != method:
            await request.discard()
            refused = Refused(405, "method_not_allowed", "", f"this path takes {method} only")
            return replace(problem(refused), headers=[(b"allow", method.encode())])
        return await handler(request)


def _kind_at(path: str) -> str:
    return path.removeprefix("/v1/").strip("/")


def _before_stopping(release: Callable[[], None]) -> None:
    """Call `release` when the process is told to end.

    Servers wait for open requests before they send `lifespan.shutdown`, and a poll is one that
    would stay open for half a minute.
    """
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        return  # signals are not ours to hear: whoever runs the loop closes the polls

    for number in (signal.SIGTERM, signal.SIGINT):
        previous = signal.getsignal(number)

        def handle(received: int, frame: FrameType | None, previous: object = previous) -> None:
            loop.call_soon_threadsafe(release)
            if callable(previous):
                previous(received, frame)

        signal.signal(number, handle)


app = App()
