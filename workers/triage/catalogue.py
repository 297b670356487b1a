"""The shape of the vendor's catalogues, as triage uses them; `health.catalogue` reads the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.triage.verdicts import Fault


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """What the vendor says of one code."""

    number: int
    mnemonic: str
    description: str
    fault: Fault
    action: str
    follow_up: str = ""
    #: The vendor marks the code as unused: it never takes a node out by itself.
    unused: bool = False
    #: Nothing says that it stops anything.
    warning: bool = False
    #: Whose word it is: "xid-catalogue", or the site's overlay of it.
    source: str = "xid-catalogue"
    of_site: bool = False


@dataclass(frozen=True, kw_only=True)
class SxidEntry:
    """What is known of one code of an NVSwitch."""

    number: int
    description: str
    #: What kind of fault it is: "corrected", "link_stall", "potentially_fatal", "always_fatal"...
    group: str
    action: str
    #: It stops nothing yet.
    warning: bool = False
    source: str = "sxid-catalogue"


@dataclass(frozen=True, kw_only=True)
class RegisterRule:
    """Bits of one of XID 74's seven register words that mean the same."""

    word: int  # from 0; -1 for any
    bits: frozenset[int]  # from the lowest; empty for any other
    group: str
    action: str
    note: str


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the bits of an interrupt word show one unit and reason, in one layout of the driver's."""

    mask: int
    value: int

    def fits(self, word: int) -> bool:
        return word & self.mask == self.value


@dataclass(frozen=True, kw_only=True)
class UnitRule:
    """One unit's error of NVLink 5, XID 144 to 150."""

    xid: int
    units: frozenset[str]  # by the names that drivers print
    layouts: tuple[Layout, ...]
    statuses: frozenset[int]  # of the error status word; empty for any
    action: str  # "xid_154": the driver's recovery action decides
    follow_up: str


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """All of them."""

    xids: Mapping[int, CatalogueEntry] = field(default_factory=dict)
    sxids: Mapping[int, SxidEntry] = field(default_factory=dict)
    registers: tuple[RegisterRule, ...] = ()
    units: Mapping[int, tuple[UnitRule, ...]] = field(default_factory=dict)
