"""What goes wrong is told as problem details, each with a code that is in the list."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import InterfaceError, OperationalError
from django.test import Client
from psycopg import errors

from controlplane.accounts.models import AuditEvent
from controlplane.rest import problems
from tests.controlplane.rest.world import Caller, World

GUIDE = Path(__file__).parents[3] / "docs" / "api.md"


def told(answer: Any) -> tuple[int, str]:
    assert answer["Content-Type"] == "application/problem+json"
    body = answer.json()
    assert body["status"] == answer.status_code == problems.KINDS[body["code"]].status
    assert body["request_id"] == answer["X-Request-Id"]
    return answer.status_code, body["code"]


@pytest.mark.parametrize("path", ["/api/", "/api/v1/", "/api/v1/ships", "/api/v2/nodes"])
def test_an_address_that_is_none(path: str, world: World, viewer: Caller) -> None:
    assert told(viewer.get(path)) == (404, "not_found")


@pytest.mark.parametrize("pk", ["nod_none", "%00", "a%2Fb", "x" * 65, "ü"])
def test_an_object_that_is_none(pk: str, world: World, viewer: Caller) -> None:
    assert told(viewer.get(f"/api/v1/nodes/{pk}")) == (404, "not_found")


@pytest.mark.parametrize("pk", ["x", "9" * 40, "-1"])
def test_a_number_that_is_none(pk: str, world: World, viewer: Caller) -> None:
    assert told(viewer.get(f"/api/v1/audit/{pk}")) == (404, "not_found")


@pytest.mark.parametrize("method", ["put", "patch", "delete", "options", "trace"])
def test_a_method_that_is_none(method: str, world: World, viewer: Caller) -> None:
    answer = getattr(viewer, method)(world.path("nodes"))

    assert told(answer) == (405, "method_not_allowed")
    assert answer["Allow"] == "GET, HEAD"


def test_an_answer_in_another_form(world: World, viewer: Caller) -> None:
    answer = viewer.get("/api/v1/nodes", headers={"Accept": "text/html"})

    assert told(answer) == (406, "not_acceptable")


def test_a_body_in_another_form(world: World, operator: Caller) -> None:
    answer = operator.post(f"{world.path('nodes')}/hold", {"reason": "a form"})

    assert told(answer) == (415, "unsupported_media_type")


@pytest.mark.parametrize("body", ["{", "[]", "7", '"text"', "\xff", '{"reason": "\\u0000"}'])
def test_a_body_that_is_no_object(body: str, world: World, operator: Caller) -> None:
    answer = operator.post(
        f"{world.path('nodes')}/hold", body.encode("latin-1"), content_type="application/json"
    )

    assert told(answer) == (400, "malformed_body")


def test_a_body_that_is_too_large(world: World, operator: Caller) -> None:
    answer = operator.order(f"{world.path('nodes')}/hold", {"reason": "x" * 300_000})

    assert told(answer) == (413, "body_too_large")


def test_a_body_in_chunks_is_not_taken_for_none(world: World, operator: Caller) -> None:
    path = f"{world.path('incidents')}/acknowledge"

    answer = operator.order(path, {"dry_run": True}, transfer_encoding="chunked")

    assert told(answer) == (411, "length_required")
    assert not AuditEvent.objects.filter(verb="incident.acknowledge").exists()


def test_nobody_is_asked_who_it_is(world: World) -> None:
    answer = Client().get(world.path("nodes"))

    assert told(answer) == (401, "not_authenticated")
    assert answer["WWW-Authenticate"] == 'Bearer realm="drydock"'


def test_a_sessions_write_takes_its_csrf_token(world: World, operator: Caller) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(operator.user)

    answer = strict.post(
        f"{world.path('nodes')}/hold", {"reason": "x"}, content_type="application/json"
    )

    assert told(answer) == (403, "csrf_failed")


def test_what_nobody_foresaw_is_a_problem_too(
    world: World, viewer: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.fleet.selectors.racks_for", None)
    viewer.raise_request_exception = False

    assert told(viewer.get("/api/v1/racks")) == (500, "internal_error")


@pytest.mark.parametrize(
    ("driver_says", "code", "again_in_s"),
    [
        (errors.LockNotAvailable(), "busy", "1"),
        (errors.DeadlockDetected(), "busy", "1"),
        (errors.QueryCanceled(), "too_slow", None),
        (psycopg.OperationalError("connection refused"), "unavailable", "5"),
        (errors.AdminShutdown(), "unavailable", "5"),
        (errors.CannotConnectNow(), "unavailable", "5"),
        (errors.TooManyConnections(), "unavailable", "5"),
        (errors.ConnectionFailure(), "unavailable", "5"),
    ],
    ids=lambda told: type(told).__name__ if isinstance(told, Exception) else str(told),
)
def test_what_the_database_cannot_do_now_is_not_called_broken(
    driver_says: Exception,
    code: str,
    again_in_s: str | None,
    world: World,
    viewer: Caller,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "controlplane.fleet.selectors.racks_for", raising(OperationalError, driver_says)
    )

    answer = viewer.get("/api/v1/racks")

    assert told(answer) == (503, code)
    assert answer.headers.get("Retry-After") == again_in_s


def test_a_connection_that_is_closed_already_is_one_that_is_lost(
    world: World, viewer: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = psycopg.InterfaceError("the connection is closed")
    monkeypatch.setattr("controlplane.fleet.selectors.racks_for", raising(InterfaceError, closed))

    assert told(viewer.get("/api/v1/racks")) == (503, "unavailable")


def test_a_question_that_the_database_cannot_take_is_our_mistake(
    world: World, viewer: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_complex = raising(OperationalError, errors.StatementTooComplex())
    monkeypatch.setattr("controlplane.fleet.selectors.racks_for", too_complex)
    viewer.raise_request_exception = False

    assert told(viewer.get("/api/v1/racks")) == (500, "internal_error")


def raising(error: type[Exception], driver_says: Exception) -> Callable[[object], None]:
    """A selector that fails as Django tells what the driver said."""

    def select(_user: object) -> None:
        raise error(str(driver_says)) from driver_says

    return select


def test_the_guide_lists_every_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", GUIDE.read_text(), flags=re.MULTILINE)

    assert {code: int(status) for code, status in rows} == {
        code: kind.status for code, kind in problems.KINDS.items()
    }
