"""How well kernel lines are judged, beside what ten other systems would have done, and how quickly.

    python benchmarks/triage.py [--lines TSV] [--speed 1000000]

The score: each line of a collection of real ones (tests/data/xid_lines.tsv, or another file of the
same columns) is judged with its neighbours in its machine's log, and compared with what NVIDIA's
documents say. Beside it stands what the others' published lists of codes (xid_practice.csv) would
have done with the same lines: how many of a healthy card's take it out of service, and how many
that ask for service pass unnoticed. Lines of codes that the vendor marks as unused, and lines that
lack what their code needs, say neither and are left out there.

The speed: as many lines, most of them mutated, with repeats and other kernel lines between, through
the same function; in the worst case each of them is an XID.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from controlplane.health.catalogue import catalogue
from node_agent.collectors.xid import LostGpu, SxidLine, XidLine
from workers.triage.logs import Judged, judge_log

ROOT = Path(__file__).resolve().parent.parent
#: What the vendor's words for a line call for, by ours that do it.
EXPECTED: dict[str, set[str]] = {
    "RESTART_APP": {"restart_app"},
    "RESTART_BM": {"reboot"},
    "RESET_GPU": {"reset_gpu"},
    "DRAIN_AND_RESET": {"drain_and_reset"},
    "IGNORE": {"ignore"},
    "CONTACT_SUPPORT": {"contact_vendor"},
    "CHECK_MECHANICALS": {"check_mechanicals"},
    "FOLLOW_PRIMARY": {"follow_primary"},
    "FOLLOW_XID_48": {"follow_primary"},
    "WORKFLOW_NVLINK_ERR:no registers": {"undecodable"},
    "RESTART_VM_OR_RESET_GPU": {"reset_gpu", "reboot"},
    "RESET_GPU_OR_RESTART_VM": {"reset_gpu", "reboot"},
}
SERVICE = {"RESTART_BM", "RESET_GPU", "DRAIN_AND_RESET", "CHECK_MECHANICALS"}
HEALTHY = {"RESTART_APP", "IGNORE", "FOLLOW_PRIMARY", "FOLLOW_XID_48"}
#: Our actions that need the card or its node out of service.
OUT = {
    "reset_gpu", "drain_and_reset", "reboot", "power_cycle", "check_mechanicals",
    "field_diagnostic", "contact_vendor",
}  # fmt: skip
#: Whether what another system's list says of a code takes the card out of service; None where it
#: looks further than its list.
PEERS: dict[str, Callable[[str], bool | None]] = {
    "nvsentinel_action": lambda said: None if said[:3] == "BY_" else not said.startswith("NONE"),
    "gpud_action": lambda said: "RebootSystem" in said or "HardwareInspection" in said,
    "eks_nma": lambda said: said == "repair",
    "k8s_device_plugin": lambda said: said == "gpu_unhealthy",
    "dcgm_health_xid": lambda said: said == "FAIL",
    "meta_gcm": lambda said: said.startswith("critical"),
    "imbue": lambda said: said == "hardware",
    "azure_nhc": lambda said: said == "hardware",
    "modal": lambda said: said == "critical",
}


@dataclass(frozen=True)
class Row:
    """One line of the collection, and how it was judged."""

    line: str
    xid: str
    pci: str
    expected: str  # without what else decides
    note: str
    judged: Judged | None

    def is_right(self) -> bool:
        """Code, card and action."""
        if self.expected == "NO_XID":
            return self.judged is None
        if self.judged is None:
            return False
        parsed = self.judged.parsed
        code = ""
        if isinstance(parsed, XidLine):
            code = str(parsed.code)
        elif isinstance(parsed, SxidLine):
            code = f"S{parsed.code}"
        elif isinstance(parsed, LostGpu):
            code = "79*"
        same_card = self.judged.verdict.pci == self.pci.partition(".")[0].lower()
        fits = self.judged.verdict.action in EXPECTED[self.expected]
        return (code, same_card, fits) == (self.xid, True, True)

    def takes_out(self) -> bool:
        """Whether we take the card out of service for it."""
        verdict = self.judged.verdict if self.judged else None
        return verdict is not None and verdict.urgency != "none" and verdict.action in OUT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lines", type=Path, default=ROOT / "tests" / "data" / "xid_lines.tsv")
    parser.add_argument("--speed", type=int, default=1_000_000, help="lines")
    given = parser.parse_args()
    rows = list(judged_rows(given.lines))
    score(rows)
    print()
    speed([row.line for row in rows], given.speed)


def judged_rows(path: Path) -> Iterator[Row]:
    """Rows of one source are one machine's log, in order."""
    with path.open(newline="") as file:
        raw = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    begin = 0
    for number in range(1, len(raw) + 1):
        if number < len(raw) and raw[number]["source"] == raw[begin]["source"]:
            continue
        part = raw[begin:number]
        split = [row["line"].split("\\n") for row in part]
        found = list(judge_log([line for lines in split for line in lines], catalogue()))
        at = 0
        for row, lines in zip(part, split, strict=True):
            here = found[at : at + len(lines)]
            at += len(lines)
            yield Row(
                line=row["line"],
                xid=row["xid"],
                pci=row["pci"],
                expected=row["expected_action_class"].partition("(")[0],
                note=row["note"],
                judged=next((one for one in here if one is not None), None),
            )
        begin = number


