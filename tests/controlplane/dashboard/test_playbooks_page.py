"""The automation page: modes, budgets, breakers and maintenance, and who may change them."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.choices import Role
from controlplane.fleet.changes import change, touch
from controlplane.fleet.models import Cluster, MaintenanceWindow
from controlplane.incidents.choices import Effect, Mode, Scope
from controlplane.incidents.limits import limits_of, mode_of
from controlplane.incidents.models import Breaker
from tests.controlplane.dashboard.world import Fleet
from tests.factories import (
    BreakerFactory,
    ClusterFactory,
    GrantFactory,
    MaintenanceWindowFactory,
    NodeFactory,
    PlaybookFactory,
    ReservationFactory,
)


def _page(client: Client, **query: str) -> str:
    return client.get(reverse("automation-page"), query).content.decode()


@pytest.fixture
def playbook(fleet: Fleet) -> str:
    step = {
        "title": "Reboot it",
        "disruptive": True,
        "does": ["power cycle"],
        "prose": "By `hand`.",
    }
    return str(PlaybookFactory(name="repair-node", steps=[step]).pk)


def test_a_playbook_is_told_with_its_steps_and_mode(
    viewer: Client, fleet: Fleet, playbook: str
) -> None:
    page = _page(viewer)

    assert 'data-playbook="repair-node" data-mode="automatic"' in page
    assert "power cycle" in page
    assert "<code>hand</code>" in page
    assert "Change the mode" not in page


def test_an_admin_sets_the_mode_with_a_reason(admin: Client, fleet: Fleet, playbook: str) -> None:
    form = {"playbook": playbook, "mode": "approve", "reason": "new firmware"}

    answer = admin.post(reverse("playbook-mode", args=[fleet.cluster.id]), form)

    assert answer["Location"] == f"{reverse('automation-page')}?cluster={fleet.cluster.id}"
    assert mode_of(fleet.cluster.id, playbook) == Mode.APPROVE


def test_only_the_modes_that_mean_something_are_offered(admin: Client, fleet: Fleet) -> None:
    step = {"title": "Start it", "disruptive": False, "effect": Effect.FENCED.label}
    PlaybookFactory(name="replica-lost", steps=[step])
    PlaybookFactory(name="move-replica", steps=[step])
    form = {"playbook": "replica-lost", "mode": "approve", "reason": "to be safe"}

    page = _page(admin)
    answer = admin.post(reverse("playbook-mode", args=[fleet.cluster.id]), form)

    lost = page[page.index('data-playbook="replica-lost"') :].split("</li>\n")[0]
    assert re.findall(r'<option value="(\w+)"', lost) == ["automatic", "off"]
    assert "no disruptive step to show or sign" in lost
    assert "mode-move-replica" not in page
    assert answer.status_code == 409


def test_an_operator_does_not_set_the_mode(operator: Client, fleet: Fleet, playbook: str) -> None:
    form = {"playbook": playbook, "mode": "off", "reason": "no"}

    answer = operator.post(reverse("playbook-mode", args=[fleet.cluster.id]), form)

    assert answer.status_code == 403
    assert mode_of(fleet.cluster.id, playbook) == Mode.AUTOMATIC


@pytest.mark.parametrize(
    "form",
    [
        {"playbook": "repair-node", "mode": "sometimes", "reason": "x"},
        {"playbook": "repair-node", "mode": "off"},
        {"playbook": "nonsense", "mode": "off", "reason": "x"},
    ],
)
def test_a_mode_without_sense_is_refused(
    form: dict[str, str], admin: Client, fleet: Fleet, playbook: str
) -> None:
    answer = admin.post(reverse("playbook-mode", args=[fleet.cluster.id]), form)

    assert answer.status_code == 409
    assert mode_of(fleet.cluster.id, playbook) == Mode.AUTOMATIC


def test_budgets_are_shown_with_what_holds_them(viewer: Client, fleet: Fleet) -> None:
    ReservationFactory(run=fleet.run, node=fleet.node, rack=fleet.rack, code="xid-79")

    page = _page(viewer)

    budget = page[page.index('data-scope="cluster"') :].split("</li>")[0]
    assert "<strong>1</strong></a> of 2" in budget
    assert f'href="/runs/{fleet.run.id}"' in page[page.index("Out now") :]


def test_a_node_that_uses_up_a_budget_without_a_run_is_named_with_its_state(
    viewer: Client, fleet: Fleet
) -> None:
    failed = NodeFactory(cluster=fleet.cluster, name="alpha-03", state="repair_failed")
    ReservationFactory(run=fleet.run, node=failed, code="xid-48", released_at=timezone.now())

    page = _page(viewer)

    budget = page[page.index('data-scope="cluster"') :].split("</li>")[0]
    assert '<a class="plain" href="#out-h"><strong>1</strong></a> of 2' in budget
    (row,) = re.findall(r'<li data-testid="out">.*?</li>', page, re.DOTALL)
    assert f'href="/nodes/{failed.pk}">alpha-03</a>' in row
    assert "Repair failed" in row
    assert "no run has it in hand" in row
    assert "xid-48" in row


def test_what_uses_up_the_budgets_is_asked_for_once(viewer: Client, fleet: Fleet) -> None:
    with CaptureQueriesContext(connection) as queries:
        _page(viewer)
    asked = [q for q in queries.captured_queries if "DISTINCT ON" in q["sql"]]
    assert len(asked) == 1


def test_what_a_list_has_no_room_for_is_said(
    viewer: Client, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.dashboard.selectors.playbooks.SHOWN", 2)
    NodeFactory.create_batch(3, cluster=fleet.cluster, state="quarantined")
    MaintenanceWindowFactory.create_batch(4, cluster=fleet.cluster)

    page = _page(viewer)

    assert "Shown are 2 of 3, by name." in page
    assert "Shown are 2 of 4, the next to end." in page
    assert (page.count('data-testid="out"'), page.count('data-testid="window"')) == (2, 2)


def test_an_admin_sets_a_limit(admin: Client, fleet: Fleet) -> None:
    form = {"scope": "rack", "nodes": "5", "reason": "larger racks"}

    admin.post(reverse("budget-limit", args=[fleet.cluster.id]), form)

    assert limits_of(fleet.cluster.id)[Scope.RACK] == 5


@pytest.mark.parametrize("nodes", ["-1", "many", "", "1e9"])
def test_a_limit_without_sense_is_refused(nodes: str, admin: Client, fleet: Fleet) -> None:
    form = {"scope": "rack", "nodes": nodes, "reason": "x"}

    assert admin.post(reverse("budget-limit", args=[fleet.cluster.id]), form).status_code == 409


def test_an_open_breaker_is_closed_with_a_reason(operator: Client, fleet: Fleet) -> None:
    breaker = BreakerFactory(cluster=fleet.cluster, code="xid-79")
    before = _page(operator)

    operator.post(
        reverse("breaker-close", args=[breaker.id]), {"reason": "bad driver, rolled back"}
    )

    assert 'data-testid="breaker"' in before
    assert Breaker.objects.get(pk=breaker.pk).closed_at is not None
    assert "Closed lately" in _page(operator)


def test_maintenance_is_announced_and_ended(operator: Client, fleet: Fleet) -> None:
    form = {"rack": fleet.rack.id, "delay": "0", "hours": "2", "reason": "switch firmware"}

    operator.post(reverse("maintenance-open", args=[fleet.cluster.id]), form)
    window = MaintenanceWindow.objects.get()
    announced = _page(operator)
    operator.post(reverse("maintenance-close", args=[window.id]), {"reason": "done early"})

    assert window.rack == fleet.rack
    assert "switch firmware" in announced
    assert "switch firmware" not in _page(operator)


@pytest.mark.parametrize("form", [{"hours": "x"}, {"hours": "2", "delay": "soon"}, {"hours": "2"}])
def test_maintenance_without_sense_is_refused(
    form: dict[str, Any], operator: Client, fleet: Fleet
) -> None:
    address = reverse("maintenance-open", args=[fleet.cluster.id])

    assert operator.post(address, form).status_code == 409
    assert not MaintenanceWindow.objects.exists()


def _form(page: str, key: str) -> str:
    """The opening tag of the part that is shown by `key`, and its form."""
    return re.split(rf'(?=<details[^>]* data-key="{key}")', page)[1].split("</form>")[0]


def test_a_mode_that_was_refused_stands_there_as_it_was_typed(
    admin: Client, fleet: Fleet, playbook: str
) -> None:
    form = {"playbook": playbook, "mode": "off", "reason": " "}

    refused = admin.post(reverse("playbook-mode", args=[fleet.cluster.id]), form).content.decode()

    again = _form(refused, f"mode-{playbook}")
    assert '<option value="off" selected>' in again
    assert again.count(" selected>") == 1
    assert re.match(r"<details[^>]* open>", again)


def test_a_limit_that_was_refused_stands_there_as_it_was_typed(admin: Client, fleet: Fleet) -> None:
    form = {"scope": "rack", "nodes": "many", "reason": "larger <racks>"}

    refused = admin.post(reverse("budget-limit", args=[fleet.cluster.id]), form).content.decode()

    again = _form(refused, "limit-rack")
    assert 'value="many"' in again
    assert 'value="larger &lt;racks&gt;"' in again
    assert "many" not in _form(refused, "limit-cluster")
    assert re.match(r"<details[^>]* open>", again)


def test_maintenance_that_was_refused_stands_there_as_it_was_typed(
    operator: Client, fleet: Fleet
) -> None:
    form = {"rack": fleet.rack.id, "delay": "12", "hours": "some", "reason": "switch firmware"}

    refused = operator.post(reverse("maintenance-open", args=[fleet.cluster.id]), form)

    again = _form(refused.content.decode(), "announce")
    assert f'<option value="{fleet.rack.id}" selected>' in again
    assert [value in again for value in ('value="12"', 'value="some"')] == [True, True]
    assert 'value="switch firmware"' in again
    assert re.match(r"<details[^>]* open>", again)


@pytest.mark.parametrize("page", ["automation-page", "overview"])
@pytest.mark.parametrize("moment", ["starts_at", "ends_at"])
def test_a_window_begins_and_ends_although_nobody_did_anything(
    moment: str, page: str, viewer: Client, fleet: Fleet
) -> None:
    starts_at = timezone.now() + {"starts_at": 1, "ends_at": -1}[moment] * timedelta(minutes=9)
    window = MaintenanceWindowFactory(
        cluster=fleet.cluster, starts_at=starts_at, ends_at=starts_at + timedelta(minutes=20)
    )
    htmx = {"HX-Request": "true"}
    shown = viewer.get(reverse(page), headers=htmx).content.decode()
    token = re.search(r'data-token="([^"]+)"', shown)
    assert token
    still = viewer.get(reverse(page), {"after": token[1]}, headers=htmx)

    MaintenanceWindow.objects.filter(pk=window.pk).update(**{moment: timezone.now()})

    told = viewer.get(reverse(page), {"after": token[1]}, headers=htmx)
    assert (still.status_code, told.status_code) == (204, 200)


def test_another_cluster_is_not_found(viewer: Client, stranger: Client, fleet: Fleet) -> None:
    address = reverse("automation-page")

    assert viewer.get(address, {"cluster": fleet.cluster.id}).status_code == 200
    assert stranger.get(address, {"cluster": fleet.cluster.id}).status_code == 404


@pytest.fixture
def beta(fleet: Fleet) -> Cluster:
    return ClusterFactory(name="beta")


@pytest.fixture
def admin_of_both(fleet: Fleet, beta: Cluster) -> Client:
    user = GrantFactory(role=Role.ADMIN, cluster=fleet.cluster).user
    GrantFactory(role=Role.ADMIN, cluster=beta, user=user)
    client = Client()
    client.force_login(user)
    return client


def _after_a_change(client: Client, page: str, changed: Cluster) -> str:
    """What the page's own poll brings it next."""
    poll = re.search(r'id="live-poll"[^>]* hx-get="([^"]+)"', page)
    assert poll
    with change():
        touch(changed.id)
    return client.get(unescape(poll[1]), headers={"HX-Request": "true"}).content.decode()


def test_below_a_refused_order_the_page_stays_with_its_cluster(
    admin_of_both: Client, fleet: Fleet, beta: Cluster
) -> None:
    form = {"hours": "x", "reason": "switch firmware"}

    refused = admin_of_both.post(reverse("maintenance-open", args=[beta.id]), form)
    fresh = _after_a_change(admin_of_both, refused.content.decode(), beta)

    # What was typed is carried into the fresh forms: they must be those that it was typed in.
    assert refused.status_code == 409
    assert f'action="{reverse("maintenance-open", args=[beta.id])}"' in fresh
    assert fleet.cluster.id not in re.sub(r"<a [^>]*>", "", fresh)


def test_a_page_stays_with_its_cluster_when_another_comes_before_it(
    admin_of_both: Client, fleet: Fleet
) -> None:
    page = _page(admin_of_both)

    earlier = ClusterFactory(name="aardvark")
    GrantFactory(cluster=earlier, user_id=admin_of_both.session["_auth_user_id"])
    fresh = _after_a_change(admin_of_both, page, earlier)

    assert f'action="{reverse("maintenance-open", args=[fleet.cluster.id])}"' in fresh
