"""Past decisions under other rules: what would change is shown, and nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from controlplane.health import catalogue as catalogues
from controlplane.health.models import Failure, Signal
from controlplane.incidents.models import Incident, PlaybookRun
from tests.workers.world import World, drain

pytestmark = pytest.mark.django_db

XID_31 = "NVRM: Xid (PCI:0000:1b:00): 31, pid=7, name=python3, Ch 0000000d, intr 0. MMU Fault"
XID_63 = "NVRM: Xid (PCI:0000:1b:00): 63, pid=7, name=python3, Row Remapper: New row marked"
XID_79 = "NVRM: Xid (PCI:0000:1b:00): 79, pid=7, name=python3, GPU has fallen off the bus."


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a site says how it sees codes."""
    monkeypatch.setenv(catalogues.OVERLAY, str(tmp_path))
    yield tmp_path
    monkeypatch.undo()
    catalogues.catalogue.cache_clear()


def replayed(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    capsys.readouterr()
    call_command("replay", "--since", "1d", *options)
    return capsys.readouterr().out.splitlines()


def test_under_the_same_rules_nothing_would_change(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.kernel_says(world.spares[0], XID_63, XID_79, XID_79)
    drain()

    (last,) = replayed(capsys)

    assert last.startswith("2 decisions since")
    assert last.endswith("0 would change")


def test_what_another_rule_would_decide_is_shown_and_not_done(
    world: World, site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.kernel_says(world.spares[0], XID_63, XID_79)
    world.kernel_says(world.spares[1], XID_31)
    drain()
    before = [model.objects.count() for model in (Signal, Failure, Incident, PlaybookRun)]
    (site / "xid.csv").write_text("xid,immediate_action\n63,RESET_GPU\n79,CONTACT_SUPPORT\n")
    catalogues.catalogue.cache_clear()

    found = [json.loads(line) for line in replayed(capsys, "--json")]

    assert [(one["was"], one["now"]) for one in found] == [
        ("nothing", "reset_gpu, now"),
        ("reboot, now", "contact_vendor, now"),
    ]
    assert {one["rule"] for one in found} == {f"site overlay {site / 'xid.csv'}"}
    assert found[1]["failure"] == Failure.objects.get(code="xid-79").pk
    assert [m.objects.count() for m in (Signal, Failure, Incident, PlaybookRun)] == before


def test_one_node_and_all_decisions_can_be_asked_for(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.kernel_says(world.spares[0], XID_79)
    world.kernel_says(world.spares[1], XID_79)
    drain()

    lines = replayed(capsys, "--node", world.spares[1].name, "--all")

    assert len(lines) == 2
    assert f"{world.spares[1].name} xid-79: reboot, now, as it was (xid-catalogue)" in lines[0]


@pytest.mark.parametrize("since", ["yesterday", "2026-13-45T00:00", "7y"])
def test_a_time_that_is_none_is_refused_with_what_would_be(since: str) -> None:
    with pytest.raises(CommandError, match=f"--since {since}"):
        call_command("replay", "--since", since)
