"""Forms that are older than who is signed in: each is refused in words that lead on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.accounts.models import User
from tests.factories import PASSWORD, UserFactory

if TYPE_CHECKING:
    from django.test.client import _MonkeyPatchedWSGIResponse as Page

pytestmark = pytest.mark.django_db

NODE = "http://testserver/nodes/nod_1?order=drain"


@pytest.fixture
def ada() -> User:
    return UserFactory(username="ada")


@pytest.fixture
def browser() -> Client:
    return Client(enforce_csrf_checks=True)


def _token_on(browser: Client, address: str) -> str:
    found = re.search(
        r'name="csrfmiddlewaretoken" value="(\w+)"', browser.get(address).content.decode()
    )
    assert found
    return found[1]


def _sign_in(browser: Client, token: str, **more: str) -> Page:
    form = {"csrfmiddlewaretoken": token, "username": "ada", "password": PASSWORD}
    return browser.post(reverse("login"), form | more)


@pytest.mark.parametrize(
    ("wanted", "leads_to"), [("/jobs/", "/jobs/"), ("https://evil.example/", "/"), ("", "/")]
)
def test_signing_in_again_from_another_tab_leads_on(
    wanted: str, leads_to: str, browser: Client, ada: User
) -> None:
    old_tab = _token_on(browser, reverse("login"))
    _sign_in(browser, old_tab)

    answer = _sign_in(browser, old_tab, next=wanted)

    assert (answer.status_code, answer["Location"]) == (302, leads_to)


def test_a_form_from_before_signing_in_is_refused_and_leads_back(
    browser: Client, ada: User
) -> None:
    old_tab = _token_on(browser, reverse("login"))
    _sign_in(browser, old_tab)

    answer = browser.post(
        reverse("logout"), {"csrfmiddlewaretoken": old_tab}, headers={"Referer": NODE}
    )

    page = answer.content.decode()
    assert answer.status_code == 403
    assert "from before you signed in" in page
    assert 'href="/nodes/nod_1?order=drain"' in page
    assert 'class="lone"' in page


def test_a_login_form_whose_cookie_is_gone_leads_to_a_fresh_one(browser: Client, ada: User) -> None:
    token = _token_on(browser, reverse("login"))
    browser.cookies.clear()

    answer = browser.post(
        reverse("login"),
        {"csrfmiddlewaretoken": token, "username": "ada", "password": PASSWORD},
        headers={"Referer": "http://testserver/login?next=/jobs/"},
    )

    assert answer.status_code == 403
    assert 'href="/login?next=/jobs/"' in answer.content.decode()


def test_a_form_from_another_address_says_what_is_set_wrong(browser: Client, ada: User) -> None:
    token = _token_on(browser, reverse("login"))

    answer = browser.post(
        reverse("login"),
        {"csrfmiddlewaretoken": token, "username": "ada", "password": PASSWORD},
        headers={"Origin": "https://<b>evil.example"},
    )

    page = answer.content.decode()
    assert answer.status_code == 403
    assert "from before you signed in" not in page
    assert "PUBLIC_URL" in page
    assert "<b>evil" not in page


def test_a_live_page_loads_anew(browser: Client, ada: User) -> None:
    browser.force_login(ada)

    answer = browser.post(reverse("logout"), headers={"HX-Request": "true"})

    assert answer["HX-Refresh"] == "true"
    assert browser.get(reverse("overview")).status_code == 200


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("/api/v1/docs", (403, "csrf_failed")),
        ("/api/v1/nonsense", (404, "not_found")),
    ],
)
def test_below_the_api_it_is_a_problem(
    address: str, told: tuple[int, str], browser: Client
) -> None:
    answer = browser.post(address, {}, content_type="application/json")

    assert answer["Content-Type"] == "application/problem+json"
    assert (answer.status_code, answer.json()["code"]) == told
