"""The page of a node: how it stands, its record, and orders that show their dry run first."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.choices import ActorKind
from controlplane.accounts.models import SYSTEM, Actor, AuditEvent
from controlplane.errors import Conflict
from controlplane.fleet import actions as fleet_actions
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Lease, MaintenanceWindow, Node
from controlplane.health.models import NodeSample
from controlplane.incidents import limits
from controlplane.incidents.models import PlaybookRun
from controlplane.incidents.plans import NODE_ORDERS
from tests.controlplane.dashboard.world import Fleet
from tests.factories import (
    CommandFactory,
    MaintenanceWindowFactory,
    PlaybookFactory,
    RepairRecordFactory,
    SpareReservationFactory,
    UserFactory,
)


def _page(client: Client, fleet: Fleet, **query: str) -> str:
    answer = client.get(reverse("node", args=[fleet.node.id]), query)
    assert answer.status_code == 200
    return answer.content.decode()


def test_it_says_how_the_node_stands_and_who_said_so(viewer: Client, fleet: Fleet) -> None:
    fleet_actions.transition(SYSTEM, fleet.node.id, NodeState.QUARANTINED, reason="xid-79 on GPU 3")
    Node.objects.filter(pk=fleet.node.pk).update(
        hold_reason="Ada looks at it", drained_by="slurm", reset_pending="xid-94"
    )
    Lease.objects.filter(node=fleet.node).update(reachable=False)
    SpareReservationFactory(cluster=fleet.cluster, node=fleet.node, holder="scheduler-7")

    page = _page(viewer, fleet)

    for words in ("xid-79 on GPU 3", "Ada looks at it", "slurm", "xid-94", "scheduler-7"):
        assert words in page
    assert 'data-testid="unreachable"' in page
    assert ", by Drydock" in page


def test_who_drained_it_is_named_wherever_that_is_said(viewer: Client, fleet: Fleet) -> None:
    person = UserFactory(username="grace")
    fleet_actions.set_drained_by(
        Actor(ActorKind.USER, str(person.pk)), fleet.node.pk, f"user/{person.pk}", "new cables"
    )

    page = _page(viewer, fleet)
    table = viewer.get(reverse("cluster", args=[fleet.cluster.pk])).content.decode()

    assert "<dd>grace</dd>" in page
    assert "Drained by grace: new cables" in page
    assert 'title="Drained by grace"' in table
    with pytest.raises(Conflict, match="was drained by grace; only they give it back"):
        fleet_actions.set_drained_by(SYSTEM, fleet.node.pk, "", "it is back")
    fleet.node.refresh_from_db()
    refused = f"{fleet.node.name} was drained by grace: theirs to give back"
    assert refused in limits.objections(fleet.node)


def test_a_faulty_card_is_named_with_its_record(viewer: Client, fleet: Fleet) -> None:
    RepairRecordFactory(gpu=fleet.card, at=timezone.now() - timedelta(days=2))
    RepairRecordFactory(gpu=fleet.card)

    page = _page(viewer, fleet)

    row = page[page.index('data-card="3" class="row--bad"') :].split("</tr>")[0]
    assert "xid-79" in row
    assert fleet.card.serial in row
    assert fleet.card.uuid in row
    assert re.search(r">1</a> / <a[^>]*>2</a>", row)  # repairs in 24 hours, and in all


def test_the_timeline_tells_from_every_source_newest_first(viewer: Client, fleet: Fleet) -> None:
    CommandFactory(node=fleet.node, verb="stop_rank")
    RepairRecordFactory(gpu=fleet.card, rung="reboot")
    fleet_actions.set_hold(SYSTEM, fleet.node.id, "cabling")

    page = _page(viewer, fleet)

    told = page[page.index('data-testid="story"') :]
    hold, repair = told.index("Hold: cabling"), told.index("Reboot, in the record of 1 card")
    command, signal = told.index("Command stop_rank"), told.index("Kernel line on GPU 3")
    assert hold < repair < command < signal
    assert "Repair alpha-01: running" in told
    assert "&lt;script&gt;" in told


def test_an_older_part_of_the_story_has_its_own_address(viewer: Client, fleet: Fleet) -> None:
    for number in range(60):
        fleet_actions.set_hold(SYSTEM, fleet.node.id, f"note {number:02d}")
    newest = _page(viewer, fleet)
    oldest_shown = AuditEvent.objects.get(after__hold_reason="note 20").at

    older = _page(viewer, fleet, before=oldest_shown.isoformat())

    assert "note 59" in newest
    assert "note 19" not in newest
    assert "note 19" in older
    assert "note 20" not in older


def test_a_time_that_is_none_is_not_found(viewer: Client, fleet: Fleet) -> None:
    address = reverse("node", args=[fleet.node.id])

    assert viewer.get(address, {"before": "yesterday"}).status_code == 404


# --- Readings -------------------------------------------------------------------------------------


def test_readings_come_by_card_and_a_missing_one_is_no_zero(
    viewer: Client, fleet: Fleet, samples: list[NodeSample]
) -> None:
    told: dict[str, Any] = viewer.get(reverse("node-samples", args=[fleet.node.id])).json()

    assert len(told["cards"]) == 8
    assert told["cards"][3]["temperature_c"][-1] is None
    assert told["cards"][2]["temperature_c"][-1] == 59.0
    assert told["cards"][2]["power_w"][-1] is None


def test_a_long_time_is_told_in_a_bounded_number_of_points(viewer: Client, fleet: Fleet) -> None:
    now = timezone.now()
    NodeSample.objects.bulk_create(
        NodeSample(
            node=fleet.node,
            at=now - timedelta(minutes=number),
            gpus=[
                {"uuid": fleet.card.uuid, "temperature_c": 50.0, "sm_clock_mhz": 1980.0 - number}
            ],
        )
        for number in range(1, 1400)
    )

    answer = viewer.get(reverse("node-samples", args=[fleet.node.id]), {"window": "1d"})

    told = answer.json()
    assert 100 < len(told["at"]) <= 161
    # Of clocks the lowest counts: a card that throttles must not hide behind an average.
    assert told["cards"][3]["sm_clock_mhz"][0] < told["cards"][3]["sm_clock_mhz"][-1]
    assert len(answer.content) < 300_000


#: What stands in a table where there is no number to tell.
UNKNOWN = "\N{EN DASH}"


def _sample(fleet: Fleet, ago: timedelta, **readings: float) -> None:
    reading = {"uuid": fleet.card.uuid, **readings}
    NodeSample.objects.create(node=fleet.node, at=timezone.now() - ago, gpus=[reading])


def _card(client: Client, fleet: Fleet) -> dict[str, str]:
    """What the table of cards says that the faulty one reads."""
    page = _page(client, fleet)
    row = page[page.index(f'data-card="{fleet.card.index}"') :].split("</tr>")[0]
    cells = re.findall(r'data-reading="(\w+)">(.*?)</(?:td|span)>', row)
    return {metric: re.sub("<[^>]+>", "", text) for metric, text in cells}


def test_a_reading_is_the_present_one_only_while_it_is_new(
    viewer: Client, fleet: Fleet, settings: Any
) -> None:
    settings.SAMPLE_INTERVAL_S = 60
    address = reverse("node-samples", args=[fleet.node.id])
    index = fleet.card.index

    _sample(fleet, timedelta(seconds=200), temperature_c=91.0)
    old = _card(viewer, fleet), viewer.get(address).json()["cards"][index]
    _sample(fleet, timedelta(seconds=100), temperature_c=52.0, ecc_corrected=7)
    new = _card(viewer, fleet), viewer.get(address).json()["cards"][index]

    assert old[0]["temperature_c"] == UNKNOWN
    assert (old[1]["present"]["temperature_c"], old[1]["temperature_c"]) == (None, [91.0])
    assert new[0] == {
        "temperature_c": "52",
        "power_w": UNKNOWN,
        "ecc_corrected": "7",
        "ecc_uncorrected": UNKNOWN,
    }
    assert new[1]["present"]["temperature_c"] == 52.0


def test_since_when_a_node_was_not_heard_is_told_only_of_one_that_is_silent(
    viewer: Client, fleet: Fleet
) -> None:
    """Beats are no change that a page would learn of: what it said of the last one would grow old
    before its reader's eyes."""
    heard = _page(viewer, fleet)
    Lease.objects.filter(node=fleet.node).update(reachable=False)
    silent = _page(viewer, fleet)

    assert "<dt>Heard</dt><dd>yes</dd>" in heard
    assert re.search(r"<dt>Not heard for</dt><dd><time", silent)


