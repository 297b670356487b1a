"""The driver's lines as they were seen in the wild, and the forms that they can take."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node_agent.collectors import xid
from node_agent.collectors.xid import LostGpu, SxidLine, XidLine, parse, same_card

with (Path(__file__).parents[1] / "data" / "xid_lines.tsv").open(newline="") as file:
    SEEN = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
XIDS = [row for row in SEEN if row["xid"].isdigit()]
SXIDS = [row for row in SEEN if row["xid"].startswith("S")]
LOST = [row for row in SEEN if row["xid"] == "79*"]
OTHERS = [row for row in SEEN if row["xid"] == ""]

BUS = "GPU has fallen off the bus."


def test_every_row_of_the_collection_is_of_one_kind() -> None:
    assert len(XIDS) + len(SXIDS) + len(LOST) + len(OTHERS) == len(SEEN) == 52


@pytest.mark.parametrize("row", XIDS, ids=lambda row: row["xid"])
def test_an_xid_is_read(row: dict[str, str]) -> None:
    parsed = parse(row["line"])

    assert isinstance(parsed, XidLine)
    assert (str(parsed.code), parsed.pci) == (row["xid"], row["pci"])


@pytest.mark.parametrize("row", SXIDS, ids=lambda row: row["xid"])
def test_an_sxid_is_read(row: dict[str, str]) -> None:
    parsed = parse(row["line"])

    assert isinstance(parsed, SxidLine)
    assert (f"S{parsed.code}", parsed.pci + ".0") == (row["xid"], row["pci"])


@pytest.mark.parametrize("row", LOST, ids=lambda row: row["pci"])
def test_a_lost_card_is_read(row: dict[str, str]) -> None:
    assert parse(row["line"]) == LostGpu(row["pci"], f"GPU {row['pci']}.0: {BUS}")


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row["line"][:30])
def test_what_only_looks_like_one_is_nothing(row: dict[str, str]) -> None:
    assert parse(row["line"]) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "NVRM: Xid (PCI:0000:1b:00): 79, pid='77', name=a b.c[1]:x, " + BUS,
            XidLine(79, "0000:1b:00", "", 77, "a b.c[1]:x", BUS),
        ),
        (
            "NVRM: Xid (PCI:0000:1B:00.0 GPU-I:01): 13, pid=9, name=[kworker/0:1], Ch 1",
            XidLine(13, "0000:1b:00", "GPU-I:01", 9, "[kworker/0:1]", "Ch 1"),
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 31, pid=9, name=a, channel 0x02",
            XidLine(31, "0000:3b:00", "GPU-I:01 GPU-CI:02", 9, "a", "channel 0x02"),
        ),
        ("NVRM: Xid (1b:00): 31, Ch 02", XidLine(31, "1b:00", "", None, "", "Ch 02")),
        ("NVRM: Xid (PCI:0000:1b:00): 79,", XidLine(79, "0000:1b:00", "", None, "", "")),
        ("NVRM: Xid (PCI:0000:1b:00): 79", XidLine(79, "0000:1b:00", "", None, "", "")),
        (
            "NVRM: Xid (PCI:0000:1b:00): 45, pid='<unk",
            XidLine(45, "0000:1b:00", "", None, "", ""),
        ),
        (
            "4,1234,567890,-;NVRM: Xid (PCI:0000:1b:00): 63, pid=1\n SUBSYSTEM=pci",
            XidLine(63, "0000:1b:00", "", 1, "", ""),
        ),
        (
            "[  17.05][ T4711] NVRM: Xid (PCI:0000:1b:00): 43, pid=1, name=x, Ch 8\r",
            XidLine(43, "0000:1b:00", "", 1, "x", "Ch 8"),
        ),
        (
            "mär 03 10:11:12 host kernel: NVRM: Xid (PCI:0000:1b:00): 8, Channel 1",
            XidLine(8, "0000:1b:00", "", None, "", "Channel 1"),
        ),
        (
            "python-1 [003] d..1. 5.1: nvidia_dev_xid: Xid (PCI:0000:75:00.0): 172, SM ICACHE",
            XidLine(172, "0000:75:00", "", None, "", "SM ICACHE"),
        ),
        (
            "XID event received: code=48 pci=0000:75:00 msg=pid=34, name=python3, Ch 0a",
            XidLine(48, "0000:75:00", "", 34, "python3", "Ch 0a"),
        ),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Data {0x00140004, 0x1}",
            SxidLine(20034, "0000:a9:00", None, None, "Data {0x00140004, 0x1}"),
        ),
        (
            "nvidia-nvswitch2: SXid (PCI:0000:85:00.0): 12028, Non-fatal, Link 61 egress",
            SxidLine(12028, "0000:85:00", False, 61, "Non-fatal, Link 61 egress"),
        ),
        (
            "nvidia-nvswitch2: SXid (PCI:0000:85:00.0): 20034, Fatal, Link 30 LTSSM",
            SxidLine(20034, "0000:85:00", True, 30, "Fatal, Link 30 LTSSM"),
        ),
        (
            "NVRM: GPU at 0000:3b:00.0 has fallen off the bus.",
            LostGpu("0000:3b:00", "GPU at 0000:3b:00.0 has fallen off the bus."),
        ),
        (
            "NVRM: fallen off the bus and is not responding to commands.",
            LostGpu("", "fallen off the bus and is not responding to commands."),
        ),
    ],
)
def test_a_form_is_read_whole(line: str, expected: xid.Parsed) -> None:
    assert parse(line) == expected


def test_a_loss_told_in_three_lines_at_once_names_its_card() -> None:
    lines = [
        "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0",
        "               NVRM: (PCI ID: 10de:26b5) installed in this system has",
        "               NVRM: fallen off the bus and is not responding to commands.",
    ]

    for joint in ("\n", r"\x0a"):
        parsed = parse(joint.join(lines))
        assert isinstance(parsed, LostGpu)
        assert parsed.pci == "0000:b3:00"


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: nvGpuXidHandler: 79, entered",
        "Unable to determine the device handle for GPU0000:03:00.0: GPU is lost.",
        "app: GPU has fallen off the bus, says somebody",
        "NVRM: GPU at PCI:0000:1b:00: GPU-6f3d",
        "",
    ],
)
def test_other_words_of_and_about_the_driver_are_nothing(line: str) -> None:
    assert parse(line) is None


@pytest.mark.parametrize(
    ("line", "nvml", "same"),
    [
        ("0000:1b:00", "00000000:1B:00.0", True),
        ("1b:00", "00000000:1B:00.0", True),
        ("0001:00", "00000000:01:00.0", True),
        ("0000:1b:00", "00000000:1C:00.0", False),
        ("0004:01:00", "00000000:01:00.0", False),
        ("0000:00:06", "00000000:00:06.0", True),
        ("", "00000000:00:00.0", False),
        ("", "", False),
    ],
)
def test_an_address_is_compared_as_an_address(line: str, nvml: str, same: bool) -> None:
    assert same_card(line, nvml) is same


@pytest.mark.parametrize(
    "name",
    [
        "NVRM: Xid: 79",
        "NVRM:Xid(1:0):7",
        "NVRM: Xid(1:0):",
        "NVRM: Xid (1:0)",
        "SXid(1:0):20034",
        "SXid (1:0): 7",
        "SXid: 20034",
    ],
)
@pytest.mark.parametrize(
    "line",
    [
        "{}[4242]: segfault at 0 ip 000055d5c0a0 sp 00007ffd2a10 error 4 in a[55d5c0a0+1000]",
        "traps: {}[4242] general protection fault ip:55d5c0a0 sp:7ffd2a10 error:0",
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task={},pid=4242,uid=1000",
        "Out of memory: Killed process 4242 ({}) total-vm:1kB, anon-rss:1kB",
        "CPU: 3 PID: 4242 Comm: {} Tainted: P           OE",
        "INFO: task {}:4242 blocked for more than 120 seconds.",
        "{}: 79 output lines suppressed due to ratelimiting",
    ],
)
def test_a_programs_name_is_never_taken_for_the_drivers_words(line: str, name: str) -> None:
    assert len(name) <= 15  # the kernel keeps no more of it
    assert parse(line.format(name)) is None


def test_a_line_that_names_no_card_is_not_the_drivers() -> None:
    assert parse("NVRM: Xid: 31, pid=4242, name=a, Ch 00000008") is None
    assert parse("NVRM: Xid (PCI): 31, pid=4242, name=a, Ch 00000008") is None


PREFIXES = st.from_regex(r"\A(\[[ 0-9.:TZ+-]{1,30}\]|[A-Za-z0-9 ,;<>.äé-]{0,40}: )*\Z")


@given(prefix=PREFIXES, row=st.sampled_from(SEEN))
def test_what_stands_before_the_drivers_words_changes_nothing(
    prefix: str, row: dict[str, str]
) -> None:
    assert parse(prefix + row["line"]) == parse(row["line"])


@given(row=st.sampled_from(SEEN), cut=st.integers(0, 300), tail=st.text(max_size=40))
def test_any_piece_of_a_line_is_read_without_an_error(
    row: dict[str, str], cut: int, tail: str
) -> None:
    parsed = parse(row["line"][:cut] + tail)

    assert parsed is None or parsed == parse(row["line"][:cut] + tail)


@given(st.text(), st.text())
def test_any_text_is_an_address_or_not_and_a_line_or_not(line: str, pci: str) -> None:
    parse(line)

    assert same_card(line, pci) is same_card(pci, line)


@pytest.mark.parametrize("row", [*XIDS, *SXIDS, *LOST], ids=lambda row: row["line"][:40])
def test_what_the_driver_began_a_line_with_is_not_forged(row: dict[str, str]) -> None:
    """As it stands in the kernel's own record, without what others put before it."""
    (text,) = re.findall(r"(?:NVRM:|nvidia-nvswitch\d:) .*", row["line"])

    assert not xid.is_forged(text)


@pytest.mark.parametrize(
    "text",
    [
        r"NVRM: The NVIDIA GPU 0000:b3:00.0\x0aNVRM: (PCI ID: 10de:26b5) installed in this system"
        r" has\x0aNVRM: fallen off the bus and is not responding to commands.",
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "NVRM: fallen off the bus and is not responding to commands.",
        "NVRM: GPU at 0000:3b:00.0 has fallen off the bus.",
        "NVRM: GPU at PCI:0000:3b:00 has fallen off the bus.",
        "train[1]: segfault at 0 ip 55d5c0a0 sp 7ffd2a10 error 4 in libcuda.so.570.1[55d5c0a0+1]",
        "nvidia 0000:3b:00.0: enabling device (0000 -> 0003)",
    ],
)
def test_what_the_kernel_says_by_itself_is_not_forged(text: str) -> None:
    assert not xid.is_forged(text)
