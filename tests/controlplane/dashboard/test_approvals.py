"""Plans that wait for a signature, runs in a person's hands, incidents resolved by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.incidents.models import Approval, Incident, PlaybookRun, PlaybookStep
from tests.controlplane.dashboard.world import Fleet, hidden_of, reasons_in
from tests.factories import (
    ApprovalFactory,
    IncidentFactory,
    JobFactory,
    PlacementFactory,
    PlaybookRunFactory,
    PlaybookStepFactory,
)


@pytest.fixture
def plan(fleet: Fleet) -> dict[str, Any]:
    return {
        "title": "Repair alpha-01",
        "node": {"id": fleet.node.id, "name": "alpha-01", "gpus": 8},
        "steps": [{"title": "Reboot it", "disruptive": True, "does": ["power cycle <alpha-01>"]}],
        "jobs": [{"id": fleet.job.id, "name": "pretrain", "replica": 0}],
        "gpu_hours_at_stake": 1.25,
        "money": "2.50 USD",
        "objections": [],
        "budgets": [{"scope": "cluster", "label": "alpha", "limit": 2, "used": 1}],
        "notes": ["Survivors take over."],
    }


@pytest.fixture
def approval(fleet: Fleet, plan: dict[str, Any]) -> Approval:
    PlaybookRun.objects.filter(pk=fleet.run.pk).update(state="waiting")
    return ApprovalFactory(run=fleet.run, plan=plan, digest="d" * 64)


@pytest.mark.parametrize("name", ["overview", "incident"])
def test_the_exact_plan_stands_where_it_is_signed(
    name: str, operator: Client, fleet: Fleet, approval: Approval
) -> None:
    page = operator.get(
        reverse(name, args=[fleet.incident.id] if name == "incident" else [])
    ).content.decode()

    shown = page[page.index('data-testid="approval"') :]
    for words in ("power cycle &lt;alpha-01&gt;", "pretrain", "1.25 GPU-h", "2.50 USD", "1 of 2"):
        assert words in shown
    assert f'name="digest" value="{"d" * 64}"' in shown


def test_a_viewer_reads_the_plan_and_signs_nothing(
    viewer: Client, fleet: Fleet, approval: Approval
) -> None:
    page = viewer.get(reverse("incident", args=[fleet.incident.id])).content.decode()

    assert 'data-testid="plan"' in page
    assert 'data-testid="approve"' not in page


def test_what_waits_to_be_signed_is_counted_once(
    viewer: Client, fleet: Fleet, approval: Approval
) -> None:
    page = viewer.get(reverse("overview")).content.decode()

    assert 'data-waiting="1"' in page


def test_a_plan_is_signed_with_a_reason(operator: Client, fleet: Fleet, approval: Approval) -> None:
    answer = operator.post(
        reverse("approval-approve", args=[approval.id]),
        {"digest": approval.digest, "reason": "the card is dead"},
    )

    approval.refresh_from_db()
    assert answer["Location"] == reverse("incident", args=[fleet.incident.id])
    assert (approval.state, approval.reason) == ("approved", "the card is dead")


def test_a_plan_that_has_changed_meanwhile_is_not_signed(
    operator: Client, approval: Approval
) -> None:
    answer = operator.post(
        reverse("approval-approve", args=[approval.id]), {"digest": "e" * 64, "reason": "yes"}
    )

    approval.refresh_from_db()
    assert answer.status_code == 409
    assert approval.state == "waiting"


def test_the_reason_for_a_plan_outlives_its_change(
    operator: Client, fleet: Fleet, approval: Approval
) -> None:
    page = operator.get(reverse("incident", args=[fleet.incident.id])).content.decode()
    field = f"approval-{approval.id}"
    form = hidden_of(page, field) | {"reason": "the card is <dead>"}
    Approval.objects.filter(pk=approval.pk).update(digest="e" * 64)

    refused = operator.post(reverse("approval-approve", args=[approval.id]), form)

    assert refused.status_code == 409
    assert reasons_in(refused.content.decode()) == {field: "the card is &lt;dead&gt;"}


def test_a_plan_is_rejected(operator: Client, approval: Approval) -> None:
    operator.post(reverse("approval-reject", args=[approval.id]), {"reason": "not tonight"})

    approval.refresh_from_db()
    assert approval.state == "rejected"


def test_a_dry_run_shows_what_would_have_been_done(
    viewer: Client, fleet: Fleet, plan: dict[str, Any]
) -> None:
    PlaybookStepFactory(run=fleet.run, state="skipped", evidence={"plan": plan})

    page = viewer.get(reverse("incident", args=[fleet.incident.id])).content.decode()

    assert "What would have been done" in page
    assert "power cycle &lt;alpha-01&gt;" in page


def test_a_run_is_paused_and_goes_on(operator: Client, fleet: Fleet) -> None:
    operator.post(reverse("run-pause", args=[fleet.run.id]), {"reason": "wait for Ada"})
    paused = PlaybookRun.objects.get(pk=fleet.run.pk)
    page = operator.get(reverse("run", args=[fleet.run.id])).content.decode()
    operator.post(reverse("run-resume", args=[fleet.run.id]), {"reason": "Ada is here"})

    assert (paused.state, paused.state_reason) == ("paused", "wait for Ada")
    assert 'data-testid="resume"' in page
    assert PlaybookRun.objects.get(pk=fleet.run.pk).state == "running"


@pytest.mark.parametrize("incident", [True, False], ids=["on its incident's page", "on its own"])
def test_what_was_typed_for_a_run_that_somebody_else_paused_stands_there(
    incident: bool, operator: Client, fleet: Fleet
) -> None:
    runs = PlaybookRun.objects.filter(pk=fleet.run.pk)
    runs.update(incident=fleet.incident if incident else None)
    page = operator.get(reverse("run", args=[fleet.run.id])).content.decode()
    field = f"deed-{fleet.run.id}"
    form = hidden_of(page, field) | {"reason": "wait for Ada"}
    runs.update(state="paused")

    refused = operator.post(reverse("run-pause", args=[fleet.run.id]), form)

    page = refused.content.decode()
    assert refused.status_code == 409
    assert reasons_in(page) == {field: "wait for Ada"}
    assert re.search(r'<details class="run-deeds"[^>]* open>', page)


@pytest.mark.parametrize(
    ("path", "state", "route", "field"),
    [
        ("incident", "needs_operator", "run-retry", "run-reason-"),
        ("incident", "needs_operator", "run-cancel", "run-reason-"),
        ("incident", "paused", "run-resume", "resume-reason-"),
        ("run", "needs_operator", "run-retry", "run-reason"),
    ],
)
def test_a_reason_that_was_refused_stands_in_the_form_that_it_was_typed_in(
    path: str, state: str, route: str, field: str, operator: Client, fleet: Fleet
) -> None:
    at = {"incident": fleet.incident, "run": None}[path]
    PlaybookRun.objects.filter(pk=fleet.run.pk).update(state=state, incident=at)
    home = {"incident": fleet.incident.id, "run": fleet.run.id}[path]
    page = operator.get(reverse(path, args=[home])).content.decode()
    [asked] = re.findall(rf'<input id="({field}[^"]*)" name="reason"', page)

    refused = operator.post(
        reverse(route, args=[fleet.run.id]), hidden_of(page, asked) | {"reason": "  "}
    )

    assert refused.status_code == 409
    assert reasons_in(refused.content.decode()) == {asked: "  "}


def test_a_run_without_an_incident_has_a_page_of_its_own(operator: Client, fleet: Fleet) -> None:
    run = PlaybookRunFactory(
        incident=None, cluster=fleet.cluster, node=fleet.node, state="needs_operator"
    )
    PlaybookStepFactory(run=run, state="needs_operator", title="Look at the cable")

    page = operator.get(reverse("run", args=[run.id])).content.decode()
    answer = operator.post(reverse("run-retry", args=[run.id]), {"reason": "reseated"})

    assert "Look at the cable" in page
    assert answer["Location"] == reverse("run", args=[run.id])
    assert PlaybookRun.objects.get(pk=run.pk).state == "running"


def test_an_incident_is_resolved_by_hand_once_nothing_is_at_work(
    operator: Client, fleet: Fleet
) -> None:
    address = reverse("incident-resolve", args=[fleet.incident.id])
    too_early = operator.post(address, {"reason": "looks fine"})
    PlaybookStep.objects.filter(run=fleet.run).delete()
    PlaybookRun.objects.filter(pk=fleet.run.pk).update(state="cancelled")

    operator.post(address, {"reason": "cable reseated"})

    assert too_early.status_code == 409
    assert Incident.objects.get(pk=fleet.incident.pk).state == "resolved"


def test_an_incident_is_closed_once_it_is_resolved(operator: Client, fleet: Fleet) -> None:
    address = reverse("incident-close", args=[fleet.incident.id])
    too_early = operator.post(address)
    PlaybookRun.objects.filter(pk=fleet.run.pk).update(state="succeeded")
    Incident.objects.filter(pk=fleet.incident.pk).update(state="resolved")
    asked = operator.get(reverse("incident", args=[fleet.incident.id])).content.decode()

    closed = operator.post(address)
    twice = operator.post(address)

    page = operator.get(reverse("incident", args=[fleet.incident.id])).content.decode()
    assert (too_early.status_code, closed.status_code, twice.status_code) == (409, 302, 409)
    assert 'data-testid="close"' in asked
    assert 'data-testid="close"' not in page
    assert Incident.objects.get(pk=fleet.incident.pk).state == "closed"
    assert fleet.incident.timeline.get(key="closed").text == "Closed"


def test_what_was_lost_and_nobody_brings_back_is_brought_back_from_its_incident_s_page(
    operator: Client, fleet: Fleet
) -> None:
    lost = PlacementFactory(replica__job=JobFactory(cluster=fleet.cluster), state="ended")
    subject = f"job/{lost.replica.job_id}/{lost.replica.index}"
    incident = IncidentFactory(cluster=fleet.cluster, job=lost.replica.job, subject=subject)
    PlaybookRunFactory(
        incident=incident,
        job=lost.replica.job,
        state="cancelled",
        state_reason="not today",
        context={"replica": lost.replica.index, "lost_placement": lost.pk},
    )
    page = operator.get(reverse("incident", args=[incident.pk])).content.decode()
    form = hidden_of(page, "bring-back-reason") | {"reason": "the storage is back"}

    answer = operator.post(reverse("incident-bring-back", args=[incident.pk]), form)

    assert "The lost replica has not been restored: “" in page
    assert answer["Location"] == reverse("incident", args=[incident.pk])
    assert incident.runs.filter(state="pending", job=lost.replica.job).exists()


def test_where_a_reason_to_resolve_was_refused_its_form_is_open(
    operator: Client, fleet: Fleet
) -> None:
    PlaybookRun.objects.filter(pk=fleet.run.pk).update(state="cancelled")
    page = operator.get(reverse("incident", args=[fleet.incident.id])).content.decode()
    form = hidden_of(page, "resolve-reason") | {"reason": " "}

    refused = operator.post(reverse("incident-resolve", args=[fleet.incident.id]), form)

    assert refused.status_code == 409
    assert re.search(r'<details[^>]* data-key="resolve" open>', refused.content.decode())


def test_the_loss_is_priced_by_its_parts(viewer: Client, fleet: Fleet) -> None:
    Incident.objects.filter(pk=fleet.incident.pk).update(
        gpu_seconds_lost=7200.0,
        impact=[
            {"part": "the lost replica", "gpu_seconds": 5400.0},
            {"part": "the survivors", "gpu_seconds": 1800.0},
        ],
    )

    page = viewer.get(reverse("incident", args=[fleet.incident.id])).content.decode()

    assert "4.00\u202fUSD" in page
    assert '<td class="num">3.00</td>' in page
    assert '<td class="num">1.00</td>' in page


def test_what_triage_found_is_told_with_its_raw_line(viewer: Client, fleet: Fleet) -> None:
    page = viewer.get(reverse("incident", args=[fleet.incident.id])).content.decode()

    found = page[page.index('data-testid="failure"') :].split("</section>")[0]
    assert fleet.card.serial in found
    assert "rule xid-79" in found
    assert "fallen off the bus. &lt;script&gt;" in found
