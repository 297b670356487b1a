"""The audit chain: whole when nobody touched it, and any edit of it is found."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC
from threading import Thread
from typing import Any

import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.accounts import chain
from controlplane.accounts.actions import chain_audit
from controlplane.accounts.models import AuditEvent
from tests.factories import AuditEventFactory, ClusterFactory

pytestmark = pytest.mark.django_db

ROWS = 6


@pytest.fixture
def chained() -> list[AuditEvent]:
    """Six rows of a chain, in its order."""
    for number in range(ROWS):
        AuditEventFactory(
            cluster=ClusterFactory(),
            before={"state": "available", "share": 0.25},
            after={"state": "suspect", "ranks": [number], "none": None},
            reason="because",
            request_id=f"req_{number}",
        )
    chain_audit()
    return list(AuditEvent.objects.order_by("position"))


def edit(event: AuditEvent, **columns: Any) -> None:
    AuditEvent.objects.filter(pk=event.pk).update(**columns)


def whats(pinned: chain.Head | None = None) -> list[tuple[int | None, str]]:
    return [(p.position, p.what.partition(":")[0]) for p in chain.verify(pinned).problems]


@contextmanager
def undone() -> Iterator[None]:
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


def test_an_untouched_chain_is_whole(chained: list[AuditEvent]) -> None:
    report = chain.verify()

    assert report.ok
    assert report.rows == ROWS
    assert report.head == chain.Head(ROWS, chained[-1].hash)
    assert report.unchained == 0


def test_rows_take_their_places_in_the_order_in_which_they_are_found() -> None:
    late = AuditEventFactory(id=7001)
    early = AuditEventFactory(id=7002)
    AuditEvent.objects.filter(pk=late.pk).delete()  # not committed yet
    chain_audit()
    AuditEventFactory(id=late.pk)
    chain_audit()

    assert list(AuditEvent.objects.order_by("position").values_list("pk", flat=True)) == [
        early.pk,
        late.pk,
    ]
    assert chain.verify().ok


def test_a_pass_chains_no_more_than_it_was_told_and_the_next_goes_on() -> None:
    AuditEventFactory.create_batch(5)

    assert chain_audit(limit=3).position == 3
    assert chain.verify().unchained == 2
    assert chain_audit(limit=3).position == 5
    assert chain.verify().ok


def test_an_empty_trail_is_whole() -> None:
    assert chain_audit() == chain.Head()
    assert chain.verify().ok


# --- Any edit is found ----------------------------------------------------------------------------

WORDS = st.text(alphabet=string.printable, max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
).filter(lambda value: value is not None)
HEX = st.text(alphabet="0123456789abcdef", min_size=64, max_size=64)
MOMENTS = st.datetimes(timezones=st.just(UTC))
#: What each column may be changed to by somebody with the whole database at hand.
EDITS: dict[str, st.SearchStrategy[Any]] = {
    "id": st.integers(10**6, 2**62),
    "at": MOMENTS,
    "actor_kind": WORDS,
    "actor_id": WORDS,
    "request_id": WORDS,
    "cluster_id": st.none(),
    "verb": WORDS,
    "object_type": WORDS,
    "object_id": WORDS,
    "before": JSON,
    "after": JSON,
    "reason": WORDS,
    "position": st.none() | st.integers(-(2**62), 0) | st.integers(ROWS + 1, 2**62),
    "hash": WORDS | HEX,
}


def test_every_column_is_among_those_that_are_edited_below() -> None:
    assert {field.attname for field in AuditEvent._meta.concrete_fields} == set(EDITS)
    assert {*chain.COVERED, "position", "hash"} == set(EDITS)


@pytest.mark.parametrize("column", EDITS)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_edit_of_any_column_of_any_row_is_found(
    column: str, data: st.DataObject, chained: list[AuditEvent]
) -> None:
    row = data.draw(st.sampled_from(chained))
    value = data.draw(EDITS[column].filter(lambda value: value != getattr(row, column)))

    with undone():
        edit(row, **{column: value})
        assert not chain.verify().ok

    assert chain.verify().ok


@pytest.mark.parametrize("position", range(1, ROWS + 1))
@pytest.mark.parametrize("column", ["reason", "hash"])
def test_the_edited_row_is_named_and_no_other(
    column: str, position: int, chained: list[AuditEvent]
) -> None:
    edit(chained[position - 1], **{column: "f" * 64})

    assert whats() == [(position, "this row or its hash was changed after it was chained")]


def test_two_edits_are_two_problems(chained: list[AuditEvent]) -> None:
    edit(chained[1], reason="another")
    edit(chained[2], after={})
    edit(chained[4], actor_id="somebody else")

    assert [problem.position for problem in chain.verify().problems] == [2, 3, 5]


def test_a_deleted_row_is_missing(chained: list[AuditEvent]) -> None:
    chained[2].delete()

    assert whats() == [(4, "missing")]


def test_a_deleted_row_whose_gap_was_closed_is_found(chained: list[AuditEvent]) -> None:
    chained[2].delete()
    for position, row in enumerate(chained[3:], start=3):
        edit(row, position=position)

    assert [position for position, _ in whats()] == [3]


def test_swapped_rows_are_found(chained: list[AuditEvent]) -> None:
    edit(chained[1], position=None, hash="")
    edit(chained[3], position=2, hash=chained[1].hash)
    edit(chained[1], position=4, hash=chained[3].hash)

    assert [position for position, _ in whats()] == [2, 4]


def test_an_inserted_row_is_found(chained: list[AuditEvent]) -> None:
    forged = chain.next_hash("ab" * 32, tuple(getattr(chained[0], c) for c in chain.COVERED))
    AuditEventFactory(position=ROWS + 1, hash=forged)

    assert [position for position, _ in whats()] == [ROWS + 1]


def test_a_row_torn_out_of_the_chain_is_found_though_it_looks_unchained(
    chained: list[AuditEvent],
) -> None:
    edit(chained[-1], position=None)

    assert whats() == [(None, "torn out")]


def test_a_cut_off_end_is_found_by_a_pinned_head_only(chained: list[AuditEvent]) -> None:
    pinned = chain.head()
    chained[-1].delete()

    assert chain.verify().ok
    assert whats(pinned) == [(ROWS, "cut off")]


def test_a_chain_that_was_made_anew_is_found_by_a_pinned_head(chained: list[AuditEvent]) -> None:
    pinned = chain.Head(ROWS, chained[-1].hash)
    AuditEvent.objects.update(position=None, hash="", reason="rewritten")
    chain_audit()

    assert chain.verify().ok
    assert whats(pinned) == [(ROWS, "not the hash that was pinned")]


def test_without_the_key_the_chain_does_not_fit(
    chained: list[AuditEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.crypto.audit_chain_key", lambda: b"another key")

    assert not chain.verify().ok


def test_a_long_list_of_problems_is_cut_but_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    AuditEventFactory.create_batch(5)
    chain_audit()
    AuditEvent.objects.update(reason="rewritten")
    monkeypatch.setattr(chain, "PROBLEMS_NAMED", 2)

    report = chain.verify()

    assert (report.problem_count, len(report.problems)) == (5, 2)


# --- Two keepers at once --------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_two_callers_at_once_make_one_chain() -> None:
    AuditEventFactory.create_batch(300)

    def in_turn(operation: Callable[[], object]) -> None:
        for _ in range(10):
            operation()
        connection.close()

    threads = [
        Thread(target=in_turn, args=[lambda: chain_audit(limit=20)], daemon=True) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    report = chain.verify()
    assert (report.ok, report.rows, report.unchained) == (True, 300, 0)