# --- Orders ---------------------------------------------------------------------------------------

#: States in which an order makes sense, where a node at work is none.
STATES = {"return": "quarantined", "retire": "quarantined"}


@pytest.mark.parametrize("verb", list(NODE_ORDERS))
def test_an_order_shows_its_dry_run_and_does_nothing(
    verb: str, operator: Client, fleet: Fleet
) -> None:
    PlaybookFactory(
        name=NODE_ORDERS[verb],
        steps=[
            {
                "key": "do",
                "title": "Do it",
                "disruptive": True,
                "does": ["switch {node} off and on"],
            }
        ],
    )

    page = _page(operator, fleet, order=verb)

    assert f'data-verb="{verb}"' in page
    assert "switch alpha-01 off and on" in page
    assert "pretrain" in page[page.index('data-testid="plan"') :]
    assert not PlaybookRun.objects.filter(playbook=NODE_ORDERS[verb]).exists()


@pytest.mark.parametrize("verb", list(NODE_ORDERS))
def test_an_order_is_given_with_its_reason(verb: str, operator: Client, fleet: Fleet) -> None:
    Node.objects.filter(pk=fleet.node.pk).update(state=STATES.get(verb, "allocated"))

    answer = operator.post(
        reverse("node-order", args=[fleet.node.id]), {"verb": verb, "reason": "fan rattles"}
    )

    run = PlaybookRun.objects.get(playbook=NODE_ORDERS[verb])
    assert answer["Location"] == reverse("node", args=[fleet.node.id])
    assert run.requested_by == operator.session["_auth_user_id"]
    assert run.context["reason"] == "fan rattles"


