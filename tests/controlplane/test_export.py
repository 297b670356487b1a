"""Lists as files: whole, as filtered and sorted, only what one may see, safe to open in a sheet."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connection
from django.http.response import HttpResponseBase
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from controlplane.accounts.choices import Role
from controlplane.accounts.models import AuditEvent
from controlplane.export import BROKEN_OFF, DANGEROUS, MAX_EXPORTS, Column, as_file
from controlplane.fleet.models import Cluster
from controlplane.paging import CHUNK
from tests import factories as make
from tests.controlplane.dashboard.world import RAW, Fleet, client_of, one_fleet

#: Every list, by the name of its page and what its address says besides the format.
LISTS = [
    ("clusters", ""),
    ("cluster", ""),
    ("jobs", ""),
    ("incidents", ""),
    ("failures", ""),
    ("repairs", "list=nodes"),
    ("repairs", "list=cases"),
    ("repairs", "list=repairs"),
    ("automation-page", ""),
    ("audit", ""),
    ("users", ""),
    ("tokens", "of=all"),
    ("enrolment", ""),
]
TABLES = [pytest.param(*one, id=" ".join(filter(None, one))) for one in LISTS]


@pytest.fixture
def fleet(db: None) -> Fleet:
    return one_fleet()


@pytest.fixture
def root(fleet: Fleet) -> Client:
    """A superuser, in a fleet in which every list has a row."""
    _fill(fleet.cluster)
    make.ClusterFactory(name="beta")
    client = Client()
    client.force_login(make.UserFactory(username="root", is_superuser=True))
    return client


def _fill(cluster: Cluster, rows: int = 1) -> None:
    for _ in range(rows):
        node = make.NodeFactory(cluster=cluster, state="quarantined")
        gpu = make.GpuFactory(node=node, index=0)
        failure = make.FailureFactory(node=node, gpu=gpu)
        failure.signals.add(make.SignalFactory(node=node, gpu=gpu, raw=RAW))
        job = make.JobFactory(cluster=cluster)
        replica = make.ReplicaFactory(job=job)
        make.PlacementFactory(replica=replica, node=make.NodeFactory(cluster=cluster))
        incident = make.IncidentFactory(cluster=cluster, node=node, job=job)
        incident.failures.add(failure)
        make.PlaybookRunFactory(incident=incident, node=node, state="succeeded")
        make.RmaCaseFactory(gpu=gpu, cluster=cluster, incident=incident)
        make.RepairRecordFactory(gpu=gpu, node=node)
        make.AuditEventFactory(cluster=cluster)
        user = make.GrantFactory(cluster=cluster).user
        make.ApiTokenFactory(user=user, cluster=cluster)
        make.JoinTokenFactory(cluster=cluster)


def _address(fleet: Fleet, page: str, query: str, form: str) -> str:
    arguments = [fleet.cluster.pk] if page == "cluster" else []
    return f"{reverse(page, args=arguments)}?{query}&export={form}"


def _body(response: Any) -> bytes:
    return response.getvalue()  # type: ignore[no-any-return]


def _table(response: Any) -> list[dict[str, str]]:
    assert response.status_code == 200
    text = _body(response).decode()
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def _objects(response: Any) -> list[dict[str, Any]]:
    assert response.status_code == 200
    return json.loads(_body(response))  # type: ignore[no-any-return]


# --- Every list -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("page", "query"), TABLES)
def test_csv_and_json_hold_the_same_rows(root: Client, fleet: Fleet, page: str, query: str) -> None:
    table = _table(root.get(_address(fleet, page, query, "csv")))
    objects = _objects(root.get(_address(fleet, page, query, "json")))
    assert len(table) == len(objects) > 0
    assert [list(row) for row in table] == [list(row) for row in objects]
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", word) for word in table[0])
    assert len({row["id"] for row in table}) == len(table)


@pytest.mark.parametrize(("page", "query"), TABLES)
def test_its_page_links_to_both_files(root: Client, fleet: Fleet, page: str, query: str) -> None:
    arguments = [fleet.cluster.pk] if page == "cluster" else []
    address = reverse(page, args=arguments)
    html = root.get(f"{address}?cases=open&of=all").content.decode()
    links = [
        link.replace("&amp;", "&")
        for link in re.findall(r'href="([^"?]*\?[^"]*export=[^"]*)"', html)
    ]
    wanted = [link for link in links if query in link]
    assert {re.search(r"export=(\w+)", link)[1] for link in wanted} == {"csv", "json"}  # type: ignore[index]
    assert all(link.startswith(f"{address}?") for link in wanted)
    assert all(root.get(link).status_code == 200 for link in wanted)


@pytest.mark.parametrize(("page", "query"), TABLES)
def test_more_rows_cost_no_more_queries(root: Client, fleet: Fleet, page: str, query: str) -> None:
    address = _address(fleet, page, query, "json")
    root.get(address)  # whatever is remembered between requests
    with CaptureQueriesContext(connection) as few:
        _body(root.get(address))
    _fill(fleet.cluster, 6)
    with CaptureQueriesContext(connection) as many:
        _body(root.get(address))
    assert len(many) == len(few)


@pytest.mark.parametrize(("page", "query"), TABLES)
def test_nobody_gets_rows_that_they_may_not_see(
    root: Client, fleet: Fleet, page: str, query: str
) -> None:
    other = make.ClusterFactory(name="elsewhere")
    make.NodeFactory(cluster=other)
    stranger = client_of(Role.ADMIN, other)
    response = stranger.get(_address(fleet, page, query, "json"))
    assert response.status_code in (200, 404)
    hidden = [fleet.cluster.pk, fleet.node.pk, fleet.job.pk, fleet.incident.pk, "pretrain"]
    assert [word for word in hidden if word in _body(response).decode()] == []


@pytest.mark.parametrize(("page", "query"), TABLES)
def test_an_unknown_format_is_refused_by_name(
    root: Client, fleet: Fleet, page: str, query: str
) -> None:
    response = root.get(_address(fleet, page, query, "xml"))
    assert response.status_code == 400
    assert response.content.decode() == "export: there is no 'xml'. Use one of: csv, json.\n"


def test_the_file_of_jobs_says_how_many_nodes_one_is_on(root: Client, fleet: Fleet) -> None:
    make.JobFactory(cluster=fleet.cluster, name="wide", world_replicas=1, nodes_per_replica=4)
    jobs = _objects(root.get(_address(fleet, "jobs", "", "json")))
    assert {job["nodes_per_replica"] for job in jobs if job["name"] == "wide"} == {4}


def test_a_page_of_several_lists_must_be_told_which(root: Client) -> None:
    response = root.get("/repairs?export=csv&list=everything")
    assert response.status_code == 400
    assert response.content.startswith(b"list: there is no 'everything'. Use one of: nodes, cases")


@pytest.mark.parametrize(
    ("page", "field", "words"),
    [
        ("failures", "window", "1h, 1d, 7d, 30d"),
        ("failures", "fault_class", "hardware"),
        ("failures", "sort", "-code, -count, -seen, code, count, seen"),
        ("incidents", "state", "unresolved, resolved"),
        ("incidents", "severity", "critical"),
        ("incidents", "window", "1h, 1d, 7d, 30d"),
        ("incidents", "sort", "-began, -opened, began, opened"),
        ("jobs", "state", "active, ended"),
        ("jobs", "sort", "-name"),
        ("repairs", "cases", "open"),
        ("cluster", "state", "available"),
        ("cluster", "spare", "yes, no, ready"),
        ("cluster", "sort", "-name"),
        ("audit", "sort", "-id, id"),
        ("audit", "since", "a time such as 2026-11-21 03:00"),
        ("tokens", "of", "all"),
        ("automation-page", "sort", "-began, began"),
        ("users", "sort", "-name, name"),
    ],
)
def test_a_word_that_is_not_known_is_refused_by_name(
    root: Client, fleet: Fleet, page: str, field: str, words: str
) -> None:
    response = root.get(_address(fleet, page, f"list=cases&{field}=90d", "csv"))
    assert response.status_code == 400
    said = response.content.decode()
    assert said.startswith(f"{field}: there is no '90d'. Use one of: ")
    assert words in said


@pytest.mark.parametrize(("page", "word"), [("automation-page", "began"), ("users", "-name")])
def test_a_file_is_sorted_as_its_page_is(root: Client, fleet: Fleet, page: str, word: str) -> None:
    _fill(fleet.cluster)
    usual = _objects(root.get(_address(fleet, page, "", "json")))
    turned = _objects(root.get(_address(fleet, page, f"sort={word}", "json")))
    assert len(usual) > 1
    assert turned == usual[::-1]


def test_a_field_that_is_left_empty_narrows_nothing(root: Client) -> None:
    asked = root.get("/incidents/?state=&severity=&window=&sort=&export=json")
    assert _objects(asked) == _objects(root.get("/incidents/?export=json"))


def test_whoever_is_not_signed_in_gets_no_file(fleet: Fleet) -> None:
    assert Client().get("/failures?export=csv").status_code == 302


# --- What stands in them --------------------------------------------------------------------------


def test_a_failure_comes_with_its_raw_line(root: Client, fleet: Fleet) -> None:
    (row,) = _table(root.get(f"/failures?export=csv&node={fleet.node.pk}"))
    assert row["raw_lines"] == RAW
    assert (row["code"], row["count"]) == ("xid-79", "1")
    assert (row["node_name"], row["cluster_name"]) == ("alpha-01", "alpha")
    assert (row["gpu_serial"], row["incident_id"]) == (fleet.card.serial, fleet.incident.pk)
    assert (row["job_name"], row["rule"]) == ("pretrain", fleet.failure.rule)
    assert datetime.fromisoformat(row["first_seen_at"]) == fleet.failure.observed_at
    assert row["first_seen_at"].endswith("Z")


def test_of_a_failure_repeated_for_days_the_first_lines_are_told(
    root: Client, fleet: Fleet
) -> None:
    fleet.failure.signals.set(
        make.SignalFactory(
            node=fleet.node, raw=f"line {n}", observed_at=timezone.now() + timedelta(seconds=n)
        )
        for n in range(50)
    )
    (row,) = _objects(root.get(f"/failures?export=json&node={fleet.node.pk}"))
    assert row["raw_lines"].split("\n") == [f"line {n}" for n in range(5)]


def test_an_audit_row_tells_before_and_after_as_json(root: Client, fleet: Fleet) -> None:
    make.AuditEventFactory(
        cluster=fleet.cluster, verb="x.y", before={"a": [1, None]}, after={"a": 'é,"'}, reason="=1"
    )
    (row,) = _table(root.get("/audit?export=csv&verb=x.y"))
    assert json.loads(row["before"]) == {"a": [1, None]}
    assert json.loads(row["after"]) == {"a": 'é,"'}
    assert (row["reason"], row["position"], row["cluster_name"]) == ("'=1", "", "alpha")
    (told,) = _objects(root.get("/audit?export=json&verb=x.y"))
    assert (told["before"], told["reason"]) == ({"a": [1, None]}, "=1")


def test_the_file_is_filtered_and_sorted_as_the_page_is(root: Client, fleet: Fleet) -> None:
    make.NodeFactory.create_batch(120, cluster=fleet.cluster, spare=True)
    query = "spare=yes&sort=-name&cursor=never&after=looked-at"
    address = f"{reverse('cluster', args=[fleet.cluster.pk])}?{query}&export=json"
    names = [row["name"] for row in _objects(root.get(address))]
    assert names == sorted(names, reverse=True)
    assert len(names) == 121


def test_whoever_sees_one_cluster_is_not_led_to_it_instead(fleet: Fleet) -> None:
    (row,) = _objects(
        client_of(Role.VIEWER, fleet.cluster).get(f"{reverse('clusters')}?export=json")
    )
    assert (row["nodes"], row["gpus"], row["nodes_available"]) == (2, 8, 1)


def test_a_file_is_named_after_its_list_and_the_moment(root: Client, fleet: Fleet) -> None:
    response = root.get(_address(fleet, "cluster", "", "csv"))
    named = r'attachment; filename="drydock-nodes-alpha-\d{8}T\d{6}Z\.csv"'
    assert re.fullmatch(named, response["Content-Disposition"])
    assert response["Content-Type"].startswith("text/csv; charset=utf-8")
    assert response["Cache-Control"] == "no-store"


# --- Cells ----------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0")),
    st.sampled_from(DANGEROUS).flatmap(
        lambda first: st.text("=+-@'\t\r\n;,\"a").map(first.__add__)
    ),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=20))
def test_every_cell_reads_back_and_none_is_run(rows: list[tuple[Any, Any]]) -> None:
    request = RequestFactory().get("/?export=csv")
    columns = [Column[Any]("a", lambda row: row[0]), Column[Any]("b", lambda row: row[1])]
    text = _body(as_file(request, "x", columns, [rows])).decode()
    header, *lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    assert header == ["a", "b"]
    cells = [
        (cell, value)
        for line, row in zip(lines, rows, strict=True)
        for cell, value in zip(line, row, strict=True)
    ]
    assert [_unguarded(cell) for cell, value in cells if isinstance(value, str)] == [
        value for _, value in cells if isinstance(value, str)
    ]
    assert [float(cell) for cell, value in cells if not isinstance(value, str)] == [
        float(value) for _, value in cells if not isinstance(value, str)
    ]
    run = [c for c, v in cells if isinstance(v, str) and c.startswith(tuple("=+-@\t\r\n"))]
    assert run == []


def _unguarded(cell: str) -> str:
    return cell.removeprefix("'")


@pytest.mark.parametrize(
    ("value", "cell", "told"),
    [
        (-3, b"-3", b"-3"),
        ("-3", b'"\'-3"', b'"-3"'),
        (True, b'"true"', b"true"),
        (None, b'""', b"null"),
        (math.nan, b'""', b"null"),
        (2.5, b"2.5", b"2.5"),
        (
            datetime(2026, 11, 21, 3, 0, 0, 5000, tzinfo=UTC),
            b'"2026-11-21T03:00:00.005000Z"',
            b'"2026-11-21T03:00:00.005000Z"',
        ),
        ({"a": "b"}, b'"{""a"":""b""}"', b'{"a":"b"}'),
    ],
)
def test_a_value_in_each_format(value: Any, cell: bytes, told: bytes) -> None:
    columns = [Column[str]("word", lambda _: value)]
    files = [
        _body(as_file(RequestFactory().get(f"/?export={form}"), "x", columns, [["row"]]))
        for form in ("csv", "json")
    ]
    assert files == [b'"word"\r\n' + cell + b"\r\n", b'[\n{"word":' + told + b"}\n]\n"]


def test_a_list_of_nothing_is_a_file_of_nothing() -> None:
    columns = [Column[str]("word", lambda row: row)]
    files = [
        _body(as_file(RequestFactory().get(f"/?export={form}"), "x", columns, []))
        for form in ("csv", "json")
    ]
    assert files == [b'"word"\r\n', b"[]\n"]


# --- Long ones ------------------------------------------------------------------------------------

LONG = 2 * CHUNK + 500


def _many_events() -> None:
    AuditEvent.objects.bulk_create(
        AuditEvent(
            actor_kind="system", actor_id="drydock", verb="a.b", object_type="x", object_id=n
        )
        for n in range(LONG)
    )


@pytest.mark.django_db
def test_a_long_list_comes_whole_and_in_order(root: Client) -> None:
    _many_events()
    response = root.get("/audit?export=json&verb=a.b")
    assert response.streaming
    assert [int(row["object_id"]) for row in _objects(response)] == list(range(LONG))[::-1]


@pytest.mark.django_db
def test_each_chunk_costs_the_same_queries(root: Client) -> None:
    _many_events()
    with CaptureQueriesContext(connection) as queries:
        _body(root.get("/audit?export=json&verb=a.b"))
    events = [one for one in queries.captured_queries if 'FROM "accounts_auditevent"' in one["sql"]]
    assert len([one for one in events if "ORDER BY" in one["sql"]]) == math.ceil(LONG / CHUNK)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("form", ["csv", "json"])
def test_a_file_that_breaks_off_cannot_be_taken_for_whole(form: str) -> None:
    _many_events()
    client = Client()
    client.force_login(make.UserFactory(is_superuser=True))
    received = []
    try:
        pieces = iter(client.get(f"/audit?export={form}"))
        received.append(next(pieces))
        _cut_the_connection()
        with pytest.raises(DatabaseError):
            received.extend(pieces)
    finally:
        connection.close()
    text = b"".join(received).decode()
    assert len(text.splitlines()) < LONG
    assert _whole(form, text) is False


def _cut_the_connection() -> None:
    other: Any = connection.copy()
    with connection.cursor() as cursor, other.cursor() as another:
        cursor.execute("SELECT pg_backend_pid()")
        another.execute("SELECT pg_terminate_backend(%s, 10000)", cursor.fetchone())
    other.close()


def _whole(form: str, text: str) -> bool:
    """Whether a program that reads what it got takes it for a file of its kind."""
    try:
        return _READS[form](text)
    except json.JSONDecodeError:
        return False


def _even(text: str) -> bool:
    rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    assert rows[-1][0] == BROKEN_OFF
    return len({len(row) for row in rows}) == 1


_READS: dict[str, Callable[[str], bool]] = {
    "csv": _even,
    "json": lambda text: bool(json.loads(text)),
}


def _slow(pages: int) -> HttpResponseBase:
    def read() -> Iterator[list[str]]:
        for _ in range(pages):
            yield ["row"]

    columns = [Column[str]("word", lambda row: row)]
    return as_file(RequestFactory().get("/?export=csv"), "x", columns, read())


@pytest.fixture
def request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the middleware gives to every request."""
    monkeypatch.setattr("django.http.HttpRequest.request_id", "req_1", raising=False)


@pytest.mark.usefixtures("request_id")
def test_slow_readers_leave_threads_to_the_pages() -> None:
    with ExitStack() as readers:
        for _ in range(MAX_EXPORTS):
            readers.callback(_slow(3).close)
        late = _slow(3)
        assert (late.status_code, late["Retry-After"]) == (503, "30")
        assert _slow(1).status_code == 200  # a short list holds nothing
    with ExitStack() as readers:
        now = _slow(3)
        readers.callback(now.close)
        assert now.status_code == 200
