"""The job's page: moving a replica, its dry run first, and what came of it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.models import SYSTEM
from controlplane.incidents import actions as incidents
from controlplane.incidents.models import PlaybookRun
from controlplane.jobs import actions as jobs
from controlplane.jobs.models import Job, Placement
from tests.controlplane.dashboard.world import Fleet, reasons_in
from tests.factories import IncidentFactory, InterruptionFactory, NodeFactory, PlacementFactory


@pytest.fixture
def job(fleet: Fleet) -> Job:
    """A job whose replica 0 can move to alpha-02."""
    Job.objects.filter(pk=fleet.job.pk).update(
        coordinator_address="127.0.0.1:4000", gpus_per_replica=0
    )
    fleet.job.refresh_from_db()
    return fleet.job


def page(client: Client, job: Job, **query: str) -> str:
    answer = client.get(reverse("job", args=[job.pk]), query)
    assert answer.status_code == 200
    return answer.content.decode()


def order(client: Client, job: Job, **fields: str) -> tuple[int, str]:
    body = {"replica": "0", "reason": "cables"} | fields
    answer = client.post(reverse("job-move", args=[job.pk]), body)
    return answer.status_code, answer.content.decode()


def test_an_operator_is_offered_the_move_of_each_replica_and_a_viewer_is_not(
    operator: Client, viewer: Client, job: Job
) -> None:
    assert 'data-testid="ask-move"' in page(operator, job)
    assert 'data-testid="ask-move"' not in page(viewer, job)
    assert 'data-testid="move-order"' not in page(viewer, job, move="0")


def test_the_dry_run_comes_first_with_a_choice_of_nodes(operator: Client, job: Job) -> None:
    third = NodeFactory(cluster=job.cluster, name="alpha-03")

    shown = page(operator, job, move="0")
    other = page(operator, job, move="0", node=third.pk)

    assert "Move replica 0 of pretrain to alpha-02" in shown
    assert "alpha-03</option>" in shown
    assert "alpha-01 is free once" in shown
    assert "Move replica 0 of pretrain to alpha-03" in other
    assert not PlaybookRun.objects.filter(playbook="move-replica").exists()


def test_a_job_that_lives_as_one_is_said_to_stand_still(operator: Client, job: Job) -> None:
    Job.objects.filter(pk=job.pk).update(whole=True)

    shown = page(operator, job, move="0")

    assert "Move pretrain to alpha-02.</strong> It stands still meanwhile." in shown
    assert "restarts as a whole" in shown
    assert "restarted as a whole" in shown
    status, _ = order(operator, job)
    assert status == 302
    assert not Placement.objects.filter(standby=True).exists()
    assert "Move pretrain to alpha-02" in page(operator, job)


def test_what_was_shown_is_ordered_with_name_and_reason(operator: Client, job: Job) -> None:
    status, _ = order(operator, job)

    shown = page(operator, job)
    assert status == 302
    assert 'data-testid="moving"' in shown
    assert "Move replica 0 of pretrain to alpha-02" in shown
    assert "cables" in shown
    assert Placement.objects.get(standby=True).node.name == "alpha-02"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reason": ""}, "give a reason"),
        ({"replica": "none"}, "say which replica"),
        ({"replica": "7"}, "has no replica 7"),
        ({"node": "nod_nowhere"}, "has no such node"),
    ],
)
def test_what_cannot_be_done_is_said_with_409(
    operator: Client, job: Job, fields: dict[str, str], words: str
) -> None:
    status, shown = order(operator, job, **fields)

    assert status == 409
    assert words in shown


def test_a_move_that_was_refused_stands_there_as_it_was_chosen(operator: Client, job: Job) -> None:
    third = NodeFactory(cluster=job.cluster, name="alpha-03")

    unknown = order(operator, job, node="nod_nowhere")[1]
    without_reason = order(operator, job, node=third.pk, reason=" ")[1]

    assert list(reasons_in(unknown).values()) == ["cables"]
    assert "Move replica 0 of pretrain to alpha-03" in without_reason
    assert f"?move=0&amp;node={third.pk}&amp;after=" in without_reason


def test_a_replica_that_cannot_move_says_why(operator: Client, fleet: Fleet) -> None:
    assert "started by its own scheduler" in page(operator, fleet.job, move="0")


def test_afterwards_the_interruption_tells_where_from_and_where_to(
    operator: Client, job: Job
) -> None:
    order(operator, job)
    now = timezone.now()
    jobs.take_place(Placement.objects.get(standby=True), now)
    InterruptionFactory(job=job, joined=[0], started_at=now - timedelta(seconds=0.3))
    IncidentFactory(job=job, replica=0, restored_at=now - timedelta(seconds=60))

    shown = page(operator, job)

    row = shown[shown.index('data-testid="interruptions"') :]
    row = row[: row.index("</table>")]
    assert "replica 0 moved from" in row
    assert row.index("alpha-01") < row.index("alpha-02")
    assert "joined" not in row
    assert "/incidents/" not in row


def test_what_came_back_from_a_loss_a_moment_later_moved_once(operator: Client, job: Job) -> None:
    order(operator, job)
    now = timezone.now()
    jobs.take_place(Placement.objects.get(standby=True), now)
    for epoch, later_s, lost, joined in ((7, 0, [], [0]), (8, 3, [0], []), (9, 5, [], [0])):
        later = now + timedelta(seconds=later_s)
        InterruptionFactory(
            job=job, epoch=epoch, lost=lost, joined=joined, started_at=later, committed_at=later
        )

    shown = page(operator, job)

    rows = shown[shown.index('data-testid="interruptions"') :]
    rows = rows[: rows.index("</table>")]
    assert rows.count("moved from") == 1
    assert rows.index("joined") < rows.index("lost") < rows.index("moved from")


def test_a_move_that_is_over_says_how_it_ended(operator: Client, job: Job) -> None:
    order(operator, job)
    run = PlaybookRun.objects.get(playbook="move-replica")
    incidents.cancel_run(SYSTEM, run.pk, "the cables can wait")

    assert "the cables can wait" in page(operator, job)


@pytest.fixture
def wide(job: Job) -> Job:
    """The job is one replica on two nodes."""
    replica = job.replicas.get(index=0)
    job.replicas.exclude(pk=replica.pk).delete()
    Job.objects.filter(pk=job.pk).update(world_replicas=1, nodes_per_replica=2, whole=True)
    other = NodeFactory(cluster=job.cluster, name="alpha-09", state="allocated")
    PlacementFactory(replica=replica, node=other, node_rank=1)
    job.refresh_from_db()
    return job


def test_of_a_replica_on_several_nodes_each_is_shown_and_can_be_left(
    operator: Client, wide: Job
) -> None:
    html = page(operator, wide)

    assert "on 2 nodes" in html
    assert html.count('data-testid="ask-move"') == 2
    assert "Replica 0, node 1" in html
    other = Placement.objects.get(node_rank=1)
    asked = page(operator, wide, move="0", leaving=other.node_id)
    assert f"Move {wide.name} from alpha-09 to alpha-02" in asked
    assert f'<input type="hidden" name="leaving" value="{other.node_id}">' in asked


def test_the_move_off_one_of_several_nodes_is_ordered_on_the_page(
    operator: Client, wide: Job
) -> None:
    other = Placement.objects.get(node_rank=1)

    refused, why = order(operator, wide)
    again = order(operator, wide, leaving=other.node_id, reason=" ")[1]
    status, _ = order(operator, wide, leaving=other.node_id)

    assert (refused, status) == (409, 302)
    assert "say in `leaving` which it is to leave" in why
    assert f'<input type="hidden" name="leaving" value="{other.node_id}">' in again
    assert PlaybookRun.objects.get(playbook="move-job").context["from"] == other.pk
