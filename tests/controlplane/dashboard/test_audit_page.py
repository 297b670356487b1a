"""The audit page: what was written in one's clusters, narrowed, as a diff, with its chain."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.accounts.actions import chain_audit
from controlplane.accounts.choices import ActorKind, Role
from controlplane.accounts.models import Actor, AuditEvent, User
from controlplane.dashboard.selectors.audit_trail import Change, changes
from controlplane.fleet import actions as fleet
from controlplane.fleet.choices import NodeState
from controlplane.fleet.models import Cluster, Node
from tests.factories import (
    AuditEventFactory,
    ClusterFactory,
    GrantFactory,
    NodeFactory,
    UserFactory,
)

if TYPE_CHECKING:
    from django.test.client import _MonkeyPatchedWSGIResponse as Page

pytestmark = pytest.mark.django_db

#: Session, user, clusters, rows, chain and names: the same whatever the number of rows.
QUERIES = 14


@pytest.fixture
def here() -> Cluster:
    return ClusterFactory(name="here")


@pytest.fixture
def ada() -> User:
    return UserFactory(username="ada")


@pytest.fixture
def node(here: Cluster, ada: User) -> Node:
    node = NodeFactory(cluster=here, name="node-07")
    actor = Actor(ActorKind.USER, str(ada.pk), "req_77")
    fleet.transition(actor, node.pk, NodeState.SUSPECT, reason="fans are loud")
    return node


@pytest.fixture
def viewer(here: Cluster) -> Client:
    client = Client()
    client.force_login(GrantFactory(cluster=here).user)
    return client


def text(page: Page) -> str:
    return page.content.decode()


def rows(client: Client, **query: str) -> int:
    return text(client.get(reverse("audit"), query)).count('data-testid="audit-row"')


def test_a_row_tells_who_did_what_to_what_and_why(viewer: Client, node: Node) -> None:
    page = text(viewer.get(reverse("audit")))

    assert ">ada</a>" in page
    assert "node.transition" in page
    assert f'href="{reverse("node", args=[node.pk])}">node-07</a>' in page
    assert "<del>available</del> → <ins>suspect</ins>" in page
    assert "fans are loud" in page


def test_a_node_among_the_values_is_told_by_its_name(
    viewer: Client, here: Cluster, node: Node
) -> None:
    AuditEventFactory(cluster=here, after={"node": node.pk, "cards": ["GPU-1"], "share": 0.5})

    page = text(viewer.get(reverse("audit")))

    assert "<dt>node</dt><dd><ins>node-07</ins>" in page


def test_each_row_says_whether_it_is_chained(viewer: Client, node: Node) -> None:
    assert "not yet" in text(viewer.get(reverse("audit")))

    chain_audit()

    page = text(viewer.get(reverse("audit")))
    assert "not yet" not in page
    assert AuditEvent.objects.get().hash in page


def poll(client: Client, token: str = "") -> Page:
    return client.get(reverse("audit"), {"after": token}, headers={"HX-Request": "true"})


def token_on(page: Page) -> str:
    found = re.search(r'data-token="([^"]+)"', text(page))
    assert found
    return found[1]


def test_a_mark_of_the_chain_arrives_although_no_cluster_changed(
    viewer: Client, node: Node
) -> None:
    shown = token_on(poll(viewer))
    still = poll(viewer, shown)

    chain_audit()

    marked = poll(viewer, shown)
    assert (still.status_code, marked.status_code) == (204, 200)
    assert "not yet" not in text(marked)


def test_what_belongs_to_no_cluster_arrives(client: Client, node: Node) -> None:
    client.force_login(UserFactory(is_superuser=True))
    shown = token_on(poll(client))
    still = poll(client, shown)

    AuditEventFactory(cluster=None, reason="joined us")

    assert still.status_code == 204
    assert "joined us" in text(poll(client, shown))


def test_what_others_wrote_brings_a_viewer_nothing(viewer: Client, node: Node) -> None:
    shown = token_on(poll(viewer))

    AuditEventFactory(cluster=ClusterFactory())
    AuditEventFactory(cluster=None)

    assert poll(viewer, shown).status_code == 204


def test_other_clusters_and_the_people_are_not_shown_to_a_viewer(
    viewer: Client, here: Cluster
) -> None:
    AuditEventFactory(cluster=ClusterFactory(), reason="elsewhere")
    AuditEventFactory(cluster=None, reason="of no cluster")

    assert rows(viewer) == 0


def test_what_belongs_to_no_cluster_is_shown_to_superusers(client: Client) -> None:
    client.force_login(UserFactory(is_superuser=True))
    AuditEventFactory(cluster=None)

    assert rows(client) == 1


@pytest.mark.parametrize(
    ("field", "fits", "fits_not"),
    [
        ("actor", "ada", "grace"),
        ("verb", "node.", "job."),
        ("verb", "node.transition", "transition"),
        ("object", "node-07", "node-08"),
        ("object", "node", "job"),
        ("cluster", "here", "there"),
        ("since", "2026-01-01 00:00", "2036-01-01 00:00"),
        ("until", "2036-01-01T00:00:00Z", "2016-01-01 00:00"),
        ("q", "FANS", "pumps"),
        ("q", "req_77", "req_78"),
    ],
)
def test_each_field_narrows(
    field: str, fits: str, fits_not: str, viewer: Client, node: Node
) -> None:
    AuditEvent.objects.update(at=datetime(2026, 6, 1, tzinfo=UTC))

    assert rows(viewer, **{field: fits}) == 1
    assert rows(viewer, **{field: fits_not}) == 0


def test_a_time_that_is_none_is_told(viewer: Client, node: Node) -> None:
    page = text(viewer.get(reverse("audit"), {"since": "2026-13-99 05:00"}))

    assert "is no time" in page
    assert page.count('data-testid="audit-row"') == 1


def test_older_rows_follow_the_cursor(viewer: Client, here: Cluster) -> None:
    for number in range(120):
        AuditEventFactory(cluster=here, reason=f"number {number}.")

    seen: list[str] = []
    address: str | None = "?"
    while address:
        page = text(viewer.get(reverse("audit") + address))
        seen += re.findall(r"number (\d+)\.", page)
        link = re.search(r'href="(\?[^"]+)" data-testid="older"', page)
        address = link[1].replace("&amp;", "&") if link else None

    assert seen == [str(number) for number in range(119, -1, -1)]


def test_the_last_verification_is_shown_with_what_came_of_it(viewer: Client, node: Node) -> None:
    everywhere = Client()
    everywhere.force_login(UserFactory(is_superuser=True))
    assert "never" in text(everywhere.get(reverse("audit")))

    AuditEventFactory(
        verb="audit.verify",
        object_type="audit",
        object_id="chain",
        after={"ok": False, "rows": 9, "problems": 2, "strays": 1},
    )

    assert "BROKEN: 2 problems in the chain, 1 node whose state does not match its events" in text(
        everywhere.get(reverse("audit"))
    )
    # It covers what this one may not see.
    assert "BROKEN" not in text(viewer.get(reverse("audit")))


def test_the_number_of_queries_does_not_grow_with_the_rows(
    viewer: Client, here: Cluster, node: Node, django_assert_max_num_queries: pytest.FixtureRequest
) -> None:
    for _ in range(40):
        AuditEventFactory(cluster=here, actor_kind="agent", actor_id=node.pk)
    with django_assert_max_num_queries(QUERIES):  # type: ignore[operator]
        assert rows(viewer) == 41


def test_what_was_observed_never_becomes_markup(viewer: Client, here: Cluster) -> None:
    AuditEventFactory(
        cluster=here,
        reason="<script>alert(1)</script>",
        after={"<b>": "<i>"},
        object_id="<u>",
        request_id='"><s>',
    )

    page = text(viewer.get(reverse("audit")))

    assert not re.search(r"<script>alert|<b>|<i>|<u>|<s>", page)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"state": "a"}, {"state": "b"}, [Change("state", "a", "b")]),
        ({"state": "a"}, {"state": "a"}, []),
        ({}, {"role": "viewer"}, [Change("role", None, "viewer")]),
        ({"role": "viewer"}, {}, [Change("role", "viewer", None)]),
        ({"role": None}, {"role": "viewer"}, [Change("role", None, "viewer")]),
        ({}, {"cluster": "clu_1", "role": "x"}, [Change("role", None, "x")]),
        (
            {},
            {"ends_at": "2026-11-21T12:20:41.701850+00:00"},
            [Change("ends at", None, "2026-11-21 12:20:41 UTC")],
        ),
    ],
)
def test_a_diff_shows_what_changed_and_no_more(
    before: dict[str, object], after: dict[str, object], told: list[Change]
) -> None:
    assert changes(before, after, known="clu_1") == told


def test_a_viewer_everywhere_still_sees_no_people(client: Client) -> None:
    client.force_login(GrantFactory(cluster=None, role=Role.OPERATOR).user)
    AuditEventFactory(cluster=None)

    assert rows(client) == 0