@pytest.mark.parametrize("form", [{"verb": "reboot"}, {"verb": "explode", "reason": "why not"}])
def test_an_order_without_reason_or_sense_is_refused_on_the_page(
    form: dict[str, str], operator: Client, fleet: Fleet
) -> None:
    answer = operator.post(reverse("node-order", args=[fleet.node.id]), form)

    assert answer.status_code == 409
    assert 'role="alert"' in answer.content.decode()
    assert PlaybookRun.objects.count() == 1


def test_an_order_that_the_state_forbids_is_shown_but_not_given(
    operator: Client, fleet: Fleet
) -> None:
    page = _page(operator, fleet, order="return")
    answer = operator.post(
        reverse("node-order", args=[fleet.node.id]), {"verb": "return", "reason": "why not"}
    )

    assert "Its present state does not allow it" in page
    assert 'data-testid="do-order"' not in page
    assert answer.status_code == 409


def test_a_viewer_is_offered_no_action(viewer: Client, fleet: Fleet) -> None:
    page = _page(viewer, fleet, order="reboot")

    assert "Actions" not in page
    assert "<textarea" not in page


def test_a_hold_is_put_on_and_lifted(operator: Client, fleet: Fleet) -> None:
    operator.post(reverse("node-hold", args=[fleet.node.id]), {"reason": "Ada looks at it"})
    held = _page(operator, fleet)
    operator.post(reverse("node-release", args=[fleet.node.id]))
    still_held = _page(operator, fleet)
    operator.post(reverse("node-release", args=[fleet.node.id]), {"reason": "she is done"})
    released = _page(operator, fleet)

    assert 'data-testid="ask-release"' in held
    assert 'data-testid="ask-hold"' not in held
    assert 'data-testid="ask-hold"' not in still_held
    assert 'data-testid="ask-hold"' in released
    assert "Hold: Ada looks at it" in released
    assert "Released: she is done" in released


