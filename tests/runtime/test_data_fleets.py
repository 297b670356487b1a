"""Each sample is trained once in each epoch, whoever dies and whoever loads: by the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from runtime.ledger.__main__ import main
from tests.runtime.replicas import PATIENCE_S, Fleet, until

MakeFleet = Callable[..., Fleet]
Capture = pytest.CaptureFixture[str]

#: A step takes 24: it ends within an epoch, mostly.
UNEVEN = 130


def killed_and_rejoined(make_fleet: MakeFleet, **options: Any) -> Fleet:
    fleet = make_fleet(3, options={"samples": UNEVEN, **options})
    fleet.start()
    fleet.wait_for_members([0, 1, 2])
    fleet.train_on()
    fleet.kill(1)
    fleet.wait_for_members([0, 2])
    fleet.train_on()
    fleet.start_rank(1)
    fleet.wait_for_members([0, 1, 2])
    fleet.train_on()
    fleet.stop()
    return fleet


def checked(fleet: Fleet, capsys: Capture) -> dict[str, Any]:
    """What the command finds in the fleet's last checkpoint."""
    assert main([str(fleet.folder / "state"), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["step_to"] == fleet.newest()
    assert len(found["epochs"]) > 5
    assert {(e["lost"], e["duplicated"], e["unknown"]) for e in found["epochs"]} == {(0, 0, 0)}
    assert {who for e in found["epochs"] for who in e["computed"]} == {"0", "1", "2"}
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"data": "dataset", "workers": 2},
        {"data": "stateful", "workers": 2},
        {"data": "loader", "workers": 0, "drop_last": True},
    ],
    ids=["dataset-2", "stateful-2", "loader-0-drop-last"],
)
def test_covering_survivors_train_each_sample_once(
    make_fleet: MakeFleet, capsys: Capture, options: dict[str, Any]
) -> None:
    fleet = killed_and_rejoined(make_fleet, **options)

    found = checked(fleet, capsys)

    each = UNEVEN - UNEVEN % 24 * options.get("drop_last", False)
    assert {e["trained_once"] for e in found["epochs"][:-1]} == {each}
    assert {e["left_out"] for e in found["epochs"]} == {UNEVEN - each}
    assert len(fleet.digests()) == 1


def test_what_is_dropped_is_listed(make_fleet: MakeFleet, capsys: Capture) -> None:
    fleet = killed_and_rejoined(make_fleet, mode="drop", data="dataset", workers=2)

    found = checked(fleet, capsys)

    assert {e["trained_once"] + e["dropped"] for e in found["epochs"][:-1]} == {UNEVEN}
    assert sum(e["dropped"] for e in found["epochs"]) > 0


def test_a_reproducible_job_ends_the_same_whoever_died_and_whoever_loaded(
    make_fleet: MakeFleet, capsys: Capture
) -> None:
    disturbed = killed_and_rejoined(make_fleet, mode="reproducible", data="loader", workers=2)
    alone = make_fleet(
        1,
        options={**disturbed.options, "steps": disturbed.newest() + 1, "pace_s": 0, "workers": 0},
    )
    alone.start()
    assert alone.ranks[0].wait(PATIENCE_S) == 0

    checked(disturbed, capsys)

    assert disturbed.weights() == alone.weights()


def test_survivors_of_a_job_with_streams_read_on_where_the_dead_one_was(
    make_fleet: MakeFleet, capsys: Capture
) -> None:
    disturbed = killed_and_rejoined(make_fleet, mode="reproducible", data="streams")
    alone = make_fleet(
        1, options={**disturbed.options, "steps": disturbed.newest() + 1, "pace_s": 0}
    )
    alone.start()
    assert alone.ranks[0].wait(PATIENCE_S) == 0

    assert main([str(disturbed.folder / "state"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["epochs"]
    assert found["trained_once"] == 24 * (disturbed.newest() + 1)
    assert found["computed"].keys() == {"0", "1", "2"}
    assert disturbed.weights() == alone.weights()


def test_a_job_that_died_as_a_whole_goes_on_in_the_middle_of_an_epoch(
    make_fleet: MakeFleet, capsys: Capture
) -> None:
    options = {"samples": UNEVEN, "data": "dataset", "workers": 2, "checkpoint_s": 0.05}
    fleet = make_fleet(2, options=options)
    fleet.start()
    checkpoints = fleet.folder / "state" / "checkpoints"
    until(lambda: len(list(checkpoints.glob("step-*"))) >= 2, "two checkpoints")
    fleet.wait_for_step(12)

    reached = fleet.newest()
    fleet.kill(0, 1)
    fleet.tell_ended()
    fleet.start_rank(0)
    fleet.start_rank(1)
    fleet.wait_for_step(reached + 40)
    fleet.stop()

    assert main([str(fleet.folder / "state"), "--json"]) == 0
    epochs = json.loads(capsys.readouterr().out)["epochs"]
    assert {e["trained_once"] for e in epochs[:-1]} == {UNEVEN}
    assert len(fleet.digests()) == 1
