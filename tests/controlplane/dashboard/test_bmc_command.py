"""`manage.py bmc`: recorded, tried, and never shown again."""

from __future__ import annotations

import io
import sys

import pytest
from django.core.management import CommandError, call_command

from controlplane.accounts.models import AuditEvent
from controlplane.crypto import unseal
from tests.factories import NodeFactory
from tests.workers.bmc import bmc_of

pytestmark = pytest.mark.django_db


def record(monkeypatch: pytest.MonkeyPatch, *arguments: str, typed: str = "secret\n") -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    output = io.StringIO()
    call_command("bmc", *arguments, stdout=output)
    return output.getvalue()


def test_it_is_recorded_sealed_and_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    node = NodeFactory(name="n-1")
    with bmc_of(node):
        node.refresh_from_db()
        said = record(monkeypatch, "n-1", node.bmc_url, "root")
    node.refresh_from_db()
    assert said == "n-1: its BMC answers; the node is on\n"
    assert (node.bmc_username, unseal(node.bmc_password_sealed)) == ("root", "secret")
    assert "secret" not in str(list(AuditEvent.objects.values_list("before", "after")))


@pytest.mark.parametrize(
    ("arguments", "password", "words"),
    [
        (("n-1", "ftp://x", "root"), "secret\n", "is no address"),
        (("n-1", "https://127.0.0.1:1", "root"), "\n", "password is empty"),
        (("nobody", "https://127.0.0.1:1", "root"), "secret\n", "There are 0 nodes"),
        (("n-1", "http://127.0.0.1:1", "root"), "secret\n", "does not work"),
    ],
)
def test_what_cannot_work_is_said(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], password: str, words: str
) -> None:
    NodeFactory(name="n-1")
    with pytest.raises(CommandError, match=words):
        record(monkeypatch, *arguments, typed=password)
