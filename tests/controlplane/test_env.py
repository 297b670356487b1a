"""Settings from the environment and from files, and what is said when they are wrong."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection

from controlplane.env import database_from_url, env_bool, env_float, env_int, env_list, env_str


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("THING", raising=False)
    monkeypatch.delenv("THING_FILE", raising=False)
    return monkeypatch


def test_a_secret_is_read_from_its_file_without_the_last_newline(
    env: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "thing").write_text("a secret\n")
    env.setenv("THING_FILE", str(tmp_path / "thing"))
    assert env_str("THING", "default") == "a secret"


def test_numbers_and_lists_come_from_files_too(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "thing").write_text("7\n")
    env.setenv("THING_FILE", str(tmp_path / "thing"))
    assert env_int("THING", 1) == 7
    assert env_list("THING", []) == ["7"]


def test_a_value_and_a_file_at_once_are_refused(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "thing").write_text("a secret")
    env.setenv("THING_FILE", str(tmp_path / "thing"))
    env.setenv("THING", "another")
    with pytest.raises(ImproperlyConfigured, match="THING and THING_FILE are both set"):
        env_str("THING")


def test_an_empty_file_is_refused(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "thing").write_text("\n")
    env.setenv("THING_FILE", str(tmp_path / "thing"))
    with pytest.raises(ImproperlyConfigured, match=r"THING_FILE names .*thing: the file is empty"):
        env_str("THING", "default")


def test_a_file_that_is_not_there_is_named(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    env.setenv("THING_FILE", str(tmp_path / "none"))
    with pytest.raises(ImproperlyConfigured, match=r"none: No such file.*must be readable"):
        env_str("THING")


def test_a_file_that_holds_no_text_is_refused(env: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "thing").write_bytes(b"\xff\xfe\x00")
    env.setenv("THING_FILE", str(tmp_path / "thing"))
    with pytest.raises(ImproperlyConfigured, match="not text in UTF-8"):
        env_str("THING")


def test_an_empty_file_name_counts_as_none(env: pytest.MonkeyPatch) -> None:
    env.setenv("THING_FILE", "")
    env.setenv("THING", "plain")
    assert env_str("THING") == "plain"


def test_what_is_neither_true_nor_false_is_refused(env: pytest.MonkeyPatch) -> None:
    env.setenv("THING", "perhaps")
    with pytest.raises(ImproperlyConfigured, match="THING must be true or false"):
        env_bool("THING", False)


def test_the_password_of_the_database_may_stand_apart_from_its_address() -> None:
    apart = database_from_url("postgresql://drydock@db:5432/drydock", "a b@c")
    together = database_from_url("postgresql://drydock:a%20b%40c@db:5432/drydock")
    assert apart == together


def test_two_passwords_of_the_database_are_refused() -> None:
    with pytest.raises(ImproperlyConfigured, match="DATABASE_PASSWORD is set too"):
        database_from_url("postgresql://drydock:one@db/drydock", "two")


def options_of(url: str) -> dict[str, str]:
    options = database_from_url(url)["OPTIONS"]
    assert isinstance(options, dict)
    return options


def test_nobody_waits_for_ever_for_a_host_that_vanished() -> None:
    options = options_of("postgresql://drydock@db/drydock")

    assert options["connect_timeout"] == "5"
    assert options["tcp_user_timeout"] == "25000"
    assert options["keepalives_idle"] == "10"
    assert "idle_in_transaction_session_timeout=60000" in options["options"]


@pytest.mark.parametrize(
    "url",
    ["postgresql:///drydock", "postgresql:///drydock?host=/run/postgresql"],
)
def test_a_server_on_this_machine_is_told_nothing_about_its_network(url: str) -> None:
    options = options_of(url)

    assert options["connect_timeout"] == "5"
    assert "options" not in options


def test_what_the_url_says_goes_before_our_own_patience() -> None:
    options = options_of("postgresql://db/drydock?connect_timeout=30&options=&sslmode=require")

    assert (options["connect_timeout"], options["options"]) == ("30", "")
    assert (options["sslmode"], options["keepalives_count"]) == ("require", "3")


@pytest.mark.django_db
def test_libpq_and_the_server_know_what_we_set() -> None:
    session = connection.copy()
    session.settings_dict["OPTIONS"] = options_of("postgresql://db/drydock")

    with closing(session), session.cursor() as cursor:
        cursor.execute("SHOW idle_in_transaction_session_timeout")
        assert cursor.fetchone() == ("1min",)


def test_a_number_that_is_too_small_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEP_LEASE_S", "8")

    with pytest.raises(ImproperlyConfigured, match="STEP_LEASE_S must be at least 15, not 8"):
        env_float("STEP_LEASE_S", 60, least=15)
    assert env_float("STEP_LEASE_S", 60, least=8) == 8
