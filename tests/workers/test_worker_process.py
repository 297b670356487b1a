"""A worker as a process: its health, its log, and that it leaves no step locked at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction

from controlplane import doorbell
from controlplane.accounts.models import SYSTEM
from controlplane.fleet.models import Command
from controlplane.incidents import actions as incidents
from controlplane.incidents.choices import StepState
from controlplane.incidents.models import PlaybookRun, PlaybookStep
from tests.controlplane.ingest.door import wait_until
from tests.factories import NodeFactory
from tests.running import running, worker
from workers.celery import app

pytestmark = pytest.mark.django_db(transaction=True)

NAME = "drydock-test@localhost"


@pytest.fixture(autouse=True)
def no_rings_from_before() -> None:
    """Other tests ring too, with nobody there to hear."""
    app.control.purge()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker.log"


def is_healthy() -> bool:
    try:
        call_command("health", "worker", f"--name={NAME}")
    except CommandError:
        return False
    return True


def admission() -> PlaybookRun:
    """A run whose first step gives its node an order."""
    node = NodeFactory(state="enrolled")
    return incidents.request_run(
        SYSTEM,
        "admit-node",
        node.pk,
        cluster_id=node.cluster_id,
        title="Admit",
        node_id=node.pk,
    )


@contextmanager
def commands_locked() -> Iterator[None]:
    """Whoever gives a node an order has to wait."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {Command._meta.db_table} IN ACCESS EXCLUSIVE MODE")
        yield


def ring_until(predicate: Callable[[], bool]) -> None:
    """Ring again and again, as the keeper does: a single ring may be lost."""

    def rung() -> bool:
        doorbell.ring()
        return predicate()

    wait_until(rung)


def is_running(run: PlaybookRun) -> bool:
    return PlaybookStep.objects.filter(run=run, state=StepState.RUNNING).exists()


def test_a_worker_that_lives_is_healthy_and_one_that_ended_is_not(log: Path) -> None:
    with worker(log, NAME) as process:
        wait_until(is_healthy)
        process.terminate()
        assert process.wait() == 0
    assert not is_healthy()


def test_a_worker_that_is_told_to_end_finishes_its_step(log: Path) -> None:
    run = admission()
    with worker(log, NAME) as process:
        wait_until(is_healthy)
        with commands_locked():
            ring_until(lambda: is_running(run))

            process.terminate()
            wait_until(lambda: "Warm shutdown" in process.output)
            assert is_running(run)

        assert process.wait() == 0
    assert not is_running(run)
    first = run.steps.get(position=0)
    assert (first.lock_token, first.lock_expires_at) == ("", None)
    assert first.state == StepState.WAITING


def test_a_worker_writes_lines_of_json_only(log: Path) -> None:
    run = admission()
    with worker(log, NAME) as process:
        wait_until(is_healthy)
        ring_until(lambda: run.steps.filter(state=StepState.WAITING).exists())
        process.terminate()
        process.wait()
        assert all(line["level"] and line["time"] for line in process.lines())


def test_a_worker_refuses_to_run_by_a_catalogue_that_it_cannot_understand(
    log: Path, tmp_path: Path
) -> None:
    overlay = tmp_path / "xid.csv"
    overlay.write_text("xid,immediate_action\n31,EXPLODE\n")
    argv = ("-m", "celery", "--quiet", "-A", "workers.celery:app", "worker", "-n", NAME)

    with running(log, *argv, DRYDOCK_CATALOGUE=str(tmp_path)) as process:
        assert process.wait() == 1

    told = log.read_text()
    assert f"{overlay}, row ['31'" in told
    assert "immediate_action: unknown action 'EXPLODE'; use one of ignore" in told
    assert "DRYDOCK_CATALOGUE" in told
