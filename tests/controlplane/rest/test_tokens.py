"""Programs that act by a token: never beyond its scope, its owner, its cluster, its life."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.accounts import actions
from controlplane.accounts.choices import Role
from controlplane.accounts.models import SYSTEM, ApiToken, AuditEvent
from tests.controlplane.rest.world import Caller, World, token_of
from tests.factories import ClusterFactory


def ask(text: str, path: str, body: dict[str, Any] | None = None) -> Any:
    client = Client(headers={"Authorization": f"Bearer {text}"})
    return client.get(path) if body is None else client.post(path, body, "application/json")


def test_a_token_reads_and_writes_without_a_session(world: World, operator: Caller) -> None:
    text = token_of(operator.user)

    held = ask(text, f"{world.path('nodes')}/hold", {"reason": "x"})

    assert ask(text, world.path("nodes")).json()["hold_reason"] == "x"
    event = AuditEvent.objects.get(request_id=held["X-Request-Id"])
    assert event.actor_id == str(operator.user.pk)


def test_a_tokens_scope_caps_what_its_owner_holds(world: World, operator: Caller) -> None:
    text = token_of(operator.user, Role.VIEWER)

    assert ask(text, world.path("nodes")).status_code == 200
    assert ask(text, f"{world.path('nodes')}/hold", {"reason": "x"}).status_code == 403


def test_a_tokens_cluster_hides_all_others(world: World, operator: Caller) -> None:
    elsewhere = ClusterFactory()
    _, text = actions.create_token(
        SYSTEM, operator.user, name="t", scope=Role.ADMIN, cluster_id=elsewhere.pk, ttl_s=60
    )

    assert ask(text, world.path("nodes")).status_code == 404


def _revoke(token: ApiToken) -> None:
    actions.revoke_token(SYSTEM, token.pk, "lost")


def _expire(token: ApiToken) -> None:
    ApiToken.objects.filter(pk=token.pk).update(expires_at=timezone.now())


def _switch_off(token: ApiToken) -> None:
    actions.set_user_active(SYSTEM, token.user, False, "left")


@pytest.mark.parametrize("end", [_revoke, _expire, _switch_off])
def test_a_token_that_is_over_is_not_accepted(end: Any, world: World, viewer: Caller) -> None:
    text = token_of(viewer.user)
    end(ApiToken.objects.select_related("user").get())

    answer = ask(text, world.path("nodes"))

    assert (answer.status_code, answer.json()["code"]) == (401, "invalid_token")
    assert "WWW-Authenticate" in answer


@pytest.mark.parametrize(
    "text", ["", "ddt_", "ddt_x", "ddt_x_y", "ddj_abc", "ddt_ü_y", f"ddt_{'x' * 40}_y"]
)
def test_what_is_no_token_is_not_accepted(text: str, world: World) -> None:
    assert ask(text, world.path("nodes")).status_code == 401


def test_a_wrong_secret_under_a_right_prefix_is_not_accepted(world: World, viewer: Caller) -> None:
    text = token_of(viewer.user)

    assert (
        ask(text[:-1] + ("A" if text[-1] != "A" else "B"), world.path("nodes")).status_code == 401
    )


def test_the_last_use_is_noted_once_a_minute(world: World, viewer: Caller) -> None:
    text = token_of(viewer.user)
    ask(text, world.path("nodes"))
    first = ApiToken.objects.get().last_used_at
    ask(text, world.path("nodes"))
    assert ApiToken.objects.get().last_used_at == first
    earlier = timezone.now() - timedelta(minutes=2)
    ApiToken.objects.update(last_used_at=earlier)

    ask(text, world.path("nodes"))

    assert ApiToken.objects.filter(last_used_at__gt=earlier + timedelta(minutes=1)).exists()
