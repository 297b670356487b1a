"""Who may read the metrics, and that each is named and written as Prometheus wants it."""

from __future__ import annotations

import re
import shutil
import subprocess
from datetime import timedelta

import pytest
from django.test import Client, override_settings
from django.utils import timezone
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import controlplane.ingest.metrics  # noqa: F401 - for what it registers
import workers.metrics
from controlplane import metrics
from controlplane.fleet.models import Lease
from controlplane.health.choices import SignalKind
from controlplane.health.models import Signal
from tests.factories import ClusterFactory, NodeFactory, PlacementFactory, SignalFactory

PROMTOOL = shutil.which("promtool")
ELSEWHERE = "198.51.100.7"

pytestmark = pytest.mark.django_db


@pytest.fixture
def fleet() -> CollectorRegistry:
    """The figures of a fleet with one node."""
    NodeFactory()
    registry = CollectorRegistry()
    registry.register(workers.metrics.FleetFigures(lambda: True))
    return registry


@pytest.fixture
def ours(fleet: CollectorRegistry) -> list[Metric]:
    """Every metric of web, ingest and keeper."""
    registered = [m for m in REGISTRY.collect() if m.name.startswith("drydock_")]
    return [*registered, *fleet.collect()]


# --- who may read them ----------------------------------------------------------------------------


def status(**headers: str) -> int:
    return Client().get("/metrics", **headers).status_code  # type: ignore[arg-type]


def test_this_machine_reads_them() -> None:
    assert status(REMOTE_ADDR="127.0.0.1") == 200
    assert status(REMOTE_ADDR="::1") == 200


def test_another_machine_does_not() -> None:
    assert status(REMOTE_ADDR=ELSEWHERE) == 403
    assert status(REMOTE_ADDR="") == 403


@pytest.mark.parametrize("header", metrics.RELAYED)
def test_a_proxy_on_this_machine_does_not_lend_its_address(header: str) -> None:
    name = "HTTP_" + header.upper().replace("-", "_")
    assert status(REMOTE_ADDR="127.0.0.1", **{name: ELSEWHERE}) == 403


@override_settings(METRICS_ALLOW=["198.51.100.0/24"])
def test_a_network_that_is_named_reads_them() -> None:
    assert status(REMOTE_ADDR=ELSEWHERE) == 200
    assert status(REMOTE_ADDR="127.0.0.1") == 403


@override_settings(METRICS_TOKEN="of-prometheus")
def test_the_token_reads_them_from_anywhere_and_no_other_does() -> None:
    relayed = {"REMOTE_ADDR": ELSEWHERE, "HTTP_X_FORWARDED_FOR": ELSEWHERE}
    assert status(**relayed, HTTP_AUTHORIZATION="Bearer of-prometheus") == 200
    assert status(**relayed, HTTP_AUTHORIZATION="Bearer another") == 403
    assert status(**relayed, HTTP_AUTHORIZATION="Bearer ") == 403


def test_without_a_token_an_empty_one_opens_nothing() -> None:
    assert status(REMOTE_ADDR=ELSEWHERE, HTTP_AUTHORIZATION="Bearer ") == 403


def test_a_signed_in_person_needs_the_right_address_too(admin_client: Client) -> None:
    assert admin_client.get("/metrics", REMOTE_ADDR=ELSEWHERE).status_code == 403


# --- how they are written -------------------------------------------------------------------------


def test_the_page_can_be_parsed_and_counts_requests() -> None:
    client = Client()
    client.get("/login")
    text = client.get("/metrics").content.decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    counted = {tuple(s.labels.values()) for s in families["drydock_http_requests"].samples}
    assert ("GET", "login", "200") in counted
    assert families["drydock_http_request_duration_seconds"].type == "histogram"


def test_a_path_that_nobody_knows_makes_no_series_of_its_own() -> None:
    client = Client()
    client.get("/made-up-by-a-scanner")
    client.generic("BREW", "/")
    text = client.get("/metrics").content.decode()
    assert "made-up" not in text
    assert "BREW" not in text


def test_names_follow_the_conventions(ours: list[Metric]) -> None:
    assert len(ours) > 20
    for metric in ours:
        assert re.fullmatch(r"drydock_[a-z]+(_[a-z]+)*", metric.name), metric.name
        assert metric.documentation.endswith("."), metric.name
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent|total|count)$", metric.name)


def test_durations_are_in_seconds_and_sizes_in_bytes(ours: list[Metric]) -> None:
    for metric in ours:
        timed = re.search(r"_(duration|age|timestamp)_", metric.name)
        assert bool(timed) == metric.name.endswith("_seconds"), metric.name


def test_labels_are_few_and_hold_no_ids(ours: list[Metric]) -> None:
    allowed = {"cluster", "state", "severity", "route", "method", "status", "kind", "outcome", "le"}
    used = {label for metric in ours for sample in metric.samples for label in sample.labels}
    assert used <= allowed


def test_a_node_that_was_retired_while_it_was_heard_does_not_make_up_for_a_silent_one() -> None:
    silent = NodeFactory()
    Lease.objects.filter(node=silent).update(reachable=False)
    NodeFactory(cluster=silent.cluster, state="retired")
    registry = CollectorRegistry()
    registry.register(workers.metrics.FleetFigures(lambda: True))

    told = registry.get_sample_value("drydock_nodes_reachable", {"cluster": silent.cluster.name})
    assert told == 0


def test_tiers_that_take_no_checkpoints_are_counted_where_their_job_is() -> None:
    placement, elsewhere = PlacementFactory(), ClusterFactory()
    job = placement.replica.job
    for tier in ("local", "shared"):
        SignalFactory(
            kind=SignalKind.JOB_TROUBLE,
            job_id=job.pk,
            placement_id=placement.pk,
            data={"kind": "checkpoint_failed", "subject": tier, "text": "full", "rank": 0},
        )
    registry = CollectorRegistry()
    registry.register(workers.metrics.FleetFigures(lambda: True))

    told = [
        registry.get_sample_value("drydock_checkpoint_tiers_failing", {"cluster": cluster.name})
        for cluster in (job.cluster, elsewhere)
    ]
    assert told == [2, 0]


@pytest.mark.parametrize(
    ("ago_s", "age_s"),
    [
        pytest.param({"recorded_at": 3600}, 3600, id="observed once"),
        pytest.param({"recorded_at": 3600, "repeated_at": 20}, 20, id="observed again"),
        pytest.param({"recorded_at": 20, "repeated_at": 3600}, 20, id="told late of its repeats"),
    ],
)
def test_a_signal_waits_for_its_triage_since_it_was_last_observed(
    ago_s: dict[str, float], age_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal = SignalFactory()
    now = timezone.now()
    moments = {field: now - timedelta(seconds=ago) for field, ago in ago_s.items()}
    Signal.objects.filter(pk=signal.pk).update(**moments)
    monkeypatch.setattr("workers.metrics.timezone.now", lambda: now)
    registry = CollectorRegistry()
    registry.register(workers.metrics.FleetFigures(lambda: True))

    told = registry.get_sample_value("drydock_signals_oldest_untriaged_age_seconds")
    assert told == age_s


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_nothing_to_complain_of(fleet: CollectorRegistry) -> None:
    assert PROMTOOL
    content = metrics.exposition() + generate_latest(fleet)
    checked = subprocess.run([PROMTOOL, "check", "metrics"], input=content, capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
