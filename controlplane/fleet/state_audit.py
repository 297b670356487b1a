"""Checks that each node's state is what its audit events tell: domain rule three.

Reads only. A node that differs was changed behind the back of `fleet.actions.transition`, or its
events were.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.db import connection

#: One statement, so that nodes and events are seen as of the same moment.
_DIFFERENCES = """
WITH moves AS (
    SELECT object_id, id, before ->> 'state' AS "from", after ->> 'state' AS "to",
           lag(after ->> 'state') OVER (PARTITION BY object_id ORDER BY id) AS "stood"
    FROM accounts_auditevent
    WHERE object_type = 'node' AND verb IN ('node.enroll', 'node.transition')
), last AS (
    SELECT DISTINCT ON (object_id) object_id, "to" FROM moves ORDER BY object_id, id DESC
), leaps AS (
    SELECT DISTINCT ON (object_id) object_id, "stood", "from"
    FROM moves WHERE "stood" IS NOT NULL AND "from" IS DISTINCT FROM "stood"
    ORDER BY object_id, id
)
SELECT node.id, node.name, node.state, last."to", leaps."stood", leaps."from"
FROM fleet_node node
LEFT JOIN last ON last.object_id = node.id
LEFT JOIN leaps ON leaps.object_id = node.id
WHERE last."to" IS DISTINCT FROM node.state OR leaps.object_id IS NOT NULL
ORDER BY node.name
"""


@dataclass(frozen=True)
class StateMismatch:
    """A node whose state is not what its audit events tell."""

    node_id: str
    name: str
    what: str


def state_mismatches() -> list[StateMismatch]:
    """Every node whose state differs from the fold of its events, or whose events do not join."""
    with connection.cursor() as cursor:
        cursor.execute(_DIFFERENCES)
        return [StateMismatch(row[0], row[1], _what(*row[2:])) for row in cursor.fetchall()]


def _what(state: str, told: str | None, stood: str | None, left: str | None) -> str:
    if told is None:
        return f"it is {state}, but no event says how it came to be"
    if told != state:
        return f"it is {state}, but its events end with {told}"
    return f"an event leads from {left}, while the one before it had led to {stood}"
