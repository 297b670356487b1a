"""Whatever is sent, the fault is the sender's: no bytes make ingest answer 5xx."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.accounts.models import SYSTEM
from controlplane.crypto import job_token
from controlplane.fleet.models import Cluster
from controlplane.jobs import actions as jobs
from controlplane.jobs.models import Job

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
numbers = st.integers(-2, 2**64) | st.sampled_from([2**31 - 1, 2**31, 2**63 - 1]) | st.floats()


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


@few
@given(message=st.data())
def test_almost_valid_runtime_messages(door: Door, job: Job, message: st.DataObject) -> None:
    names = [
        *("step", "steps", "epoch", "at", "step_s", "max_gap_s", "samples", "tokens"),
        *("loss", "grad_norm", "step_from", "step_to", "replica", "gap_s", "started_at"),
        *("committed_at", "bytes", "stall_s", "seconds", "pid"),
    ]
    kinds = {
        "hello": {"pid", "at"},
        "progress": {*names[:10], "replicas"},
        "ledger": {"step_from", "step_to", "epoch", "samples"},
        "peer_lost": {"epoch", "replica", "placement", "step", "at", "how"},
        "checkpoint": {
            *("step", "tier", "path", "bytes", "digest", "stall_s", "seconds", "at"),
        },
        "trouble": {"kind", "text", "at"},
        "stopped": {"step", "reason", "at"},
    }
    kind = message.draw(st.sampled_from(sorted(kinds)))
    fixed = {"replicas": [0], "how": "reset", "tier": "local"}
    fields = {
        name: fixed.get(name, message.draw(numbers if name in names else text))
        for name in sorted(kinds[kind])
    }
    batch = {
        "job": job.pk,
        "replica": 0,
        "rank": 0,
        "placement": message.draw(text),
        "sent_at": 1.0,
        "messages": [{"type": kind, **fields}],
    }
    bearer = {"Authorization": f"Bearer {job_token(job.pk)}"}

    answer = door.request("POST", "/v1/runtime", json.dumps(batch).encode(), bearer)

    assert answer.status < 500
