"""The enrolment page: a join token shown once with what to paste, and who came by it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from configparser import ConfigParser
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane import crypto
from controlplane.accounts.choices import Role
from controlplane.accounts.models import AuditEvent, User
from controlplane.fleet import enrolment_views
from controlplane.fleet.models import Cluster, JoinToken
from node_agent.__main__ import EX_CONFIG
from node_agent.config import REPOSITORY, load_config
from tests.factories import ClusterFactory, GrantFactory, JoinTokenFactory, NodeFactory

if TYPE_CHECKING:
    from django.test.client import _MonkeyPatchedWSGIResponse as Page

pytestmark = pytest.mark.django_db


@pytest.fixture
def here() -> Cluster:
    return ClusterFactory(name="here")


@pytest.fixture
def admin(here: Cluster) -> Client:
    client = Client()
    client.force_login(GrantFactory(role=Role.ADMIN, cluster=here).user)
    return client


def create(client: Client, cluster: Cluster, uses: str = "8", ttl_s: str = "7200") -> Page:
    return client.post(
        reverse("join-token-create"), {"cluster": cluster.pk, "uses": uses, "ttl_s": ttl_s}
    )


def test_a_join_token_is_shown_once_and_kept_as_a_hash(admin: Client, here: Cluster) -> None:
    page = create(admin, here).content.decode()

    shown = re.search(r'data-testid="secret">([^<]+)<', page)
    assert shown
    token = JoinToken.objects.get()
    assert token.hash == crypto.token_hash(shown[1])
    assert (token.max_uses, token.cluster) == (8, here)
    assert shown[1] not in admin.get(reverse("enrolment")).content.decode()


@pytest.fixture
def pasted(admin: Client, here: Cluster, tmp_path: Path) -> Path:
    """The folder that stands for / once the commands were pasted."""
    page = create(admin, here).content.decode()
    block = re.search(r'data-testid="agent-commands">(.*?)</pre>', page, re.DOTALL)
    assert block
    shell = unescape(re.sub(r"<[^>]+>", "", block[1]))
    assert "systemctl" not in shell
    assert page.index("set <code>rack") < page.index("systemctl enable --now drydock-agent")
    for folder in ("/etc/", "/var/lib"):
        shell = shell.replace(folder, f"{tmp_path}{folder}")
    (tmp_path / "etc" / "systemd" / "system").mkdir(parents=True)
    subprocess.run(["bash", "-e", "-c", shell], check=True)
    return tmp_path


def test_the_commands_to_paste_make_a_file_that_the_agent_reads(pasted: Path) -> None:
    written = pasted / "etc" / "drydock" / "agent.toml"

    config = load_config(written)

    assert config.name == tomllib.loads(written.read_text())["name"]
    assert config.join_token_file is not None
    token = config.join_token_file.read_text()
    assert JoinToken.objects.get().hash == crypto.token_hash(token)
    assert config.join_token_file.stat().st_mode & 0o077 == 0


def test_it_names_a_program_or_the_node_would_refuse_every_start(pasted: Path) -> None:
    config = load_config(pasted / "etc" / "drydock" / "agent.toml")

    (argv,) = config.programs.values()

    assert (REPOSITORY / argv[1]).exists()


def test_the_agent_is_a_service_that_its_ranks_outlive(pasted: Path) -> None:
    unit = ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(pasted / "etc" / "systemd" / "system" / "drydock-agent.service")

    service = unit["Service"]
    config = f"{pasted}/etc/drydock/agent.toml"
    assert service["ExecStart"].endswith(f"/python -m node_agent --config {config}")
    assert service["ExecStart"].startswith(service["WorkingDirectory"])
    assert service["KillMode"] == "process"
    assert service["OOMPolicy"] == "continue"
    assert service["Restart"] == "always"
    assert service["RestartPreventExitStatus"] == str(EX_CONFIG)


@pytest.mark.parametrize(("uses", "ttl_s"), [("0", "7200"), ("x", "7200"), ("1", "7"), ("1", "")])
def test_a_token_that_cannot_be_is_refused_in_words(
    uses: str, ttl_s: str, admin: Client, here: Cluster
) -> None:
    assert create(admin, here, uses, ttl_s).status_code == 409
    assert not JoinToken.objects.exists()


def test_what_was_typed_stands_in_the_form_that_was_refused(admin: Client, here: Cluster) -> None:
    GrantFactory(user=User.objects.get(), role=Role.ADMIN, cluster=ClusterFactory(name="aaa"))

    page = create(admin, here, "0", "7200").content.decode()

    assert f'<option value="{here.pk}" selected>' in page
    assert 'name="uses" type="number" min="1" max="10000" value="0"' in page
    assert '<option value="7200" selected>' in page


def test_a_revoked_token_stays_listed_with_its_reason_on_record(
    admin: Client, here: Cluster
) -> None:
    token = JoinTokenFactory(cluster=here)

    answer = admin.post(reverse("join-token-revoke", args=[token.pk]), {"reason": "leaked"})

    assert answer.status_code == 302
    assert "Revoked" in admin.get(reverse("enrolment")).content.decode()
    assert AuditEvent.objects.get(verb="join_token.revoke").reason == "leaked"


def test_revoking_wants_a_reason(admin: Client, here: Cluster) -> None:
    token = JoinTokenFactory(cluster=here)

    assert admin.post(reverse("join-token-revoke", args=[token.pk])).status_code == 409
    assert JoinToken.objects.filter(revoked_at=None).exists()


def test_used_up_and_expired_tokens_are_marked(admin: Client, here: Cluster) -> None:
    JoinTokenFactory(cluster=here, uses=1, max_uses=1)
    JoinTokenFactory(cluster=here, expires_at=timezone.now())

    page = admin.get(reverse("enrolment")).content.decode()

    assert "Used up" in page
    assert "Expired" in page
    assert "Revoke…" not in page


def test_a_token_that_runs_out_is_told_although_nobody_did_anything(
    admin: Client, here: Cluster
) -> None:
    JoinTokenFactory(cluster=here)
    htmx = {"HX-Request": "true"}
    found = re.search(
        r'data-token="([^"]+)"', admin.get(reverse("enrolment"), headers=htmx).content.decode()
    )
    assert found
    still = admin.get(reverse("enrolment"), {"after": found[1]}, headers=htmx)

    JoinToken.objects.update(expires_at=timezone.now())

    told = admin.get(reverse("enrolment"), {"after": found[1]}, headers=htmx)
    assert still.status_code == 204
    assert "Expired" in told.content.decode()


def test_a_live_token_is_listed_however_many_dead_ones_are_newer(
    admin: Client, here: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolment_views, "TOKENS_SHOWN", 2)
    live = JoinTokenFactory(cluster=here)
    JoinTokenFactory(cluster=here, uses=1, max_uses=1)
    JoinTokenFactory(cluster=here, expires_at=timezone.now())
    JoinTokenFactory(cluster=here, revoked_at=timezone.now())

    page = admin.get(reverse("enrolment")).content.decode()

    assert reverse("join-token-revoke", args=[live.pk]) in page
    assert page.count('data-testid="join-token-row"') == 3
    assert "Only the newest 2 expired or" in page


def test_it_shows_the_newcomers_of_own_clusters_only(admin: Client, here: Cluster) -> None:
    NodeFactory(cluster=here, name="newcomer-here")
    NodeFactory(name="newcomer-elsewhere")

    page = admin.get(reverse("enrolment")).content.decode()

    assert "newcomer-here" in page
    assert "newcomer-elsewhere" not in page


def test_of_what_a_stolen_token_let_in_it_shows_whose_key_is_revoked(
    admin: Client, here: Cluster
) -> None:
    NodeFactory(cluster=here)
    before = admin.get(reverse("enrolment")).content.decode()
    NodeFactory(cluster=here, key_revoked_at=timezone.now())

    page = admin.get(reverse("enrolment")).content.decode()

    assert "Key revoked" not in before
    assert page.count("Key revoked") == 1


def test_empty_it_says_what_to_do(admin: Client) -> None:
    page = admin.get(reverse("enrolment")).content.decode()

    assert "Make one above" in page
    assert "No node has enrolled yet" in page
