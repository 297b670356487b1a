"""Users, roles and tokens: who may be what, on whose word, and that none can be locked out."""

from __future__ import annotations

import re
from datetime import timedelta
from threading import Thread

import pytest
from django.contrib.auth import authenticate
from django.db import connection
from django.test import Client
from django.utils import timezone

from controlplane import crypto
from controlplane.accounts import actions
from controlplane.accounts.choices import ActorKind, Role
from controlplane.accounts.models import Actor, ApiToken, AuditEvent, Grant, User
from controlplane.errors import Conflict
from controlplane.fleet.models import Cluster
from controlplane.fleet.selectors import (
    audit_for,
    clusters_for,
    is_superuser,
    may,
    may_everywhere,
    may_somewhere,
)
from tests.factories import (
    ApiTokenFactory,
    AuditEventFactory,
    ClusterFactory,
    GrantFactory,
    UserFactory,
)

pytestmark = pytest.mark.django_db

ROOT = Actor(ActorKind.USER, "1", "req_1")
GOOD = "correct horse battery"


def last_event() -> AuditEvent:
    return AuditEvent.objects.latest("pk")


def told() -> tuple[str, dict[str, object], dict[str, object], str, str]:
    event = last_event()
    return event.verb, event.before, event.after, event.reason, event.request_id


# --- People ---------------------------------------------------------------------------------------


def test_a_new_person_can_sign_in_and_sees_nothing() -> None:
    ClusterFactory()
    user = actions.create_user(ROOT, "ada", GOOD)

    assert authenticate(username="ada", password=GOOD) == user
    assert not clusters_for(user).exists()
    assert told()[0] == "user.create"


@pytest.mark.parametrize(
    ("username", "password", "words"),
    [("ada", GOOD, "already"), ("ADA", GOOD, "already"), ("a b", GOOD, "letters")],
)
def test_a_name_is_taken_once_whatever_its_case(username: str, password: str, words: str) -> None:
    UserFactory(username="ada")

    with pytest.raises(Conflict, match=words):
        actions.create_user(ROOT, username, password)
    assert not AuditEvent.objects.exists()


def test_an_easy_password_is_refused_and_the_old_one_stays() -> None:
    user = UserFactory()

    with pytest.raises(Conflict, match="too short"):
        actions.set_password(ROOT, user, "short")
    assert not AuditEvent.objects.exists()


def test_a_new_password_ends_the_sessions_and_is_written_nowhere() -> None:
    user = UserFactory()
    client = Client()
    client.force_login(user)
    assert client.get("/").status_code == 200

    actions.set_password(ROOT, User.objects.get(pk=user.pk), GOOD, reason="lost")

    assert client.get("/").status_code == 302
    assert told() == ("user.set_password", {}, {}, "lost", "req_1")


def test_switching_off_ends_the_sessions_and_on_again_brings_the_roles_back() -> None:
    grant = GrantFactory(cluster=None)
    client = Client()
    client.force_login(grant.user)

    actions.set_user_active(ROOT, grant.user, False, "left")

    assert client.get("/").status_code == 302
    assert told() == ("user.switch_off", {"active": True}, {"active": False}, "left", "req_1")

    actions.set_user_active(ROOT, grant.user, True, "came back")

    assert may_everywhere(grant.user, Role.VIEWER)
    assert last_event().verb == "user.switch_on"


def test_the_last_superuser_cannot_be_switched_off() -> None:
    UserFactory(is_superuser=True, is_active=False)
    last = UserFactory(is_superuser=True)

    with pytest.raises(Conflict, match="last active superuser"):
        actions.set_user_active(ROOT, last, False, "bye")
    last.refresh_from_db()
    assert last.is_active


