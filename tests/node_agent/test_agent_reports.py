"""Enrolment, beats and reports of a real agent."""

from __future__ import annotations

import json
import signal

import pytest

from node_agent import wire
from node_agent.config import ConfigError, load_config
from tests.node_agent.fleet import DEADLINE_S, ControlPlane, Node, eventually, problem


def test_a_new_node_enrols_with_its_token_and_keeps_its_key_to_itself(agent: Node) -> None:
    request = agent.plane.enrolments[0]

    assert (request.join_token, request.name, request.rack) == ("join-me", "node-a", "rack-1")
    assert [gpu.uuid for gpu in request.inventory.gpus] == ["GPU-a", "GPU-b"]
    assert (agent.state / "node.key").stat().st_mode & 0o777 == 0o600


def test_an_enrolled_node_does_not_enrol_again(agent: Node) -> None:
    agent.kill()
    beats = len(agent.plane.beats)
    agent.start()
    eventually(lambda: len(agent.plane.beats) > beats)

    assert len(agent.plane.enrolments) == 1


def test_a_refused_token_is_logged_and_tried_again(node: Node, plane: ControlPlane) -> None:
    plane.refuse = lambda path, body: problem(403, "token_used", field="join_token")
    node.start()

    refused = eventually(lambda: node.log("enrol_refused"))

    assert refused[0]["problem"]["code"] == "token_used"
    plane.refuse = lambda path, body: None
    eventually(lambda: plane.enrolments)


def test_a_senseless_enrolment_ends_the_agent(node: Node, plane: ControlPlane) -> None:
    plane.refuse = lambda path, body: problem(422, "name_taken", field="name")
    node.start()
    assert node.process is not None

    assert node.process.wait(DEADLINE_S) == 78
    assert "name_taken" in node.log("cannot_start")[0]["error"]


def test_a_misspelt_key_is_named(node: Node) -> None:
    node.configure(rack_name="x")
    node.start()
    assert node.process is not None

    assert node.process.wait(DEADLINE_S) == 78
    assert "rack_name" in node.log("cannot_start")[0]["error"]


def test_a_rack_whose_name_is_too_long_is_named(node: Node) -> None:
    node.configure(rack="r" * 64)

    with pytest.raises(ConfigError, match=r"`\$\.rack`"):
        load_config(node.config)


def test_beats_carry_readings_and_rise(agent: Node) -> None:
    eventually(lambda: len(agent.plane.beats) >= 4)
    beats = list(agent.plane.beats)

    assert [beat.seq for beat in beats] == sorted({beat.seq for beat in beats})
    assert {reading.uuid for reading in beats[-1].readings} == {"GPU-a", "GPU-b"}
    assert all(reading.temperature_c is not None for reading in beats[-1].readings)
    assert beats[-1].report_digest == agent.plane.reports[-1].digest


def test_new_cards_are_reported_at_once(agent: Node) -> None:
    agent.fit("GPU-c", "GPU-d")

    cards = eventually(
        lambda: [r for r in agent.plane.reports if r.inventory.gpus[0].uuid == "GPU-c"]
    )
    assert [gpu.uuid for gpu in cards[0].inventory.gpus] == ["GPU-c", "GPU-d"]


def test_a_report_is_sent_when_it_is_wanted(agent: Node) -> None:
    agent.plane.want_report = True

    eventually(lambda: len(agent.plane.reports) == 2)

    first, second = agent.plane.reports
    assert second.digest == first.digest
    assert second.inventory == first.inventory


def test_the_first_event_of_a_boot_is_the_boot(agent: Node) -> None:
    events = eventually(lambda: list(agent.plane.events.values()))

    assert [(event.kind, event.boot_id) for event in events] == [("boot", "boot-1")]


def test_a_card_that_stops_answering_is_an_event_once(agent: Node) -> None:
    agent.fit("GPU-a", "GPU-b", unreadable=True)
    eventually(lambda: len(agent.plane.events_of("gpu_unreadable")) == 2)
    beats = len(agent.plane.beats)
    eventually(lambda: len(agent.plane.beats) > beats + 2)

    events = agent.plane.events_of("gpu_unreadable")
    assert sorted(event.gpu_uuid for event in events) == ["GPU-a", "GPU-b"]
    assert agent.plane.beats[-1].readings[0].temperature_c is None


def told_again(agent: Node, times: int) -> wire.Event:
    """The one event of a silent card, once it was told so often."""

    def counted() -> list[wire.Event]:
        events = agent.plane.events_of("gpu_unreadable")
        return [event for event in events if event.data.get("count", 1) >= times]

    (event,) = eventually(counted)
    assert isinstance(event, wire.Event)
    return event


def test_a_card_that_stays_silent_is_told_again_as_the_same_event(agent: Node) -> None:
    agent.fit("GPU-a", unreadable=True)

    event = told_again(agent, 2)

    assert len(agent.plane.events_of("gpu_unreadable")) == 1
    assert event.data["last_at"] > event.at


