"""Transactions that end by giving each cluster they touched its next change number.

Pages ask "anything after N?". The number is taken in the last statement, so that the cluster's row
is locked for an instant only and always after the rows that changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from django.db import transaction
from django.db.models import F

from controlplane.fleet.models import Cluster

_touched: ContextVar[set[str] | None] = ContextVar("touched", default=None)


@contextmanager
def change() -> Iterator[None]:
    """A transaction; inside another `change` a savepoint of it. Also usable as a decorator."""
    if _touched.get() is not None:
        with transaction.atomic():
            yield
        return
    touched: set[str] = set()
    token = _touched.set(touched)
    try:
        with transaction.atomic():
            yield
            # Sorted, so that two such transactions can never wait for each other.
            for cluster_id in sorted(touched):
                Cluster.objects.filter(pk=cluster_id).update(change_seq=F("change_seq") + 1)
    finally:
        _touched.reset(token)


def touch(cluster_id: str) -> None:
    """Say that something visible of this cluster changes in the present `change`."""
    touched = _touched.get()
    if touched is None:
        raise RuntimeError("touch() outside of change(): pages would not learn of this write")
    touched.add(cluster_id)
