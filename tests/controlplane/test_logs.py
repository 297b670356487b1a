"""Every log line of a process is one JSON object, whoever wrote it and whatever went wrong."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from controlplane import logs


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What a handler with our format has written."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.formatter())
    root = logging.getLogger()
    root.addHandler(handler)
    yield stream
    root.removeHandler(handler)


def line(written: io.StringIO) -> dict[str, Any]:
    (only,) = written.getvalue().splitlines()
    content: dict[str, Any] = json.loads(only)
    return content


def test_an_event_has_name_level_time_and_its_fields(written: io.StringIO) -> None:
    structlog.get_logger("test.ours").warning("node.lost", node="node-1", seconds=3)
    told = line(written)
    assert told.pop("time")
    assert told == {
        "event": "node.lost",
        "level": "warning",
        "logger": "test.ours",
        "node": "node-1",
        "seconds": 3,
    }


def test_ids_bound_for_a_while_stand_on_each_line(written: io.StringIO) -> None:
    with structlog.contextvars.bound_contextvars(run="run_1", step="check"):
        structlog.get_logger("test.ours").warning("step.error")
    assert (line(written)["run"], line(written)["step"]) == ("run_1", "check")


def test_a_library_s_line_has_the_same_shape(written: io.StringIO) -> None:
    logging.getLogger("test.theirs").warning("%d things\nbroke", 3)
    assert line(written)["event"] == "3 things\nbroke"
    assert line(written)["level"] == "warning"


def test_a_traceback_is_a_field_of_its_line(written: io.StringIO) -> None:
    try:
        raise KeyError("missing")
    except KeyError:
        logging.getLogger("test.theirs").exception("it failed")
    assert "KeyError: 'missing'" in line(written)["exception"]


def test_a_field_that_is_not_json_is_written_as_its_text(written: io.StringIO) -> None:
    structlog.get_logger("test.ours").warning("odd", value={1, 2}.__class__)
    assert "set" in line(written)["value"]
