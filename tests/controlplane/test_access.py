"""Roles, lists and signing in. Each route by each role is tried in `test_routes_by_role`."""

from __future__ import annotations

from urllib.parse import parse_qs, urlsplit

import pytest
from django.contrib.auth.models import AnonymousUser
from django.test import Client
from django.urls import reverse

from controlplane.accounts.choices import Role
from controlplane.accounts.models import User
from controlplane.fleet.models import Cluster
from controlplane.fleet.selectors import clusters_for, may
from controlplane.incidents.models import Incident
from tests.factories import (
    PASSWORD,
    ClusterFactory,
    GrantFactory,
    IncidentFactory,
    JobFactory,
    UserFactory,
)

pytestmark = pytest.mark.django_db


@pytest.fixture
def incident() -> Incident:
    cluster = ClusterFactory(name="alpha")
    return IncidentFactory(
        cluster=cluster, job=JobFactory(cluster=cluster, name="the-job"), title="The incident"
    )


@pytest.fixture
def operator(incident: Incident) -> Client:
    return _client(Role.OPERATOR, incident.cluster)


@pytest.fixture
def viewer(incident: Incident) -> Client:
    return _client(Role.VIEWER, incident.cluster)


@pytest.fixture
def stranger(incident: Incident) -> Client:
    return _client(Role.ADMIN, ClusterFactory(name="elsewhere"))


def _client(role: Role, cluster: Cluster) -> Client:
    client = Client()
    client.force_login(GrantFactory(role=role, cluster=cluster).user)
    return client


# --- The selector that every other one starts from ------------------------------------------------


def test_a_grant_in_one_cluster_shows_that_cluster_only() -> None:
    here, _ = ClusterFactory(), ClusterFactory()
    grant = GrantFactory(cluster=here)

    assert list(clusters_for(grant.user)) == [here]


def test_a_grant_without_a_cluster_holds_in_all() -> None:
    clusters = {ClusterFactory(), ClusterFactory()}
    grant = GrantFactory(cluster=None)

    assert set(clusters_for(grant.user)) == clusters


def test_a_superuser_sees_all_without_a_grant() -> None:
    cluster = ClusterFactory()

    assert list(clusters_for(UserFactory(is_superuser=True), Role.ADMIN)) == [cluster]


def test_a_role_includes_those_before_it_and_none_after() -> None:
    cluster = ClusterFactory()
    user = GrantFactory(cluster=cluster, role=Role.OPERATOR).user

    assert may(user, Role.VIEWER, cluster.id)
    assert may(user, Role.OPERATOR, cluster.id)
    assert not may(user, Role.ADMIN, cluster.id)


def test_nobody_and_the_switched_off_see_nothing() -> None:
    ClusterFactory()
    switched_off = UserFactory(is_superuser=True, is_active=False)

    assert not clusters_for(AnonymousUser()).exists()
    assert not clusters_for(switched_off).exists()


# --- Reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["overview", "jobs", "incidents"])
def test_lists_show_a_stranger_nothing_of_the_cluster(
    name: str, viewer: Client, stranger: Client
) -> None:
    words = {"overview": "The incident", "jobs": "the-job", "incidents": "The incident"}[name]

    assert words in viewer.get(reverse(name)).content.decode()
    assert words not in stranger.get(reverse(name)).content.decode()


def test_a_live_update_after_signing_out_leads_to_the_login_page(incident: Incident) -> None:
    page = reverse("incident", args=[incident.id])

    answer = Client().get(
        page, headers={"HX-Request": "true", "HX-Current-URL": f"http://testserver{page}"}
    )

    assert answer["HX-Redirect"] == f"{reverse('login')}?next={page}"


def test_after_signing_in_a_live_update_goes_on_with_what_was_shown(incident: Incident) -> None:
    page = f"{reverse('incidents')}?cluster={incident.cluster_id}"

    answer = Client().get(
        page, headers={"HX-Request": "true", "HX-Current-URL": f"http://testserver{page}"}
    )

    assert _next(answer["HX-Redirect"]) == page