def test_maintenance_is_announced_from_now_on(operator: Client, fleet: Fleet) -> None:
    form = {"reason": "new fans", "hours": "1.5"}

    operator.post(reverse("node-maintenance", args=[fleet.node.id]), form)

    window = MaintenanceWindow.objects.get(node=fleet.node)
    assert window.ends_at - window.starts_at == timedelta(hours=1.5)
    assert "new fans" in _page(operator, fleet)


def test_a_maintenance_is_told_with_the_day_of_its_end_and_the_name_of_its_owner(
    operator: Client, fleet: Fleet
) -> None:
    ends_at = datetime(2032, 2, 29, 14, tzinfo=UTC)
    owner = UserFactory(username="ada")
    MaintenanceWindowFactory(cluster=fleet.cluster, ends_at=ends_at, owner=str(owner.pk))

    page = _page(operator, fleet, order="reboot")

    assert "Maintenance until 29 Feb, 14:00 UTC" in page
    assert "maintenance until 2032-02-29 14:00 UTC by ada: cabling" in page


def test_a_spare_is_told_as_reserved_with_the_day_of_its_end(viewer: Client, fleet: Fleet) -> None:
    ends_at = datetime(2032, 2, 29, 14, tzinfo=UTC)
    SpareReservationFactory(cluster=fleet.cluster, node=fleet.node, expires_at=ends_at)

    assert "until 29 Feb, 14:00 UTC" in _page(viewer, fleet)


@pytest.mark.parametrize("hours", ["", "soon", "0", "-1", "9999", "nan", "inf"])
def test_a_maintenance_of_no_sensible_length_is_refused(
    hours: str, operator: Client, fleet: Fleet
) -> None:
    form = {"reason": "new fans", "hours": hours}

    answer = operator.post(reverse("node-maintenance", args=[fleet.node.id]), form)

    assert answer.status_code == 409
    assert not MaintenanceWindow.objects.exists()


@pytest.mark.parametrize(
    ("route", "form", "kept"),
    [
        (
            "node-maintenance",
            {"hours": "1,5", "reason": "new fans"},
            ['value="1,5"', 'value="new fans"', "order=maintenance"],
        ),
        ("node-order", {"verb": "drain", "reason": ""}, ['data-verb="drain"', "order=drain"]),
    ],
)
def test_an_order_that_was_refused_stands_there_as_it_was_typed(
    route: str, form: dict[str, str], kept: list[str], operator: Client, fleet: Fleet
) -> None:
    answer = operator.post(reverse(route, args=[fleet.node.id]), form)

    page = answer.content.decode()
    assert answer.status_code == 409
    assert [word for word in kept if word not in page] == []


# --- Spares ---------------------------------------------------------------------------------------


def _free(fleet: Fleet) -> None:
    Node.objects.filter(pk=fleet.node.pk).update(state="available")


def test_a_free_node_is_made_a_spare_and_is_one_no_longer(operator: Client, fleet: Fleet) -> None:
    _free(fleet)
    asked = _page(operator, fleet, order="spare")
    operator.post(reverse("node-spare", args=[fleet.node.id]), {"reason": "the pool is empty"})
    spare = _page(operator, fleet)
    again = _page(operator, fleet, order="spare")
    operator.post(reverse("node-unspare", args=[fleet.node.id]), {"reason": "we need it"})
    common = _page(operator, fleet)

    assert "Make alpha-01 a spare" in asked
    assert 'data-testid="ask-unspare"' not in asked
    assert 'data-testid="ask-unspare"' in spare
    assert 'data-testid="ask-spare"' not in spare
    assert 'data-testid="do-order"' not in again
    assert 'data-testid="ask-spare"' in common
    changes = AuditEvent.objects.filter(verb="node.set_spare").order_by("pk")
    assert [event.reason for event in changes] == ["the pool is empty", "we need it"]
    assert [event.after for event in changes] == [{"spare": True}, {"spare": False}]


