"""What becomes of a dead replica's shards in each mode, and what must stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.runtime.replicas import PATIENCE_S, Fleet, until

MakeFleet = Callable[..., Fleet]
RICH = {"rich": True}
STEP_PHASES = ("forward", "backward", "reduce", "apply", "optimizer")


def alone(make_fleet: MakeFleet, like: Fleet, world: int = 1) -> set[str]:
    """The digest of `world` replicas that nobody disturbs, after as many steps."""
    options = {**like.options, "steps": like.newest() + 1, "pace_s": 0}
    undisturbed = make_fleet(world, divided=like.divided, options=options)
    undisturbed.start()
    assert [rank.wait(PATIENCE_S) for rank in undisturbed.ranks.values()] == [0] * world
    return undisturbed.weights()


def covered(steps: list[dict[str, Any]]) -> set[tuple[int, ...]]:
    return {tuple(step["coverage"]) for step in steps}


@pytest.mark.parametrize("options", [{}, RICH], ids=["plain", "rich"])
def test_a_reproducible_job_of_four_three_four_ends_as_one_that_was_left_alone(
    make_fleet: MakeFleet, options: dict[str, Any]
) -> None:
    fleet = make_fleet(4, options={"mode": "reproducible", **options})
    fleet.start()
    fleet.wait_for_step(20)

    fleet.kill(2)
    fleet.wait_for_members([0, 1, 3])
    fleet.train_on()
    fleet.start_rank(2)
    fleet.wait_for_members([0, 1, 2, 3])
    fleet.train_on()
    fleet.stop()

    assert covered(fleet.steps(0)) == {(1,) * 12}
    assert fleet.weights() == alone(make_fleet, fleet, world=4) == alone(make_fleet, fleet)


@pytest.mark.soak
def test_a_job_that_resumes_with_two_and_with_four_replicas_ends_as_one_left_alone(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(4, options={"mode": "reproducible"})
    resume_with_two_and_with_four(fleet)

    assert [step["step"] for step in fleet.steps(0)] == [*range(60)]
    assert alone(make_fleet, fleet) == fleet.weights()


@pytest.mark.soak
def test_a_covering_job_that_resumes_with_two_and_with_four_replicas_stays_close(
    make_fleet: MakeFleet,
) -> None:
    """Not more: two replicas add up the shards in another order than four."""
    fleet = make_fleet(4, options={"mode": "cover"})
    resume_with_two_and_with_four(fleet)
    undisturbed = make_fleet(4, options={"mode": "cover", "steps": 60, "pace_s": 0})
    undisturbed.start()
    assert [rank.wait(PATIENCE_S) for rank in undisturbed.ranks.values()] == [0] * 4

    for key in ("loss", "grad_norm"):
        expected = [step[key] for step in undisturbed.steps(0)]
        assert [step[key] for step in fleet.steps(0)] == pytest.approx(expected, rel=1e-3)


def resume_with_two_and_with_four(fleet: Fleet) -> None:
    """Twenty steps of four replicas, of two, and of four."""
    fleet.start_coordinator()
    for world, steps in ((4, 20), (2, 40), (4, 60)):
        fleet.world, fleet.options["steps"] = world, steps
        for replica in range(world):
            fleet.start_rank(replica)
        ended = [fleet.ranks[replica].wait(PATIENCE_S) for replica in range(world)]
        assert ended == [0] * world


def test_covering_survivors_keep_scaler_schedules_averages_and_several_optimizers(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(3, options=RICH)
    fleet.start()
    fleet.wait_for_step(20)

    fleet.kill(1)
    fleet.wait_for_members([0, 2])
    fleet.start_rank(1)
    fleet.wait_for_members([0, 1, 2])
    fleet.train_on()
    fleet.stop()

    assert covered(fleet.steps(0)) == {(1,) * 12}
    assert len(fleet.digests()) == 1


def test_dropped_shards_are_listed_and_come_back_with_their_replica(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(4, options={"mode": "drop"})
    fleet.start()
    fleet.wait_for_step(20)

    fleet.kill(1)
    fleet.wait_for_members([0, 2, 3])
    fleet.train_on()
    fleet.start_rank(1)
    fleet.wait_for_members([0, 1, 2, 3])
    fleet.train_on()
    fleet.stop()

    without = (1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1)
    steps = fleet.steps(0)
    assert [s["step"] for s in steps] == list(range(len(steps)))
    assert covered([s for s in steps if s["members"] == [0, 2, 3]][1:]) == {without}
    assert covered([s for s in steps if s["members"] == [0, 1, 2, 3]]) == {(1,) * 12}
    assert {s["samples"] for s in steps if tuple(s["coverage"]) == without} == {18}
    assert len(fleet.digests()) == 1


def die_in_each_phase(fleet: Fleet) -> None:
    fleet.start()
    fleet.wait_for_step(5)
    fleet.kill(1)

    for phase in STEP_PHASES:
        doomed = fleet.start_rank(1, kill_at=phase)
        assert doomed.wait(PATIENCE_S) == -9
        fleet.wait_for_members([0, 2])
    fleet.start_rank(1)
    fleet.wait_for_members([0, 1, 2])
    fleet.train_on()
    fleet.stop()


def test_a_death_in_any_phase_of_a_step_changes_nothing(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(3, options={"mode": "reproducible"})
    die_in_each_phase(fleet)

    assert covered(fleet.steps(0)) == {(1,) * 12}
    assert fleet.weights() == alone(make_fleet, fleet)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("mode", "left_out"),
    [("cover", set()), ("drop", {(1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1)})],
)
def test_a_death_in_any_phase_loses_no_more_than_its_mode_gives_up(
    make_fleet: MakeFleet, mode: str, left_out: set[tuple[int, ...]]
) -> None:
    fleet = make_fleet(3, options={"mode": mode, **RICH})
    die_in_each_phase(fleet)

    steps = fleet.steps(0)
    assert [step["step"] for step in steps] == [*range(len(steps))]
    assert covered(steps) == {(1,) * 12, *left_out}
    assert len(fleet.digests()) == 1


def test_deaths_during_the_recovery_from_another_down_to_one(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(4, options={"mode": "reproducible"})
    fleet.start_coordinator()
    for replica in (0, 3):
        fleet.start_rank(replica)
    second = fleet.start_rank(1, kill_at="regroup")
    first = fleet.start_rank(2, kill_at="reduce:20")

    assert first.wait(PATIENCE_S) == -9
    assert second.wait(PATIENCE_S) == -9
    fleet.ranks = {replica: fleet.ranks[replica] for replica in (0, 3)}
    fleet.wait_for_members([0, 3])
    newcomer = fleet.start_rank(1, kill_at="sync")
    assert newcomer.wait(PATIENCE_S) == -9
    fleet.kill(1, 3)
    fleet.wait_for_members([0])
    fleet.train_on()
    fleet.stop()

    assert covered(fleet.steps(0)) == {(1,) * 12}
    assert fleet.weights() == alone(make_fleet, fleet)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"width": 64}, "this replica's model is Sequential of 4 tensors and 1,153 parameters"),
        ({"rate": 0.5}, "this replica's optimizer is Momentum(rate=0.5), the job's is"),
        ({"samples": 480}, "this replica's dataset's length is 480, the job's is 960"),
        ({"content": 4}, "this replica's dataset's content is 61,440 bytes ("),
        ({"seed": 6}, "this replica's data order's seed is 6, the job's is 5"),
        ({"mode": "drop"}, "this replica's mode is drop, the job's is cover"),
        ({"token": "guessed"}, "wrong token: this process's is not the job's"),
    ],
)
def test_a_replica_of_another_job_is_refused_with_a_sentence(
    one_trains: Fleet, options: dict[str, Any], sentence: str
) -> None:
    misfit = one_trains.start_rank(1, **options)

    assert misfit.wait(PATIENCE_S) == 1
    assert sentence in (one_trains.folder / "rank1.log").read_text()
    one_trains.train_on(5)


@pytest.fixture(scope="module")
def one_trains(tmp_path_factory: pytest.TempPathFactory) -> Any:
    fleet = Fleet(tmp_path_factory.mktemp("one"), 1, options={"data": "dataset"})
    fleet.start()
    fleet.wait_for_step(5)
    until(lambda: fleet.last(0)["members"] == [0], "it trains alone")
    yield fleet
    fleet.close()