def score(rows: list[Row]) -> None:
    wrong = [row for row in rows if not row.is_right()]
    print(f"{len(rows) - len(wrong)} of {len(rows)} lines judged as NVIDIA's documents have them")
    for row in wrong:
        action = row.judged.verdict.action if row.judged else None
        print(f"  wrong: {row.expected} expected, {action} given: {row.line[:120]}")
    with (ROOT / "benchmarks" / "xid_practice.csv").open(newline="") as file:
        practice = {row["xid"]: row for row in csv.DictReader(file)}
    known = [row for row in rows if row.xid in practice and "unused" not in row.note]
    healthy = [row for row in known if row.expected in HEALTHY]
    service = [row for row in known if row.expected in SERVICE]
    print(f"of {len(healthy)} XID lines of healthy cards, and {len(service)} that ask for service:")
    print(f"{'':20} healthy taken out   service missed")
    out = sum(row.takes_out() for row in healthy)
    missed = sum(not row.takes_out() for row in service)
    print(f"{'ours':20} {share(out, len(healthy))}   {share(missed, len(service))}")
    for peer, acts in PEERS.items():
        out = sum(acts(practice[row.xid][peer]) is True for row in healthy)
        missed = sum(acts(practice[row.xid][peer]) is False for row in service)
        print(f"{peer:20} {share(out, len(healthy))}   {share(missed, len(service))}")


def share(part: int, whole: int) -> str:
    return f"{part:6} ({100 * part / max(whole, 1):4.0f}%)    "


def speed(seeds: list[str], count: int) -> None:
    """One machine's log of so many lines, and one in which all are XIDs."""
    drawn = random.Random(3)  # noqa: S311 - the same lines each time
    mixed = [mutated(drawn, drawn.choice(seeds)) for _ in range(count)]
    xids = [line for line in seeds if "Xid (" in line]
    worst = [f"[{k / 7:.6f}] {drawn.choice(xids)}" for k in range(count)]
    for name, lines in (("mutated", mixed), ("all XIDs, stamped", worst)):
        began = time.perf_counter()
        found = sum(one is not None for one in judge_log(lines, catalogue()))
        each = (time.perf_counter() - began) / count
        print(
            f"{count:,} lines, {name}: {each * 1e6:.1f} us each, {found:,} mean something; "
            f"target 50 us: {'kept' if each < 50e-6 else 'MISSED'}"
        )


def mutated(drawn: random.Random, line: str) -> str:
    """Cut, turned over, doubled or with rubbish inside; now and then as it is."""
    kind = drawn.randrange(6)
    at = drawn.randrange(len(line))
    if kind == 0:
        return line[:at]
    if kind == 1:
        return line[:at] + chr(drawn.randrange(1, 0x2FFF)) + line[at + 1 :]
    if kind == 2:
        return line[at:] + line[:at]
    if kind == 3:
        return line + line
    if kind == 4:
        return "".join(chr(drawn.randrange(32, 127)) for _ in range(120))
    return line


if __name__ == "__main__":
    main()
