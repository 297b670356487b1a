"""Rows that several tests read: made once, and undone after the last of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import transaction
from pytest_django import DjangoDbBlocker


@contextmanager
def around_tests(blocker: DjangoDbBlocker) -> Iterator[None]:
    """A transaction around those of some tests, which undo what they do in it."""
    around = transaction.atomic()
    # As around TestCase.setUpTestData: what is durable in production may be called within it.
    around._from_testcase = True  # type: ignore[attr-defined]
    with blocker.unblock():
        around.__enter__()
    try:
        yield
    finally:
        with blocker.unblock():
            transaction.set_rollback(True)
            around.__exit__(None, None, None)
