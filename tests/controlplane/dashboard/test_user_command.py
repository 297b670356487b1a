"""`manage.py user`: a person gets in with the role given, where it was given."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from controlplane.accounts.choices import Role
from controlplane.accounts.models import AuditEvent, User
from controlplane.fleet.selectors import may
from tests.factories import ClusterFactory, GrantFactory, UserFactory

pytestmark = pytest.mark.django_db


def say(*arguments: str) -> str:
    out = StringIO()
    call_command("user", *arguments, stdout=out)
    return out.getvalue()


def test_a_new_person_can_log_in_and_holds_the_role_in_that_cluster_only() -> None:
    here, there = ClusterFactory(), ClusterFactory()
    answer = say("alice", "--role", "operator", "--cluster", here.name)
    password = answer.splitlines()[0].rpartition(" ")[2]
    alice = User.objects.get(username="alice")
    assert Client().login(username="alice", password=password)
    assert may(alice, Role.OPERATOR, here.pk)
    assert not may(alice, Role.ADMIN, here.pk)
    assert not may(alice, Role.VIEWER, there.pk)
    assert AuditEvent.objects.filter(verb="user.grant").count() == 1


def test_a_second_word_changes_the_role_and_keeps_the_password() -> None:
    cluster = ClusterFactory()
    say("bob", "--role", "admin", "--cluster", cluster.name)
    assert "password" not in say("bob", "--role", "viewer", "--cluster", cluster.name)
    assert not may(User.objects.get(username="bob"), Role.OPERATOR, cluster.pk)


def test_an_unknown_cluster_is_named_and_nobody_is_made() -> None:
    with pytest.raises(CommandError, match="no cluster 'nowhere'"):
        say("carol", "--role", "viewer", "--cluster", "nowhere")
    assert not User.objects.filter(username="carol").exists()


def test_the_first_superuser_logs_in_and_makes_people() -> None:
    answer = say("alice", "--superuser")

    client = Client()
    password = answer.splitlines()[0].rpartition(" ")[2]
    assert client.login(username="alice", password=password)
    assert "alice is a superuser: every role in every cluster" in answer
    assert client.post(reverse("user-create"), {"username": "bob"}).status_code == 200
    assert AuditEvent.objects.get(verb="user.create", actor_id="drydock").after == {
        "username": "alice",
        "superuser": True,
    }


def test_a_person_becomes_a_superuser_with_their_password_and_once_on_record() -> None:
    user = UserFactory(username="bob")

    answers = [say("bob", "--superuser") for _ in range(2)]

    user.refresh_from_db()
    event = AuditEvent.objects.get()
    assert user.is_superuser
    assert not any("password" in answer for answer in answers)
    assert (event.verb, event.object_id) == ("user.make_superuser", str(user.pk))
    assert (event.before, event.after) == ({"superuser": False}, {"superuser": True})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "one of the arguments --role --superuser/--no-superuser is required"),
        (("--superuser", "--role", "admin"), "--role: not allowed with argument --superuser"),
        (("--superuser", "--cluster", "here"), "--cluster: not allowed with argument --superuser"),
    ],
)
def test_a_superuser_holds_every_role_everywhere_so_none_is_named(
    arguments: tuple[str, ...], words: str
) -> None:
    ClusterFactory(name="here")

    with pytest.raises(CommandError, match=words):
        say("carol", *arguments)

    assert not User.objects.exists()


def test_a_superuser_is_one_no_longer_and_keeps_the_roles_that_were_given() -> None:
    cluster = ClusterFactory()
    UserFactory(is_superuser=True)
    bob = GrantFactory(
        user=UserFactory(username="bob", is_superuser=True), role=Role.VIEWER, cluster=cluster
    ).user

    answer = say("bob", "--no-superuser")

    bob.refresh_from_db()
    event = AuditEvent.objects.get()
    assert "bob is no superuser" in answer
    assert may(bob, Role.VIEWER, cluster.pk)
    assert not may(bob, Role.OPERATOR, cluster.pk)
    assert event.verb == "user.unmake_superuser"
    assert (event.before, event.after) == ({"superuser": True}, {"superuser": False})


def test_the_last_superuser_stays_one() -> None:
    UserFactory(username="bob", is_superuser=True)

    with pytest.raises(CommandError, match="bob is the last active superuser"):
        say("bob", "--no-superuser")

    assert User.objects.get(username="bob").is_superuser


def test_who_is_nobody_is_no_superuser_already() -> None:
    with pytest.raises(CommandError, match="There is no person 'carol'"):
        say("carol", "--no-superuser")

    assert not User.objects.exists()


def test_a_name_that_is_none_is_refused_in_words() -> None:
    with pytest.raises(CommandError, match="a name is made of letters"):
        say("two words", "--role", "viewer")
