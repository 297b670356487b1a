"""Among all orders that were ever given, those that matter are found at once: the keeper looks each
second, and a playbook with each of its steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from controlplane.fleet import actions
from controlplane.fleet.actions.commands import COMMAND_RETENTION
from controlplane.fleet.choices import CommandState
from controlplane.fleet.models import Command
from controlplane.incidents.models import PlaybookStep
from tests.factories import NodeFactory

pytestmark = pytest.mark.django_db

EACH = 5_000


@pytest.fixture
def told() -> None:
    """Many steps have given orders, which are over."""
    node, now = NodeFactory(), timezone.now()
    Command.objects.bulk_create(
        Command(node=node, verb="diagnose", payload="{}", state=CommandState.DONE, expires_at=now,
                requester=f"stp_{n}.{turn}-0")
        for n in range(EACH)
        for turn in range(2)
    )  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE fleet_command")


def _expire() -> None:
    actions.expire_commands(timezone.now())


def _forget() -> None:
    nobody = PlaybookStep.objects.none().values_list("pk", flat=True)
    actions.forget_commands(timezone.now(), nobody)


def _call_back() -> None:
    actions.call_back_commands("stp_7")


def _of_a_step() -> None:
    list(Command.objects.filter(requester__startswith="stp_7."))


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("lookup", [_expire, _forget, _call_back, _of_a_step])
def test_orders_are_found_by_an_index(lookup: Callable[[], None]) -> None:
    with CaptureQueriesContext(connection) as asked:
        lookup()
    found = [one["sql"] for one in asked if "fleet_command" in one["sql"]]

    assert found
    assert [sql for sql in found if "Seq Scan" in plan_of(sql)] == []


@pytest.mark.usefixtures("told")
def test_orders_that_are_kept_for_good_are_not_read_to_forget_others() -> None:
    node, long_ago = NodeFactory(), timezone.now() - 2 * COMMAND_RETENTION
    Command.objects.bulk_create(
        Command(node=node, verb="stop_process", payload="{}", state=CommandState.DONE,
                requester=f"end/plc_{n}.0", expires_at=long_ago, finished_at=long_ago)
        for n in range(EACH)
    )  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE fleet_command")
    with CaptureQueriesContext(connection) as asked:
        _forget()
    plan = plan_of(asked[0]["sql"], "EXPLAIN ANALYZE")

    assert "command_by_end" in plan
    assert "Rows Removed" not in plan


def plan_of(sql: str, explain: str = "EXPLAIN") -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"{explain} {sql}")
        return "\n".join(row[0] for row in cursor.fetchall())
