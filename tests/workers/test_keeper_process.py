"""The keeper as a process: how it is, over HTTP; who leads; and that it lets go at its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from prometheus_client.parser import text_string_to_metric_families

from controlplane.incidents.choices import RunState
from tests.controlplane.ingest.door import wait_until
from tests.factories import IncidentFactory, NodeFactory, PlaybookRunFactory
from tests.running import answers, get, keeper, running

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "keeper.log"


def samples(port: int) -> dict[tuple[str, ...], float]:
    """Each sample by its name and the values of its labels."""
    status, text = get(port, "/metrics")
    assert status == 200, text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def is_healthy() -> bool:
    try:
        call_command("health", "keeper")
    except CommandError:
        return False
    return True


def test_a_keeper_that_leads_is_ready_and_tells_of_the_fleet(log: Path) -> None:
    node = NodeFactory()
    incident = IncidentFactory(cluster=node.cluster)
    PlaybookRunFactory(incident=incident, state=RunState.NEEDS_OPERATOR)
    cluster = node.cluster.name

    with keeper(log) as (_process, port):
        wait_until(lambda: get(port, "/readyz") == (200, "leads\n"))
        told = samples(port)

    assert told["drydock_keeper_leads",] == 1
    assert told["drydock_nodes", cluster, "available"] == 1
    assert told["drydock_nodes", cluster, "quarantined"] == 0
    assert told["drydock_nodes_reachable", cluster] == 1
    assert told["drydock_incidents_unresolved", cluster, "major"] == 1
    assert told["drydock_runs_unfinished", cluster, "needs_operator"] == 1
    assert told["drydock_signals_untriaged",] == 0


def test_a_stand_by_is_ready_and_leads_once_the_first_has_ended(log: Path, tmp_path: Path) -> None:
    with keeper(log) as (first, port), keeper(tmp_path / "second.log") as (_second, second_port):
        wait_until(lambda: get(port, "/readyz") == (200, "leads\n"))
        wait_until(lambda: get(second_port, "/readyz") == (200, "stands by\n"))
        standing_by = samples(second_port)

        first.terminate()

        assert first.wait() == 0
        wait_until(lambda: get(second_port, "/readyz") == (200, "leads\n"))
    assert standing_by["drydock_keeper_leads",] == 0
    assert not [sample for sample in standing_by if sample[0] == "drydock_nodes"]


def test_without_a_database_a_keeper_lives_but_is_not_ready(log: Path) -> None:
    away = "postgresql://nobody@127.0.0.1:1/none"
    with keeper(log, DATABASE_URL=away) as (process, port):
        assert get(port, "/readyz")[0] == 503
        assert answers(port, "/healthz")
        wait_until(lambda: process.said("keeper.database_away"))


def test_the_health_command_says_how_the_keeper_is(log: Path, settings: object) -> None:
    with keeper(log) as (_process, port):
        settings.KEEPER_METRICS_ADDRESS = f"127.0.0.1:{port}"  # type: ignore[attr-defined]
        wait_until(is_healthy)
    with pytest.raises(CommandError, match="does not answer"):
        call_command("health", "keeper")


def test_an_address_that_is_none_is_said_in_a_sentence(log: Path) -> None:
    with running(log, "manage.py", "keeper", KEEPER_METRICS_ADDRESS="8002") as process:
        assert process.wait() == 1
    assert "must be host:port" in log.read_text()


def test_a_keeper_refuses_to_run_by_a_catalogue_that_it_cannot_understand(
    log: Path, tmp_path: Path
) -> None:
    overlay = tmp_path / "xid.csv"
    overlay.write_text("xid,immediate_action\n31,EXPLODE\n")

    with running(log, "manage.py", "keeper", DRYDOCK_CATALOGUE=str(tmp_path)) as process:
        assert process.wait() == 1

    assert f"{overlay}, row ['31'" in log.read_text()