@pytest.mark.django_db(transaction=True)
def test_two_superusers_cannot_switch_each_other_off_at_once() -> None:
    pair = [UserFactory(is_superuser=True), UserFactory(is_superuser=True)]
    refused: list[Conflict] = []

    def switch_off(user: User) -> None:
        try:
            actions.set_user_active(ROOT, user, False, "bye")
        except Conflict as conflict:
            refused.append(conflict)
        connection.close()

    threads = [Thread(target=switch_off, args=[user], daemon=True) for user in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert len(refused) == 1
    assert User.objects.filter(is_superuser=True, is_active=True).count() == 1


def test_a_role_replaces_the_one_there_was_and_both_are_on_record() -> None:
    cluster = ClusterFactory()
    user = UserFactory()
    actions.grant_role(ROOT, user, Role.VIEWER, cluster.pk)
    actions.grant_role(ROOT, user, Role.OPERATOR, cluster.pk, reason="on call")

    assert told() == (
        "user.grant",
        {"role": "viewer"},
        {"role": "operator", "cluster": cluster.pk},
        "on call",
        "req_1",
    )
    assert Grant.objects.get(user=user).role == Role.OPERATOR


def test_a_revoked_role_is_gone_and_cannot_be_revoked_again() -> None:
    grant = GrantFactory(cluster=ClusterFactory(), role=Role.ADMIN)

    actions.revoke_role(ROOT, grant.user, grant.cluster_id, reason="moved")

    assert not clusters_for(grant.user).exists()
    assert last_event().before == {"role": "admin", "cluster": grant.cluster_id}
    with pytest.raises(Conflict, match="no role"):
        actions.revoke_role(ROOT, grant.user, grant.cluster_id)


# --- Tokens ---------------------------------------------------------------------------------------


def new_token(user: User, scope: Role = Role.VIEWER, ttl_s: float = 60) -> tuple[ApiToken, str]:
    return actions.create_token(ROOT, user, name="ci", scope=scope, cluster_id=None, ttl_s=ttl_s)


def test_a_token_is_recognised_by_its_prefix_and_only_its_hash_is_kept() -> None:
    token, text = new_token(UserFactory())

    assert re.fullmatch(rf"ddt_{token.prefix}_[A-Za-z0-9_-]{{43}}", text)
    assert token.hash == crypto.token_hash(text)
    kept = str(ApiToken.objects.values()) + str(AuditEvent.objects.values())
    assert text.rpartition(f"{token.prefix}_")[2] not in kept


def test_a_token_expires_when_it_was_told_to() -> None:
    token, _ = new_token(UserFactory(), ttl_s=3600)

    assert token.expires_at - timezone.now() == pytest.approx(
        timedelta(hours=1), abs=timedelta(seconds=10)
    )


@pytest.mark.parametrize("ttl_s", [0, -1, 366 * 86_400 + 1, float("inf")])
def test_a_token_must_expire_within_a_year(ttl_s: float) -> None:
    with pytest.raises(Conflict, match="366 days"):
        new_token(UserFactory(), ttl_s=ttl_s)


def test_a_token_needs_a_name() -> None:
    with pytest.raises(Conflict, match="name"):
        actions.create_token(
            ROOT, UserFactory(), name=" ", scope=Role.VIEWER, cluster_id=None, ttl_s=60
        )


def test_a_revoked_token_stays_on_record_and_cannot_be_revoked_again() -> None:
    token, _ = new_token(UserFactory())

    actions.revoke_token(ROOT, token.pk, "leaked")

    token.refresh_from_db()
    assert token.revoked_at is not None
    assert (last_event().verb, last_event().reason) == ("token.revoke", "leaked")
    with pytest.raises(Conflict, match="already"):
        actions.revoke_token(ROOT, token.pk, "again")


# --- What a token may -----------------------------------------------------------------------------


@pytest.fixture
def here() -> Cluster:
    return ClusterFactory()


def bearing(user: User, scope: Role, cluster: Cluster | None = None) -> User:
    """The user as requests see them whose token this is."""
    user.token = ApiTokenFactory(user=user, scope=scope, cluster=cluster)  # type: ignore[attr-defined]
    return user


@pytest.mark.parametrize("held", Role)
@pytest.mark.parametrize("scope", Role)
@pytest.mark.parametrize("asked", Role)
def test_a_token_may_what_both_its_owner_and_its_scope_allow(
    held: Role, scope: Role, asked: Role, here: Cluster
) -> None:
    user = bearing(GrantFactory(role=held, cluster=here).user, scope)
    order = list(Role)

    assert may(user, asked, here.pk) == (
        order.index(asked) <= min(order.index(held), order.index(scope))
    )


def test_what_its_owner_loses_the_token_loses(here: Cluster) -> None:
    grant = GrantFactory(role=Role.OPERATOR, cluster=here)
    user = bearing(grant.user, Role.OPERATOR)
    grant.delete()

    assert not may(user, Role.VIEWER, here.pk)


def test_a_token_of_one_cluster_reaches_no_other(here: Cluster) -> None:
    elsewhere = ClusterFactory()
    user = bearing(UserFactory(is_superuser=True), Role.ADMIN, here)

    assert list(clusters_for(user)) == [here]
    assert not may(user, Role.VIEWER, elsewhere.pk)
    assert not may_everywhere(user, Role.VIEWER)
    assert not is_superuser(user)


def test_a_token_of_a_cluster_that_its_owner_does_not_see_reaches_nothing(here: Cluster) -> None:
    user = bearing(GrantFactory(cluster=ClusterFactory()).user, Role.ADMIN, here)

    assert not clusters_for(user).exists()


@pytest.mark.parametrize("asked", Role)
@pytest.mark.parametrize("scope", Role)
@pytest.mark.parametrize("limited", [False, True], ids=["anywhere", "one cluster"])
@pytest.mark.parametrize("owner", ["superuser", "operator here", "operator of all", "elsewhere"])
def test_one_may_somewhere_what_one_may_in_some_cluster(
    owner: str, limited: bool, scope: Role, asked: Role, here: Cluster
) -> None:
    owners = {
        "superuser": lambda: UserFactory(is_superuser=True),
        "operator here": lambda: GrantFactory(role=Role.OPERATOR, cluster=here).user,
        "operator of all": lambda: GrantFactory(role=Role.OPERATOR, cluster=None).user,
        "elsewhere": lambda: GrantFactory(role=Role.ADMIN, cluster=ClusterFactory()).user,
    }
    user = bearing(owners[owner](), scope, here if limited else None)

    assert may_somewhere(user, asked) == clusters_for(user, asked).exists()


def test_an_admin_of_all_clusters_is_one_before_there_is_any() -> None:
    assert may_somewhere(GrantFactory(role=Role.ADMIN, cluster=None).user, Role.ADMIN)


@pytest.mark.parametrize("scope", Role)
def test_a_superusers_token_is_one_only_with_the_widest_scope(scope: Role) -> None:
    user = bearing(UserFactory(is_superuser=True), scope)

    assert is_superuser(user) == (scope == Role.ADMIN)


def test_a_switched_off_superuser_is_none() -> None:
    user = UserFactory(is_superuser=True, is_active=False)

    assert not is_superuser(user)
    assert not may_everywhere(user, Role.VIEWER)
    assert not may_somewhere(user, Role.VIEWER)


# --- Who reads the audit trail --------------------------------------------------------------------


def test_the_trail_shows_the_callers_clusters_and_the_rest_to_admins_of_all(here: Cluster) -> None:
    own = AuditEventFactory(cluster=here)
    foreign = AuditEventFactory(cluster=ClusterFactory())
    nowhere = AuditEventFactory(cluster=None)

    assert list(audit_for(GrantFactory(cluster=here).user)) == [own]
    assert list(audit_for(GrantFactory(cluster=None).user)) == [foreign, own]
    everything = [nowhere, foreign, own]
    assert list(audit_for(GrantFactory(cluster=None, role=Role.ADMIN).user)) == everything
    assert list(audit_for(UserFactory(is_superuser=True))) == everything
    assert list(audit_for(bearing(UserFactory(is_superuser=True), Role.VIEWER))) == [foreign, own]
