"""What the control plane is told before the fleet boots; told twice, nothing changes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from controlplane.accounts.models import User
from controlplane.fleet.models import Cluster, JoinToken
from controlplane.incidents.models import PlaybookRun
from controlplane.jobs.choices import JobState
from controlplane.local import demo, fleet
from tests.factories import ClusterFactory, JobFactory

pytestmark = pytest.mark.django_db


def test_the_first_user_can_log_in_with_the_password_in_the_home(home: Path) -> None:
    demo.ensure_admin(home)
    demo.ensure_admin(home)
    password = home / "admin-password"
    assert User.objects.get(username=demo.ADMIN).check_password(password.read_text())
    assert stat.S_IMODE(password.stat().st_mode) == 0o600


def test_each_cluster_gets_a_token_for_exactly_its_nodes(home: Path) -> None:
    demo.ensure_clusters(fleet.plan(home, 8))
    uses = {token.cluster.name: token.max_uses for token in JoinToken.objects.all()}
    assert uses == {"harbor": 6, "quay": 2}
    tokens = {node.join_token.read_text() for node in fleet.plan(home, 8)}
    assert len(tokens) == 2


def test_a_larger_fleet_later_keeps_its_clusters(home: Path) -> None:
    demo.ensure_clusters(fleet.plan(home, 8))
    demo.ensure_clusters(fleet.plan(home, 12))
    assert Cluster.objects.count() == 2


@pytest.mark.parametrize(
    "job",
    [
        {"state": JobState.PENDING},
        {"state": JobState.RUNNING, "coordinator_address": ""},  # its own scheduler started it
        {"state": JobState.STOPPED, "coordinator_address": "127.0.0.1:9000"},
    ],
)
def test_what_our_agents_did_not_run_is_not_started_with_the_machine(job: dict[str, str]) -> None:
    JobFactory(**job)
    demo.resume()
    assert not PlaybookRun.objects.exists()


@pytest.mark.parametrize(
    "job",
    [
        {"state": JobState.STARTING},
        {"state": JobState.RUNNING, "coordinator_address": "127.0.0.1:9000"},
    ],
)
def test_what_our_agents_ran_goes_on_with_the_machine(job: dict[str, str]) -> None:
    going_on = JobFactory(**job)
    demo.resume()
    run = PlaybookRun.objects.get()
    assert (run.playbook, run.job) == ("start-job", going_on)


@pytest.mark.parametrize("state", [JobState.STOPPING, JobState.STOPPED, JobState.FAILED])
def test_a_demo_job_that_was_ended_is_left_alone(
    state: JobState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "FIRST_STEPS_DEADLINE_S", 0)
    ended = JobFactory(
        name=demo.JOB_NAME, cluster=ClusterFactory(name=fleet.MAIN_CLUSTER), state=state
    )
    said: list[str] = []
    assert demo.start_job(said.append) == ended
    assert not PlaybookRun.objects.exists()
    assert said == [
        f"gpt-demo is {state}: it is left alone (`make reset` begins anew, without what was "
        "recorded)"
    ]


def test_a_demo_job_that_was_registered_and_not_started_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "FIRST_STEPS_DEADLINE_S", 0)
    job = JobFactory(
        name=demo.JOB_NAME,
        cluster=ClusterFactory(name=fleet.MAIN_CLUSTER),
        state=JobState.PENDING,
    )
    with pytest.raises(demo.DemoError):  # nobody is there to start it in this test
        demo.start_job(lambda _line: None)
    assert PlaybookRun.objects.get().job == job
