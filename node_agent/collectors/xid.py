"""Reads the driver's own words out of a kernel line: an Xid, an NVSwitch's SXid, a lost card. (What
the rest of the kernel says of a host is in `host_lines`.)

Pure and total: any text gives a value or None, never an error. It says what the line says and
judges nothing; what a code means is triage's business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class XidLine:
    """One Xid. `pci` is "domain:bus:device" in lower case, or "bus:device" where the line has no
    more."""

    code: int
    pci: str
    #: "GPU-I:01 GPU-CI:02" where the card is cut into instances, else "".
    mig: str
    pid: int | None
    #: Name of the process, "" where the driver did not know it.
    process: str
    #: What follows, verbatim.
    text: str

    @property
    def previous(self) -> int | None:
        """The code that this one is a consequence of, where the driver says so."""
        found = _PREVIOUS.search(self.text)
        return int(found[1]) if found is not None else None

    @property
    def link(self) -> int | None:
        """The NVLink that it is about."""
        return _link(self.text)

    @property
    def words(self) -> tuple[int, ...]:
        """The register words in brackets; empty where the line was cut before their end."""
        found = _WORDS.search(self.text)
        return tuple(int(word, 16) for word in _WORD.findall(found[1])) if found else ()

    @property
    def unit(self) -> str:
        """The unit of NVLink 5 that it is about, as the driver names it: "RLW_REMAP"."""
        found = _UNIT.match(self.text)
        return found["unit"].strip() if found is not None else ""

    @property
    def fatal(self) -> bool | None:
        """What the driver prints, which is not always what the vendor's table says."""
        return _fatal(self.text)

    @property
    def place_in_gpu(self) -> tuple[int, int] | None:
        """The GPC and TPC that raised an exception of a shader."""
        found = _TPC.search(self.text)
        return (int(found[1]), int(found[2])) if found is not None else None


@dataclass(frozen=True)
class SxidLine:
    """One SXid of an NVSwitch, or a further line of it: the driver prints up to three, of which the
    second has the severity and the third the registers. `fatal` and `link` are None where the line
    does not say."""

    code: int
    pci: str
    fatal: bool | None
    link: int | None
    text: str
    #: The port leads to another switch, not to a GPU.
    trunk: bool = False


@dataclass(frozen=True)
class LostGpu:
    """A card that left the bus, said without an Xid. `pci` is "" where another line names it."""

    pci: str
    text: str


Parsed = XidLine | SxidLine | LostGpu

#: What the driver always says of where it was: the card's address (before 2013 without "PCI:"), and
#: perhaps its function and a MIG instance. A program's name, which the kernel prints too, has at
#: most 15 characters: too few for the driver's words with an address, whose parts have two digits.
_WHERE = (
    r"\s+\((?P<place>(?:PCI:)?(?:[0-9A-Fa-f]{2,8}:)?[0-9A-Fa-f]{2,4}:[0-9A-Fa-f]{2}[^)\n]{0,200})\)"
    r"\s*:\s*(?P<code>[0-9]{1,9})(?=[,\s]|$)(?P<body>.*)"
)
#: The driver's printk, and its tracepoint (`nv-tracepoint.h` of NVIDIA's open modules).
_XID = re.compile(r"(?:NVRM|nvidia_dev_xid):\s+Xid" + _WHERE)
#: The same tracepoint as an eBPF reader prints it.
_TRACED = re.compile(
    r"XID event received:\s*code=(?P<code>[0-9]{1,9})\s+pci=(?P<place>\S+)\s+msg=(?P<body>.*)"
)
_SXID = re.compile(r"nvidia-nvswitch[0-9]{1,4}:?\s+SXid" + _WHERE)
_PROCESS = re.compile(r"pid='?(?P<pid>[0-9]{0,10})[^,]*(?:,\s*name=(?P<name>[^,]*))?,?\s*")
_PLACE = re.compile(r"(?:PCI:)?(?P<pci>[0-9A-Fa-f]{1,8}(?::[0-9A-Fa-f]{1,4}){1,2})(?![0-9A-Fa-f])")
_MIG = re.compile(r"GPU-I:\S+(?:\s+GPU-CI:\S+)?")
_FATAL = re.compile(r"\b(non-?)?fatal\b", re.IGNORECASE)
#: A switch's second line has it as a number: 0 stands for what the first one calls non-fatal.
_SEVERITY = re.compile(r"^Severity\s{1,4}([0-9]{1,2})\b")
#: A kernel record has a kilobyte; of what is longer nobody knows what it is.
_MAX_LINE = 8192
_LINK = re.compile(r"\blink\s+([0-9]{1,4})(?![0-9])", re.IGNORECASE)
_TRUNK = re.compile(r"\btrunk\b", re.IGNORECASE)
_PREVIOUS = re.compile(r"caused by (?:a )?previous Xid\s{0,4}:?\s{0,4}([0-9]{1,4})", re.IGNORECASE)
_WORD = re.compile(r"(?:0x)?([0-9a-fA-F]{1,8})(?![0-9a-fA-FxX])")
#: Two words or more, to the closing bracket: of words that are cut off nothing can be said.
_WORDS = re.compile(
    r"\(\s{0,4}((?:0x)?[0-9a-fA-F]{1,8}"
    r"(?:(?:\s{0,4},\s{0,4}|\s{1,4})(?:0x)?[0-9a-fA-F]{1,8}){1,31})\s{0,4}\)"
)
_UNIT = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_]{2,40}(?: Degraded)?)\s+(?:(?:Non-?|Link[ -])?Fatal|XC[0-9])",
    re.IGNORECASE,
)
_TPC = re.compile(r"\bGPC\s*([0-9]{1,3})\s*,?\s*TPC\s*([0-9]{1,3})", re.IGNORECASE)
_LOST = "fallen off the bus"
#: A line of it from its beginning.
_LOST_LINE = re.compile(
    r"NVRM:\s+(?:GPU\s+(?:at\s+)?(?:PCI:)?[0-9A-Fa-f:.]{5,20}\s+(?:GPU\s+)?has\s+)?" + _LOST
)
#: The driver prints it in one line, or in three of which the first names the card.
_CARD = re.compile(
    r"\bGPU\s+(?:at\s+)?(?:PCI:)?"
    r"(?P<pci>(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?![0-9A-Fa-f:])"
)
#: And the first line of the three.
_FIRST_OF_THREE = re.compile(
    r"NVRM:\s+The NVIDIA GPU\s+(?P<pci>(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})"
)
#: How the driver begins a line that reports something.
_BEGINNINGS = (_XID, _SXID, _FIRST_OF_THREE, _LOST_LINE)


