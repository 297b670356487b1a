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

from runtime.replica.observing import PHASES
from runtime.torture.network import impossible

ROOT = Path(__file__).resolve().parents[2]
PHASES_OF_TRAINING = ",".join(PHASES)

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


def assert_every_claim_held(report: dict[str, Any], mode: str = "reproducible") -> None:
    assert report["problems"] == []
    assert report["ok"]
    assert report["digest_equal"] is (True if mode == "reproducible" else None)
    assert report["ledger"] == {"lost": 0, "duplicated": 0, "dropped": 0}
    assert report["survivor_deaths"] == 0


def assert_each_fell_where_it_was_aimed(report: dict[str, Any], pairs: int) -> None:
    """So many of the kinds by the phases, and no blow that was aimed at a phase of the training
    fell in another."""
    failures = report["failures"]
    assert len({(f["kind"], f["phase"]) for f in failures}) == len(failures) == pairs
    aimed = [f for f in failures if f["phase"] in PHASES]
    assert [f["landed"] for f in aimed] == [[f["phase"]] for f in aimed]


@pytest.mark.parametrize(
    ("mode", "replicas"), [("reproducible", 3), ("reproducible", 4), ("cover", 4)]
)
def test_every_kind_of_death_in_every_phase(mode: str, replicas: int) -> None:
    report = torture(
        "--each", "--kinds", "kill,stop,cut,blackhole",
        "--phases", f"{PHASES_OF_TRAINING},donor,away",
        "--mode", mode, "--replicas", str(replicas), "--seed", "6",
    )  # fmt: skip

    assert_every_claim_held(report, mode)
    assert_each_fell_where_it_was_aimed(report, pairs=4 * 9)


def test_replicas_sent_away_at_every_moment() -> None:
    report = torture("--kinds", "leave,kill", "--faults", "20", "--seed", "9", "--at-once", "3")

    assert_every_claim_held(report)


@pytest.mark.skipif(bool(impossible()), reason=f"no network of its own here: {impossible()}")
@pytest.mark.parametrize(("replicas", "phases"), [(3, 6), (4, 7)])  # two are left to regroup
def test_parted_replicas_in_every_phase(replicas: int, phases: int) -> None:
    report = torture(
        "--each", "--kinds", "part", "--phases", PHASES_OF_TRAINING,
        "--replicas", str(replicas), "--seed", "8",
    )  # fmt: skip

    assert_every_claim_held(report)
    assert_each_fell_where_it_was_aimed(report, pairs=phases)


@pytest.mark.parametrize("mode", ["reproducible", "cover"])
def test_twenty_kills_and_rejoins(mode: str) -> None:
    report = torture(
        "--faults", "20", "--kinds", "kill", "--seed", "20", "--mode", mode, "--at-once", "3"
    )

    assert report["ok"]
    assert report["survivor_deaths"] == 0
    assert report["ledger"] == {"lost": 0, "duplicated": 0, "dropped": 0}
    assert len(report["failures"]) == 20


@pytest.mark.parametrize("replicas", [3, 4])
def test_coordinators_that_die_or_freeze_in_any_phase_cost_nobody(replicas: int) -> None:
    report = torture(
        "--each", "--kinds", "coordinator,frozen,slow", "--phases", PHASES_OF_TRAINING,
        "--replicas", str(replicas), "--seed", "7",
    )  # fmt: skip

    assert_every_claim_held(report)
    assert_each_fell_where_it_was_aimed(report, pairs=3 * len(PHASES))
