"""What the command palette finds, for whom, and at which cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.accounts.choices import Role
from controlplane.dashboard.selectors.search import MAX_CHARS
from tests.controlplane.dashboard.world import Fleet, client_of
from tests.factories import (
    ClusterFactory,
    GpuFactory,
    IncidentFactory,
    JobFactory,
    NodeFactory,
    PlaybookRunFactory,
    RackFactory,
    RmaCaseFactory,
    UserFactory,
)

pytestmark = pytest.mark.django_db

#: One query for each kind of thing, and the session and the user.
MAX_QUERIES = 8 + 2
MAX_RESULTS = 23


def _found(client: Client, text: str) -> str:
    answer = client.get(reverse("search"), {"q": text})
    assert answer.status_code == 200
    return answer.content.decode()


def _options(body: str) -> int:
    return body.count('role="option"')


# --- What is found --------------------------------------------------------------------------------


def test_a_node_is_found_by_a_part_of_its_name(viewer: Client, fleet: Fleet) -> None:
    body = _found(viewer, "pha-01")

    assert reverse("node", args=[fleet.node.id]) in body
    assert reverse("node", args=[fleet.other.id]) not in body


def test_case_does_not_matter_and_neither_do_blanks_around(viewer: Client, fleet: Fleet) -> None:
    assert reverse("node", args=[fleet.node.id]) in _found(viewer, "  ALPHA-01 ")


def test_a_name_that_begins_so_comes_before_one_that_holds_it(viewer: Client, fleet: Fleet) -> None:
    NodeFactory(cluster=fleet.cluster, name="a-r7")
    NodeFactory(cluster=fleet.cluster, name="r7-z")

    body = _found(viewer, "r7")

    assert body.index("r7-z") < body.index("a-r7")


def test_a_node_is_found_by_its_address(viewer: Client, fleet: Fleet) -> None:
    node = NodeFactory(cluster=fleet.cluster, address="10.77.3.4")

    assert node.name in _found(viewer, "10.77.3")


@pytest.mark.parametrize("text", ["SN-77", "sn-7712", "GPU-beef", "gpu-BEEF-01", "beef-0"])
def test_a_card_leads_to_its_node(text: str, viewer: Client, fleet: Fleet) -> None:
    GpuFactory(node=fleet.other, index=0, serial="SN-7712", uuid="GPU-beef-01")

    assert f"{reverse('node', args=[fleet.other.id])}#cards-h" in _found(viewer, text)


def test_cards_are_not_looked_for_by_a_letter_or_two(viewer: Client, fleet: Fleet) -> None:
    assert "#cards-h" not in _found(viewer, "GPU")


def test_a_job_is_found_by_name_and_by_id(viewer: Client, fleet: Fleet) -> None:
    address = reverse("job", args=[fleet.job.id])

    assert address in _found(viewer, "trai")
    assert address in _found(viewer, fleet.job.id)


def test_an_incident_is_found_by_words_of_its_title_in_any_order(
    viewer: Client, fleet: Fleet
) -> None:
    incident = IncidentFactory(cluster=fleet.cluster, title="Card 3 of alpha-02 fell off the bus")

    assert reverse("incident", args=[incident.id]) in _found(viewer, "bus alpha-02")


def test_unresolved_incidents_come_first(viewer: Client, fleet: Fleet) -> None:
    unresolved = IncidentFactory(cluster=fleet.cluster, title="Switch gone", state="mitigating")
    resolved = IncidentFactory(cluster=fleet.cluster, title="Switch gone", state="resolved")

    body = _found(viewer, "switch")

    assert body.index(unresolved.id) < body.index(resolved.id)


def test_an_id_is_found_by_the_tail_that_pages_show(viewer: Client, fleet: Fleet) -> None:
    assert reverse("incident", args=[fleet.incident.id]) in _found(viewer, fleet.incident.id[-6:])
    assert reverse("run", args=[fleet.run.id]) in _found(viewer, fleet.run.id[-6:])
    assert reverse("run", args=[fleet.run.id]) in _found(viewer, fleet.run.id)


def test_places_and_cases_are_found(viewer: Client, fleet: Fleet) -> None:
    case = RmaCaseFactory(gpu=fleet.card, vendor_reference="NV-4711")

    body = _found(viewer, "alpha")

    assert f'"{reverse("cluster", args=[fleet.cluster.id])}"' in body
    assert f'"{reverse("cluster", args=[fleet.cluster.id])}?rack={fleet.rack.id}"' in body
    assert reverse("rma-case", args=[case.id]) in _found(viewer, "4711")
    assert reverse("rma-case", args=[case.id]) in _found(viewer, fleet.card.serial)


# --- For whom -------------------------------------------------------------------------------------


def test_a_stranger_finds_nothing_of_it_by_any_word(stranger: Client, fleet: Fleet) -> None:
    case = RmaCaseFactory(gpu=fleet.card)
    things = (fleet.cluster, fleet.rack, fleet.node, fleet.job, fleet.incident, fleet.run, case)
    words = [*(thing.pk for thing in things), "alpha", fleet.card.serial, fleet.card.uuid]
    words += [fleet.job.name, fleet.incident.title, fleet.run.title]

    assert [text for text in words if _options(_found(stranger, text))] == []


def test_a_card_that_moved_where_the_caller_sees_nothing_is_not_found(
    viewer: Client, fleet: Fleet
) -> None:
    hidden = NodeFactory(cluster=ClusterFactory(name="hidden"))
    type(fleet.card).objects.filter(pk=fleet.card.pk).update(node=hidden)

    assert _options(_found(viewer, fleet.card.serial)) == 0


def test_whoever_is_not_signed_in_is_asked_to(fleet: Fleet) -> None:
    answer = Client().get(reverse("search"), {"q": "alpha"})

    assert answer.status_code == 302
    assert "/login" in answer["Location"]


# --- Rubbish, and the cost ------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "   ", "%", "_", "\\", "'; --", "x" * (MAX_CHARS + 1), "🧨"])
def test_what_names_nothing_finds_nothing(text: str, viewer: Client) -> None:
    assert _options(_found(viewer, text)) == 0


def test_a_nul_is_refused(viewer: Client) -> None:
    assert viewer.get(f"{reverse('search')}?q=%00").status_code == 400


def test_a_name_is_told_as_text(viewer: Client, fleet: Fleet) -> None:
    IncidentFactory(cluster=fleet.cluster, title="<script>alert(1)</script>")

    assert "<script>" not in _found(viewer, "script")


def test_queries_and_results_do_not_grow_with_the_fleet(
    fleet: Fleet, django_assert_max_num_queries: Callable[..., Any]
) -> None:
    text = "alphabet"
    for number in range(8):
        name = f"{text}-{number}"
        cluster = ClusterFactory(name=name)
        node = NodeFactory(cluster=cluster, rack=RackFactory(cluster=cluster, name=name), name=name)
        card = GpuFactory(node=node, index=0, serial=name)
        incident = IncidentFactory(cluster=cluster, node=node, title=name)
        JobFactory(cluster=cluster, name=name)
        PlaybookRunFactory(id=f"run_{number}{text}", incident=incident)
        RmaCaseFactory(gpu=card)
    client = Client()
    client.force_login(UserFactory(is_superuser=True))

    with django_assert_max_num_queries(MAX_QUERIES):
        body = _found(client, text)

    assert _options(body) == MAX_RESULTS
    assert body.count("the first of more") == 7


# --- The palette itself ---------------------------------------------------------------------------


def test_pages_for_administrators_stand_only_in_their_palette(viewer: Client, fleet: Fleet) -> None:
    users = f'role="option" tabindex="-1" aria-selected="false" href="{reverse("users")}"'

    assert users not in viewer.get("/").content.decode()
    assert users in client_of(Role.ADMIN, fleet.cluster).get("/").content.decode()
