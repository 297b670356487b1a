"""Group commit: one thread, one connection, one transaction for whatever came in meanwhile.

An outcome is told only after the commit, so what was answered is never lost. An item that fails is
rolled back to its own savepoint and must never take its neighbours with it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    InterfaceError,
    OperationalError,
    close_old_connections,
    connection,
    transaction,
)
from psycopg import Error
from psycopg.errors import CheckViolation, NotNullViolation, UniqueViolation

from controlplane.errors import Conflict, Refused
from controlplane.fleet.changes import change
from controlplane.ingest import metrics
from controlplane.ingest.http import unavailable

T = TypeVar("T")
Hook = Callable[[], object]
log = structlog.get_logger(__name__)

#: After the first item the writer waits this long for more, in seconds.
GATHER_S = 0.004
MAX_BATCH = 128
#: Above either of these a new item is refused: the sender keeps it.
MAX_WAITING = 4096
MAX_WAITING_BYTES = 64 * 1024 * 1024
#: Of these kinds no more than so many wait: who sends them is known only once they are written, and
#: a flood of them must leave the queue to those who signed. One commit takes that many.
MAX_WAITING_OF = {"enroll": MAX_BATCH}
#: An item that is not committed within this many seconds is answered 503; it may be sent again.
ANSWER_S = 10.0
#: What is waiting at the end has this long to be committed, in seconds.
CLOSE_S = 10.0
#: No item may hold the others up for longer than this behind a lock or in a query, in ms.
LOCK_TIMEOUT_MS = 1000
STATEMENT_TIMEOUT_MS = 5000
MAX_BELLS = 1000

_RETRY = "the database does not answer; keep this and send it again"


@dataclass(frozen=True, slots=True)
class _Item:
    write: Callable[[], Any]
    future: asyncio.Future[Any]
    size: int
    kind: str
    job: str


class Writer:
    """Runs writes, many to a transaction: those of one job, and those of none, in their order."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._waiting: Counter[str] = Counter()
        self._waiting_bytes = 0
        self._bells = _Bells()
        metrics.WRITES_WAITING.set_function(lambda: self._waiting.total())
        metrics.WRITES_WAITING_BYTES.set_function(lambda: self._waiting_bytes)
        self._thread = threading.Thread(target=self._run, name="ingest-writer", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def submit(
        self, write: Callable[[], T], size: int = 0, kind: str = "", job: str = ""
    ) -> T:
        """Run `write` on the writer's thread and return its value once it is committed.

        `kind` is that of the message, if it is one; `job` is the one whose row it locks. Raises
        Refused: what `write` itself raised, or 503 if it is not known to be committed.
        """
        if (
            self._waiting.total() >= MAX_WAITING
            or self._waiting[kind] >= MAX_WAITING_OF.get(kind, MAX_WAITING)
            or self._waiting_bytes + size > MAX_WAITING_BYTES
        ):
            raise unavailable("too much is waiting to be written; keep this and send it again")
        item = _Item(write, self._loop.create_future(), size, kind, job)
        self._waiting[kind] += 1
        self._waiting_bytes += size
        self._queue.put(item)
        try:
            async with asyncio.timeout(ANSWER_S):
                value: T = await item.future
                return value
        except TimeoutError:
            raise unavailable(_RETRY) from None

    async def close(self) -> None:
        """Commit what is waiting, then end the threads."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        await asyncio.to_thread(self._bells.close)

    def _run(self) -> None:
        open_ = True
        while open_:
            batch, open_ = self._gather()
            # Two processes that lock rows of the same jobs never wait for each other in a circle.
            batch.sort(key=lambda item: item.job)
            with metrics.COMMITS.time():
                outcomes, hooks = _commit(batch)
            self._loop.call_soon_threadsafe(self._settle, batch, outcomes)
            self._bells.ring(hooks)
        connection.close()

    def _gather(self) -> tuple[list[_Item], bool]:
        """Wait for an item, then a moment for more. False once the writer is to close."""
        item = self._queue.get()
        batch: list[_Item] = []
        until = time.monotonic() + GATHER_S
        while item is not None:
            batch.append(item)
            if len(batch) == MAX_BATCH:
                return batch, True
            try:
                item = self._queue.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return batch, True
        return batch, False

    def _settle(self, batch: list[_Item], outcomes: list[Any]) -> None:
        for item, outcome in zip(batch, outcomes, strict=True):
            self._waiting[item.kind] -= 1
            self._waiting_bytes -= item.size
            if item.future.done():
                continue  # its sender was told 503 or has gone
            if isinstance(outcome, Exception):
                item.future.set_exception(outcome)
            else:
                item.future.set_result(outcome)


def _commit(batch: list[_Item]) -> tuple[list[Any], list[Hook]]:
    """The outcome of each item, a value or an exception, and what to do after the commit."""
    if not batch:
        return [], []
    try:
        close_old_connections()  # pings it, and drops it if Postgres has gone meanwhile
        with change():
            _set_patience()
            outcomes = [_apply(item) for item in batch]
            # Taken out, because the thread that writes must not wait for Redis.
            hooks: list[Hook] = [hook[1] for hook in connection.run_on_commit]
            connection.run_on_commit = []
    except (DatabaseError, InterfaceError) as error:
        log.warning("ingest.postgres_unavailable", error=str(error), items=len(batch))
        metrics.COMMITS_FAILED.inc()
        connection.close()
        return [unavailable(_RETRY) for _ in batch], []
    except Exception as error:
        log.exception("ingest.commit_failed", items=len(batch))
        metrics.COMMITS_FAILED.inc()
        connection.close()
        return [error for _ in batch], []
    return outcomes, hooks


def _set_patience() -> None:
    """Constraints speak up inside their item's savepoint, not at the commit of all."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SET CONSTRAINTS ALL IMMEDIATE;"
            f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS};"
            f"SET LOCAL statement_timeout = {STATEMENT_TIMEOUT_MS}"
        )


