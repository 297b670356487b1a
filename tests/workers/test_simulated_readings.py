"""Each fault that sensors alone show, from the simulated card to what triage makes of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from node_agent import faults, simulated, wire
from node_agent.cards import HARDWARE_FILE
from node_agent.simulated import SimulatedHardware
from tests.node_agent.test_simulated import CARD
from workers import triage
from workers.detectors import CARD_FLAGS, CardWatch, Finding, PortWatch


class Clock:
    """Time that passes when it is told to, in place of the module's."""

    def __init__(self) -> None:
        self.now = time.time()

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(simulated, "time", one)
    monkeypatch.setattr(faults, "time", one)
    return one


class Watched:
    """A simulated node of one card, as the keeper follows it."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self.clock = folder, clock
        self.card = dict(CARD)
        self.fit()
        self.hardware = SimulatedHardware(folder, lambda: True)
        self.watch, self.port = CardWatch(hold_s=5.0), PortWatch()
        self.flags: dict[str, float] = {}

    def fit(self) -> None:
        (self.folder / HARDWARE_FILE).write_text(json.dumps({"gpus": [self.card]}))

    def let_pass(self, seconds: int) -> set[str]:
        """The codes of what is found in so many seconds, a beat in each."""
        found: list[Finding] = []
        for _ in range(seconds):
            self.clock.now += 1.0
            (reading,), (port,) = self.hardware.readings().values, self.hardware.ports()
            card = msgspec.to_builtins(reading)
            found += self.watch.read(self.clock.now, card)
            found += self.port.read(self.clock.now, msgspec.to_builtins(port))
            shown = {name: card[name] for name in CARD_FLAGS if card[name] is not None}
            found += [Finding(name, {"value": value}) for name, value in shown.items()]
        verdicts = [triage.judge_reading("", {"reading": f.reading, **f.values}) for f in found]
        return {verdict.code for verdict in verdicts if verdict is not None}


@pytest.fixture
def watched(tmp_path: Path, clock: Clock) -> Watched:
    return Watched(tmp_path, clock)


def test_a_healthy_card_under_load_shows_nothing(watched: Watched) -> None:
    assert watched.let_pass(600) == set()


@pytest.mark.parametrize(
    ("fault", "seconds", "codes"),
    [
        ("nvlink-slow", 20, {"nvlink-slow"}),
        ("nvlink-errors", 20, {"nvlink-errors"}),
        ("overheating", 120, {"overheating"}),
        ("power-brake", 20, {"throttled"}),
        ("pcie-narrow", 20, {"pcie-downgrade"}),
        ("pcie-replays", 20, {"pcie-replays"}),
        ("port-down", 260, {"fabric-drop"}),
        ("port-flaps", 160, {"fabric-flaps"}),
        ("port-errors", 60, {"fabric-errors"}),
        ("remap-pending", 2, {"remap-pending"}),
        ("remap-failed", 2, {"remap-failed"}),
        ("bank-exhausted", 2, {"remap-exhausted"}),
        ("sram-errors", 2, {"sram-threshold"}),
        ("wants-reset", 2, {"recovery-action"}),
    ],
)
def test_a_fault_is_seen_by_its_own_name_and_no_other(
    watched: Watched, fault: str, seconds: int, codes: set[str]
) -> None:
    watched.let_pass(200)
    watched.card = faults.FAULTS[fault].mark(watched.card)
    watched.fit()

    assert watched.let_pass(seconds) == codes


@pytest.mark.parametrize("fault", ["nvlink-slow", "nvlink-errors", "remap-pending", "wants-reset"])
def test_what_a_reset_mends_is_seen_no_more_after_it(watched: Watched, fault: str) -> None:
    watched.card = faults.after_reset(faults.FAULTS[fault].mark(watched.card))
    watched.fit()

    assert watched.let_pass(60) == set()


@pytest.mark.parametrize("fault", sorted(faults.FAULTS))
def test_what_any_fault_shows_is_what_an_agent_may_send(watched: Watched, fault: str) -> None:
    watched.card = faults.FAULTS[fault].mark(watched.card)
    watched.fit()
    watched.let_pass(3)

    beat = wire.Beat(
        boot_id="b", seq=1, at=1.0,
        readings=watched.hardware.readings().values, ports=watched.hardware.ports(),
    )  # fmt: skip

    assert msgspec.json.decode(msgspec.json.encode(beat), type=wire.Beat) == beat
