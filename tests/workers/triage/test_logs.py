"""A machine's log, judged with look-ahead and look-behind; rubbish in it harms nothing."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.triage import judged_rows, mutated
from controlplane.health.catalogue import catalogue
from workers.triage.logs import judge_log, stamp_of
from workers.triage.verdicts import condemns_node

LINES = Path(__file__).parents[2] / "data" / "xid_lines.tsv"
with LINES.open(newline="") as file:
    SEEN = [row["line"] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)]
OFF_THE_BUS = "79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
RESET = "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
REMAPPED = "63, Row Remapper: New row marked for remapping"
DBE = "48, An uncorrectable double bit error (DBE) in the framebuffer"
CLEARED = "154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
CUT_LINK = "74, NVLink: fatal error detected on link 1"
FAULT_UP = "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"


def at(seconds: float, rest: str, card: str = "0000:1b:00") -> str:
    return f"[{seconds:.6f}] NVRM: Xid (PCI:{card}): {rest}"


def actions(*lines: str) -> list[str | None]:
    found = judge_log(lines, catalogue())
    return [None if one is None else one.verdict.action for one in found]


@pytest.mark.parametrize("row", list(judged_rows(LINES)), ids=lambda row: row.line[:60])
def test_every_line_of_the_collection_is_judged_as_its_row_says(row: Any) -> None:
    assert row.is_right()


# --- neighbours -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([at(5, DBE), at(6, REMAPPED)], ["drain_and_reset", "ignore"]),
        ([at(6, REMAPPED), at(7, DBE)], ["ignore", "drain_and_reset"]),
        ([at(5, DBE), at(600, REMAPPED)], ["reset_gpu", "ignore"]),
        ([at(5, DBE), at(6, REMAPPED, "0000:5d:00")], ["reset_gpu", "ignore"]),
        ([at(5, OFF_THE_BUS), at(5, RESET)], ["reboot", "reboot"]),
        ([at(5, RESET), at(5, OFF_THE_BUS)], ["reboot", "reboot"]),
        ([at(5, OFF_THE_BUS), at(500, RESET)], ["reboot", "reset_gpu"]),
        ([at(5, OFF_THE_BUS), f"[6.0] {FAULT_UP}"], ["reboot", "follow_primary"]),
        ([f"[4.0] {FAULT_UP}", at(5, OFF_THE_BUS)], ["reset_gpu", "reboot"]),
        ([at(5, OFF_THE_BUS), f"[300.0] {FAULT_UP}"], ["reboot", "follow_primary"]),
        ([at(5, OFF_THE_BUS), f"[900.0] {FAULT_UP}"], ["reboot", "reset_gpu"]),
        ([at(5, OFF_THE_BUS), at(6, RESET, "3b:00")], ["reboot", "reset_gpu"]),
        ([at(5, OFF_THE_BUS, "0000:3b:00"), at(6, RESET, "3b:00")], ["reboot", "reboot"]),
        (  # what clears an earlier wish says nothing of a fault beside it
            [at(5, CLEARED), at(80, CUT_LINK)],
            ["ignore", "undecodable"],
        ),
        ([at(5, RESET), at(6, CLEARED), at(7, CUT_LINK)], ["reset_gpu", "ignore", "reset_gpu"]),
        (
            [at(5, OFF_THE_BUS), "[    0.000000] Linux version 6.8.0", at(6, RESET)],
            ["reboot", None, "reset_gpu"],
        ),
        (  # its uptime fell
            [at(50, OFF_THE_BUS), at(6, RESET), f"[7.0] {FAULT_UP}"],
            ["reboot", "reset_gpu", "reset_gpu"],
        ),
    ],
)
def test_what_stands_near_in_time_decides(lines: list[str], expected: list[str]) -> None:
    assert actions(*lines) == expected


def test_the_further_lines_of_a_switch_are_about_its_message() -> None:
    switch = "nvidia-nvswitch2: SXid (PCI:0000:85:00.0): "
    lines = [
        f"[1.0] {switch}22099, Non-fatal, Link 30 from the future",
        f"[1.1] {switch}22099, Severity 0 Engine instance 30 Sub-engine instance 00",
        f"[1.2] {switch}22099, Data {{0x00140004, 0x1}}",
        f"[9.0] {switch}20034, Fatal, Link 3 LTSSM Fault Up (trunk)",
        f"[9.1] {switch}20034, Severity 1 Engine instance 3 Sub-engine instance 00",
    ]
    found = [one.verdict for one in judge_log(lines, catalogue()) if one is not None]

    assert [one.urgency for one in found] == ["none"] * 3 + ["now"] * 2
    assert {one.action for one in found[3:]} == {"drain_and_reset"}


def test_without_stamps_the_order_says_what_is_near() -> None:
    plain = [line.partition("] ")[2] for line in (at(0, DBE), at(0, REMAPPED))]
    between = ["something else"] * 500

    assert actions(*plain) == ["drain_and_reset", "ignore"]
    assert actions(plain[0], *between, plain[1])[0] == "reset_gpu"


def test_a_lost_card_without_an_xid_is_told_in_three_lines() -> None:
    lines = [
        "NVRM: The NVIDIA GPU 0000:1B:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    ]
    found = list(judge_log(lines, catalogue()))

    assert [one and (one.verdict.pci, one.verdict.action) for one in found] == [
        ("0000:1b:00", "reboot"), None, ("0000:1b:00", "reboot"),
    ]  # fmt: skip
    assert actions("NVRM: The NVIDIA GPU 0000:1b:00.0", "NVRM: is not supported") == [None, None]


def test_other_lines_between_the_three_do_no_harm() -> None:
    lines = [
        "NVRM: The NVIDIA GPU 0000:1b:00.0", "usb 1-1: new device",
        "NVRM: (PCI ID: 10de:2330) installed in this system has", "eth0: link is up",
        "NVRM: fallen off the bus and is not responding to commands.",
    ]  # fmt: skip
    found = [one for one in judge_log(lines, catalogue()) if one is not None]

    assert [one.verdict.pci for one in found] == ["0000:1b:00"] * 2


@pytest.mark.parametrize(
    "line",
    [
        at(1, "74, NVLink (0x0" + " " * 100_000),
        at(1, "45, caused by previous Xid" + " " * 100_000),
        at(1, "48, " + "SM " * 40_000),
        "NVRM: Xid (PCI:" * 10_000,
        "[1.0] nvme " * 10_000,
    ],
)
def test_a_line_that_never_ends_is_read_at_once(line: str) -> None:
    assert len(list(judge_log([line], catalogue()))) == 1


def test_a_repeat_at_one_place_of_a_card_asks_for_a_diagnosis_of_it() -> None:
    warp = "13, pid=1, name=a, Graphics SM Warp Exception on (GPC 8, TPC 5, SM 1): Out Of Range"
    other = warp.replace("TPC 5", "TPC 1")
    lines = [
        at(1, warp),
        at(2, warp),
        at(3, other),
        at(4000, warp),
        at(4001, warp),
        at(99_000, warp),
    ]
    found = [one.verdict for one in judge_log(lines, catalogue()) if one is not None]

    assert [one.action == "field_diagnostic" for one in found] == [
        False, False, False, True, True, False,  # the last one is a day later
    ]  # fmt: skip
    assert {one.fault for one in found} == {"program"}


def test_a_repeat_that_other_machines_saw_too_is_the_programs() -> None:
    lines = [at(1, "31, pid=1, name=a, MMU Fault"), at(4000, "31, pid=2, name=a, MMU Fault")]
    found = list(judge_log(lines, catalogue(), elsewhere={31: 7}))

    assert [one and one.verdict.action for one in found] == ["restart_app", "restart_app"]
    assert found[1] is not None
    assert "on cards of 7 other nodes too" in found[1].verdict.summary


def test_parity_errors_are_counted_for_each_link() -> None:
    def error(link: int) -> str:
        return (
            f"74, NVLink: fatal error detected on link {link}(0x10, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)"
        )

    lines = [at(k, error(link)) for k, link in enumerate([1, 1, 2, 1, 2])]

    assert actions(*lines) == ["reset_gpu", "reset_gpu", "reset_gpu", "contact_vendor", "reset_gpu"]


@settings(max_examples=60)
@given(st.permutations([at(5.0, DBE), at(5.5, REMAPPED), at(6.0, OFF_THE_BUS), at(6.5, RESET)]))
def test_the_order_of_lines_near_each_other_changes_nothing(lines: list[str]) -> None:
    found = dict(zip(lines, actions(*lines), strict=True))

    assert [found[line] for line in sorted(lines)] == [
        "drain_and_reset", "ignore", "reboot", "reboot"
    ]  # fmt: skip


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([at(5.0, DBE), at(5.5, REMAPPED), at(6.0, OFF_THE_BUS)])), st.data()
)
def test_repeats_and_other_lines_between_change_nothing(lines: list[str], data: Any) -> None:
    alone = dict(zip(set(lines), actions(*set(lines)), strict=True))
    mixed = [*lines]
    for _ in range(data.draw(st.integers(0, 5))):
        mixed.insert(data.draw(st.integers(0, len(mixed))), "[5.1] usb 1-1: new device")

    found = [pair for pair in zip(mixed, actions(*mixed), strict=True) if pair[1] is not None]

    assert found == [(line, alone[line]) for line in lines]


# --- rubbish --------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.lists(st.text() | st.sampled_from(SEEN), max_size=12), st.randoms())
def test_any_log_is_judged_line_by_line(lines: list[str], drawn: random.Random) -> None:
    given_lines = [line if not line else mutated(drawn, line) for line in lines]

    assert len(list(judge_log(given_lines, catalogue()))) == len(given_lines)


def test_ten_thousand_lines_of_programs_take_no_node_out() -> None:
    drawn = random.Random(7)  # noqa: S311 - the same lines each time
    programs = [
        "13, pid={pid}, name=python3, Graphics SM Warp Exception on (GPC {n}, TPC {n}, SM 1): Out",
        "31, pid={pid}, name=python3, Ch 0000000{n}, intr 10000000. MMU Fault: ENGINE GRAPHICS",
        "43, pid={pid}, name=python3, Ch 0000000{n}",
        "45, pid={pid}, name=python3, Ch 0000000{n}",
        "94, pid={pid}, name=python3, Ch 0000000{n}",
        "68, pid={pid}, name=python3, Ch 0000000{n}",
    ]
    lines = [
        at(
            k * drawn.uniform(0, 90),
            drawn.choice(programs).format(pid=drawn.randrange(9999), n=drawn.randrange(8)),
            f"0000:{drawn.randrange(8):02x}:00",
        )
        for k in range(10_000)
    ]
    found = [one.verdict for one in judge_log(lines, catalogue()) if one is not None]

    assert len(found) == 10_000
    assert not any(condemns_node(verdict) for verdict in found)


# --- stamps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("earlier", "later", "apart"),
    [
        ("[  10.500000] x", "[ 12.000000 ] x", 1.5),
        ("[  10.500000][  T77] x", "[   12.000000][C3] x", 1.5),
        ("6,100,5000000,-;NVRM: x", "6,101,6500000,-,caller=T1;NVRM: x", 1.5),
        ("[Fri Apr  5 21:29:39 2024] x", "[Fri Apr  5 21:30:39 2024] x", 60.0),
        ("Mar 29 15:38:59 node kernel: x", "Mar 29 15:39:01 node kernel: x", 2.0),
        ("Mär 29 15:38:59 node kernel: x", "Mär 30 15:38:59 node kernel: x", 86_400.0),
        ("29 мар 15:38:59 node kernel: x", "29 мар 15:39:59 node kernel: x", 60.0),
        ("2025-01-21T04:41:44,283302+00:00 x", "2025-01-21T05:41:44,283302+01:00 x", 0.0),
        ("kern :warn : 2025-01-21T04:41:44Z x", "kern :warn : 2025-01-21 04:41:45.5 x", 1.5),
        ("2024-02-29T23:59:59 x", "2024-03-01T00:00:00 x", 1.0),
    ],
)
def test_a_stamp_is_read_in_every_form(earlier: str, later: str, apart: float) -> None:
    first, second = stamp_of(earlier), stamp_of(later)

    assert first is not None
    assert second is not None
    assert first.clock == second.clock
    assert second.seconds - first.seconds == pytest.approx(apart)


@pytest.mark.parametrize("line", ["NVRM: x", "", "Feb 31 25:61:99 x", "[no time] x", "2024-13-45T"])
def test_what_is_no_stamp_is_none(line: str) -> None:
    assert stamp_of(line) is None


# --- the command ----------------------------------------------------------------------------------


def test_the_command_answers_each_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kern.log"
    path.write_bytes(
        b"\n".join(
            [
                at(5, "13, pid=9, name=a, Graphics Exception", "0000:3B:00 GPU-I:01 GPU-CI:02"),
                "usb 1-1: new device",
                "# log",
                FAULT_UP,
                "NVRM: GPU 0000:a1:00.0: GPU has fallen off the bus.",
            ][k].encode()
            for k in range(5)
        )
        + b"\n\xff\xfe rubbish"
    )

    call_command("triage", "--lines", str(path))
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [answer and answer["action"] for answer in answers] == [
        "restart_app", None, None, "reset_gpu", "reboot", None,
    ]  # fmt: skip
    assert answers[0] | {"why": "", "rule": ""} == {
        "xid": 13, "sxid": None, "pci": "0000:3b:00", "mig": "GPU-I:01 GPU-CI:02",
        "lost_gpu": False, "class": "program", "action": "restart_app",
        "follow_up": "workflow_xid_13", "urgency": "now", "why": "", "rule": "",
    }  # fmt: skip
    assert (answers[3]["sxid"], answers[3]["pci"]) == (20034, "0000:a9:00")
    assert (answers[4]["xid"], answers[4]["lost_gpu"]) == (None, True)


def test_another_log_knows_nothing_of_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kern.log"
    path.write_text("\n".join([at(5, DBE), "# log another machine", at(6, REMAPPED)]))

    call_command("triage", "--lines", str(path))
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [answer and answer["action"] for answer in answers] == ["reset_gpu", None, "ignore"]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"kern\.log: No such file"):
        call_command("triage", "--lines", str(tmp_path / "kern.log"))
