"""What the control plane is told before the fleet boots; told twice, nothing changes."""

from __future__ import annotations

import stat
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Cluster, JoinToken, Lease, Node
from controlplane.incidents.models import PlaybookRun
from controlplane.jobs.choices import JobState
from controlplane.local import demo, fleet
from controlplane.local.up import Options, _greet
from tests.factories import ClusterFactory, JobFactory, NodeFactory

pytestmark = pytest.mark.django_db


@pytest.fixture
def plans(home: Path) -> list[fleet.NodePlan]:
    """The smallest fleet, its folders made and all its nodes on record: admitted, heard later."""
    plans = fleet.plan(home, fleet.MIN_NODES)
    clusters = {name: ClusterFactory(name=name) for name in {plan.cluster for plan in plans}}
    for plan in plans:
        fleet.prepare(plan, "http://127.0.0.1:8001", home / "shared")
        NodeFactory(
            name=plan.name,
            cluster=clusters[plan.cluster],
            lease__last_beat_at=timezone.now() + timedelta(hours=1),
        )
    return plans


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ENROL_DEADLINE_S", 0)
    monkeypatch.setattr(demo, "ADMISSION_DEADLINE_S", 0)


def silent(name: str, **fields: object) -> None:
    """This node has not been heard since."""
    Lease.objects.filter(node__name=name).update(last_beat_at=timezone.now() - timedelta(hours=1))
    Node.objects.filter(name=name).update(**fields)


def held(name: str) -> str:
    return Node.objects.get(name=name).hold_reason


def test_the_first_user_can_log_in_with_the_password_in_the_home(home: Path) -> None:
    demo.ensure_admin(home)
    demo.ensure_admin(home)
    password = home / "admin-password"
    assert User.objects.get(username=demo.ADMIN).check_password(password.read_text())
    assert stat.S_IMODE(password.stat().st_mode) == 0o600


@pytest.mark.parametrize("now", [{"password": "!"}, {"is_active": False}])
def test_a_password_that_lets_nobody_in_is_not_told(
    home: Path, capsys: pytest.CaptureFixture[str], now: dict[str, object]
) -> None:
    demo.ensure_admin(home)
    admins = User.objects.filter(username=demo.ADMIN)
    before = admins.values("password", "is_active").get()
    admins.update(**now)
    assert "as it was set on the Users page" in greeting(home, capsys)

    admins.update(**before)
    assert (home / "admin-password").read_text() in greeting(home, capsys)


def greeting(home: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the next `up` tells of the first user."""
    demo.ensure_admin(home)
    _greet(Options(home=home), whole=False)
    return capsys.readouterr().out


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


def test_nodes_that_stay_off_are_held_until_they_are_started(
    home: Path, plans: list[fleet.NodePlan]
) -> None:
    demo.choose_nodes(home, plans[1:])
    assert held(plans[0].name) == demo.NOT_STARTED
    assert held(plans[1].name) == ""

    demo.choose_nodes(home, plans)
    assert held(plans[0].name) == ""


def test_a_persons_hold_outlives_a_smaller_fleet(home: Path, plans: list[fleet.NodePlan]) -> None:
    Node.objects.filter(name=plans[0].name).update(hold_reason="its fan rattles")
    demo.choose_nodes(home, plans[1:])
    demo.choose_nodes(home, plans)
    assert held(plans[0].name) == "its fan rattles"


def test_without_a_fleet_only_the_simulated_nodes_are_held(
    home: Path, plans: list[fleet.NodePlan]
) -> None:
    own = NodeFactory(name="rack1-host1", cluster=Cluster.objects.get(name=fleet.MAIN_CLUSTER))
    namesake = NodeFactory(name=plans[0].name)
    demo.choose_nodes(home, [])
    assert {held(plan.name) for plan in plans[1:]} == {demo.NOT_STARTED}
    assert held(own.name) == ""
    namesake.refresh_from_db()
    assert namesake.hold_reason == ""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "out",
    [
        {"key_revoked_at": timezone.now()},
        {"state": NodeState.RETIRED},
        {"hold_reason": "its fan rattles"},
    ],
)
def test_a_node_that_somebody_took_out_is_not_waited_for(
    plans: list[fleet.NodePlan], out: dict[str, object]
) -> None:
    silent(plans[0].name, **out)
    said: list[str] = []
    demo.admit_fleet(plans, said.append)
    assert said == ["5 of 5 nodes enrolled"]


@pytest.mark.usefixtures("impatient")
def test_a_node_that_is_held_before_its_diagnostics_is_not_waited_for(
    plans: list[fleet.NodePlan],
) -> None:
    Node.objects.filter(name=plans[0].name).update(
        state=NodeState.ENROLLED, hold_reason="its fan rattles"
    )
    said: list[str] = []
    demo.admit_fleet(plans, said.append)
    assert said == ["5 of 5 nodes enrolled"]


@pytest.mark.usefixtures("impatient")
def test_a_node_that_stays_silent_keeps_no_other_from_being_introduced(
    plans: list[fleet.NodePlan],
) -> None:
    silent(plans[0].name)
    with pytest.raises(demo.DemoError, match="Only 5 of 6 nodes enrolled"):
        demo.admit_fleet(plans, lambda _line: None)
    introduced = Node.objects.exclude(bmc_url="").values_list("name", flat=True)
    assert {*introduced} >= {plan.name for plan in plans[1:]}


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
