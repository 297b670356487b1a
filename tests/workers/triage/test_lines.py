"""What one line means: the driver first, the catalogue next, its neighbours where they decide."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.health.catalogue import (
    DATA,
    OVERLAY,
    CatalogueError,
    catalogue,
    edited,
    read,
)
from workers.triage import LineVerdict, condemns_node, judge_line
from workers.triage.lines import Near
from workers.triage.verdicts import ACTIONS, stronger

SWITCH = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): "


def xid(rest: str) -> str:
    return f"NVRM: Xid (PCI:0000:1b:00): {rest}"


def judged(line: str, **near: object) -> LineVerdict:
    verdict = judge_line(line, catalogue(), Near(**near))  # type: ignore[arg-type]
    assert verdict is not None
    return verdict


def codes(*found: int) -> dict[str, object]:
    return {"codes": frozenset(found)}


def link_error(*words: int, link: int = 6) -> str:
    padded = [*words, *[0] * (7 - len(words))]
    said = ", ".join(hex(word) for word in padded)
    return xid(f"74, pid='<unknown>', name=<unknown>, NVLink: fatal error on link {link}({said})")


def unit(code: int, name: str, interrupt: int, status: int, printed: str = "Nonfatal") -> str:
    words = " ".join(f"{word:#010x}" for word in (interrupt, status, 0, 0, 0, 0))
    return xid(f"{code}, {name} {printed} XC0 i0 Link 03 ({words})")


# --- codes on which neighbours decide -------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "near", "action", "follow_up"),
    [
        (xid("48, DBE in the framebuffer"), {}, "reset_gpu", "drain_and_reset"),
        (xid("48, DBE in the framebuffer"), codes(63), "drain_and_reset", ""),
        (xid("48, DBE in the framebuffer"), codes(64), "drain_and_reset", "contact_vendor"),
        (xid("48, DBE in SRAM"), codes(63), "reset_gpu", "field_diagnostic"),
        (
            xid("48, (DBE) has been detected on GPU in the SM L1 cache"), {},
            "reset_gpu", "field_diagnostic",
        ),
        (xid("48, DBE in the framebuffer"), codes(172, 63), "drain_and_reset", ""),
        (xid("48, pid=1, name=a, channel 0x2"), codes(171, 172, 63), "drain_and_reset", ""),
        (xid("48, pid=1, name=a, channel 0x2"), codes(172), "reset_gpu", "field_diagnostic"),
        (xid("171, GDDR"), codes(48), "follow_primary", "follow_xid_63_64"),
        (
            xid("172, L2"), {}, "follow_primary", "check_sram_threshold_then_fielddiag"
        ),
        (xid("45, pid=1, name=a, Ch 00000008"), {}, "follow_primary", "restart_app"),
        (xid("45, pid=1, name=a, Ch 00000008"), codes(62), "follow_primary", ""),
        (xid("94, pid=1, name=a, Ch 00000008"), {}, "restart_app", "reset_gpu"),
        (xid("63, Row Remapper: New row marked"), {}, "ignore", "reset_gpu"),
        (xid("64, Row Remapper Error"), {}, "reset_gpu", "contact_vendor"),
        (xid("79, GPU has fallen off the bus."), {}, "reboot", "contact_vendor"),
        (xid("13, Graphics Exception"), {}, "restart_app", "workflow_xid_13"),
        *(
            (xid(f"{code}, x"), {"bursts_before": 1}, "field_diagnostic", "contact_vendor")
            for code in (13, 31, 43)
        ),
        (
            xid("13, x"), {"bursts_before": 1, "other_nodes": 2},
            "restart_app", "workflow_xid_13",
        ),
        (xid("74, NVLink: fatal error detected on link 1"), {}, "undecodable", "contact_vendor"),
        (
            xid("74, NVLink: fatal error detected on link 1"), {"recovery": "reset_gpu"},
            "reset_gpu", "contact_vendor",
        ),
    ],
)  # fmt: skip
def test_what_stands_near_decides(
    line: str, near: dict[str, object], action: str, follow_up: str
) -> None:
    verdict = judged(line, **near)

    assert (verdict.action, verdict.follow_up) == (action, follow_up)


def test_the_driver_names_what_a_torn_down_channel_is_a_consequence_of() -> None:
    verdict = judged(xid("45, pid=1, name=a, Ch 00000008, caused by previous Xid 119"))

    assert "a consequence of XID 119" in verdict.summary
    assert not condemns_node(verdict)


@pytest.mark.parametrize(
    ("value", "action"),
    [
        ("0x0 (None)", "ignore"),
        ("0x1 (GPU Reset Required)", "reset_gpu"),
        ("0x1 (PF FLR)", "reset_gpu"),
        ("0x2 (Node Reboot Required)", "reboot"),
        ("0x2 (OS Reboot)", "reboot"),
        ("0x3 (Drain P2P)", "drain_and_reset"),
        ("0x4 (Drain and Reset)", "drain_and_reset"),
        ("0x7 (anything)", "reboot"),
        ("0x63 (not yet invented)", "undecodable"),
    ],
)
def test_the_drivers_recovery_action_is_read_by_its_number(value: str, action: str) -> None:
    line = xid(f"154, GPU recovery action changed from 0x0 (None) to {value}")

    assert judged(line).action == action


@pytest.mark.parametrize("rest", ["154", "154,", "154, GPU recovery action changed from 0x0 (No"])
def test_a_recovery_action_that_was_cut_off_is_undecodable(rest: str) -> None:
    assert judged(xid(rest)).action == "undecodable"


@pytest.mark.parametrize(
    ("value", "action"),
    [("0x1 (Reset)", "reboot"), ("0x0 (None)", "reboot"), ("0x7 (x)", "reboot")],
)
def test_beside_a_lost_card_the_stronger_holds(value: str, action: str) -> None:
    line = xid(f"154, GPU recovery action changed from 0x0 (None) to {value}")

    assert judged(line, codes=frozenset({79})).action == action


@pytest.mark.parametrize(("code", "action"), [(1, "contact_vendor"), (14, "ignore")])
def test_an_unused_code_takes_no_node_out(code: int, action: str) -> None:
    verdict = judged(xid(f"{code}, something old"))

    assert (verdict.action, verdict.urgency, condemns_node(verdict)) == (action, "none", False)


def test_a_text_that_speaks_of_something_else_than_its_code_is_noted() -> None:
    verdict = judged(xid("71, NVLink: fatal error detected on link 6"))

    assert verdict.action == "restart_app"
    assert "the text speaks of NVLink" in verdict.summary


# --- NVLink ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "action"),
    [
        ((1 << 0,), "ignore"),
        ((1 << 23 | 1 << 30,), "ignore"),
        ((1 << 20,), "contact_vendor"),  # a consequence, and of nothing
        ((1 << 4,), "reset_gpu"),
        ((1 << 16,), "check_mechanicals"),
        ((1 << 21,), "check_mechanicals"),
        ((1 << 27,), "reset_gpu"),
        ((0, 0, 1 << 13), "contact_vendor"),
        ((0, 0, 1 << 16), "reset_gpu"),
        ((0, 0, 0, 1 << 18), "contact_vendor"),
        ((0, 0, 0, 0, 1 << 20), "ignore"),
        ((0, 1 << 3), "contact_vendor"),  # any other bit
        ((1 << 0 | 1 << 16,), "check_mechanicals"),  # the strongest of several
    ],
)
def test_register_bits_decide_on_an_nvlink_error(words: tuple[int, ...], action: str) -> None:
    assert judged(link_error(*words)).action == action


@pytest.mark.parametrize("near", [{"codes": frozenset({79})}, {"switch": True}])
@pytest.mark.parametrize(
    ("words", "action"), [((1 << 20,), "follow_primary"), ((0, 0, 0, 1 << 18), "reset_gpu")]
)
def test_bits_of_a_consequence_follow_what_stands_near(
    words: tuple[int, ...], action: str, near: dict[str, object]
) -> None:
    assert judged(link_error(*words), **near).action == action


@pytest.mark.parametrize(
    ("line", "urgency"),
    [
        (unit(145, "RLW_REMAP", 0x00000004, 0), "idle"),
        (unit(145, "RLW_REMAP", 0x00000004, 0, "Fatal"), "now"),
        (xid("145, RLW_REMAP Nonfatal XC0 i0 Link 03 (0x00000004 0x0000"), "idle"),
        (xid("176, PCIe correctable error"), "idle"),
        (xid("74, NVLink: fatal error detected on link 1"), "now"),
    ],
)
def test_what_cannot_be_decoded_takes_a_node_out_only_if_it_is_grave(
    line: str, urgency: str
) -> None:
    verdict = judged(line)

    assert (verdict.action, verdict.urgency) == ("undecodable", urgency)


def test_too_many_parity_errors_on_one_link_go_to_the_vendor() -> None:
    line = link_error(1 << 4)

    assert judged(line, parity_before=1).action == "reset_gpu"
    assert judged(line, parity_before=2).action == "contact_vendor"


@pytest.mark.parametrize(
    "line",
    [
        xid("74, NVLink: fatal error detected on link 6(0x10000, 0x0, 0x"),
        xid("74, NVLink: fatal error detected on link 6(0x10000, 0x0)"),
        link_error(0),
        xid("149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6"),
        xid("144, SAW_MVB Nonfatal XC0 i0 Link 0"),
        unit(144, "SAW_MVB", 0x00000001, 0x40),  # a bit that no row knows
    ],
)
def test_without_the_words_that_its_code_needs_a_line_is_undecodable(line: str) -> None:
    assert judged(line).action == "undecodable"


@pytest.mark.parametrize(
    ("line", "action", "follow_up"),
    [
        (unit(144, "SAW_MVB", 0x00000001, 0x8), "ignore", "contact_vendor"),  # v2
        (unit(144, "SAW_MVB", 0x00000021, 0x2, "Fatal"), "reset_gpu", "contact_vendor"),  # v1
        (unit(144, "SAW_MVB", 0x00000021, 0x2 | 0x4), "reset_gpu", "contact_vendor"),
        (
            unit(149, "NETIR_LINK_EVT", 0x026001C6, 0, "Fatal"), "ignore", "investigate_sw_user"
        ),
        (
            unit(149, "NETIR_LINK_DOWN", 0x02600011, 0, "Fatal"), "ignore", "investigate_sw_user"
        ),
        (
            unit(149, "NETIR_LINK_EVT", 0x025001C6, 0, "Fatal"),
            "reset_gpu", "investigate_peer_device",
        ),
        (
            unit(149, "NETIR_BER_EVENT", 0x00000226, 1), "ignore", "investigate_link_si_and_cables"
        ),
        (unit(145, "RLW_SRC_TRACK", 0x000000E2, 0x8), "restart_app", ""),
        (unit(145, "RLW_RXPIPE", 0x000000C2, 0x1), "ignore", "contact_vendor"),
        (unit(145, "RLW_RXPIPE", 0x000004C2, 0x1), "reset_gpu", "contact_vendor"),
        (unit(146, "TLW_TX_PIPE1", 0x0000000D, 0x4), "reset_gpu", "contact_vendor"),
        (unit(147, "TREX", 0x00000184, 0x80000000), "ignore", "contact_vendor"),
    ],
)  # fmt: skip
def test_nvlink_5_is_decoded_in_either_layout(line: str, action: str, follow_up: str) -> None:
    verdict = judged(line)

    assert (verdict.action, verdict.follow_up) == (action, follow_up)


def test_where_the_table_leaves_it_to_the_driver_its_recovery_action_decides() -> None:
    line = unit(145, "RLW_SRC_TRACK", 0x000000E2, 0x8)

    assert judged(line, recovery="reset_gpu").action == "reset_gpu"


# --- switches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "near", "action", "out"),
    [
        ("20034, Fatal, Link 30 LTSSM Fault Up", {}, "reset_gpu", True),
        ("20034, Severity 1 Engine instance 30 Sub-engine instance 00", {}, "reset_gpu", True),
        ("20034, Data {0x00140004, 0x1}", {}, "reset_gpu", True),
        ("20034, Fatal, Link 30 LTSSM", {"lost_before": True}, "follow_primary", False),
        ("20034, Fatal, Link 30 LTSSM (trunk)", {}, "drain_and_reset", True),
        ("12028, Non-fatal, Link 61 egress non-posted PRIV error (First)", {}, "reset_gpu", True),
        ("23001, Fatal, Link 3", {"lost_before": True}, "reboot", True),
        ("11012, Non-fatal, Link 1", {}, "ignore", False),
        ("22013, Non-fatal", {}, "ignore", False),
        ("10004, Non-fatal, thermal event start", {}, "check_mechanicals", False),
        ("19084, Fatal, AN1 heartbeat", {}, "drain_and_reset", True),
        ("99999, Fatal, from the future", {}, "contact_vendor", True),
        ("99999, Non-fatal, from the future", {}, "contact_vendor", False),
    ],
)
def test_a_switchs_code_is_judged_by_its_group(
    line: str, near: dict[str, object], action: str, out: bool
) -> None:
    verdict = judged(SWITCH + line, **near)

    assert (verdict.action, condemns_node(verdict)) == (action, out)


# --- hosts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "action"),
    [
        ("Out of memory: Killed process 7 (train) total-vm:1kB", "oom", "restart_app"),
        ("EDAC MC0: 1 CE memory read error", "memory-error", "ignore"),
        ("EDAC MC0: 1 UE memory read error", "memory-error", "field_diagnostic"),
        ("INFO: task a:1 blocked for more than 120 seconds.", "blocked-task", "ignore"),
    ],
)
def test_what_else_the_kernel_says_takes_no_node_out(line: str, code: str, action: str) -> None:
    verdict = judged(line)

    assert (verdict.code, verdict.action) == (code, action)
    assert not condemns_node(verdict)


# --- catalogues -----------------------------------------------------------------------------------


def test_every_code_of_the_catalogues_is_judged() -> None:
    known = catalogue()

    assert (len(known.xids), len(known.sxids)) == (176, 97)
    assert {judged(xid(f"{code}, x")).action for code in known.xids} <= set(ACTIONS)
    assert {judged(f"{SWITCH}{code}, x").action for code in known.sxids} <= set(ACTIONS)


def test_a_site_sees_a_code_otherwise_and_the_verdict_says_so(tmp_path: Path) -> None:
    (tmp_path / "xid.csv").write_text(
        "xid,immediate_action\n31,RESET_GPU\n9001,IGNORE\n45,RESTART_APP\n"
    )
    known = read(DATA, tmp_path)

    seen = judge_line(xid("31, pid=1, name=a, MMU Fault"), known)
    new = judge_line(xid("9001, of ours"), known)

    torn_down = judge_line(xid("45, pid=1, name=a, Ch 00000008"), known)
    assert seen is not None
    assert new is not None
    assert torn_down is not None
    assert torn_down.action == "restart_app"
    assert (seen.action, seen.rule) == ("reset_gpu", f"site overlay {tmp_path / 'xid.csv'}")
    assert new.action == "ignore"
    assert judged(xid("31, pid=1, name=a, MMU Fault")).action == "restart_app"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("xid,immediate_action\n31,EXPLODE\n", "immediate_action: unknown action 'EXPLODE'"),
        ("xid,imediate_action\n31,IGNORE\n", r"unknown columns \['imediate_action'\]"),
        ("xid,imediate_action\n31,IGNORE,\n", r"\['imediate_action', 'without a name'\]"),
        ("code,immediate_action\n31,IGNORE\n", "no xid"),
        ("xid,immediate_action\n31,\xff\n", r"xid\.csv cannot be read: .*utf-8"),
    ],
)
def test_an_overlay_that_cannot_be_understood_is_refused(
    text: str, error: str, tmp_path: Path
) -> None:
    (tmp_path / "xid.csv").write_text(text, encoding="latin-1")

    with pytest.raises(CatalogueError, match=error):
        read(DATA, tmp_path)


def test_an_overlay_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OVERLAY, str(tmp_path / "mistyped"))

    with pytest.raises(CatalogueError, match=r"DRYDOCK_CATALOGUE names .*mistyped, which is no"):
        edited("xid", 31, "IGNORE")


def test_of_two_actions_the_stronger_does_more() -> None:
    assert stronger("reset_gpu", "reboot") == stronger("reboot", "reset_gpu") == "reboot"
