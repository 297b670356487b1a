"""The embedded services start, answer, survive a crash, and hide from other users."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
import redis
from django.conf import settings
from django.db import connection

from controlplane.env import database_from_url
from controlplane.local import processes, services
from controlplane.local.processes import Child
from tests.controlplane.local.conftest import as_nobody, by_root


def start(home: Path) -> tuple[services.Plan, dict[str, Child]]:
    plan = services.plan(home, {}, print)
    children = {program.name: Child(home, program) for program in plan.programs}
    for child in children.values():
        child.start()
    services.wait_ready(plan, list(children.values()))
    return plan, children


@pytest.mark.django_db
def test_the_test_database_answers() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        assert cursor.fetchone() == (1,)


def test_the_test_redis_answers() -> None:
    assert redis.Redis.from_url(settings.REDIS_URL).ping()


def test_committed_rows_survive_a_killed_postgres(
    home: Path, eventually: Callable[..., object]
) -> None:
    plan, children = start(home)
    with psycopg.connect(plan.database_url) as session:
        session.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    os.kill(children["postgres"].pid or 0, signal.SIGKILL)
    processes.sweep(home)
    eventually(lambda: children["postgres"].poll() is not None, 120, "it is gone")
    plan, children = start(home)
    with psycopg.connect(plan.database_url) as session:
        assert session.execute("SELECT answer FROM kept").fetchone() == (42,)
    assert [child.stop() for child in children.values()] == [True, True]


def socket_folder(plan: services.Plan) -> Path:
    """As Django is told it."""
    return Path(str(database_from_url(plan.database_url)["HOST"]))


@pytest.mark.parametrize("name", ["my work", "50% #1 & a+b", 'so, "quoted" \\'])
def test_any_folder_will_do(home: Path, name: str) -> None:
    plan, children = start(home / name)
    assert (socket_folder(plan) / ".s.PGSQL.5432").is_socket()
    with psycopg.connect(plan.database_url) as session:
        assert session.execute("SELECT 42").fetchone() == (42,)
    assert [child.stop() for child in children.values()] == [True, True]
    socket_folder(plan).rmdir()


def test_the_database_socket_is_closed_to_other_users(home: Path) -> None:
    plan = services.plan(home, {}, print)
    folder = socket_folder(plan)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_long_path_gets_a_short_socket(home: Path) -> None:
    deep = home / ("d" * 90)
    plan = services.plan(deep, {}, print)
    folder = socket_folder(plan)
    assert len(str(folder)) < 80
    folder.rmdir()


@by_root
@pytest.mark.parametrize("name", ["up.lock", "postgres", "redis", "sockets"])
def test_what_belongs_to_another_users_servers_is_left_to_them(home: Path, name: str) -> None:
    (home / name).mkdir()
    shutil.chown(home / name, "nobody")
    with pytest.raises(services.ServiceError, match=f"{name} belongs to nobody: .* as nobody"):
        services.plan(home, {}, print)
    assert [(path.name, path.owner()) for path in home.iterdir()] == [(name, "nobody")]


@by_root
def test_what_root_has_started_is_refused_to_others(home: Path) -> None:
    services.plan(home, {}, print)
    with as_nobody(), pytest.raises(services.ServiceError, match="run `make up` as root"):
        services.plan(home, {}, print)


def test_the_users_own_servers_are_used_and_nothing_is_started(home: Path) -> None:
    own = {"DATABASE_URL": "postgresql://db/x", "REDIS_URL": "redis://cache"}
    plan = services.plan(home, own, print)
    assert plan.programs == ()
    assert plan.environment == own


def test_a_wrong_binary_says_why(home: Path) -> None:
    plan = services.plan(home, {}, print)
    (home / "redis" / "redis.conf").write_text("no such directive\n")
    children = [Child(home, program) for program in plan.programs]
    for child in children:
        child.start()
    with pytest.raises(services.ServiceError, match="redis ended at once"):
        services.wait_ready(plan, children)
    for child in children:
        child.stop()


def test_a_port_is_one_that_no_connection_takes_and_nobody_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(services, "SERVER_PORTS", range(15_000, 15_100))
    given: set[int] = set()
    for _ in range(20):
        port = services.free_port(taken=given)
        assert port not in given
        assert port in services.SERVER_PORTS
        given.add(port)


def test_the_wanted_port_is_had_unless_it_is_taken() -> None:
    wanted = services.free_port()
    assert services.free_port(wanted) == wanted
    assert services.free_port(wanted, {wanted}) != wanted
    with socket.create_server(("127.0.0.1", wanted)):
        assert services.free_port(wanted) != wanted


def test_where_all_ports_are_taken_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "SERVER_PORTS", range(15_000, 15_002))
    with pytest.raises(services.ServiceError, match="close some programs"):
        services.free_port(taken={15_000, 15_001})
