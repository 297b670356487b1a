"""What the pages show, how they stay live, and that nothing that was observed becomes markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.db.models import F
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.choices import Role
from controlplane.fleet.models import Cluster, Lease
from controlplane.incidents.models import Incident
from controlplane.jobs.models import Job
from tests.factories import (
    ApprovalFactory,
    CheckpointFactory,
    ClusterFactory,
    FailureFactory,
    GrantFactory,
    IncidentFactory,
    InterruptionFactory,
    JobFactory,
    LedgerRangeFactory,
    NodeFactory,
    PlacementFactory,
    PlaybookRunFactory,
    PlaybookStepFactory,
    ProgressSampleFactory,
    ReplicaFactory,
    SignalFactory,
    TimelineEntryFactory,
)

if TYPE_CHECKING:
    # What the test client answers has a type of its own, known to type checkers only.
    from django.test.client import _MonkeyPatchedWSGIResponse as Page

pytestmark = pytest.mark.django_db

#: Sessions, users and grants are read on every page.
QUERIES = {"overview": 22, "jobs": 6, "job": 18, "incidents": 6, "incident": 12}


@pytest.fixture
def cluster() -> Cluster:
    return ClusterFactory(name="alpha")


@pytest.fixture
def operator(cluster: Cluster) -> Client:
    return _client(Role.OPERATOR, cluster)


@pytest.fixture
def viewer(cluster: Cluster) -> Client:
    return _client(Role.VIEWER, cluster)


def _client(role: Role, cluster: Cluster) -> Client:
    client = Client()
    client.force_login(GrantFactory(role=role, cluster=cluster).user)
    return client


@pytest.fixture
def job(cluster: Cluster) -> Job:
    job = JobFactory(cluster=cluster, name="pretrain", step=1999, loss=2.5, samples_per_s=480.0)
    for index in range(4):
        PlacementFactory(replica=ReplicaFactory(job=job, index=index))
    return job


@pytest.fixture
def incident(cluster: Cluster, job: Job) -> Incident:
    return IncidentFactory(
        cluster=cluster, job=job, replica=2, title="Replica lost", cause="The node lost power."
    )


def _refresh(client: Client, address: str, after: str) -> Page:
    return client.get(address, {"after": after}, headers={"HX-Request": "true"})


def _token(page: Page) -> str:
    found = re.search(r'data-token="([^"]+)"', page.content.decode())
    assert found
    return found[1]


def _changed(cluster: Cluster) -> None:
    Cluster.objects.filter(pk=cluster.pk).update(change_seq=F("change_seq") + 1)


# --- Live -----------------------------------------------------------------------------------------


@pytest.fixture(params=["overview", "jobs", "job", "incidents", "incident"])
def address(request: pytest.FixtureRequest, job: Job, incident: Incident) -> str:
    arguments = {"job": [job.id], "incident": [incident.id]}
    return reverse(request.param, args=arguments.get(request.param, []))


def test_nothing_new_is_answered_with_204(viewer: Client, address: str) -> None:
    token = _token(viewer.get(address))

    answer = _refresh(viewer, address, token)

    assert answer.status_code == 204
    assert answer.content == b""


def test_a_change_is_answered_with_the_regions_and_a_new_token(
    viewer: Client, address: str, cluster: Cluster
) -> None:
    token = _token(viewer.get(address))
    _changed(cluster)

    answer = _refresh(viewer, address, token)

    body = answer.content.decode()
    assert answer.status_code == 200
    assert "<html" not in body
    assert 'hx-swap-oob="true"' in body
    assert _token(answer) != token


def test_a_change_elsewhere_is_not_news_here(viewer: Client, address: str) -> None:
    elsewhere = ClusterFactory()
    token = _token(viewer.get(address))
    _changed(elsewhere)

    assert _refresh(viewer, address, token).status_code == 204


def test_a_full_page_is_sent_whatever_the_token(viewer: Client, address: str) -> None:
    token = _token(viewer.get(address))

    answer = viewer.get(address, {"after": token})

    assert "<html" in answer.content.decode()
    assert answer["Cache-Control"] == "no-store"


def test_a_page_that_is_refreshed_keeps_its_filters(viewer: Client, incident: Incident) -> None:
    page = viewer.get(reverse("incidents"), {"state": "unresolved"}).content.decode()

    assert re.search(r'hx-get="/incidents/\?state=unresolved&amp;after=', page)


def test_nothing_on_a_page_needs_inline_script_or_style(viewer: Client, address: str) -> None:
    page = viewer.get(address)
    body = page.content.decode()

    assert "default-src 'self'" in page["Content-Security-Policy"]
    assert not re.search(r"<[^>]+\sstyle=", body)
    assert not re.search(r"<[^>]+\son[a-z]+=", body)
    assert not re.search(r"<script(?![^>]*\ssrc=)", body)


# --- A constant number of queries -----------------------------------------------------------------


@pytest.mark.parametrize("page", list(QUERIES))
def test_queries_do_not_grow_with_what_is_shown(
    page: str,
    viewer: Client,
    cluster: Cluster,
    job: Job,
    incident: Incident,
    django_assert_max_num_queries: Callable[..., Any],
) -> None:
    for index in range(5):
        other = JobFactory(cluster=cluster)
        PlacementFactory(replica=ReplicaFactory(job=other, index=0))
        IncidentFactory(cluster=cluster, job=other)
        run = PlaybookRunFactory(incident=incident, job=job, state="needs_operator")
        step = PlaybookStepFactory(
            run=run, state="done", outcome="done", finished_at=timezone.now()
        )
        TimelineEntryFactory(incident=incident, text=step.outcome, data={"by": "1"})
        InterruptionFactory(job=job, lost=[2], gap_s=0.3 + index)
        CheckpointFactory(job=job)
        LedgerRangeFactory(job=job)
    arguments = {"job": [job.id], "incident": [incident.id]}

    with django_assert_max_num_queries(QUERIES[page]):
        answer = viewer.get(reverse(page, args=arguments.get(page, [])))

    assert answer.status_code == 200


# --- Overview -------------------------------------------------------------------------------------


def test_a_calm_overview_says_that_nothing_needs_you(viewer: Client) -> None:
    assert "Nothing needs you" in viewer.get(reverse("overview")).content.decode()


def test_what_waits_for_a_person_comes_with_its_reason(viewer: Client, incident: Incident) -> None:
    PlaybookRunFactory(
        incident=incident, state="needs_operator", state_reason="The BMC does not answer."
    )

    page = viewer.get(reverse("overview")).content.decode()

    assert "What needs you now" in page
    assert "The BMC does not answer." in page
    assert 'data-waiting="1"' in page


def test_what_a_person_paused_waits_for_one_also_without_an_incident(
    viewer: Client, cluster: Cluster
) -> None:
    told = {"state": "paused", "state_reason": "wait for Ada"}
    PlaybookRunFactory(incident=None, cluster=cluster, title="Drain node-01", **told)

    page = viewer.get(reverse("overview")).content.decode()

    assert 'data-waiting="1"' in page
    assert "Drain node-01" in page
    assert "Paused by a person: wait for Ada." in page
    assert "Nothing needs you" not in page


def test_what_automation_has_in_hand_does_not_ask_for_anybody(
    viewer: Client, incident: Incident
) -> None:
    PlaybookRunFactory(incident=incident, state="running")

    page = viewer.get(reverse("overview")).content.decode()

    assert 'data-waiting="0"' in page
    assert "nothing waits for you" in page


def test_a_run_that_stopped_is_told_beside_a_plan_to_sign(
    viewer: Client, incident: Incident
) -> None:
    ApprovalFactory(run=PlaybookRunFactory(incident=incident, state="waiting"))
    PlaybookRunFactory(
        incident=incident, state="needs_operator", state_reason="The BMC does not answer."
    )

    page = viewer.get(reverse("overview")).content.decode()

    assert 'data-waiting="2"' in page
    assert "The BMC does not answer." in page


def test_what_waits_for_a_person_stands_before_what_is_in_hand(
    viewer: Client, cluster: Cluster
) -> None:
    in_hand = IncidentFactory(cluster=cluster, title="A critical, in hand", severity="critical")
    PlaybookRunFactory(incident=in_hand, state="running")
    paused = IncidentFactory(cluster=cluster, title="B minor, paused", severity="minor")
    PlaybookRunFactory(incident=paused, state="paused")

    page = viewer.get(reverse("overview")).content.decode()

    assert 'data-waiting="1"' in page
    assert page.index("B minor, paused") < page.index("A critical, in hand")


def test_what_there_is_no_room_for_is_counted(viewer: Client, cluster: Cluster) -> None:
    IncidentFactory.create_batch(53, cluster=cluster)
    resolved = IncidentFactory(cluster=cluster, state="resolved")
    PlaybookRunFactory.create_batch(52, incident=resolved, state="needs_operator")

    page = viewer.get(reverse("overview")).content.decode()

    assert 'data-waiting="105"' in page
    assert "Shown are 50 of 53 open incidents" in page
    assert "Shown are 50 of 52 stopped playbooks.</p>" in page  # nowhere all of them are listed
    assert page.count('data-testid="needs-incident"') == 50


def test_the_gravest_incident_comes_first_then_the_oldest(viewer: Client, cluster: Cluster) -> None:
    hour_ago = timezone.now() - timedelta(hours=1)
    IncidentFactory(cluster=cluster, title="C minor", severity="minor", occurred_at=hour_ago)
    IncidentFactory(cluster=cluster, title="B major, new", severity="major")
    IncidentFactory(cluster=cluster, title="A major, old", severity="major", occurred_at=hour_ago)
    IncidentFactory(cluster=cluster, title="Z critical", severity="critical")

    page = viewer.get(reverse("overview")).content.decode()

    titles = ["Z critical", "A major, old", "B major, new", "C minor"]
    assert sorted(titles, key=page.index) == titles


def test_nodes_are_counted_by_state_and_the_unheard_are_named(
    viewer: Client, cluster: Cluster
) -> None:
    NodeFactory(cluster=cluster, name="fit", spare=True)
    silent = NodeFactory(cluster=cluster, name="silent", state="allocated")
    Lease.objects.filter(node=silent).update(reachable=False)

    page = viewer.get(reverse("overview")).content.decode()

    assert "<strong>1</strong> available" in page
    assert "<strong>1</strong> allocated" in page
    assert "<strong>1</strong> spare ready" in page
    assert "<strong>1</strong> unreachable" in page
    assert "silent: Allocated, unreachable" in page


# --- Job ------------------------------------------------------------------------------------------


def test_a_job_shows_where_each_replica_sits(viewer: Client, job: Job) -> None:
    page = viewer.get(reverse("job", args=[job.id])).content.decode()

    assert len(re.findall(r'data-testid="replica"', page)) == 4
    assert 'data-active="4"' in page


def test_an_interruption_leads_to_the_incident_that_explains_it(
    viewer: Client, job: Job, incident: Incident
) -> None:
    InterruptionFactory(job=job, lost=[2], started_at=incident.occurred_at)

    page = viewer.get(reverse("job", args=[job.id])).content.decode()

    assert f'href="/incidents/{incident.id}"' in page
    assert "lost replica 2" in page


@pytest.mark.parametrize(
    ("step_s", "late_s"),
    [(0.1, 30), (45.0, 145)],  # three times as long as a step takes, and ten seconds
)
def test_a_commit_is_late_by_how_long_the_jobs_steps_take(
    step_s: float, late_s: int, viewer: Client, job: Job
) -> None:
    ProgressSampleFactory(job=job, step=9, step_s=600.0)
    ProgressSampleFactory(job=job, step=19, step_s=step_s)

    page = viewer.get(reverse("job", args=[job.id])).content.decode()

    assert f'<div data-late="{late_s}"><dt>Last commit</dt>' in page


def test_a_commit_of_a_job_that_has_told_no_step_is_late_after_a_while(
    viewer: Client, job: Job
) -> None:
    page = viewer.get(reverse("job", args=[job.id])).content.decode()

    assert '<div data-late="30"><dt>Last commit</dt>' in page


def test_the_ledger_names_what_was_lost(viewer: Client, job: Job) -> None:
    LedgerRangeFactory(job=job, step_from=0, lost=[[7, 1], [8, 1]])

    page = viewer.get(reverse("job", args=[job.id])).content.decode()

    assert "incomplete" in page
    assert '<dd data-testid="ledger-lost">2</dd>' in page


def test_the_curves_are_whole_at_first(viewer: Client, job: Job) -> None:
    for step in (9, 19, 29):
        ProgressSampleFactory(job=job, step=step)
    InterruptionFactory(job=job, epoch=2, lost=[1])
    CheckpointFactory(job=job, step=20)

    curves = viewer.get(reverse("job-series", args=[job.id])).json()

    assert curves["step"] == [9, 19, 29]
    assert curves["throughput"] == pytest.approx([480, 480, 480])
    assert [mark["lost"] for mark in curves["marks"]] == [[1]]
    assert [one["step"] for one in curves["checkpoints"]] == [20]


def test_later_curves_bring_only_what_is_new(viewer: Client, job: Job) -> None:
    for step in (9, 19, 29):
        ProgressSampleFactory(job=job, step=step)

    address = reverse("job-series", args=[job.id])
    seen = viewer.get(address).json()["at"][1]

    curves = viewer.get(address, {"after": seen}).json()

    assert curves["step"] == [29]


def test_a_chart_that_was_hidden_for_long_is_brought_all_that_it_missed(
    viewer: Client, job: Job
) -> None:
    now = timezone.now()
    ProgressSampleFactory(job=job, step=9, at=now - timedelta(hours=1))
    ProgressSampleFactory(job=job, step=999, at=now)
    for number in range(30):
        at = now - timedelta(minutes=number)
        InterruptionFactory(job=job, epoch=100 - number, started_at=at, committed_at=at)
        CheckpointFactory(job=job, step=900 - number, at=at)
    long_ago = now - timedelta(hours=2)
    InterruptionFactory(job=job, epoch=2, started_at=long_ago, committed_at=long_ago)
    CheckpointFactory(job=job, step=8, at=long_ago)
    address = reverse("job-series", args=[job.id])

    hidden_at = (now - timedelta(hours=1)).timestamp()
    curves = viewer.get(address, {"after": str(hidden_at)}).json()

    assert [mark["epoch"] for mark in curves["marks"]] == [*range(71, 101)]
    assert [one["step"] for one in curves["checkpoints"]] == [*range(871, 901)]


def test_curves_without_anything_new_are_204(viewer: Client, job: Job) -> None:
    ProgressSampleFactory(job=job, step=9)

    address = reverse("job-series", args=[job.id])
    (seen,) = viewer.get(address).json()["at"]

    answer = viewer.get(address, {"after": seen})

    assert answer.status_code == 204


@pytest.mark.parametrize("after", ["soon", "nan", "-1", "1e300"])
def test_curves_after_no_time_are_not_found(after: str, viewer: Client, job: Job) -> None:
    answer = viewer.get(reverse("job-series", args=[job.id]), {"after": after})

    assert answer.status_code == 404


def test_a_long_job_is_drawn_with_a_bounded_number_of_points(viewer: Client, job: Job) -> None:
    began = timezone.now() - timedelta(hours=1)
    job.progress.bulk_create(
        ProgressSampleFactory.build(job=job, step=step, began=began)
        for step in range(9, 25_000, 10)
    )

    curves = viewer.get(reverse("job-series", args=[job.id]), {"window": "all"}).json()

    assert 900 < len(curves["step"]) <= 1000
    assert curves["step"][-1] == 24_999
    assert curves["step"] == sorted(curves["step"])


def test_a_window_reaches_back_from_the_newest_point(viewer: Client, job: Job) -> None:
    now = timezone.now()
    ProgressSampleFactory(job=job, step=9, at=now - timedelta(minutes=6))
    ProgressSampleFactory(job=job, step=19, at=now - timedelta(minutes=1))
    ProgressSampleFactory(job=job, step=29, at=now)

    curves = viewer.get(reverse("job-series", args=[job.id]), {"window": "5m"}).json()

    assert curves["step"] == [19, 29]


# --- Incident -------------------------------------------------------------------------------------


def test_a_raw_line_is_shown_verbatim_and_never_as_markup(
    viewer: Client, incident: Incident
) -> None:
    raw = "NVRM: Xid 79 <script>alert('x')</script> & \"more\""
    TimelineEntryFactory(incident=incident, text="<b>line</b>", data={"raw": raw})

    page = viewer.get(reverse("incident", args=[incident.id])).content.decode()

    assert "<script>alert" not in page
    assert "<b>line" not in page
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;more&quot;" in page


def test_of_each_failure_the_first_five_signals_are_shown(
    viewer: Client, incident: Incident
) -> None:
    now = timezone.now()
    for name in ("a", "b"):
        failure = FailureFactory()
        incident.failures.add(failure)
        for age in range(8):  # the last to be told was observed first
            seen = now - timedelta(seconds=age)
            raw = f"{name}, {age} s ago"
            failure.signals.add(SignalFactory(node=failure.node, raw=raw, observed_at=seen))

    page = viewer.get(reverse("incident", args=[incident.id])).content.decode()

    shown = re.findall(r'data-testid="failure-raw"[^>]*>([^<]+)<', page)
    assert shown == [f"{name}, {age} s ago" for name in ("a", "b") for age in (7, 6, 5, 4, 3)]
    assert "2 failures" in page


def test_what_an_incident_has_no_room_for_is_said(
    viewer: Client, incident: Incident, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.incidents.selectors.FAILURES_SHOWN", 2)
    monkeypatch.setattr("controlplane.incidents.selectors.LINES_SHOWN", 3)
    TimelineEntryFactory.create_batch(3, incident=incident)
    incident.failures.set(FailureFactory.create_batch(2))
    whole = viewer.get(reverse("incident", args=[incident.id])).content.decode()
    TimelineEntryFactory(incident=incident)
    incident.failures.add(FailureFactory())

    cut = viewer.get(reverse("incident", args=[incident.id])).content.decode()

    assert '<p class="panel-note">2 failures</p>' in whole
    assert '<p class="panel-note">since the fault' in whole
    assert '<p class="panel-note">the first 2 of 3 failures</p>' in cut
    assert '<p class="panel-note">the newest 3 of 4 lines · since the fault' in cut


def test_prose_and_evidence_are_never_markup(viewer: Client, incident: Incident) -> None:
    hostile = "# <img src=x onerror=a>\n\n- `<script>`\n\n**<i>**"
    run = PlaybookRunFactory(incident=incident, state_reason=hostile)
    PlaybookStepFactory(run=run, prose=hostile, outcome=hostile, evidence={"<u>": ["<u>", hostile]})
    Incident.objects.filter(pk=incident.pk).update(postmortem=hostile, cause=hostile)

    page = viewer.get(reverse("incident", args=[incident.id])).content.decode()

    for tag in ("<img", "<script>", "<i>", "<u>"):
        assert tag not in page
    assert "<code>&lt;script&gt;</code>" in page


def test_a_viewer_sees_no_button(viewer: Client, incident: Incident) -> None:
    PlaybookRunFactory(incident=incident, state="needs_operator")

    page = viewer.get(reverse("incident", args=[incident.id])).content.decode()

    assert "What you need to do" in page
    assert 'data-testid="acknowledge"' not in page
    assert 'data-testid="retry"' not in page
    assert "Add note" not in page


def test_acknowledging_makes_the_incident_mine(operator: Client, incident: Incident) -> None:
    page = reverse("incident", args=[incident.id])

    answer = operator.post(reverse("incident-acknowledge", args=[incident.id]))

    incident.refresh_from_db()
    assert answer["Location"] == page
    assert incident.state == "acknowledged"
    assert incident.owner is not None
    assert f"{incident.owner.username} has it" in operator.get(page).content.decode()


def test_what_the_state_does_not_allow_is_said_with_409(
    operator: Client, incident: Incident
) -> None:
    operator.post(reverse("incident-acknowledge", args=[incident.id]))

    answer = operator.post(reverse("incident-acknowledge", args=[incident.id]))

    page = answer.content.decode()
    assert answer.status_code == 409
    assert "acknowledged this incident already" in page
    assert f'hx-get="/incidents/{incident.id}?after=' in page


def test_a_note_is_told_with_its_author(operator: Client, incident: Incident) -> None:
    operator.post(reverse("incident-note", args=[incident.id]), {"text": "Fan replaced."})

    page = operator.get(reverse("incident", args=[incident.id])).content.decode()

    assert "Fan replaced." in page
    author = operator.session["_auth_user_id"]
    assert incident.timeline.get(kind="note").data["by"] == author


def test_a_run_that_waits_is_tried_again_from_the_page(
    operator: Client, incident: Incident
) -> None:
    run = PlaybookRunFactory(incident=incident, state="needs_operator")
    PlaybookStepFactory(run=run, state="needs_operator")
    page = operator.get(reverse("incident", args=[incident.id])).content.decode()

    operator.post(reverse("run-retry", args=[run.id]), {"reason": "cable reseated"})

    run.refresh_from_db()
    assert 'data-ask="decide"' in page
    assert (run.state, run.state_reason) == ("running", "cable reseated")


def test_an_incident_without_a_playbook_asks_somebody_to_look(
    viewer: Client, incident: Incident
) -> None:
    page = viewer.get(reverse("incident", args=[incident.id])).content.decode()

    assert 'data-ask="look"' in page


def test_the_key_times_count_from_the_fault(viewer: Client, incident: Incident) -> None:
    Incident.objects.filter(pk=incident.pk).update(
        mitigated_at=incident.occurred_at + timedelta(milliseconds=310),
        restored_at=incident.occurred_at + timedelta(seconds=38.2),
    )

    page = viewer.get(reverse("incident", args=[incident.id])).content.decode()

    assert "+0.31 s" in page
    assert "+38.2 s" in page
    assert re.search(r'data-testid="moment-resolved".*?not yet', page, re.DOTALL)


def test_what_came_before_the_fault_by_a_clock_that_is_ahead_is_told_so(
    viewer: Client, incident: Incident
) -> None:
    Incident.objects.filter(pk=incident.pk).update(
        opened_at=incident.occurred_at - timedelta(milliseconds=84)
    )

    page = viewer.get(reverse("incident", args=[incident.id])).content.decode()

    assert '<span class="moment-after">\N{MINUS SIGN}84 ms</span>' in page


def test_the_longest_gap_is_the_jobs_own(viewer: Client, incident: Incident, job: Job) -> None:
    InterruptionFactory(job=job, started_at=incident.occurred_at, gap_s=0.42, lost=[2])
    before = incident.occurred_at - timedelta(minutes=5)
    InterruptionFactory(job=job, started_at=before, gap_s=9.0, lost=[1])

    page = viewer.get(reverse("incident", args=[incident.id])).content.decode()

    assert '<dd data-testid="longest-gap">0.42 s</dd>' in page


def test_the_post_mortem_is_edited_and_exported_as_written(
    operator: Client, incident: Incident
) -> None:
    page = operator.get(reverse("incident", args=[incident.id])).content.decode()
    _save_postmortem(operator, incident, page, "# What\n\n- it was")

    export = operator.get(reverse("incident-export", args=[incident.id]))

    assert export.content.decode() == "# What\n\n- it was"
    assert export["Content-Type"].startswith("text/markdown")
    assert export["Content-Disposition"] == f'attachment; filename="{incident.id}.md"'


def test_a_post_mortem_that_nobody_read_is_not_overwritten(
    operator: Client, incident: Incident
) -> None:
    before_it_was_drafted = operator.get(reverse("incident", args=[incident.id])).content.decode()
    Incident.objects.filter(pk=incident.pk).update(postmortem="Drafted meanwhile.")

    refused = _save_postmortem(operator, incident, before_it_was_drafted, "One sentence.")
    incident.refresh_from_db()
    kept = incident.postmortem
    page = refused.content.decode()
    _save_postmortem(operator, incident, page, "Drafted meanwhile. One sentence.")

    incident.refresh_from_db()
    assert (refused.status_code, kept) == (409, "Drafted meanwhile.")
    assert re.search(r"<textarea id=\"postmortem-text\"[^>]*>\s*One sentence.</textarea>", page)
    assert incident.postmortem == "Drafted meanwhile. One sentence."


def _save_postmortem(operator: Client, incident: Incident, page: str, text: str) -> Page:
    """Save it in the form that stands on `page`."""
    editor = page[page.index('class="panel editor"') :]
    form = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', editor))
    return operator.post(reverse("incident-postmortem", args=[incident.id]), form | {"text": text})


def test_older_incidents_are_paged_by_a_cursor(viewer: Client, cluster: Cluster) -> None:
    made = sorted((IncidentFactory(cluster=cluster) for _ in range(60)), key=lambda one: one.id)

    first = viewer.get(reverse("incidents")).content.decode()
    cursor = re.search(r'href="[^"?]*\?cursor=([^"]+)" rel="next"', first)
    assert cursor
    second = viewer.get(reverse("incidents"), {"cursor": cursor[1]}).content.decode()

    assert made[10].id in first
    assert made[9].id not in first
    assert made[9].id in second
    assert made[10].id not in second


# --- For load balancers ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["healthz", "readyz"])
def test_health_is_answered_without_signing_in(name: str) -> None:
    assert Client().get(reverse(name)).status_code == 200