@pytest.mark.parametrize(
    ("given_on", "leads_to"),
    [
        ("http://testserver/nodes/node_1?order=drain", "/nodes/node_1?order=drain"),
        ("https://evil.example/nodes/node_1", "/"),
        ("", "/"),
    ],
)
def test_an_order_after_signing_out_leads_back_to_its_page(
    given_on: str, leads_to: str, incident: Incident
) -> None:
    order = reverse("incident-acknowledge", args=[incident.id])

    answer = Client().post(order, headers={"Referer": given_on})

    assert _next(answer["Location"]) == leads_to


def _next(login: str) -> str:
    """Where the login page leads on to."""
    return parse_qs(urlsplit(login).query)["next"][0]


# --- Acting ---------------------------------------------------------------------------------------


def test_reading_an_action_is_refused(operator: Client, incident: Incident) -> None:
    address = reverse("incident-acknowledge", args=[incident.id])

    assert operator.get(address).status_code == 405
    assert incident.timeline.count() == 0


def test_a_form_without_its_token_is_refused(incident: Incident) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(GrantFactory(role=Role.OPERATOR, cluster=incident.cluster).user)

    answer = client.post(reverse("incident-acknowledge", args=[incident.id]))

    assert answer.status_code == 403


# --- Signing in and out ---------------------------------------------------------------------------


@pytest.fixture
def ada() -> User:
    return UserFactory(username="ada")


def test_the_right_password_opens_the_page_that_was_asked_for(ada: User) -> None:
    answer = Client().post(
        reverse("login") + "?next=/jobs/", {"username": "ada", "password": PASSWORD}
    )

    assert answer["Location"] == "/jobs/"


def test_the_next_page_is_never_on_another_site(ada: User) -> None:
    answer = Client().post(
        reverse("login"),
        {"username": "ada", "password": PASSWORD, "next": "https://evil.example/"},
    )

    assert answer["Location"] == reverse("overview")


def test_a_wrong_password_says_so_and_nothing_more(ada: User) -> None:
    known = Client().post(reverse("login"), {"username": "ada", "password": "wrong"})
    unknown = Client().post(reverse("login"), {"username": "bob", "password": "wrong"})

    assert "do not match" in known.content.decode()
    assert "do not match" in unknown.content.decode()


def test_who_is_switched_off_is_not_told_that_the_password_is_wrong() -> None:
    gone = UserFactory(username="gone", is_active=False)

    right = Client().post(reverse("login"), {"username": gone.username, "password": PASSWORD})
    wrong = Client().post(reverse("login"), {"username": gone.username, "password": "wrong"})

    told = "do not match an account that is switched on"
    assert [told in answer.content.decode() for answer in (right, wrong)] == [True, True]
    assert "_auth_user_id" not in right.wsgi_request.session


def test_after_ten_failures_even_the_right_password_waits() -> None:
    victim = UserFactory(username="much-guessed")
    for _ in range(10):
        Client().post(reverse("login"), {"username": "much-guessed", "password": "wrong"})

    answer = Client().post(reverse("login"), {"username": victim.username, "password": PASSWORD})

    assert "Too many failed attempts" in answer.content.decode()


def test_another_address_is_not_kept_out_by_the_guesser() -> None:
    victim = UserFactory(username="guessed-from-afar")
    for _ in range(10):
        Client(REMOTE_ADDR="192.0.2.7").post(
            reverse("login"), {"username": victim.username, "password": "wrong"}
        )

    answer = Client().post(reverse("login"), {"username": victim.username, "password": PASSWORD})

    assert answer.status_code == 302


def test_signing_out_takes_a_post(ada: User) -> None:
    client = Client()
    client.force_login(ada)

    assert client.get(reverse("logout")).status_code == 405
    assert client.post(reverse("logout"))["Location"] == reverse("login")
    assert client.get(reverse("overview")).status_code == 302


# --- Who is refused is told why -------------------------------------------------------------------


def test_who_lacks_a_role_is_told_which(operator: Client) -> None:
    page = operator.get(reverse("enrolment"))

    assert page.status_code == 403
    assert "Only admins of a cluster let nodes in." in page.content.decode()


def test_a_cluster_without_nodes_leads_only_those_to_tokens_who_may_make_them(
    incident: Incident, operator: Client
) -> None:
    admin = _client(Role.ADMIN, incident.cluster)
    address = reverse("cluster", args=[incident.cluster.pk])

    empty = {who: who.get(address).content.decode() for who in (operator, admin)}

    assert "An administrator makes a join token" in empty[operator]
    assert "Make a join token</a>" in empty[admin]
