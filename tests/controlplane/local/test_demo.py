"""What the control plane is told before the fleet boots; told twice, nothing changes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from controlplane.accounts.models import User
from controlplane.fleet.models import Cluster, JoinToken
from controlplane.local import demo, fleet

pytestmark = pytest.mark.django_db


def test_the_first_user_can_log_in_with_the_password_in_the_home(home: Path) -> None:
    demo.ensure_admin(home)
    demo.ensure_admin(home)
    password = home / "admin-password"
    assert User.objects.get(username=demo.ADMIN).check_password(password.read_text())
    assert stat.S_IMODE(password.stat().st_mode) == 0o600


def test_each_cluster_gets_a_token_for_exactly_its_nodes(home: Path) -> None:
    demo.ensure_clusters(fleet.plan(home, 8))
    uses = {token.cluster.name: token.max_uses for token in JoinToken.objects.all()}
    assert uses == {"harbor": 6, "quay": 2}
    tokens = {node.join_token.read_text() for node in fleet.plan(home, 8)}
    assert len(tokens) == 2


def test_a_larger_fleet_later_keeps_its_clusters(home: Path) -> None:
    demo.ensure_clusters(fleet.plan(home, 8))
    demo.ensure_clusters(fleet.plan(home, 12))
    assert Cluster.objects.count() == 2
