"""Triage, recovery, spares and repair: pure decisions, each with its reasons."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers import recovery, repair, spares, triage


def evidence(**known: object) -> triage.LossEvidence:
    return triage.LossEvidence(**known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "code", "fit"),
    [
        ({"process_exited": True, "exit_signal": 9}, "process-killed", True),
        ({"process_exited": True, "exit_code": 1}, "process-exited", True),
        ({"process_exited": True}, "process-vanished", True),
        ({"process_exited": True, "exit_reason": "reboot"}, "node-rebooted", False),
        ({"node_reachable": False, "peers_lost_it": True}, "node-lost", False),
        ({"node_reachable": False, "silent_s": 31.0}, "node-lost", False),
        ({"peers_lost_it": True, "hardware_lines": ("Xid",)}, "hardware-fault", False),
        (
            {"peers_lost_it": True, "waited_s": 41.0, "patience_s": 40.0},
            "replica-unresponsive",
            False,
        ),
    ],
)
def test_the_cause_follows_from_the_evidence(
    known: dict[str, object], code: str, fit: bool
) -> None:
    cause = triage.cause_of_loss(evidence(**known))
    assert isinstance(cause, triage.Cause)
    assert (cause.code, cause.node_fit) == (code, fit)


def test_without_a_word_from_agent_or_lease_there_is_no_cause_yet() -> None:
    assert isinstance(
        triage.cause_of_loss(evidence(peers_lost_it=True, waited_s=1.0)), triage.NotYet
    )


def test_a_silent_agent_loses_no_replica_that_commits_steps() -> None:
    known = evidence(node_reachable=False, silent_s=60.0, still_commits=True, waited_s=1e3)
    assert isinstance(triage.cause_of_loss(known), triage.NotYet)


def test_silence_that_is_over_has_lost_nothing() -> None:
    assert isinstance(triage.cause_of_loss(evidence(waited_s=1e3)), triage.NothingLost)


def test_a_hardware_line_outranks_the_way_in_which_the_process_ended() -> None:
    cause = triage.cause_of_loss(
        evidence(process_exited=True, exit_signal=9, hardware_lines=("NVRM: Xid 79",))
    )
    assert isinstance(cause, triage.Cause)
    assert not cause.node_fit


@pytest.mark.parametrize(
    ("line", "is_fault"),
    [
        ("NVRM: Xid (PCI:0000:1b:00): 79, pid=123, GPU has fallen off the bus.", True),
        ("NVRM: GPU at PCI:0000:1b:00: GPU-x is lost: GPU has fallen off the bus", True),
        ("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal", True),
        ("mce: [Hardware Error]: Machine check events logged", True),
        ("NVRM: loading NVIDIA UNIX x86_64 Kernel Module", False),
        ("in function handleXidEvent of some module", False),
    ],
)
def test_hardware_lines_are_told_from_others(line: str, is_fault: bool) -> None:
    assert triage.is_hardware_line(line) is is_fault


candidates = st.lists(
    st.builds(
        spares.Candidate,
        node_id=st.uuids().map(str),
        name=st.text("abc", min_size=1, max_size=3),
        rack=st.sampled_from(["r1", "r2", "r3"]),
        spare=st.booleans(),
    ),
    max_size=12,
    unique_by=lambda c: c.node_id,
)


@given(candidates=candidates, racks=st.lists(st.sampled_from(["r1", "r2", "r3"]), max_size=8))
def test_a_spare_is_taken_before_any_other_free_node(
    candidates: list[spares.Candidate], racks: list[str]
) -> None:
    choice = spares.choose_spare(candidates, racks)
    chosen = [c for c in candidates if choice is not None and c.node_id == choice.node_id]
    assert bool(chosen) == bool(candidates)
    assert [c.spare for c in chosen] == [any(c.spare for c in candidates)] * len(chosen)


@given(candidates=candidates, count=st.integers(0, 8))
def test_a_starting_job_gets_distinct_nodes_and_spares_last(
    candidates: list[spares.Candidate], count: int
) -> None:
    chosen = spares.choose_nodes(candidates, count)
    common = [c for c in candidates if not c.spare]
    assert len({c.node_id for c in chosen}) == len(chosen) == min(count, len(candidates))
    assert sum(c.spare for c in chosen) == max(0, len(chosen) - len(common))


def situation(**changes: object) -> recovery.Situation:
    fields: dict[str, object] = {
        "node_fit": True,
        "spare": spares.Choice("nod_1", "n1", "free"),
        "survivors": 3,
        "replicas": 4,
        "gpus_per_replica": 8,
        "start_s": 10.0,
    }
    return recovery.Situation(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_fit_node_keeps_its_replica() -> None:
    assert recovery.decide(situation()).strategy == "in_place"


def test_an_unfit_node_loses_its_replica_to_a_spare() -> None:
    assert recovery.decide(situation(node_fit=False)).strategy == "on_spare"


def test_without_a_place_the_survivors_go_on_and_it_waits() -> None:
    assert recovery.decide(situation(node_fit=False, spare=None)).strategy == "wait"


@given(fit=st.booleans(), spare=st.booleans(), start=st.floats(0.1, 1e4))
def test_every_option_is_shown_and_the_cheapest_possible_one_is_taken(
    fit: bool, spare: bool, start: float
) -> None:
    choice = spares.Choice("nod_1", "n1", "free") if spare else None
    decision = recovery.decide(situation(node_fit=fit, spare=choice, start_s=start))
    priced = {o.strategy: o.gpu_seconds for o in decision.options if o.gpu_seconds is not None}
    assert {o.strategy for o in decision.options} == {"in_place", "on_spare", "wait"}
    assert decision.strategy == min(priced, key=lambda s: priced[s], default="wait")


def test_a_card_that_was_tried_too_often_stops_the_rung() -> None:
    assert repair.may_attempt("power_cycle", [0, 1, 0], 2).allowed
    assert not repair.may_attempt("power_cycle", [0, 2, 0], 2).allowed


@pytest.mark.parametrize(
    ("output", "passed"),
    [
        ({"tests": [{"name": "a", "outcome": "passed"}]}, True),
        ({"tests": [{"name": "a", "outcome": "skipped"}], "passed": True}, False),
        ({"tests": [{"name": "a", "outcome": "failed"}]}, False),
        ({"tests": []}, False),
        ({}, False),
    ],
)
def test_only_tests_that_really_passed_let_a_node_return(
    output: dict[str, object], passed: bool
) -> None:
    assert repair.diagnosis_passed(output)[0] is passed