def _apply(item: _Item) -> Any:
    """One item in its own savepoint: its value, or the exception to answer it with."""
    if item.future.cancelled():
        return None
    outcome = _attempt(item)
    if isinstance(outcome, IntegrityError) and isinstance(outcome.__cause__, UniqueViolation):
        # Somebody else wrote the same row a moment ago; now it can be seen.
        outcome = _attempt(item)
    if isinstance(outcome, IntegrityError):
        return Refused(409, "conflict", "", f"contradicts what is stored: {outcome}")
    return outcome


def _attempt(item: _Item) -> Any:
    try:
        with transaction.atomic():
            return item.write()
    except Refused as error:
        return error
    except IntegrityError as error:
        if isinstance(error.__cause__, CheckViolation | NotNullViolation):
            return _not_stored(item, error)
        return error
    except Conflict as error:
        return Refused(409, "conflict", "", error.detail)
    except (DataError, UnicodeEncodeError, RecursionError) as error:
        return _not_stored(item, error)
    except (OperationalError, InterfaceError) as error:
        if (
            connection.needs_rollback
            or connection.connection is None
            or connection.connection.closed
        ):
            raise
        # The connection is well: a lock was not to be had in time, or a deadlock was broken.
        log.warning("ingest.item_put_back", error=str(error))
        return unavailable("this could not be written in time; keep it and send it again")
    except Exception as error:
        log.exception("ingest.item_failed")
        return error


def _not_stored(item: _Item, error: Exception) -> Refused:
    """The refusal of a value: it names the column if Postgres does, else the message's kind."""
    cause = error.__cause__
    column = cause.diag.column_name if isinstance(cause, Error) else None
    return Refused(422, "invalid_field", column or item.kind, f"cannot be stored: {error}")


class _Bells:
    """Runs what is due after a commit on a thread of its own; under pressure it forgets the oldest.

    The keeper rings again each second, so that a forgotten bell costs latency only.
    """

    def __init__(self) -> None:
        self._due: deque[Hook] = deque(maxlen=MAX_BELLS)
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ingest-bells", daemon=True)
        self._thread.start()

    def ring(self, hooks: list[Hook]) -> None:
        self._due.extend(hooks)
        if hooks:
            self._wake.set()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait()
            self._wake.clear()
            while self._due:
                try:
                    self._due.popleft()()
                except Exception:
                    log.exception("ingest.after_commit_failed")
