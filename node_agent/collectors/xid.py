"""Reads the driver's own words out of a kernel line: an Xid, an NVSwitch's SXid, a lost card.

Pure and total: any text gives a value or None, never an error. It says what the line says and
judges nothing; what a code means is triage's business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class XidLine:
    """One Xid. `pci` is "domain:bus:device" in lower case, as far as the line gives it."""

    code: int
    pci: str
    #: "GPU-I:01 GPU-CI:02" where the card is cut into instances, else "".
    mig: str
    pid: int | None
    #: Name of the process, "" where the driver did not know it.
    process: str
    #: What follows, verbatim.
    text: str


@dataclass(frozen=True)
class SxidLine:
    """One SXid of an NVSwitch. `fatal` and `link` are None where the line does not say."""

    code: int
    pci: str
    fatal: bool | None
    link: int | None
    text: str


@dataclass(frozen=True)
class LostGpu:
    """A card that left the bus, said without an Xid. `pci` is "" where another line names it."""

    pci: str
    text: str


Parsed = XidLine | SxidLine | LostGpu

#: The driver's printk, its tracepoint (`nv-tracepoint.h` of NVIDIA's open modules), and before
#: 2013 no "PCI:"; then the place, which may carry a function and a MIG instance.
_XID = re.compile(
    r"(?:NVRM|nvidia_dev_xid):\s*Xid(?:\s*\((?P<place>[^)\n]{0,200})\))?"
    r"\s*:\s*(?P<code>[0-9]{1,9})(?![0-9])(?P<body>.*)"
)
#: The same tracepoint as an eBPF reader prints it.
_TRACED = re.compile(
    r"XID event received:\s*code=(?P<code>[0-9]{1,9})\s+pci=(?P<place>\S+)\s+msg=(?P<body>.*)"
)
_SXID = re.compile(
    r"(?<![\w])SXid(?:\s*\((?P<place>[^)\n]{0,200})\))?"
    r"\s*:\s*(?P<code>[0-9]{1,9})(?![0-9])(?P<body>.*)"
)
_PROCESS = re.compile(r"pid='?(?P<pid>[0-9]{0,10})[^,]*(?:,\s*name=(?P<name>[^,]*))?,?\s*")
_PLACE = re.compile(r"(?:PCI:)?(?P<pci>[0-9A-Fa-f]{1,8}(?::[0-9A-Fa-f]{1,4}){1,2})(?![0-9A-Fa-f])")
_MIG = re.compile(r"GPU-I:\S+(?:\s+GPU-CI:\S+)?")
_FATAL = re.compile(r"\b(non-)?fatal\b", re.IGNORECASE)
_LINK = re.compile(r"\blink\s+([0-9]{1,4})\b", re.IGNORECASE)
_LOST = "fallen off the bus"
#: The driver prints it in one line, or in three of which the first names the card.
_CARD = re.compile(
    r"\bGPU\s+(?:at\s+)?(?:PCI:)?"
    r"(?P<pci>(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?![0-9A-Fa-f:])"
)


def parse(line: str) -> Parsed | None:
    """What the line reports, whatever stands before it; None if nothing of these."""
    found = _XID.search(line) or _TRACED.search(line)
    if found is not None:
        return _xid(found)
    found = _SXID.search(line)
    if found is not None:
        return _sxid(found)
    return _lost(line)


def same_card(line_pci: str, nvml_pci: str) -> bool:
    """Whether a kernel line's "0000:1b:00" or "1b:00" is NVML's "00000000:1B:00.0".

    An address without a domain is in domain 0, as everywhere in Linux.
    """
    one, other = _address(line_pci), _address(nvml_pci)
    return one is not None and one == other


def _xid(found: re.Match[str]) -> XidLine:
    place = found["place"] or ""
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
    fatal = _FATAL.search(text)
    link = _LINK.search(text)
    return SxidLine(
        code=int(found["code"]),
        pci=_pci(found["place"] or ""),
        fatal=None if fatal is None else fatal[1] is None,
        link=int(link[1]) if link is not None else None,
        text=text,
    )


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


def _address(pci: str) -> tuple[int, ...] | None:
    """(domain, bus, device), or None if it is no address."""
    found = _PLACE.match(pci.strip())
    if found is None:
        return None
    parts = [int(part, 16) for part in found["pci"].split(":")]
    return (*([0] * (3 - len(parts))), *parts)
