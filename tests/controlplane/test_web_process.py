"""Web as a process: its log lines, its metrics over several processes, and its end."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode, urlsplit, urlunsplit

import pytest
from django.conf import settings
from django.db import connection, transaction
from django.test import Client
from prometheus_client.parser import text_string_to_metric_families

from controlplane.accounts.models import User
from tests.controlplane.ingest.door import database_url, wait_until
from tests.controlplane.ingest.relay import Relay, postgres_relay
from tests.controlplane.rest.world import token_of
from tests.factories import IncidentFactory, UserFactory
from tests.running import answers, get, running, web

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "web.log"


def session_of(user: User) -> str:
    client = Client()
    client.force_login(user)
    return f"{settings.SESSION_COOKIE_NAME}={client.cookies[settings.SESSION_COOKIE_NAME].value}"


def test_each_request_leaves_one_line_without_what_the_caller_sent(log: Path) -> None:
    user, secret = UserFactory(is_superuser=True), secrets.token_urlsafe(16)
    cookie = session_of(user)
    with web(log) as (process, port):
        status, _ = get(port, f"/incidents/?token={secret}", Cookie=cookie)
        get(port, f"/no/such/page/{secret}", Authorization=f"Bearer {secret}")
        wait_until(lambda: len([x for x in process.lines() if x["event"] == "http.request"]) == 2)
        told, unknown = (x for x in process.lines() if x["event"] == "http.request")

    assert status == told["status"] == 200
    assert (told["method"], told["route"], told["user"]) == ("GET", "incidents", user.pk)
    assert told["request"].startswith("req_")
    assert told["duration_s"] > 0
    assert (told["level"], bool(told["time"])) == ("info", True)
    assert (unknown["route"], unknown["status"], unknown["user"]) == ("unknown", 404, None)
    assert secret not in log.read_text()
    assert cookie.partition("=")[2] not in log.read_text()


def test_a_request_under_way_is_answered_before_web_ends(log: Path) -> None:
    cookie = session_of(UserFactory(is_superuser=True))
    with web(log) as (process, port):
        slow = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("LOCK TABLE django_session IN ACCESS EXCLUSIVE MODE")
            slow.request("GET", "/incidents/", headers={"Cookie": cookie})
            wait_until(waits_for_a_lock)

            process.terminate()
            wait_until(lambda: process.said("Shutting down granian"))

        assert slow.getresponse().status == 200
        assert process.wait() == 0
    assert process.said("Granian shutdown completed, see ya!")


def test_several_processes_tell_one_set_of_metrics(log: Path, tmp_path: Path) -> None:
    shared = tmp_path / "metrics"
    shared.mkdir()
    with web(log, workers=2, PROMETHEUS_MULTIPROC_DIR=str(shared)) as (_process, port):
        wait_until(lambda: answers(port, "/healthz") and len(list(shared.glob("counter_*"))) == 2)
        for _ in range(20):
            get(port, "/login")
        status, text = get(port, "/metrics")

    (told,) = [f for f in text_string_to_metric_families(text) if f.name == "drydock_http_requests"]
    logins = [s.value for s in told.samples if s.labels["route"] == "login"]
    assert (status, logins) == (200, [20.0])


def test_an_order_in_chunks_is_refused_and_not_done(log: Path) -> None:
    incident = IncidentFactory()
    token = token_of(UserFactory(is_superuser=True))
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with web(log) as (_process, port):
        caller = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        path = f"/api/v1/incidents/{incident.pk}/acknowledge"
        caller.request("POST", path, body=iter([b'{"dry_run":', b" true}"]), headers=headers)
        answer = caller.getresponse()
        code = json.loads(answer.read())["code"]

    incident.refresh_from_db()
    assert (answer.status, code, incident.owner) == (411, "length_required", None)


def test_what_takes_the_database_too_long_is_given_up(log: Path) -> None:
    user = UserFactory(is_superuser=True)
    token, cookie = token_of(user), session_of(user)
    with (
        web(log, WEB_STATEMENT_TIMEOUT_S="1") as (_process, port),
        transaction.atomic(),
        connection.cursor() as cursor,
    ):
        cursor.execute("LOCK TABLE accounts_auditevent IN ACCESS EXCLUSIVE MODE")
        told = get(port, "/api/v1/audit", Authorization=f"Bearer {token}")
        page = get(port, "/audit", Cookie=cookie)
        file = get(port, "/audit?export=csv", Cookie=cookie)

    assert (told[0], json.loads(told[1])["code"]) == (503, "too_slow")
    assert [status for status, _ in (page, file)] == [503, 503]
    assert "Narrow the filter" in page[1]


def test_no_process_but_web_gives_up_so_soon(tmp_path: Path) -> None:
    code = (
        "import controlplane.ingest.app, workers.celery, workers.keeper\n"
        "from django.db import connection\n"
        "with connection.cursor() as cursor:\n"
        "    cursor.execute('SHOW statement_timeout')\n"
        "    print(*cursor.fetchone())"
    )
    with running(tmp_path / "other.log", "-c", code) as process:
        assert process.wait() == 0, process.log.read_text()

    assert process.output.split() == ["0"]


@pytest.fixture
def postgres() -> Iterator[tuple[Relay, str]]:
    """A relay to Postgres, and the URL of the database behind it."""
    with tempfile.TemporaryDirectory() as folder:
        relay = postgres_relay(Path(folder), str(connection.settings_dict["HOST"])).restore()
        url = urlsplit(database_url())._replace(query=urlencode({"host": folder}))
        yield relay, urlunsplit(url)
        relay.cut()


@pytest.mark.skipif(
    "host=" not in os.environ["DATABASE_URL"], reason="needs Postgres on a local socket"
)
def test_while_the_database_is_away_web_says_so(log: Path, postgres: tuple[Relay, str]) -> None:
    relay, url = postgres
    user = UserFactory(is_superuser=True)
    token, cookie = f"Bearer {token_of(user)}", session_of(user)
    with web(log, DATABASE_URL=url) as (process, port):
        before = get(port, "/api/v1/nodes", Authorization=token)
        relay.cut()
        told = get(port, "/api/v1/nodes", Authorization=token)
        page = get(port, "/incidents/", Cookie=cookie)
        relay.restore()
        wait_until(lambda: get(port, "/api/v1/nodes", Authorization=token)[0] == 200)
        said = process.said("http.postgres_unavailable")

    assert before[0] == 200
    assert (told[0], json.loads(told[1])["code"]) == (503, "unavailable")
    assert page[0] == 503
    assert "The database does not answer" in page[1]
    assert said


def waits_for_a_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
        return bool(cursor.fetchone()[0] > 0)
