"""The pages of users and tokens: an admin manages own clusters, a secret is shown once."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane import crypto
from controlplane.accounts.choices import Role
from controlplane.accounts.models import ApiToken, AuditEvent, Grant, User
from controlplane.dashboard import tokens
from controlplane.fleet.models import Cluster
from controlplane.fleet.selectors import may
from tests.factories import (
    ApiTokenFactory,
    ClusterFactory,
    GrantFactory,
    JoinTokenFactory,
    NodeFactory,
    RackFactory,
    UserFactory,
)

if TYPE_CHECKING:
    # What the test client answers has a type of its own, known to type checkers only.
    from django.test.client import _MonkeyPatchedWSGIResponse as Page

pytestmark = pytest.mark.django_db


@pytest.fixture
def here() -> Cluster:
    return ClusterFactory(name="here")


@pytest.fixture
def elsewhere() -> Cluster:
    return ClusterFactory(name="elsewhere")


def signed_in(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def root() -> Client:
    return signed_in(UserFactory(username="root", is_superuser=True))


@pytest.fixture
def admin(here: Cluster) -> Client:
    return signed_in(GrantFactory(role=Role.ADMIN, cluster=here).user)


def words(page: Page) -> str:
    return page.content.decode()


def secret(page: Page) -> str:
    found = re.search(r'data-testid="secret">([^<]+)<', words(page))
    assert found
    return found[1]


# --- Users ----------------------------------------------------------------------------------------


def test_a_new_user_gets_a_password_that_opens_the_door_and_is_shown_once(root: Client) -> None:
    page = root.post(reverse("user-create"), {"username": "ada"})

    assert Client().login(username="ada", password=secret(page))
    assert page["Cache-Control"] == "no-store"
    again = root.get(reverse("users"), {"user": User.objects.get(username="ada").pk})
    assert secret(page) not in words(again)


def test_a_name_that_is_taken_is_told_above_the_form(root: Client) -> None:
    UserFactory(username="ada")

    page = root.post(reverse("user-create"), {"username": "ada"})

    assert page.status_code == 409
    assert "already" in words(page)


def test_a_reset_password_replaces_the_old_one(root: Client) -> None:
    user = UserFactory()

    page = root.post(reverse("user-password", args=[user.pk]), {"reason": "forgotten"})

    assert Client().login(username=user.username, password=secret(page))
    assert AuditEvent.objects.get(verb="user.set_password").reason == "forgotten"


def test_a_superuser_cannot_switch_off_the_last_one(root: Client) -> None:
    last = User.objects.get(username="root")

    page = root.post(reverse("user-switch", args=[last.pk]), {"active": "no", "reason": "bye"})

    assert page.status_code == 409
    assert "last active superuser" in words(page)


@pytest.mark.parametrize(
    ("name", "body"),
    [("user-switch", {"active": "no"}), ("user-password", {}), ("user-revoke", {"cluster": ""})],
)
def test_what_takes_something_away_wants_a_reason(
    name: str, body: dict[str, str], root: Client
) -> None:
    user = GrantFactory(cluster=None).user

    page = root.post(reverse(name, args=[user.pk]), body)

    assert page.status_code == 409
    assert "give a reason" in words(page)
    assert not AuditEvent.objects.exists()


def test_an_admin_grants_and_revokes_in_own_clusters(admin: Client, here: Cluster) -> None:
    user = UserFactory()
    given = {"username": user.username, "role": "operator", "cluster": here.pk, "reason": "on call"}

    assert admin.post(reverse("user-grant"), given).status_code == 302
    assert may(user, Role.OPERATOR, here.pk)

    taken = {"cluster": here.pk, "reason": "moved"}
    assert admin.post(reverse("user-revoke", args=[user.pk]), taken).status_code == 302
    assert not may(user, Role.VIEWER, here.pk)


def test_an_admin_grants_nothing_elsewhere_nor_everywhere(
    admin: Client, here: Cluster, elsewhere: Cluster
) -> None:
    seen = GrantFactory(user=User.objects.get(grants__cluster=here), cluster=elsewhere)
    user = UserFactory()

    def grant(cluster_id: str) -> int:
        body = {"username": user.username, "role": "viewer", "cluster": cluster_id, "reason": "x"}
        return admin.post(reverse("user-grant"), body).status_code

    assert grant(elsewhere.pk) == 403  # where the admin is a viewer
    assert grant("") == 403
    seen.delete()
    assert grant(elsewhere.pk) == 404
    assert not Grant.objects.filter(user=user).exists()


def test_an_admin_sees_the_people_and_roles_of_own_clusters_only(
    admin: Client, here: Cluster, elsewhere: Cluster
) -> None:
    colleague = GrantFactory(user__username="colleague", cluster=here).user
    GrantFactory(user=colleague, cluster=elsewhere)
    GrantFactory(user__username="foreigner", cluster=elsewhere)
    UserFactory(username="boss", is_superuser=True)

    page = words(admin.get(reverse("users")))

    assert "colleague" in page
    assert "boss" in page
    assert "foreigner" not in page
    assert "elsewhere" not in page


def test_an_admin_finds_no_form_for_what_only_superusers_do(admin: Client, here: Cluster) -> None:
    user = GrantFactory(cluster=here).user

    page = words(admin.get(reverse("users"), {"user": user.pk}))

    assert reverse("user-grant") in page
    assert reverse("user-create") not in page
    assert reverse("user-password", args=[user.pk]) not in page


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"username": "nobody-known", "role": "viewer"}, "There is no user"),
        ({"username": "root", "role": "emperor"}, "Choose one of the roles"),
    ],
)
def test_a_grant_to_nobody_or_of_nothing_is_told(
    body: dict[str, str], told: str, root: Client
) -> None:
    page = root.post(reverse("user-grant"), {**body, "cluster": "", "reason": "x"})

    assert page.status_code == 409
    assert told in words(page)


def test_a_grant_to_nobody_stands_there_as_it_was_typed(
    admin: Client, here: Cluster, elsewhere: Cluster
) -> None:
    GrantFactory(role=Role.ADMIN, cluster=elsewhere, user=User.objects.get(grants__cluster=here))
    form = {"username": "jdoe", "role": "operator", "cluster": here.pk, "reason": "on <call>"}

    page = words(admin.post(reverse("user-grant"), form))

    assert re.findall(r'<option value="([^"]*)" selected>', page) == ["operator", here.pk]
    assert 'value="jdoe"' in page
    assert 'value="on &lt;call&gt;"' in page


def test_a_grant_without_a_reason_stands_there_as_it_was_chosen(
    root: Client, here: Cluster
) -> None:
    user = UserFactory()
    form = {"username": user.username, "role": "admin", "cluster": "", "reason": " "}

    page = words(root.post(reverse("user-grant"), form))

    assert re.findall(r'<option value="([^"]*)" selected>', page) == ["admin", ""]


def test_a_person_who_was_refused_stands_there_as_typed_and_one_who_was_made_does_not(
    root: Client,
) -> None:
    UserFactory(username="ada")
    form = {"email": "ada@example.org", "superuser": "yes"}

    refused = words(root.post(reverse("user-create"), form | {"username": "ada"}))
    made = words(root.post(reverse("user-create"), form | {"username": "grace"}))

    kept = ['value="ada"', 'value="ada@example.org"', " checked>"]
    assert [word in refused for word in kept] == [True, True, True]
    assert " checked>" not in made


def test_a_list_of_people_goes_on_after_the_last_one(root: Client) -> None:
    for number in range(60):
        UserFactory(username=f"person-{number:02d}")

    first = words(root.get(reverse("users")))
    more = re.search(r'href="([^"]*cursor=[^"]+)"', first)
    assert more
    second = words(root.get(more[1].replace("&amp;", "&")))

    assert "person-49" in first
    assert "person-50" not in first
    assert "person-50" in second
    assert "person-49" not in second


# --- Tokens ---------------------------------------------------------------------------------------


def make_token(client: Client, **body: Any) -> Page:
    return client.post(
        reverse("token-create"), {"name": "ci", "scope": "operator", "days": "30", **body}
    )


def test_a_token_is_shown_once_and_kept_as_a_hash(here: Cluster) -> None:
    client = signed_in(GrantFactory(role=Role.OPERATOR, cluster=here).user)

    page = make_token(client, cluster=here.pk)

    token = ApiToken.objects.get()
    assert token.hash == crypto.token_hash(secret(page))
    assert (token.scope, token.cluster_id) == ("operator", here.pk)
    assert token.expires_at - timezone.now() > timedelta(days=29)
    assert page["Cache-Control"] == "no-store"
    assert secret(page) not in words(client.get(reverse("tokens")))


def test_a_token_is_told_to_be_sent_to_where_people_reach_the_pages(
    root: Client, settings: Any
) -> None:
    # A proxy that speaks TLS asks this process without it, so a request does not tell the scheme.
    settings.PUBLIC_URL = "https://drydock.example.org"

    page = make_token(root)

    told = f'Bearer {secret(page)}" https://drydock.example.org/api/v1/nodes<'
    assert told in words(page)


@pytest.mark.parametrize(
    "body", [{"name": " "}, {"scope": "emperor"}, {"days": "9999"}, {"days": "x"}]
)
def test_a_token_that_cannot_be_is_refused_in_words(body: dict[str, str], root: Client) -> None:
    assert make_token(root, **body).status_code == 409
    assert not ApiToken.objects.exists()


def test_a_token_that_was_refused_stands_there_as_it_was_typed(
    root: Client, here: Cluster, elsewhere: Cluster
) -> None:
    refused = words(make_token(root, name=" ", cluster=here.pk, days="7"))
    unlived = words(make_token(root, name="ci", days="9999"))
    fresh = words(root.get(reverse("tokens")))

    chosen = re.compile(r'<option value="([^"]*)" selected>')
    assert chosen.findall(refused) == ["operator", here.pk, "7"]
    assert 'value="ci"' in unlived
    assert chosen.findall(fresh) == ["90"]


def test_a_token_for_a_cluster_that_one_does_not_see_is_not_made(
    admin: Client, elsewhere: Cluster
) -> None:
    assert make_token(admin, cluster=elsewhere.pk).status_code == 404


def test_one_sees_and_revokes_ones_own_tokens_only(admin: Client, here: Cluster) -> None:
    own = ApiTokenFactory(user=User.objects.get(grants__cluster=here), name="own-token")
    foreign = ApiTokenFactory(name="foreign-token")

    page = words(admin.get(reverse("tokens"), {"of": "all"}))

    assert "own-token" in page
    assert "foreign-token" not in page
    revoke = {"reason": "leaked"}
    assert admin.post(reverse("token-revoke", args=[own.pk]), revoke).status_code == 302
    assert admin.post(reverse("token-revoke", args=[foreign.pk]), revoke).status_code == 404
    assert list(ApiToken.objects.filter(revoked_at=None)) == [foreign]


def test_a_superuser_sees_everybodys_when_asking_for_them(root: Client) -> None:
    ApiTokenFactory(name="foreign-token")

    assert "foreign-token" not in words(root.get(reverse("tokens")))
    assert "foreign-token" in words(root.get(reverse("tokens"), {"of": "all"}))


def test_what_no_longer_opens_anything_is_marked_and_has_no_revoke(root: Client) -> None:
    owner = User.objects.get(username="root")
    now = timezone.now()
    dead = [
        ApiTokenFactory(user=owner, expires_at=now - timedelta(days=1)),
        ApiTokenFactory(user=owner, revoked_at=now),
    ]
    live = ApiTokenFactory(user=owner, expires_at=now + timedelta(days=3))

    page = words(root.get(reverse("tokens")))

    assert "Expired" in page
    assert "Revoked" in page
    assert "Expires soon" in page
    assert reverse("token-revoke", args=[live.pk]) in page
    assert all(reverse("token-revoke", args=[token.pk]) not in page for token in dead)


def test_a_live_token_is_listed_however_many_dead_ones_are_newer(
    root: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "SHOWN", 2)
    owner = User.objects.get(username="root")
    live = ApiTokenFactory(user=owner)
    for number in range(3):
        ApiTokenFactory(user=owner, revoked_at=timezone.now(), name=f"dead-{number}")

    page = words(root.get(reverse("tokens")))

    assert reverse("token-revoke", args=[live.pk]) in page
    assert re.findall(r"<td>(dead-\d)", page) == ["dead-2", "dead-1"]
    assert "Only the newest 2 expired or" in page


def test_without_a_token_the_page_says_what_one_is_for(root: Client) -> None:
    assert "No token yet. Make one above" in words(root.get(reverse("tokens")))


def test_without_a_role_the_page_says_whom_to_ask() -> None:
    assert "Ask an admin" in words(signed_in(UserFactory()).get(reverse("tokens")))


# --- Both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "most"), [("users", 8), ("tokens", 8), ("enrolment", 8)])
def test_the_number_of_queries_does_not_grow_with_the_rows(
    name: str, most: int, root: Client, here: Cluster, django_assert_max_num_queries: Any
) -> None:
    for _ in range(20):
        grant = GrantFactory(cluster=here)
        ApiTokenFactory(user=grant.user, cluster=here)
        JoinTokenFactory(cluster=here)
        NodeFactory(cluster=here, rack=RackFactory(cluster=here))

    with django_assert_max_num_queries(most):
        assert root.get(reverse(name), {"of": "all", "user": str(grant.user_id)}).status_code == 200
