"""Who computes more slowly than its peers: told once, and once when it keeps up again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.replica.stragglers import Pace, Stragglers
from tests.runtime.replicas import Fleet, until
from tests.runtime.test_client import Door

AFTER_S = 60.0
#: 1 + the replica that computes each of six shards.
THREE = (1, 1, 2, 2, 3, 3)


def told(steps: Sequence[Sequence[float]], who: Sequence[int] = THREE) -> list[Pace]:
    """What is told of these steps, each a second long: how long each shard took."""
    stragglers = Stragglers(AFTER_S)
    return [pace for i, one in enumerate(steps) for pace in stragglers.note(who, one, float(i))]


def steps_of(*paces: float, times: int) -> list[list[float]]:
    """The replicas take so long for a shard, so often."""
    return [[pace for pace in paces for _ in range(2)] for _ in range(times)]


def test_a_replica_that_is_slow_for_long_is_told_once_by_its_number() -> None:
    (pace,) = told(steps_of(1.0, 1.0, 1.4, times=300))

    assert (pace.replica, pace.slow) == (2, True)
    assert str(pace).startswith("replica 2 takes 1.40 times as long for a shard as its peers")
    assert "look on its node" in str(pace)


@pytest.mark.parametrize("slow", [1.0, 1.1, 1.29])
def test_who_is_hardly_slower_is_no_straggler(slow: float) -> None:
    assert told(steps_of(1.0, 1.0, slow, times=300)) == []


def test_who_was_slow_for_a_while_is_no_straggler() -> None:
    assert told((steps_of(1.0, 1.0, 2.0, times=40) + steps_of(1.0, 1.0, 1.0, times=60)) * 5) == []


def test_one_very_long_step_is_no_straggler() -> None:
    well, stuck = steps_of(1.0, 1.0, 1.0, times=50), steps_of(1.0, 1.0, 900.0, times=1)
    assert told((well + stuck) * 6) == []


def test_who_keeps_up_again_is_told_so_and_may_be_slow_again() -> None:
    episode = steps_of(1.0, 1.0, 2.0, times=120) + steps_of(1.0, 1.0, 1.0, times=120)
    assert [(p.replica, p.slow) for p in told(episode * 2)] == [(2, True), (2, False)] * 2


def test_when_all_are_slow_nobody_is() -> None:
    assert told(steps_of(1.0, 1.0, 1.0, times=100) + steps_of(3.0, 3.0, 3.0, times=200)) == []


def test_a_replica_that_was_away_begins_anew() -> None:
    away = [[1.0, 1.0, 1.0, 1.0, 0.0, 0.0]]
    stragglers = Stragglers(AFTER_S)
    for second in range(50):
        stragglers.note(THREE, [1.0, 1.0, 1.0, 1.0, 2.0, 2.0], float(second))
    for second in range(50, 60):
        stragglers.note((1, 1, 2, 2, 1, 2), away[0], float(second))

    assert stragglers.note(THREE, [1.0, 1.0, 1.0, 1.0, 2.0, 2.0], 3600.0) == []


def test_time_in_which_no_step_is_made_makes_nobody_slow() -> None:
    """As while all evaluate, or wait for another."""
    stragglers = Stragglers(AFTER_S)
    for second in range(50):
        stragglers.note(THREE, [1.0] * 6, float(second))
    hiccup = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    for second in range(50, 60):
        assert stragglers.note(THREE, hiccup, float(second)) == []

    assert stragglers.note(THREE, hiccup, 3600.0) == []


def test_what_is_hardly_slower_for_long_does_not_add_up() -> None:
    steps = steps_of(1.0, 1.0, 1.6, times=20) + steps_of(1.0, 1.0, 1.22, times=300)
    assert told(steps + steps_of(1.0, 1.0, 1.6, times=20)) == []


def test_of_two_the_slower_one_is_told() -> None:
    assert [p.replica for p in told(steps_of(1.0, 1.5, times=200), who=(1, 1, 2, 2))] == [1]


def test_a_replica_alone_is_compared_to_nobody() -> None:
    assert told([[5.0]] * 200, who=(1,)) == []


def test_what_nobody_measured_counts_for_nothing() -> None:
    assert told([[0.0] * 6] * 200) == []
    assert told(steps_of(1.0, 1.0, 2.0, times=200), who=(0,) * 6) == []


def test_it_can_be_switched_off() -> None:
    never = Stragglers(0)
    assert [never.note(THREE, one, 1e9 * i) for i, one in enumerate(
        steps_of(1.0, 1.0, 9.0, times=50)
    )] == [[]] * 50  # fmt: skip


def test_a_replica_whose_node_is_slow_is_named_by_its_peers(
    make_fleet: Callable[..., Fleet],
) -> None:
    door = Door()
    fleet = make_fleet(3, url=door.url, options={"straggler_after_s": 1.0})
    fleet.start_coordinator()
    for replica, pace_s in enumerate([0.01, 0.25, 0.01]):
        fleet.start_rank(replica, pace_s=pace_s)
    until(lambda: door.messages("trouble"), "an engineer is told")
    fleet.stop()
    door.close()

    told = door.messages("trouble")
    assert [(one["kind"], one["subject"]) for one in told] == [("straggler", "replica 1")]
    assert told[0]["text"].startswith("replica 1 takes ")


@given(
    st.lists(st.lists(st.floats(0, 100), min_size=6, max_size=6), max_size=120),
    st.lists(st.integers(0, 4), min_size=6, max_size=6),
)
def test_slow_and_keeping_up_are_told_in_turn(steps: list[list[float]], who: list[int]) -> None:
    paces = told(steps, who)
    for replica in range(4):
        turns = [pace.slow for pace in paces if pace.replica == replica]
        assert turns == [i % 2 == 0 for i in range(len(turns))]
