"""No list costs more queries the longer it is; what each costs is kept in tests/query_counts.json.

To accept a new cost: run with DRYDOCK_WRITE_QUERY_COUNTS=1 and read the difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.api import RESOURCES
from tests.controlplane.rest.world import ROWS, Caller, World

BASELINE = Path(__file__).parents[2] / "query_counts.json"
MOST = 8


def _cost(caller: Caller, name: str) -> int:
    with CaptureQueriesContext(connection) as queries:
        answer = caller.get(f"/api/v1/{name}?limit=500")
    assert answer.status_code == 200
    return len(queries)


def test_every_list_has_a_way_to_make_its_rows() -> None:
    assert set(ROWS) == set(RESOURCES)


@pytest.mark.parametrize("name", sorted(RESOURCES))
def test_a_list_costs_as_many_queries_as_the_baseline_says_at_any_length(
    name: str, world: World, viewer: Caller
) -> None:
    short = _cost(viewer, name)
    for _ in range(29):
        ROWS[name](world.cluster)
    long = _cost(viewer, name)

    assert long == short
    assert long <= MOST
    assert long == _baseline(name, long)


def _baseline(name: str, now: int) -> int:
    told: dict[str, int] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    if os.environ.get("DRYDOCK_WRITE_QUERY_COUNTS"):
        told[name] = now
        BASELINE.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")
    return told[name]
