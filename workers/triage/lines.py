"""What one kernel line means, with what stands near it.

No Django, no I/O, no clock: the same evidence gives the same verdict, so decisions can be replayed.
Order of authority: the driver's own recovery action, the vendor's catalogue, then what repeats.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from node_agent.collectors import host_lines, xid
from node_agent.collectors.host_lines import HostLine
from workers.triage import nvlink
from workers.triage.catalogue import Catalogue, CatalogueEntry
from workers.triage.verdicts import Fault, LineVerdict, Urgency, stronger

#: Anything that a kernel line may say.
Parsed = xid.Parsed | HostLine

#: The driver's own recovery action in an XID 154, read by its number, for the words change from
#: driver to driver. NVML field 230 has the same: NVIDIA's nvml.h, NVML_GPU_RECOVERY_ACTION_*.
RECOVERY_ACTIONS = {
    0: "ignore",
    1: "reset_gpu",
    2: "reboot",
    3: "drain_and_reset",  # drain P2P
    4: "drain_and_reset",
    5: "contact_vendor",  # IMEX domain
    6: "reset_gpu",  # bus reset
    7: "reboot",
}
_RECOVERY = re.compile(r"\bto\s+(?:0x)?([0-9a-f]{1,8})\b", re.IGNORECASE)
#: Where an uncorrectable error lies, as XID 48 and its companions say it.
_SRAM = re.compile(r"\bSRAM\b|detected on GPU in the (?!framebuffer)", re.IGNORECASE)
_DRAM = re.compile(r"\bDRAM\b|\bframebuffer\b|\bFBPA\b", re.IGNORECASE)

LOST = 79
#: XID 45 is never a root cause: whatever else stands near its card is.
CONSEQUENCE = 45
#: Stands for any code but that, and for any but that and XID 74.
ANY, ANY_BUT_LINKS = 0, -1
NVLINK = 74
RECOVERY_ACTION = 154
_CONTAINED = 94
_UNCORRECTABLE = 48
_REMAPPED, _NOT_REMAPPED = 63, 64
_DRAM_ERROR, _SRAM_ERROR = 171, 172
#: Codes that decide on what others near them mean.
DECIDING = frozenset({LOST, _REMAPPED, _NOT_REMAPPED, _DRAM_ERROR, _SRAM_ERROR, RECOVERY_ACTION})
#: Codes of a program's doing, until they repeat at one place of a card.
PROGRAM_CODES = (13, 31, 43)
#: Groups of SXids that are what a switch sees of a GPU that is gone.
_SEEN_OF_A_GPU = ("potentially_fatal", "link_stall")


@dataclass(frozen=True)
class Near:
    """What stands near a line in time, on the same card unless said otherwise."""

    #: Codes of XIDs; 79 also for a card that is lost without one.
    codes: frozenset[int] = frozenset()
    #: The strongest action that an XID 154 there calls for; "" without one, or where it says that
    #: nothing is left to be done.
    recovery: str = ""
    #: A switch speaks of a fault.
    switch: bool = False
    #: On any card of the machine, one was lost before.
    lost_before: bool = False
    #: Errors of parity that this card's link had before, however long ago.
    parity_before: int = 0
    #: Separate bursts of this code, at this place, in the day before.
    bursts_before: int = 0
    #: Other nodes whose cards said this code within the day.
    other_nodes: int = 0


NOTHING_NEAR = Near()


@dataclass
class _Words:
    """What a rule has found, before it becomes a verdict."""

    action: str
    rule: str
    why: list[str] = field(default_factory=list)
    follow_up: str = ""
    urgency: Urgency | None = None
    reset_when_idle: bool = False


def parse(line: str) -> Parsed | None:
    """What the line says, of a card, a switch or the host; None if nothing."""
    return xid.parse(line) or host_lines.parse(line)


def judge_line(line: str, catalogue: Catalogue, near: Near = NOTHING_NEAR) -> LineVerdict | None:
    """What a kernel line means; None if it means nothing."""
    parsed = parse(line)
    return None if parsed is None else judge(parsed, catalogue, near)


def judge(parsed: Parsed, catalogue: Catalogue, near: Near = NOTHING_NEAR) -> LineVerdict:
    """What this observation means, with what stands near it."""
    if isinstance(parsed, xid.LostGpu):
        return LineVerdict(
            "gpu-lost", parsed.pci, "hardware", "reboot", "now", "lost-card",
            "the card has fallen off the bus", follow_up="contact_vendor",
        )  # fmt: skip
    if isinstance(parsed, HostLine):
        return _host(parsed)
    if isinstance(parsed, xid.SxidLine):
        return _sxid(parsed, catalogue, near)
    return _xid(parsed, catalogue, near)


def decided_by(code: int, catalogue: Catalogue) -> tuple[int, ...]:
    """The codes that decide on what this one means, if they stand near it on the same card."""
    if code == CONSEQUENCE:
        return (ANY,)
    if code == _UNCORRECTABLE:
        return (_REMAPPED, _NOT_REMAPPED, _DRAM_ERROR, _SRAM_ERROR)
    if code == RECOVERY_ACTION:
        return (LOST,)
    if code == NVLINK:
        return (RECOVERY_ACTION, ANY_BUT_LINKS)
    entry = catalogue.xids.get(code)
    return (RECOVERY_ACTION,) if entry is not None and entry.action == "undecodable" else ()


def recovery_action(parsed: xid.XidLine) -> str:
    """What an XID 154 calls for; "" if it does not say, or says what nobody knows yet."""
    number = _RECOVERY.search(parsed.text)
    return RECOVERY_ACTIONS.get(int(number[1], 16), "") if number else ""


# --- XIDs ---------------------------------------------------------------------------------------


def _xid(parsed: xid.XidLine, catalogue: Catalogue, near: Near) -> LineVerdict:
    entry = catalogue.xids.get(parsed.code)
    if entry is None:
        return LineVerdict(
            f"xid-{parsed.code}", parsed.pci, "unknown", "undecodable", "now", "not-in-catalogue",
            f"XID {parsed.code}, which the catalogue does not know",
        )  # fmt: skip
    special = _by_catalogue if entry.of_site else _SPECIAL.get(parsed.code, _by_catalogue)
    words = special(parsed, entry, catalogue, near)
    if words.action == "undecodable" and near.recovery:
        words.action, words.urgency = near.recovery, None
        words.rule = "driver-recovery-action"
        words.why.append("decided by the driver's recovery action (XID 154) beside it")
    if words.action == "undecodable" and entry.warning:
        words.urgency = "idle"
    fault = _fault(parsed, entry, words)
    return LineVerdict(
        code=f"xid-{parsed.code}",
        pci=parsed.pci,
        fault=fault,
        action=words.action,
        urgency=words.urgency or _urgency(words.action),
        rule=words.rule,
        summary=f"XID {parsed.code}: " + "; ".join([entry.description, *words.why]),
        follow_up=words.follow_up,
        reset_when_idle=words.reset_when_idle,
    )


def _fault(parsed: xid.XidLine, entry: CatalogueEntry, words: _Words) -> Fault:
    if parsed.code == RECOVERY_ACTION:
        return "hardware"
    if words.action == "restart_app" and entry.fault == "hardware" and parsed.code != _CONTAINED:
        return "program"
    return entry.fault


def _by_catalogue(
    parsed: xid.XidLine, entry: CatalogueEntry, _catalogue: Catalogue, near: Near
) -> _Words:
    words = _Words(entry.action, entry.source, follow_up=entry.follow_up)
    if entry.of_site:  # it knows why
        return words
    if entry.unused:
        words.rule += ": unused code"
        words.urgency = "none"
        words.why.append("the vendor marks the code as unused: it takes no node out by itself")
    if parsed.code in PROGRAM_CODES and near.bursts_before:
        place = parsed.place_in_gpu
        where = f"GPC {place[0]}, TPC {place[1]} of this card" if place else "this card"
        words.rule += ": repeats"
        again = f"again on {where}, after {near.bursts_before} in the day before"
        if near.other_nodes:
            others = f"{near.other_nodes} other node{'s' if near.other_nodes > 1 else ''}"
            words.why.append(f"{again}, and on cards of {others} too: it is the program's")
        else:  # whose fault it is nobody knows yet: somebody looks
            words.action, words.urgency = "field_diagnostic", "idle"
            words.follow_up = "contact_vendor"
            words.why.append(
                f"{again}: if other programs meet it there too, the card is to be diagnosed"
            )
    if parsed.code == LOST:
        words.follow_up = "contact_vendor"
        if near.bursts_before:
            words.why.append("again on the same card: a restart has not mended it")
    if parsed.code == _CONTAINED:  # NVIDIA: restart that program, reset when convenient
        words.reset_when_idle = True
        words.follow_up = "reset_gpu"
    if parsed.code == _REMAPPED:  # takes effect with the next reset
        words.follow_up = "reset_gpu"
        words.urgency = "idle"
    if "NVLink" in parsed.text and "NVLINK" not in entry.mnemonic and entry.fault != "fabric":
        words.why.append("the text speaks of NVLink, which this code is not about: the code counts")
    return words


def _torn_down(
    parsed: xid.XidLine, entry: CatalogueEntry, _catalogue: Catalogue, near: Near
) -> _Words:
    """XID 45 is never a root cause."""
    why = "a consequence"
    previous = parsed.previous
    others = sorted(near.codes - {CONSEQUENCE})
    if previous is not None:
        why = f"a consequence of XID {previous}, as the driver says"
    elif others:
        why = f"a consequence: beside it stands XID {', '.join(map(str, others[:4]))}"
    words = _Words("follow_primary", entry.source, [why])
    if previous is None and not others:
        words.follow_up = "restart_app"
        words.why.append("no other fault stands near it: the program ended or was killed")
    return words


def _uncorrectable(
    parsed: xid.XidLine, entry: CatalogueEntry, _catalogue: Catalogue, near: Near
) -> _Words:
    """XID 48: which memory, and whether a row was remapped, decides."""
    remaps = sorted(near.codes.intersection((_REMAPPED, _NOT_REMAPPED)))
    dram = _DRAM_ERROR in near.codes or _DRAM.search(parsed.text) is not None
    sram = _SRAM_ERROR in near.codes or _SRAM.search(parsed.text) is not None
    if sram and not dram:
        return _Words(
            "reset_gpu", f"{entry.source}: SRAM", ["in SRAM: its threshold flag decides on RMA"],
            follow_up="field_diagnostic",
        )  # fmt: skip
    if remaps:
        codes = " and ".join(map(str, remaps))
        return _Words(
            "drain_and_reset", f"{entry.source}: with {codes}",
            [f"with XID {codes}: a row is to be remapped, which needs a reset"],
            follow_up="contact_vendor" if _NOT_REMAPPED in remaps else "",
        )  # fmt: skip
    return _Words("reset_gpu", entry.source, follow_up="drain_and_reset")


def _companion(
    parsed: xid.XidLine, entry: CatalogueEntry, _catalogue: Catalogue, _near: Near
) -> _Words:
    what = "DRAM" if parsed.code != _SRAM_ERROR else "SRAM"
    return _Words(
        "follow_primary", entry.source, [f"says of XID 48 that it was {what}"],
        follow_up=entry.follow_up,
    )  # fmt: skip


def _recovery(
    parsed: xid.XidLine, _entry: CatalogueEntry, _catalogue: Catalogue, near: Near
) -> _Words:
    """XID 154: the driver says what it wants."""
    action = recovery_action(parsed)
    words = _Words(action or "undecodable", "driver-recovery-action")
    if not action:
        words.why.append("its value cannot be read")
    elif LOST in near.codes and stronger(action, "reboot") != action:
        words.action = "reboot"
        words.rule += ": the stronger of two"
        words.why.append("the card fell off the bus too (XID 79): the stronger of the two holds")
    words.why.insert(0, parsed.text.strip() or "no text")
    return words


def _registers(
    parsed: xid.XidLine, entry: CatalogueEntry, catalogue: Catalogue, near: Near
) -> _Words:
    decoded = nvlink.decode_registers(parsed, catalogue, near.parity_before)
    words = _decoded(decoded, parsed, entry, near)
    alone = not near.switch and not near.codes - {RECOVERY_ACTION, NVLINK}
    if decoded is not None and decoded.secondary and alone:
        words.action, words.follow_up, words.urgency = "contact_vendor", "", "idle"
        words.why.append("a consequence by its bits, but no other fault stands near: reported")
    return words


def _unit(parsed: xid.XidLine, entry: CatalogueEntry, catalogue: Catalogue, near: Near) -> _Words:
    return _decoded(nvlink.decode_unit(parsed, catalogue), parsed, entry, near)


def _decoded(
    decoded: nvlink.Decoded | None, parsed: xid.XidLine, entry: CatalogueEntry, near: Near
) -> _Words:
    link = f"link {parsed.link}" if parsed.link is not None else "an unnamed link"
    if decoded is None:
        return _Words(
            "undecodable", f"{entry.source}: no registers",
            [f"{link}: the line lacks the registers that its code needs"],
            follow_up=entry.follow_up,
            urgency="idle" if parsed.fatal is False else None,
        )  # fmt: skip
    words = _Words(decoded.action, decoded.rule, [f"{link}, {decoded.why}"], decoded.follow_up)
    if decoded.action == nvlink.XID_154:
        words.action = near.recovery or "restart_app"
        words.why.append(
            "the driver's recovery action decides"
            + ("" if near.recovery else ", and none stands near: the program's")
        )
    return words


_Special = Callable[[xid.XidLine, CatalogueEntry, Catalogue, Near], _Words]
_SPECIAL: dict[int, _Special] = {
    CONSEQUENCE: _torn_down,
    _UNCORRECTABLE: _uncorrectable,
    NVLINK: _registers,
    RECOVERY_ACTION: _recovery,
    _DRAM_ERROR: _companion,
    _SRAM_ERROR: _companion,
    **dict.fromkeys(range(144, 151), _unit),
}


# --- switches and hosts -------------------------------------------------------------------------


def _sxid(parsed: xid.SxidLine, catalogue: Catalogue, near: Near) -> LineVerdict:
    entry = catalogue.sxids.get(parsed.code)
    printed = {True: "printed Fatal", False: "printed Non-fatal", None: ""}[parsed.fatal]
    port = f"link {parsed.link}" if parsed.link is not None else ""
    why = [word for word in (printed, port) if word]
    follow_up = ""
    urgency: Urgency | None = None
    if entry is None:
        action, rule = "contact_vendor", "not-in-catalogue"
        why.insert(0, "which the catalogue does not know")
        urgency = "none" if parsed.fatal is False else None
    elif near.lost_before and entry.group in _SEEN_OF_A_GPU:
        action, rule = "follow_primary", f"{entry.source}: after a lost GPU"
        why = [entry.description, *why, "what the switch sees of a GPU that fell off the bus"]
    elif parsed.trunk and entry.group == "potentially_fatal":
        action, rule = "drain_and_reset", f"{entry.source}: trunk port"
        why = [entry.description, *why, "a trunk port: every partition that crosses it has to stop"]
    else:
        action, rule = entry.action, f"{entry.source}: {entry.group}"
        why = [entry.description, *why]
        follow_up = "contact_vendor" if action in ("reset_gpu", "reboot") else ""
        urgency = "idle" if entry.warning and _urgency(action) == "now" else None
    return LineVerdict(
        f"sxid-{parsed.code}", parsed.pci, "fabric", action, urgency or _urgency(action), rule,
        f"SXid {parsed.code} of an NVSwitch: {'; '.join(why)}", follow_up=follow_up,
    )  # fmt: skip


#: What each kind of host line calls for if it was not corrected: fault, action, what comes next,
#: and in words. None of them takes a node out by itself: they explain what else is seen.
_HOST: dict[str, tuple[Fault, str, str, str]] = {
    "oom": ("program", "restart_app", "", "the kernel killed a process for want of memory"),
    "memory_error": ("platform", "field_diagnostic", "", "the host's memory or processor erred"),
    "pcie_error": ("platform", "check_mechanicals", "field_diagnostic", "an error on PCIe"),
    "disk_error": ("platform", "field_diagnostic", "", "a disk does not do as it is asked"),
    "filesystem_error": ("platform", "field_diagnostic", "", "a file system is damaged"),
    "link_down": ("fabric", "ignore", "check_mechanicals", "a network link went down"),
    "blocked_task": ("platform", "ignore", "reboot", "a process has been stuck in the kernel"),
    "panic": ("platform", "ignore", "field_diagnostic", "the kernel panicked before this boot"),
}


#: The codes of their verdicts.
HOST_CODES = frozenset(kind.replace("_", "-") for kind in _HOST)


def is_note(verdict: LineVerdict) -> bool:
    """Whether nothing follows from it by itself: it explains what else is seen."""
    quiet = verdict.action in ("ignore", "follow_primary") or verdict.urgency == "none"
    return quiet or verdict.code in HOST_CODES


def may_end_rank(verdict: LineVerdict) -> bool:
    """Whether it may be why a process of a job ended."""
    return verdict.code not in HOST_CODES or verdict.code == "oom"


def _host(parsed: HostLine) -> LineVerdict:
    fault, action, follow_up, said = _HOST[parsed.kind]
    if parsed.corrected:
        action, said = "ignore", f"{said}, which was corrected"
    about = f" ({parsed.subject})" if parsed.subject else ""
    return LineVerdict(
        parsed.kind.replace("_", "-"), "", fault, action, _urgency(action),
        f"host-line: {parsed.kind}", f"{said}{about}", follow_up=follow_up,
    )  # fmt: skip


def _urgency(action: str) -> Urgency:
    if action in ("ignore", "follow_primary"):
        return "none"
    return "idle" if action == "update_software" else "now"
