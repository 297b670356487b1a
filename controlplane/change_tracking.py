"""What the present `fleet.changes.change` touches: clusters that move on, and objects in them.

It knows no model, so that the audit trail, which comes before every other app, can tell it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Touched:
    """Ids of clusters, and (cluster id, object type, object id) of what was written in them."""

    clusters: set[str] = field(default_factory=set)
    objects: set[tuple[str, str, str]] = field(default_factory=set)


_present: ContextVar[Touched | None] = ContextVar("touched", default=None)


def present() -> Touched | None:
    """What is collected at the moment; None outside of a change."""
    return _present.get()


@contextmanager
def collecting() -> Iterator[Touched]:
    """Collect from here on, until the block ends."""
    collected = Touched()
    token = _present.set(collected)
    try:
        yield collected
    finally:
        _present.reset(token)


def note(cluster_id: str | None, object_type: str, object_id: str) -> None:
    """Say that this object was written. Outside of a change nobody listens."""
    collected = _present.get()
    if collected is not None and cluster_id is not None:
        collected.objects.add((cluster_id, object_type, object_id))
        collected.clusters.add(cluster_id)
