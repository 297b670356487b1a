"""Every kind of death in every phase, and a long row of kills: minutes each, so not in `make test`.

`make soak` runs them, before a release and after a change to how replicas come and go.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.torture.network import impossible

ROOT = Path(__file__).resolve().parents[2]
PHASES = "forward,backward,reduce,apply,optimizer,regroup,sync"

pytestmark = pytest.mark.soak


def torture(*words: str) -> dict[str, Any]:
    """The report of a run in which a shard takes as long as on an accelerator."""
    done = subprocess.run(
        [sys.executable, "-m", "runtime.torture", "--json", "--pace", "0.015", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=False,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def assert_every_claim_held(report: dict[str, Any]) -> None:
    assert report["problems"] == []
    assert report["ok"]
    assert report["digest_equal"] is True
    assert report["ledger"] == {"lost": 0, "duplicated": 0, "dropped": 0}
    assert report["survivor_deaths"] == 0


@pytest.mark.parametrize("replicas", [3, 4])
def test_every_kind_of_death_in_every_phase(replicas: int) -> None:
    report = torture(
        "--each", "--kinds", "kill,stop,cut,blackhole", "--phases", f"{PHASES},donor,away",
        "--replicas", str(replicas), "--seed", "6",
    )  # fmt: skip

    assert_every_claim_held(report)
    assert len({(f["kind"], f["phase"]) for f in report["failures"]}) == 36


def test_replicas_sent_away_at_every_moment() -> None:
    report = torture("--kinds", "leave,kill", "--faults", "20", "--seed", "9", "--at-once", "3")

    assert_every_claim_held(report)


@pytest.mark.skipif(bool(impossible()), reason=f"no network of its own here: {impossible()}")
@pytest.mark.parametrize(("replicas", "phases"), [(3, 6), (4, 7)])  # two are left to regroup
def test_parted_replicas_in_every_phase(replicas: int, phases: int) -> None:
    report = torture(
        "--each", "--kinds", "part", "--phases", PHASES,
        "--replicas", str(replicas), "--seed", "8",
    )  # fmt: skip

    assert_every_claim_held(report)
    assert len(report["failures"]) == phases


@pytest.mark.parametrize("mode", ["reproducible", "cover"])
def test_twenty_kills_and_rejoins(mode: str) -> None:
    report = torture(
        "--faults", "20", "--kinds", "kill", "--seed", "20", "--mode", mode, "--at-once", "3"
    )

    assert report["ok"]
    assert report["survivor_deaths"] == 0
    assert report["ledger"] == {"lost": 0, "duplicated": 0, "dropped": 0}
    assert len(report["failures"]) == 20


def test_coordinators_that_die_or_freeze_in_any_phase_cost_nobody() -> None:
    report = torture(
        "--each", "--kinds", "coordinator,frozen,slow", "--phases", PHASES, "--seed", "7"
    )

    assert_every_claim_held(report)