def parse(line: str) -> Parsed | None:
    """What the line reports, whatever stands before it; None if nothing of these."""
    line = line[:_MAX_LINE]
    if "Xid" in line or "XID" in line:  # most lines of a log have none: this is quicker
        found = _XID.search(line) or _TRACED.search(line)
        if found is not None:
            return _xid(found)
        found = _SXID.search(line)
        if found is not None:
            return _sxid(found)
    return _lost(line) if _LOST in line else None


def is_forged(text: str) -> bool:
    """Whether a record of the kernel reports something that its driver did not say.

    The kernel prints names of files and of groups of processes: long enough for all of the driver's
    words. No record begins with those, and the name of a program, with which some do, is too short.
    """
    reports = parse(text) is not None or named_card(text) != ""
    return reports and not any(words.match(text) for words in _BEGINNINGS)


def named_card(line: str) -> str:
    """The card that the first of three lines names, of which the last says that it is lost; "" if
    this is no such line."""
    found = _FIRST_OF_THREE.search(line) if "The NVIDIA GPU" in line else None
    return found["pci"].lower() if found is not None else ""


def same_card(line_pci: str, nvml_pci: str) -> bool:
    """Whether a kernel line's "0000:1b:00" or "1b:00" is NVML's "00000000:1B:00.0".

    An address without a domain is in domain 0, as everywhere in Linux.
    """
    one, other = address(line_pci), address(nvml_pci)
    return one is not None and one == other


def _xid(found: re.Match[str]) -> XidLine:
    place = found["place"]
    body = found["body"].lstrip(", \t")
    pid, process = None, ""
    told = _PROCESS.match(body)
    if told is not None:
        pid = int(told["pid"]) if told["pid"] else None
        process = _known((told["name"] or "").strip().strip("'"))
        body = body[told.end() :]
    mig = _MIG.search(place)
    return XidLine(
        code=int(found["code"]),
        pci=_pci(place),
        mig=mig[0] if mig is not None else "",
        pid=pid,
        process=process,
        text=body.strip(),
    )


def _sxid(found: re.Match[str]) -> SxidLine:
    text = found["body"].strip(", \t\r")
    severity = _SEVERITY.match(text)
    return SxidLine(
        code=int(found["code"]),
        pci=_pci(found["place"]),
        fatal=_fatal(text) if severity is None else severity[1] != "0",
        link=_link(text),
        trunk=_TRUNK.search(text) is not None,
        text=text,
    )


def _fatal(text: str) -> bool | None:
    found = _FATAL.search(text)
    return None if found is None else found[1] is None


def _link(text: str) -> int | None:
    found = _LINK.search(text)
    return int(found[1]) if found is not None else None


def _lost(line: str) -> LostGpu | None:
    start = line.find("NVRM:")
    if start < 0 or line.find(_LOST, start) < 0:
        return None
    text = line[start:].removeprefix("NVRM:").strip()
    card = _CARD.search(text)
    return LostGpu(pci=card["pci"].lower() if card is not None else "", text=text)


def _known(name: str) -> str:
    return "" if name == "<unknown>" else name


def _pci(place: str) -> str:
    found = _PLACE.match(place.strip())
    return found["pci"].lower() if found is not None else ""


def address(pci: str) -> tuple[int, ...] | None:
    """(domain, bus, device), however it is written; None if it is no address."""
    found = _PLACE.match(pci.strip())
    if found is None:
        return None
    parts = [int(part, 16) for part in found["pci"].split(":")]
    return (*([0] * (3 - len(parts))), *parts)
