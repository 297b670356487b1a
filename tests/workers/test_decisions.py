"""Triage, recovery, spares and repair: pure decisions, each with its reasons."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.health.catalogue import catalogue
from controlplane.health.choices import Action
from workers import placement, recovery, triage
from workers.repair_ladder import LADDER, Record, cards_named, choose_rung, diagnosis_passed
from workers.triage.lines import Near

XID_79 = (
    "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
)
XID_31 = "NVRM: Xid (PCI:0000:1b:00): 31, pid=7, name=python3, Ch 0000000d, intr 0. MMU Fault"
XID_94 = "NVRM: Xid (PCI:0000:1b:00): 94, pid=7, name=python3, Ch 00000008"
XID_48 = "NVRM: Xid (PCI:0000:1b:00): 48, An uncorrectable double bit error"
XID_45 = "NVRM: Xid (PCI:0000:1b:00): 45, pid=7, name=python3, channel 0x00000002"


def xid(rest: str) -> str:
    return f"NVRM: Xid (PCI:0000:1b:00): {rest}"


def recovery_action(value: str) -> str:
    return (
        f"NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from 0x0 (None) to {value}"
    )


def judged(line: str) -> triage.LineVerdict:
    verdict = triage.judge_line(line, catalogue())
    assert verdict is not None
    return verdict


REPEATED = triage.judge(
    triage.parse(XID_31),  # type: ignore[arg-type]
    catalogue(),
    Near(bursts_before=1),
)
SILENT_CARD = triage.judge_silence("00000000:1B:00.0", "no answer")


def evidence(**known: object) -> triage.LossEvidence:
    return triage.LossEvidence(**known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "code", "fit"),
    [
        ({"process_exited": True, "exit_signal": 9}, "process-killed", True),
        ({"process_exited": True, "exit_code": 1}, "process-exited", True),
        ({"process_exited": True, "exit_code": 0, "sent_away": True}, "process-sent-away", True),
        ({"process_exited": True}, "process-vanished", True),
        ({"process_exited": True, "exit_reason": "reboot"}, "node-rebooted", False),
        ({"node_reachable": False, "peers_lost_it": True}, "node-lost", False),
        ({"node_reachable": False, "silent_s": 31.0}, "node-lost", False),
        ({"peers_lost_it": True, "verdicts": (judged(XID_79),)}, "xid-79", False),
        ({"process_exited": True, "verdicts": (judged(XID_31),)}, "xid-31", True),
        ({"process_exited": True, "verdicts": (judged(XID_94),)}, "xid-94", True),
        ({"process_exited": True, "verdicts": (REPEATED,)}, "xid-31", True),
        ({"process_exited": True, "verdicts": (REPEATED, judged(XID_48))}, "xid-48", False),
        ({"process_exited": True, "verdicts": (SILENT_CARD, judged(XID_31))}, "xid-31", True),
        ({"process_exited": True, "verdicts": (judged(XID_45),)}, "process-vanished", True),
        ({"peers_lost_it": True, "card_silent": "no answer"}, "gpu-unreadable", False),
        ({"process_exited": True, "stopped_by_order": True}, "stopped-by-order", True),
        ({"ended": True}, "stopped-by-order", True),
        ({"ended": True, "peers_lost_it": True}, "stopped-by-order", True),
        ({"ended": True, "process_exited": True, "exit_signal": 11}, "process-killed", True),
        ({"ended": True, "still_commits": True, "node_reachable": False}, "node-lost", False),
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


def test_a_node_that_booted_anew_has_its_cards_reset_before_it_returns() -> None:
    known = evidence(process_exited=True, exit_reason="reboot")
    cause = triage.cause_of_loss(known)
    assert isinstance(cause, triage.Cause)
    choice = choose_rung(cause.action, Record(), limit=2, card_known=False)
    assert choice is not None
    assert choice.rung == "reset_gpu"


def test_a_program_that_met_a_fault_again_is_restarted_all_the_same() -> None:
    cause = triage.cause_of_loss(evidence(process_exited=True, verdicts=(REPEATED,)))
    assert isinstance(cause, triage.Cause)
    assert (cause.fault, cause.action) == ("program", "restart_app")


HERE: dict[str, object] = {}
GONE: dict[str, object] = {"process_exited": True, "exit_code": 1}
SILENT: dict[str, object] = {"node_reachable": False, "silent_s": 31.0}
HIT: dict[str, object] = {"verdicts": (judged(XID_79),)}


@pytest.mark.parametrize(
    ("places", "first"),
    [
        ([(HERE, 0, 9.0), (GONE, 0, 2.0)], 1),  # killed: it said nothing
        ([(GONE, 2, 1.0), (GONE, 1, 1.5)], 1),  # one of its ranks was killed
        ([(GONE, 2, 1.5), (GONE, 2, 1.0)], 1),  # the one that spoke first
        ([(GONE, 2, 1.0), (SILENT, 0, math.inf)], 1),
        ([(GONE, 2, 1.0), (HIT, 0, math.inf)], 1),
        ([(SILENT, 0, math.inf), (GONE | HIT, 0, 1.0)], 1),  # what is known outranks silence
        ([({"ended": True}, 0, math.inf), (GONE, 2, 1.0)], 0),  # emptied off its node
        ([(GONE | {"waited_s": 99.0}, 2, 1.0), (HERE, 0, math.inf)], 0),  # the other only hangs
        ([(HERE, 0, math.inf), (HERE, 0, math.inf)], 0),
    ],
)
def test_of_several_nodes_the_one_with_evidence_took_the_others_along(
    places: list[tuple[dict[str, object], int, float]], first: int
) -> None:
    known = [triage.PlaceEvidence(evidence(**loss), said, at) for loss, said, at in places]
    assert triage.first_to_go(known) == first


def test_one_whose_ranks_lost_a_peer_is_not_the_first_while_another_may_be() -> None:
    places = [triage.PlaceEvidence(evidence(**GONE), 2, 1.0), triage.PlaceEvidence(evidence())]
    assert isinstance(triage.first_to_go(places), triage.NotYet)


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
        evidence(process_exited=True, exit_signal=9, verdicts=(judged(XID_79),))
    )
    assert isinstance(cause, triage.Cause)
    assert not cause.node_fit


@pytest.mark.parametrize(
    ("line", "action", "condemned"),
    [
        (XID_79, "reboot", True),
        ("NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.", "reboot", True),
        (XID_31, "restart_app", False),
        (XID_94, "restart_app", False),
        (XID_45, "follow_primary", False),
        (xid("48, An uncorrectable double bit error"), "reset_gpu", True),
        (xid("119, pid=1, name=q, Timeout waiting for RPC"), "reset_gpu", True),
        (xid("63, Row Remapper: New row marked"), "ignore", False),
        (xid("1, something old"), "contact_vendor", False),  # an unused code
        (xid("9999, from the future"), "undecodable", False),
        ("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30", "reset_gpu", True),
        (recovery_action("0x0 (None)"), "ignore", False),
        (recovery_action("0x1 (GPU Reset Required)"), "reset_gpu", True),
        (recovery_action("0x2 (Node Reboot Required)"), "reboot", True),
        (recovery_action("0x4 (anything it may be called)"), "drain_and_reset", True),
    ],
)  # fmt: skip
def test_a_line_is_judged_by_the_driver_first_and_the_catalogue_next(
    line: str, action: str, condemned: bool
) -> None:
    verdict = judged(line)
    assert (verdict.action, triage.condemns_node(verdict)) == (action, condemned)


@pytest.mark.parametrize(
    "line",
    ["NVRM: loading NVIDIA UNIX x86_64 Kernel Module", "in function handleXidEvent of a module"],
)
def test_a_line_that_only_looks_like_a_fault_is_none(line: str) -> None:
    assert triage.judge_line(line, catalogue()) is None


def test_every_action_of_the_rules_has_a_name_for_people() -> None:
    assert set(triage.ACTIONS) == set(Action.values)


candidates = st.lists(
    st.builds(
        placement.Candidate,
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
    candidates: list[placement.Candidate], racks: list[str]
) -> None:
    choice = placement.choose_spare(candidates, racks)
    chosen = [c for c in candidates if choice is not None and c.node_id == choice.node_id]
    assert bool(chosen) == bool(candidates)
    assert [c.spare for c in chosen] == [any(c.spare for c in candidates)] * len(chosen)


def a_spare(name: str, **known: Any) -> placement.Candidate:
    return placement.Candidate(f"nod_{name}", name, known.pop("rack", "r1"), True, **known)


def test_cards_of_the_same_model_come_before_everything_else() -> None:
    other, same = a_spare("a", gpu_model="H100", gpus=8), a_spare("b", gpu_model="H200", gpus=8)
    choice = placement.choose_spare([other, same], [], placement.Wanted("H200", 8, "r1"))
    assert choice is not None
    assert choice.name == "b"


def test_a_node_with_too_few_cards_is_no_place() -> None:
    wanted = placement.Wanted("H100", 8, "r1")
    assert placement.choose_spare([a_spare("a", gpu_model="H100", gpus=7)], [], wanted) is None


def test_among_equally_crowded_racks_the_replica_stays_near() -> None:
    far, near = a_spare("a", rack="r1"), a_spare("b", rack="r2")
    choice = placement.choose_spare([far, near], ["r1", "r2"], placement.Wanted(rack="r2"))
    assert choice is not None
    assert choice.name == "b"


@given(candidates=candidates, count=st.integers(0, 8))
def test_a_starting_job_gets_distinct_nodes_and_spares_last(
    candidates: list[placement.Candidate], count: int
) -> None:
    chosen = placement.choose_nodes(candidates, count)
    common = [c for c in candidates if not c.spare]
    assert len({c.node_id for c in chosen}) == len(chosen) == min(count, len(candidates))
    assert sum(c.spare for c in chosen) == max(0, len(chosen) - len(common))


def test_the_nodes_of_one_replica_are_in_as_few_racks_as_possible() -> None:
    def free(name: str, rack: str, *, spare: bool = False) -> placement.Candidate:
        return placement.Candidate(f"nod_{name}", name, rack, spare)

    nodes = [free("a", "r1"), free("b", "r2"), free("c", "r2"), free("d", "r1", spare=True)]

    assert [c.name for c in placement.choose_near(nodes, 3)] == ["b", "c", "a"]
    assert [c.name for c in placement.choose_near(nodes, 9)] == ["b", "c", "a", "d"]


def situation(**changes: object) -> recovery.Situation:
    fields: dict[str, object] = {
        "node_fit": True,
        "spare": placement.Choice("nod_1", "n1", "free"),
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
    decision = recovery.decide(situation(node_fit=False, spare=None))

    assert (decision.strategy, decision.reason[:9]) == ("wait", "survivors")


def test_a_job_without_survivors_stands_still_while_it_waits() -> None:
    decision = recovery.decide(situation(node_fit=False, spare=None, survivors=0))

    assert decision.strategy == "wait"
    assert decision.reason.startswith("the job stands still; wait until a node is free")


ON_DISK = recovery.Saved("local disk", 900, behind_s=3.0, everywhere=False)
SHARED = recovery.Saved("shared storage", 500, behind_s=1800.0, everywhere=True)


def test_what_would_be_made_again_on_a_spare_may_cost_more_than_another_interruption() -> None:
    alone = situation(survivors=0, replicas=1, reset_pending=True, trained_s=7200.0)
    old, new = replace(alone, saved=(ON_DISK, SHARED)), replace(SHARED, behind_s=2.0)

    decision = recovery.decide(old)

    assert decision.strategy == "in_place"
    assert {one.strategy: one.gpu_seconds for one in decision.options} == {
        "in_place": 8 * (10 + 11 + 3),
        "on_spare": 8 * (11 + 1800),
        "wait": None,
    }
    assert decision.reason.endswith(
        "; it goes on from step 900, local disk, 3 s of training before"
    )
    assert recovery.decide(replace(alone, saved=(ON_DISK, new))).strategy == "on_spare"
    assert recovery.decide(replace(alone, saved=(ON_DISK,))).strategy == "in_place"
    assert recovery.decide(replace(old, survivors=1)).strategy == "on_spare"


def test_a_job_that_saved_nothing_makes_all_again_wherever_it_goes() -> None:
    decision = recovery.decide(situation(survivors=0, replicas=1, trained_s=60.0))
    assert {one.gpu_seconds for one in decision.options} == {8 * (10 + 60), 8 * (11 + 60), None}
    assert "from nothing, 60 s of training before" in decision.reason


@given(fit=st.booleans(), spare=st.booleans(), start=st.floats(0.1, 1e4))
def test_every_option_is_shown_and_the_cheapest_possible_one_is_taken(
    fit: bool, spare: bool, start: float
) -> None:
    choice = placement.Choice("nod_1", "n1", "free") if spare else None
    decision = recovery.decide(situation(node_fit=fit, spare=choice, start_s=start))
    priced = {o.strategy: o.gpu_seconds for o in decision.options if o.gpu_seconds is not None}
    assert {o.strategy for o in decision.options} == {"in_place", "on_spare", "wait"}
    assert decision.strategy == min(priced, key=lambda s: priced[s], default="wait")


@pytest.mark.parametrize(
    ("action", "record", "rung"),
    [
        ("reset_gpu", {}, "reset_gpu"),
        ("drain_and_reset", {}, "reset_gpu"),
        ("reboot", {}, "reboot"),
        ("power_cycle", {}, "power_cycle"),
        ("reboot", {"attempts": {"reboot": 2}}, "power_cycle"),
        ("reset_gpu", {"attempts": {"reset_gpu": 2, "reboot": 2}}, "power_cycle"),
        ("reboot", {"attempts": {"reboot": 2, "power_cycle": 2}}, "rma"),
        ("reboot", {"in_vain": frozenset({"reboot"})}, "rma"),
        ("reset_gpu", {"in_vain": frozenset({"reset_gpu"})}, "reboot"),
        ("reset_gpu", {"in_vain": frozenset({"reset_gpu", "reboot"})}, "rma"),
    ],
)
def test_the_ladder_is_climbed_from_where_the_failure_begins(
    action: str, record: dict[str, Any], rung: str
) -> None:
    choice = choose_rung(action, Record(**record), limit=2, card_known=True)
    assert choice is not None
    assert choice.rung == rung


@pytest.mark.parametrize(
    ("action", "record", "rung"),
    [
        ("field_diagnostic", {}, "field_diagnostic"),
        ("field_diagnostic", {"attempts": {"field_diagnostic": 2}}, "rma"),
        ("field_diagnostic", {"in_vain": frozenset({"field_diagnostic"})}, "rma"),
        ("field_diagnostic", {"beyond_remapping": "a remap failed"}, "rma"),
        ("reboot", {}, "reboot"),
        ("reboot", {"attempts": {"reboot": 2, "power_cycle": 2}}, "field_diagnostic"),
        ("reboot", {"in_vain": frozenset({"reboot"})}, "rma"),
        ("reset_gpu", {"in_vain": frozenset({"reset_gpu", "reboot"})}, "field_diagnostic"),
        ("reset_gpu", {"in_vain": frozenset({"reset_gpu", "reboot", "field_diagnostic"})}, "rma"),
    ],
)
def test_a_node_with_the_field_diagnostic_has_a_rung_more(
    action: str, record: dict[str, Any], rung: str
) -> None:
    choice = choose_rung(action, Record(**record), limit=2, card_known=True, can_examine=True)
    assert choice is not None
    assert choice.rung == rung


def test_without_a_card_to_blame_there_is_nothing_to_examine() -> None:
    used_up = Record({"power_cycle": 2})
    for action in ("power_cycle", "field_diagnostic"):
        assert choose_rung(action, used_up, limit=2, card_known=False, can_examine=True) is None


def test_a_rung_that_did_not_help_is_not_taken_again_in_the_same_repair() -> None:
    choice = choose_rung("reset_gpu", Record(), limit=2, card_known=True, not_below="reboot")
    assert choice is not None
    assert choice.rung == "reboot"


@pytest.mark.parametrize("action", ["contact_vendor", "field_diagnostic", "check_mechanicals"])
def test_what_only_people_can_do_is_left_to_them(action: str) -> None:
    assert choose_rung(action, Record(), limit=2, card_known=True) is None


def test_without_a_card_to_blame_nothing_goes_to_the_vendor() -> None:
    record = Record(in_vain=frozenset({"reboot"}))
    assert choose_rung("reboot", record, limit=2, card_known=False) is None


@given(
    action=st.sampled_from(sorted(triage.NODE_REPAIRS)),
    attempts=st.dictionaries(st.sampled_from(LADDER), st.integers(0, 4)),
    in_vain=st.frozensets(st.sampled_from(LADDER)),
    can_examine=st.booleans(),
)
def test_a_rung_that_is_used_up_is_never_chosen(
    action: str, attempts: dict[str, int], in_vain: frozenset[str], can_examine: bool
) -> None:
    record = Record(attempts, in_vain)
    choice = choose_rung(action, record, limit=2, card_known=True, can_examine=can_examine)
    assert choice is not None
    assert choice.rung == "rma" or (attempts.get(choice.rung, 0) < 2 and choice.rung not in in_vain)


CARDS = {"GPU-a": "00000000:1B:00.0", "GPU-b": "00000001:2B:00.0", "GPU-c": ""}


@pytest.mark.parametrize(
    ("detail", "named"),
    [
        ("no readings from GPU-a", {"GPU-a"}),
        ("2 lines on 0000:1b:00, 0001:2b:00, first: ...", {"GPU-a", "GPU-b"}),
        ("NVRM: Xid (PCI:0000:1B:00): 79, at 10:12:34", {"GPU-a"}),
        ("/checkpoints: No space left", set()),
    ],
)
def test_a_diagnostic_names_cards_by_either_of_their_names(detail: str, named: set[str]) -> None:
    tests = [
        {"name": "a", "outcome": "failed", "detail": detail},
        {"name": "b", "outcome": "passed", "detail": "GPU-c"},
    ]
    assert cards_named({"tests": tests}, CARDS) == named


def test_a_node_whose_cards_want_a_reset_gives_its_replica_to_a_spare() -> None:
    assert recovery.decide(situation(reset_pending=True)).strategy == "on_spare"
    assert recovery.decide(situation(reset_pending=True, spare=None)).strategy == "in_place"


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
    assert diagnosis_passed(output)[0] is passed


def test_a_program_that_was_hit_is_given_a_moment_to_end() -> None:
    hit = triage.gravest([judged(XID_94)])
    soon = triage.cause_of_loss(evidence(verdicts=hit, waited_s=0.1))
    later = triage.cause_of_loss(evidence(verdicts=hit, waited_s=60.0))
    assert isinstance(soon, triage.NotYet)
    assert isinstance(later, triage.NothingLost)
