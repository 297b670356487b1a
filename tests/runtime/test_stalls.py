"""A rank that keeps all others waiting is told of once, with the place where it is."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from runtime import stalls as module
from runtime.stalls import FIRST_S, FIRST_STEPS, Stalls, where
from tests.runtime.replicas import Fleet, until
from tests.runtime.test_client import Door

AFTER_S = 60.0


class Scene:
    """A training thread whose clock the test turns."""

    def __init__(self, after_s: float = AFTER_S, *, steps: int = FIRST_STEPS) -> None:
        self.now = 1000.0
        self.told: list[tuple[str, str]] = []
        self.stalls = Stalls(
            lambda kind, text: self.told.append((kind, text)), after_s, clock=lambda: self.now
        )
        for _ in range(steps):
            self.step(1.0)

    def step(self, *looks: float) -> None:
        """A step that lasts as long as these together, looked at after each of them."""
        with self.stalls.computing():
            for seconds in looks:
                self.now += seconds
                self.stalls.look()

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _text in self.told]


@pytest.fixture(autouse=True)
def _looked_at_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 3600.0)


def test_a_step_that_takes_far_too_long_is_told_once_and_so_is_its_end() -> None:
    scene = Scene()
    scene.step(61.0, 100.0)

    assert scene.kinds == ["stalled", "stall_over"]
    assert "has taken 61 s, where it usually takes 1 s" in scene.told[0][1]
    assert "after 161 s" in scene.told[1][1]


def test_what_follows_to_a_step_is_looked_at_and_says_nothing_of_what_is_usual() -> None:
    scene = Scene()
    for _ in range(20):
        with scene.stalls.computing(counts=False):
            scene.now += 0.001
    with scene.stalls.computing(counts=False):
        scene.now += 61.0
        scene.stalls.look()

    assert scene.kinds == ["stalled", "stall_over"]
    assert "has taken 61 s, where it usually takes 1 s" in scene.told[0][1]


def test_the_place_is_told_where_the_training_thread_is() -> None:
    scene = Scene()
    scene.step(61.0)

    assert "its training thread is at" in scene.told[0][1]
    assert "test_stalls.py" in scene.told[0][1]
    assert "(step)" in scene.told[0][1]


def test_a_thread_that_has_ended_is_nowhere() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()

    assert where(thread.ident or 0) == ""


@pytest.mark.parametrize(
    ("usual_s", "lasted_s"),
    [pytest.param(0.1, 59.0, id="short of the least"), pytest.param(10.0, 199.0, id="of 20 usual")],
)
def test_what_is_merely_long_is_not_told(usual_s: float, lasted_s: float) -> None:
    scene = Scene(steps=0)
    for _ in range(FIRST_STEPS):
        scene.step(usual_s)
    scene.step(lasted_s)

    assert scene.told == []


def test_the_first_steps_may_compile() -> None:
    scene = Scene(steps=0)
    scene.step(FIRST_S - 1.0)

    assert scene.told == []


def test_an_evaluation_is_told_of_the_first_time_only() -> None:
    scene = Scene()
    for _ in range(3):
        scene.step(600.0)
        scene.step(1.0)

    assert scene.kinds == ["stalled", "stall_over"]


def test_a_long_evaluation_beside_a_step_makes_no_step_that_hangs_look_usual() -> None:
    scene = Scene(steps=FIRST_STEPS + 1)
    with scene.stalls.computing(counts=False):
        scene.now += 2400.0
        scene.stalls.look()
    scene.step(61.0)
    with scene.stalls.computing(counts=False):
        scene.now += 2400.0
        scene.stalls.look()

    assert scene.kinds == ["stalled", "stall_over"] * 2
    assert "has taken 61 s" in scene.told[2][1]


def test_who_waits_for_others_is_no_stall() -> None:
    scene = Scene()
    scene.now += 3600.0
    scene.stalls.look()

    assert scene.told == []


def test_zero_seconds_is_never() -> None:
    before = threading.active_count()
    scene = Scene(0.0)
    scene.step(3600.0)

    assert threading.active_count() == before
    assert scene.told == []


def test_less_than_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stalled_after_s=-1\.0: give a number of seconds"):
        Scene(-1.0)


def test_where_no_thread_can_be_started_the_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    scene = Scene(steps=0)
    scene.step(1.0)

    assert scene.told == []


def test_of_a_job_that_stands_still_the_replica_that_hangs_says_so(
    make_fleet: Callable[..., Fleet],
) -> None:
    door = Door()
    fleet = make_fleet(3, url=door.url, options={"stalled_after_s": 2})
    fleet.start_coordinator()
    for replica, hangs_at in enumerate([-1, 30, -1]):
        fleet.start_rank(replica, evaluate_at=hangs_at)

    (told,) = until(lambda: door.messages("trouble"), "an engineer is told")
    fleet.close()
    door.close()

    assert told["kind"] == "stalled"
    assert "tiny.py" in told["text"]
