"""Stores that may hang: whoever touches one waits for a word from it, and not for ever.

A network file system whose server is gone holds a process in whatever call it made, out of reach of
signals. So the calls are made on threads that are left behind if they do not come back. They are
daemons, for the process may end before they do. Imports no torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

#: So long a store may give no sign of life. An NFS server that was started again lets its clients
#: wait for 90 s, and has lost nothing: who passes it over sooner may go back to an older state. And
#: with each second more all cards of the job wait for what may never come.
ANSWER_S = 120.0
LOOK_S = 0.2  # so often whoever waits looks whether it still has to

_T = TypeVar("_T")


class WatchedStore:
    """Calls to one store. After one that was not answered no other is made while that hangs."""

    def __init__(self, what: str) -> None:
        """`what`: it, as it is told to a person."""
        self._what = what
        self._heard = 0.0  # when it gave the last sign of life
        self._hung: Future[Any] | None = None

    def call(
        self,
        call: Callable[[], _T],
        patience_s: float | None = None,
        unless: Callable[[], object] = lambda: None,
    ) -> _T:
        """What the call returns, on another thread. Raises what it raises, and TimeoutError, which
        is an OSError, if the store gives no sign of life for `patience_s`, else ANSWER_S: by then
        the call is left to itself. So it is if `unless`, which is called now and then, raises."""
        if self._hung is not None and not self._hung.done():
            raise TimeoutError(f"{self._what} hangs")
        answer: Future[_T] = Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        began, limit_s = time.monotonic(), ANSWER_S if patience_s is None else patience_s
        threading.Thread(target=run, name="drydock-store", daemon=True).start()
        while not answer.done():
            left_s = max(began, self._heard) + limit_s - time.monotonic()
            if left_s <= 0:
                self._hung = answer
                raise TimeoutError(f"{self._what} has not answered for {limit_s:g} s")
            if not wait([answer], min(left_s, LOOK_S)).done:
                unless()
        return answer.result()

    def alive(self, _bytes: int = 0) -> None:
        """A sign of life of the store while it is asked for much; on any thread."""
        self._heard = time.monotonic()
