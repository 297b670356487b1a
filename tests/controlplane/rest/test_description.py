"""The description of the API: valid, whole, and a page that people can read."""

from __future__ import annotations

import re

import pytest
from django.test import Client
from django.urls import reverse
from drf_spectacular.validation import validate_schema

from controlplane.api import RESOURCES
from controlplane.rest import docs, problems
from tests.controlplane.rest.orders import verbs
from tests.controlplane.rest.world import Caller, World

pytestmark = pytest.mark.django_db


def test_the_document_is_valid_openapi() -> None:
    document = Client().get(reverse("api-openapi")).json()

    assert document["openapi"].startswith("3.1")
    validate_schema(document)  # type: ignore[no-untyped-call]


def test_it_describes_every_list_and_every_verb() -> None:
    operations = {
        operation["operationId"]
        for methods in docs.document()["paths"].values()
        for operation in methods.values()
    }

    lists = {f"{name}_{what}" for name in RESOURCES for what in ("list", "retrieve")}
    told = {one.replace("-", "_") for one in lists | {v.replace("/", "_") for v in verbs()}}
    assert told <= operations


def test_every_operation_says_what_it_is() -> None:
    for section in docs.sections():
        for operation in section.operations:
            assert operation.summary, operation.path
            assert all(field.description for field in operation.takes if field.place == "query")


def test_the_page_shows_every_operation_and_every_problem(world: World, viewer: Caller) -> None:
    page = viewer.get(reverse("api-docs")).content.decode()

    for section in docs.sections():
        for operation in section.operations:
            assert f'id="{operation.id}"' in page
    for code in problems.KINDS:
        assert f'id="{code}"' in page
    assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=", page)