def test_a_node_at_work_is_not_made_a_spare(operator: Client, fleet: Fleet) -> None:
    page = _page(operator, fleet, order="spare")
    answer = operator.post(reverse("node-spare", args=[fleet.node.id]), {"reason": "why not"})

    assert 'data-testid="do-order"' not in page
    assert answer.status_code == 409
    assert "alpha-01 is allocated" in answer.content.decode()
    fleet.node.refresh_from_db()
    assert not fleet.node.spare


def test_a_spare_that_is_kept_for_somebody_stays_one(operator: Client, fleet: Fleet) -> None:
    SpareReservationFactory(cluster=fleet.cluster, node=fleet.other, holder="slurm")

    answer = operator.post(reverse("node-unspare", args=[fleet.other.id]), {"reason": "why not"})

    assert answer.status_code == 409
    assert "alpha-02 is reserved for slurm" in answer.content.decode()
    fleet.other.refresh_from_db()
    assert fleet.other.spare


@pytest.mark.parametrize("route", ["node-spare", "node-unspare", "node-revoke-key"])
def test_what_changes_nothing_at_work_takes_its_reason_too(
    route: str, admin: Client, fleet: Fleet
) -> None:
    before = AuditEvent.objects.count()

    assert admin.post(reverse(route, args=[fleet.other.id])).status_code == 409
    assert AuditEvent.objects.count() == before


# --- A node's key ---------------------------------------------------------------------------------


def test_an_admin_revokes_a_nodes_key_and_the_page_says_so(admin: Client, fleet: Fleet) -> None:
    asked = _page(admin, fleet, order="revoke-key")
    answer = admin.post(reverse("node-revoke-key", args=[fleet.node.id]), {"reason": "stolen"})
    page = _page(admin, fleet)

    fleet.node.refresh_from_db()
    assert "Revoke the key of alpha-01" in asked
    assert answer["Location"] == reverse("node", args=[fleet.node.id])
    assert fleet.node.key_revoked_at is not None
    assert 'data-testid="key-revoked"' in page
    assert "under another name" in page
    assert "Key revoked: stolen" in page
    assert 'data-testid="ask-revoke-key"' not in page


def test_a_key_is_revoked_once(admin: Client, fleet: Fleet) -> None:
    admin.post(reverse("node-revoke-key", args=[fleet.node.id]), {"reason": "stolen"})

    again = admin.post(reverse("node-revoke-key", args=[fleet.node.id]), {"reason": "stolen"})

    assert again.status_code == 409
    assert "do-order" not in _page(admin, fleet, order="revoke-key")
    assert AuditEvent.objects.filter(verb="node.revoke_key").count() == 1


def test_an_operator_is_not_offered_a_nodes_key(operator: Client, fleet: Fleet) -> None:
    page = _page(operator, fleet, order="revoke-key")
    answer = operator.post(reverse("node-revoke-key", args=[fleet.node.id]), {"reason": "stolen"})

    assert 'data-testid="ask-revoke-key"' not in page
    assert 'data-testid="do-order"' not in page
    assert answer.status_code == 403


def test_a_node_that_is_heard_no_more_is_not_made_a_spare(operator: Client, fleet: Fleet) -> None:
    _free(fleet)
    fleet_actions.revoke_node_key(SYSTEM, fleet.node.id, "stolen")

    answer = operator.post(reverse("node-spare", args=[fleet.node.id]), {"reason": "why not"})

    assert answer.status_code == 409
    assert "its key was revoked" in answer.content.decode()


def test_real_hardware_is_not_broken_from_a_page(
    operator: Client, fleet: Fleet, settings: Any
) -> None:
    settings.SIMULATED_FLEET = False

    assert "Break something" not in _page(operator, fleet)
