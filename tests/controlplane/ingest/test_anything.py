"""Whatever is sent, the fault is the sender's: no bytes make ingest answer 5xx."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.accounts.models import SYSTEM
from controlplane.crypto import job_token
from controlplane.fleet.models import Cluster
from controlplane.jobs import actions as jobs
from controlplane.jobs.models import Job
from runtime import client

from .door import Door, NodeClient

few = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

SIGNED_PATHS = ["/v1/beat", "/v1/report", "/v1/events", "/v1/commands/result"]
text = st.text(st.characters(exclude_categories=[]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
edges = st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**63 - 1])
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-1, 1000) | edges,
    "float": st.floats(0, 1e11) | st.floats(),
    "str": text,
    "list[int]": st.lists(st.integers(0, 3) | edges, max_size=3),
    "list[list[int]]": st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=3),
}
BY_NAME: dict[str, st.SearchStrategy[Any]] = {"how": st.just("reset"), "tier": st.just("local")}
numbers = st.integers(-2, 2**64) | st.sampled_from([2**31 - 1, 2**31, 2**63 - 1]) | st.floats()
clocks = st.sampled_from([0.0, 1.0, time.time(), 1e11])


@pytest.fixture
def job(cluster: Cluster) -> Job:
    return jobs.register(SYSTEM, cluster_id=cluster.pk, name="t", program="p", world_replicas=1)


@few
@given(path=st.sampled_from(SIGNED_PATHS), body=st.binary(max_size=200))
def test_arbitrary_bytes(node: NodeClient, path: str, body: bytes) -> None:
    assert node.post_bytes(path, body).status < 500


@few
@given(path=st.sampled_from(SIGNED_PATHS), value=values)
def test_arbitrary_json(node: NodeClient, path: str, value: Any) -> None:
    assert node.post_bytes(path, json.dumps(value).encode()).status < 500


@few
@given(
    changes=st.fixed_dictionaries(
        {},
        optional={
            "kind": st.sampled_from(["boot", "process_exited", "kernel_line"]),
            "raw": text,
            "source": text,
            "gpu_uuid": text,
            "at": numbers,
            "data": st.dictionaries(
                st.sampled_from(["job", "replica", "placement"]) | text, values, max_size=4
            ),
        },
    )
)
def test_almost_valid_events(node: NodeClient, changes: dict[str, Any]) -> None:
    body = json.dumps({"events": [node.event(**changes)]}).encode()

    assert node.post_bytes("/v1/events", body).status < 500


@few
@given(index=numbers, memory=numbers, uuid=text, model=text, cpus=numbers)
def test_almost_valid_reports(
    node: NodeClient, index: Any, memory: Any, uuid: str, model: str, cpus: Any
) -> None:
    report = node.report()
    report["inventory"]["cpus"] = cpus
    report["inventory"]["gpus"][0] |= {
        "index": index,
        "memory_bytes": memory,
        "uuid": uuid,
        "model": model,
    }

    assert node.post_bytes("/v1/report", json.dumps(report).encode()).status < 500


@settings(few, max_examples=150)
@given(data=st.data())
def test_almost_valid_runtime_messages(door: Door, job: Job, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(client.MESSAGES))
    fields = {
        field.name: data.draw(BY_NAME.get(field.name, BY_TYPE.get(str(field.type), text)))
        for field in dataclasses.fields(kind)
    }
    batch = {
        "job": job.pk,
        "replica": 0,
        "rank": 0,
        "placement": "",
        "sent_at": data.draw(clocks),
        "messages": [{"type": kind.type, **fields}],
    }
    bearer = {"Authorization": f"Bearer {job_token(job.pk)}"}

    answer = door.request("POST", "/v1/runtime", json.dumps(batch).encode(), bearer)

    assert answer.status < 500, answer.json
