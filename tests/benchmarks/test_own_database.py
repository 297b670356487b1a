"""Benchmarks that write make a database and a Redis for themselves, whatever the caller has set."""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping
from pathlib import Path

import pytest

from controlplane.local import runfile, services

THEIRS = {
    "DATABASE_URL": "postgresql://theirs/drydock",
    "DATABASE_PASSWORD": "theirs",
    "REDIS_URL": "redis://theirs",
}


class Asked(Exception):
    """Services were asked for: in a test that is enough."""


@pytest.mark.parametrize("name", ["audit_chain", "api_lists", "ingest", "repeats"])
def test_what_the_caller_has_set_is_neither_used_nor_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Mapping[str, str]] = []
    homes: list[Path] = []

    def plan(home: Path, environ: Mapping[str, str], *_: object, **__: object) -> services.Plan:
        homes.append(home)
        seen.extend([dict(environ), dict(os.environ)])
        raise Asked

    monkeypatch.setattr(services, "plan", plan)
    monkeypatch.setattr("sys.argv", [name])
    monkeypatch.setenv("DRYDOCK_HOME", "/theirs")
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "controlplane.local.settings")
    for variable, value in THEIRS.items():
        monkeypatch.setenv(variable, value)
        monkeypatch.setenv(f"{variable}_FILE", "/theirs")

    with pytest.raises(Asked):
        runpy.run_path(str(runfile.REPOSITORY / "benchmarks" / f"{name}.py"), run_name="__main__")

    given, environment = seen
    assert given == {}
    assert [variable for variable in environment if variable.startswith((*THEIRS,))] == []
    assert environment["DRYDOCK_HOME"] == str(homes[0])
    assert not homes[0].exists()
