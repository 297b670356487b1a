"""A replica dies in the middle of a step's sum, and of the survivors one has applied the step and
the other has not: with real processes, in which that surely happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from runtime.ledger.__main__ import main as check_ledger
from runtime.replica.record import RecordFile
from tests.runtime.replicas import PATIENCE_S, Fleet, until
from tests.runtime.test_modes import alone

MakeFleet = Callable[..., Fleet]
AT = 20  # the step that they disagree about
#: What of a step is the same on all who applied one sum.
OF_THE_SUM = ("epoch", "loss", "grad_norm", "samples", "coverage", "computed")


def next_epoch(fleet: Fleet) -> dict[str, Any]:
    """What the coordinator granted after what the survivors reported."""
    records = RecordFile(fleet.folder / "c", "job_t")
    until(lambda: records.read().epoch == 2, "the next epoch")
    return records.read().grant


def assert_the_sum_was_handed_over(
    fleet: Fleet, granted: dict[str, Any], late: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the one that was late, and to nobody else; nothing was made twice, nothing lost."""
    assert (granted["step"], granted["behind"]) == (AT, [late])
    fleet.train_on()
    fleet.stop()
    ours, theirs = (fleet.steps(replica) for replica in (0, 2))
    every = [*range(fleet.newest() + 1)]
    assert [[step["step"] for step in steps] for steps in (ours, theirs)] == [every, every]
    assert {tuple(step["coverage"]) for step in ours + theirs} == {(1,) * 12}
    # The one that died has its share in it, which nobody else had computed.
    assert [ours[AT][key] for key in OF_THE_SUM] == [theirs[AT][key] for key in OF_THE_SUM]
    assert (ours[AT]["epoch"], {*ours[AT]["computed"]}) == (1, {0, 1, 2})
    assert len(fleet.digests()) == 1
    assert check_ledger([str(fleet.folder / "state"), "--json"]) == 0
    epochs = json.loads(capsys.readouterr().out)["epochs"]
    assert {(one["lost"], one["duplicated"], one["unknown"]) for one in epochs} == {(0, 0, 0)}


def test_who_lacks_a_slice_of_the_sum_when_a_peer_dies_is_handed_it(
    make_fleet: MakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = make_fleet(3, forks=False, options={"mode": "reproducible"})
    fleet.start_coordinator()
    for replica, part_at in enumerate(["", f"deaf:{AT}", ""]):
        fleet.start_rank(replica, part_at=part_at)

    until(lambda: max(fleet.last(r)["step"] for r in (0, 2)) == AT, "one has applied the step")
    reached = {fleet.last(replica)["step"]: replica for replica in (0, 2)}
    fleet.kill(1)

    assert sorted(reached) == [AT - 1, AT]
    assert_the_sum_was_handed_over(fleet, next_epoch(fleet), reached[AT - 1], capsys)
    assert fleet.weights() == alone(make_fleet, fleet)


def test_who_lost_its_sum_when_a_peer_died_that_had_it_is_handed_it(
    make_fleet: MakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = make_fleet(3, options={"mode": "cover"})
    fleet.start_coordinator()
    fleet.start_rank(0)
    doomed = fleet.start_rank(1, kill_at=f"apply:{AT}:0")
    fleet.start_rank(2, part_at=f"late:{AT}")

    assert doomed.wait(PATIENCE_S) == -9
    del fleet.ranks[1]

    assert_the_sum_was_handed_over(fleet, next_epoch(fleet), 2, capsys)
