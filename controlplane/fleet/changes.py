"""Transactions that end by giving each cluster they touched its next change number.

Pages and schedulers ask "anything after N?". The number is taken in the last statement, so that the
cluster's row is locked for an instant only and always after the rows that changed: numbers are in
the order of commits. The same statement writes the number beside every object that was changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection, transaction

from controlplane import change_tracking
from controlplane.change_tracking import Touched

# Cluster.update(change_seq=F("change_seq") + 1), then for each object
# Changed.update_or_create(cluster, object_type, object_id, defaults={"seq": the new number}).
_NEXT_NUMBER_SQL = """
WITH taken AS (
    UPDATE fleet_cluster SET change_seq = change_seq + 1 WHERE id = %s RETURNING id, change_seq
)
INSERT INTO fleet_changed (cluster_id, object_type, object_id, seq)
SELECT taken.id, changed.object_type, changed.object_id, taken.change_seq
FROM taken, unnest(%s::text[], %s::text[]) AS changed(object_type, object_id)
ON CONFLICT (cluster_id, object_type, object_id) DO UPDATE SET seq = excluded.seq
"""


@contextmanager
def change() -> Iterator[None]:
    """A transaction; inside another `change` a savepoint of it. Also usable as a decorator."""
    if change_tracking.present() is not None:
        with transaction.atomic():
            yield
        return
    with change_tracking.collecting() as collected, transaction.atomic():
        yield
        _number(collected)


def touch(cluster_id: str, *objects: tuple[str, str]) -> None:
    """Say that something visible of this cluster changes in the present `change`.

    What is audited is noted by itself; `objects` names (type, id) of what is not.
    """
    collected = change_tracking.present()
    if collected is None:
        raise RuntimeError("touch() outside of change(): pages would not learn of this write")
    collected.clusters.add(cluster_id)
    collected.objects.update((cluster_id, kind, object_id) for kind, object_id in objects)


def _number(collected: Touched) -> None:
    # Sorted, so that two such transactions can never wait for each other.
    for cluster_id in sorted(collected.clusters):
        objects = sorted((k, o) for c, k, o in collected.objects if c == cluster_id)
        kinds, ids = [kind for kind, _ in objects], [object_id for _, object_id in objects]
        with connection.cursor() as cursor:
            cursor.execute(_NEXT_NUMBER_SQL, [cluster_id, kinds, ids])