def test_a_card_that_answers_for_a_moment_is_silent_still(agent: Node) -> None:
    agent.fit("GPU-a", unreadable=True)
    eventually(lambda: agent.plane.events_of("gpu_unreadable"))
    agent.fit("GPU-a")
    eventually(lambda: agent.plane.beats[-1].readings[0].temperature_c is not None)
    agent.fit("GPU-a", unreadable=True)

    told_again(agent, 2)

    assert len(agent.plane.events_of("gpu_unreadable")) == 1


def test_a_silent_card_is_told_without_waiting_for_a_beat(agent: Node) -> None:
    agent.plane.next_in_s = 600.0
    beats = len(agent.plane.beats)
    eventually(lambda: len(agent.plane.beats) > beats)
    beats = len(agent.plane.beats)

    agent.fit("GPU-a", unreadable=True)

    event = eventually(lambda: agent.plane.events_of("gpu_unreadable"))[0]
    assert event.gpu_uuid == "GPU-a"
    assert len(agent.plane.beats) == beats


def next_beat(plane: ControlPlane) -> int:
    """How many beats there are after one more has come."""
    before = len(plane.beats)
    eventually(lambda: len(plane.beats) > before)
    return len(plane.beats)


def test_a_card_that_falls_silent_during_a_report_is_told_without_waiting_for_a_beat(
    node: Node,
) -> None:
    """The first report is followed by a beat, which reads the cards too."""

    def silence(path: str, _body: bytes) -> None:
        {"/v1/report": lambda: node.fit("GPU-a", unreadable=True)}.get(path, lambda: None)()

    node.plane.next_in_s = 60.0
    node.plane.refuse = silence
    node.start()

    event = eventually(lambda: node.plane.events_of("gpu_unreadable"))[0]

    assert event.gpu_uuid == "GPU-a"
    assert len(node.plane.beats) == 1


def test_a_report_that_failed_is_sent_again_without_waiting_for_a_beat(agent: Node) -> None:
    away = iter([problem(503, "unavailable")])
    agent.plane.next_in_s = 60.0
    beats = next_beat(agent.plane)
    agent.plane.refuse = lambda path, _body: {"/v1/report": lambda: next(away, None)}.get(
        path, lambda: None
    )()
    agent.fit("GPU-c")

    report = eventually(lambda: agent.plane.reports[1:])[0]

    assert [gpu.uuid for gpu in report.inventory.gpus] == ["GPU-c"]
    assert len(agent.log("report_failed")) == 1
    assert len(agent.plane.beats) == beats


def test_an_answer_that_wants_beats_at_once_gets_ten_a_second(agent: Node) -> None:
    agent.plane.next_in_s = -5.0
    before = next_beat(agent.plane)
    beats = eventually(lambda: agent.plane.beats[before + 10 :] and agent.plane.beats[before:])

    assert beats[10].at - beats[0].at > 0.5


def test_an_answer_that_wants_no_more_beats_ends_no_agent(agent: Node) -> None:
    agent.plane.next_in_s = 1e300
    next_beat(agent.plane)
    agent.fit("GPU-c")

    report = eventually(lambda: agent.plane.reports[1:])[0]

    assert [gpu.uuid for gpu in report.inventory.gpus] == ["GPU-c"]


def test_beats_survive_cut_connections_and_a_server_that_went_away(agent: Node) -> None:
    agent.plane.cut()
    agent.plane.stop()
    eventually(lambda: agent.log("beat_failed"))
    agent.plane.start()
    beats = len(agent.plane.beats)

    eventually(lambda: len(agent.plane.beats) > beats)

    # The one that was cut off may have arrived: it is the same one that is sent again.
    told = dict.fromkeys((beat.seq, beat.at) for beat in list(agent.plane.beats))
    sequence = [seq for seq, _at in told]
    assert sequence == sorted(set(sequence))
    assert len(agent.log("agent_started")) == 1
    assert len(agent.plane.enrolments) == 1


def test_sigterm_ends_the_agent_and_leaves_its_ranks(agent: Node) -> None:
    pid = agent.started_rank()

    assert agent.kill(signal.SIGTERM) == 0
    assert str(pid) == (agent.shared / "job-1" / "p-1").read_text()
    assert agent.log("agent_stopped")[0]["processes"] == 1


def test_diagnose_passes_on_a_sound_node(agent: Node) -> None:
    result = agent.plane.result(agent.plane.send(wire.Diagnose()))

    outcomes = {test["name"]: test["outcome"] for test in result.output["tests"]}
    assert result.output["passed"] is True
    assert set(outcomes.values()) == {"passed"}


def test_diagnose_fails_after_an_xid_and_on_memory_errors(agent: Node) -> None:
    agent.fit("GPU-a", ecc_uncorrected=2)
    (agent.folder / "kernel.log").write_text("NVRM: Xid (PCI:0000:1b:00): 79, pid=1, lost\n")

    result = agent.plane.result(agent.plane.send(wire.Diagnose()))

    outcomes = {test["name"]: test["outcome"] for test in result.output["tests"]}
    assert result.output["passed"] is False
    assert (outcomes["ecc"], outcomes["kernel_log"]) == ("failed", "failed"), json.dumps(outcomes)
