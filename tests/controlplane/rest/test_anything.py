"""Whatever is sent to any operation, the answer is one that the description foresees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from controlplane.accounts.choices import Role
from tests.controlplane.rest.world import World, token_of
from tests.factories import GrantFactory

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]

#: By random values only: the systematic ones are 7,600 requests, a hundred for each operation.
#: Run those too, now and then, with DRYDOCK_SYSTEMATIC=1.
WAYS = schemathesis.Config()
WAYS.projects.default.phases.coverage.enabled = bool(os.environ.get("DRYDOCK_SYSTEMATIC"))
schema = schemathesis.openapi.from_wsgi("/api/v1/openapi.json", get_wsgi_application(), config=WAYS)


@pytest.fixture
def one_connection() -> Iterator[None]:
    """Keep the test's transaction over many requests, as Django's own client does."""
    request_started.disconnect(close_old_connections)
    request_finished.disconnect(close_old_connections)
    yield
    request_started.connect(close_old_connections)
    request_finished.connect(close_old_connections)


@pytest.fixture
def token(world: World, one_connection: None) -> str:
    return token_of(GrantFactory(role=Role.ADMIN, cluster=world.cluster).user)


@schema.parametrize()
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    # The rows are made once for all examples of an operation; none of them needs them untouched.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_every_answer_is_foreseen(case: Any, world: World, token: str) -> None:
    name = case.path.removeprefix("/api/v1/").partition("/")[0]
    for parameter in case.path_parameters or {}:
        target = world.objects["nodes"] if parameter == "node" else world.objects[name]
        case.path_parameters[parameter] = str(target.pk)
    if isinstance(case.body, dict) and isinstance(case.body.get("cluster"), str):
        case.body["cluster"] = world.cluster.pk

    answer = case.call(headers={"Authorization": f"Bearer {token}"})

    case.validate_response(answer, checks=CHECKS)
