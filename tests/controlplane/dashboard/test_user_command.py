"""`manage.py user`: a person gets in with the role given, where it was given."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from controlplane.accounts.choices import Role
from controlplane.accounts.models import AuditEvent, User
from controlplane.fleet.selectors import may
from tests.factories import ClusterFactory

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
