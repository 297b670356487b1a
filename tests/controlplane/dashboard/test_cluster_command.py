"""`manage.py cluster`: a cluster is made, or another price is set for the one that there is."""

from __future__ import annotations

from decimal import Decimal
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from controlplane.accounts.models import SYSTEM, AuditEvent
from controlplane.errors import Conflict
from controlplane.fleet import actions
from controlplane.fleet.models import Cluster
from tests.factories import ClusterFactory, GrantFactory, UserFactory

pytestmark = pytest.mark.django_db


def say(*arguments: str) -> str:
    out = StringIO()
    call_command("cluster", *arguments, stdout=out)
    return out.getvalue()


def test_a_new_cluster_is_made_and_nodes_can_be_let_into_it() -> None:
    answer = say("alpha")

    admin = Client()
    admin.force_login(UserFactory(is_superuser=True))
    assert "alpha was made: 2.00 USD a GPU-hour" in answer
    assert admin.get(reverse("enrolment")).status_code == 200
    assert AuditEvent.objects.get(verb="cluster.create").after == {
        "name": "alpha",
        "gpu_hour_price": "2.00",
        "currency": "USD",
    }


def test_its_price_may_be_told_at_once() -> None:
    say("alpha", "--price", "3.10", "--currency", "eur")

    cluster = Cluster.objects.get()
    assert (cluster.gpu_hour_price, cluster.currency) == (Decimal("3.10"), "EUR")


def test_the_price_of_one_that_is_there_is_changed_and_on_record() -> None:
    cluster = ClusterFactory(name="alpha", gpu_hour_price=2, currency="EUR")

    answer = say("alpha", "--price", "3.5")

    cluster.refresh_from_db()
    event = AuditEvent.objects.get(verb="cluster.set_price")
    assert "alpha: 3.50 EUR a GPU-hour, 2.00 EUR before" in answer
    assert (cluster.gpu_hour_price, cluster.currency) == (Decimal("3.50"), "EUR")
    assert event.before == {"gpu_hour_price": "2.00", "currency": "EUR"}
    assert event.after == {"gpu_hour_price": "3.50", "currency": "EUR"}


def test_a_free_one_may_be_made() -> None:
    assert "0.00 USD" in say("alpha", "--price", "0")


def test_its_currency_alone_may_be_changed() -> None:
    cluster = ClusterFactory(name="alpha", gpu_hour_price=Decimal("2.50"))

    say("alpha", "--currency", "CHF")

    cluster.refresh_from_db()
    assert (cluster.gpu_hour_price, cluster.currency) == (Decimal("2.50"), "CHF")


@pytest.mark.parametrize("more", [(), ("--price", "2"), ("--currency", "USD")])
def test_what_stands_already_is_told_and_changes_nothing(more: tuple[str, ...]) -> None:
    ClusterFactory(name="alpha", gpu_hour_price=2)

    assert "alpha is there already: 2.00 USD a GPU-hour" in say("alpha", *more)
    assert not AuditEvent.objects.exists()


def test_a_page_that_shows_the_price_learns_of_another() -> None:
    cluster = ClusterFactory(name="alpha")
    before = cluster.change_seq

    say("alpha", "--price", "5")

    cluster.refresh_from_db()
    assert cluster.change_seq > before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("two words",), "argument NAME: 'two words'"),
        (("x" * 51,), "argument NAME: 'xxx"),
        (("clu_1",), "argument NAME: 'clu_1'"),
        (("alpha", "--price", "much"), "argument --price: 'much'"),
        (("alpha", "--price", "-1"), "argument --price: '-1'"),
        (("alpha", "--price", "nan"), "argument --price: 'nan'"),
        (("alpha", "--price", "1000000"), "argument --price: '1000000'"),
        (("alpha", "--price", "2.005"), "argument --price: '2.005'"),
        (("alpha", "--currency", "EURO"), "argument --currency: 'EURO'"),
        (("alpha", "--currency", "€"), "argument --currency: '€'"),
    ],
)
def test_an_argument_that_cannot_be_is_named_and_nothing_is_made(
    arguments: tuple[str, ...], named: str
) -> None:
    with pytest.raises(CommandError, match=named):
        say(*arguments)

    assert not Cluster.objects.exists()


def test_a_name_is_given_once() -> None:
    ClusterFactory(name="alpha")

    with pytest.raises(Conflict, match="there is a cluster 'alpha' already"):
        actions.create_cluster(SYSTEM, "alpha")


def test_where_there_is_no_cluster_yet_whoever_lets_nodes_in_is_told_how_to_make_one() -> None:
    admin, operator = Client(), Client()
    admin.force_login(GrantFactory(role="admin", cluster=None).user)
    operator.force_login(GrantFactory(role="operator", cluster=None).user)
    before = admin.get(reverse("enrolment"))
    overview = admin.get(reverse("overview")).content.decode()
    automation = admin.get(reverse("automation-page")).content.decode()

    say("alpha")

    assert before.status_code == 200
    assert "manage.py cluster NAME" in before.content.decode()
    assert "manage.py cluster NAME" in overview
    assert f'href="{reverse("enrolment")}"' in overview
    assert "manage.py cluster NAME" in automation
    assert "create-join-token" not in before.content.decode()
    assert "create-join-token" in admin.get(reverse("enrolment")).content.decode()
    assert operator.get(reverse("enrolment")).status_code == 403
