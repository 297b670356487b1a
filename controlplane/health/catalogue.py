"""The vendor's catalogues, as triage uses them: read once, checked when read.

Collected from NVIDIA's XID catalogue, its Fabric Manager guide, its decode tables and other public
lists; each row of data/xid.csv and data/sxid.csv names its sources and where they disagree. A site
does not edit them: DRYDOCK_CATALOGUE names a folder with files of the same names and only the rows
and columns that it sees otherwise.
"""

from __future__ import annotations

import csv
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

from workers.triage import ACTIONS, Catalogue, CatalogueEntry, Fault, SxidEntry
from workers.triage.catalogue import Layout, RegisterRule, UnitRule
from workers.triage.nvlink import XID_154

DATA = Path(__file__).parent / "data"
#: Names the folder of a site's overlay.
OVERLAY = "DRYDOCK_CATALOGUE"

#: The vendor's words for an action, in ours.
_ACTIONS: dict[str, str] = {
    "IGNORE": "ignore",
    "RESTART_APP": "restart_app",
    "RESTART_BM": "reboot",
    "RESTART_VM": "reboot",
    "RESET_GPU": "reset_gpu",
    "CONTACT_SUPPORT": "contact_vendor",
    "CHECK_MECHANICALS": "check_mechanicals",
    "CHECK_COOLING": "check_mechanicals",
    "UPDATE_SWFW": "update_software",
    "WORKFLOW_XID_45": "follow_primary",
    "WORKFLOW_XID_48": "reset_gpu",  # and what stands beside it decides: see `lines`
    "FOLLOW_XID_48": "follow_primary",
    "WORKFLOW_NVLINK_ERR": "undecodable",
    "WORKFLOW_NVLINK5_ERR": "undecodable",
    "XID_154": "undecodable",
    "XID_154_EVAL": XID_154,
    "CHECK_UVM": "undecodable",
    "UNKNOWN": "undecodable",
    # of NVSwitches
    "RESTART_VM_OR_RESET_GPU": "reset_gpu",
    "RESET_GPU_OR_RESTART_VM(access port) / STOP_ALL_PARTITIONS(trunk port)": "reset_gpu",
    "RESET_ALL_GPUS_AND_SWITCHES": "drain_and_reset",
    # of XID 74's registers
    "FOLLOW_OTHER_ERRORS": "follow_primary",
    "COUNT_PER_LINK": "reset_gpu",
    "REPORT_IF_REPEATED": "reset_gpu",
    "FIELD_DIAG_IF_REPEATED": "reset_gpu",
    "RESET_FABRIC": "reset_gpu",
}
_FAULTS: dict[str, Fault] = {
    "user_app": "program",
    "app_or_driver": "program",
    "driver_sw": "driver",
    "fabric_link": "fabric",
    "consequence": "unknown",
    "informational": "unknown",
    "reserved": "unknown",
    "meta": "unknown",
}
_WORDS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh")

Row = dict[str, str]
Kind = Literal["xid", "sxid"]
_T = TypeVar("_T")


class CatalogueError(Exception):
    """A catalogue cannot be read, or has a row that cannot be understood; the message names the
    file, the row and the column."""


@cache
def catalogue() -> Catalogue:
    """All of them, with the site's overlay. Raises CatalogueError."""
    return read(DATA, _overlay())


def edited(kind: Kind, number: int, action: str) -> Catalogue:
    """The same as if the site said this of one code: to see what would come of it. Raises
    CatalogueError for an action that is none."""
    edit = {kind: str(number), "immediate_action": action, "overlay": "as edited"}
    return read(DATA, _overlay(), [edit])


def read(folder: Path, overlay: Path | None = None, edits: Sequence[Row] = ()) -> Catalogue:
    """The catalogues in a folder, changed by an overlay's rows, and then by these, which bear the
    code under "xid" or "sxid". Raises CatalogueError."""
    xids = _each(_rows(folder, overlay, "xid.csv", "xid", edits), "xid.csv", _xid)
    sxids = _each(_rows(folder, overlay, "sxid.csv", "sxid", edits), "sxid.csv", _sxid)
    units: dict[int, list[UnitRule]] = defaultdict(list)
    for rules in _each(_read(folder / "nvlink5.csv"), "nvlink5.csv", _units):
        for rule in rules:
            units[rule.xid].append(rule)
    registers = _each(_read(folder / "nvlink4.csv"), "nvlink4.csv", _registers)
    return Catalogue(
        xids={one.number: one for one in xids},
        sxids={one.number: one for one in sxids},
        registers=tuple(registers),
        units={number: tuple(rules) for number, rules in units.items()},
    )


def _overlay() -> Path | None:
    named = os.environ.get(OVERLAY)
    if named and not Path(named).is_dir():
        raise CatalogueError(f"{OVERLAY} names {named}, which is no folder")
    return Path(named) if named else None


def _rows(
    folder: Path, overlay: Path | None, name: str, key: str, edits: Sequence[Row]
) -> list[Row]:
    rows = _read(folder / name)
    path = overlay / name if overlay is not None else None
    given = _read(path) if path is not None and path.exists() else []
    changes = [{"overlay": str(path), **row} for row in given]
    changes += [row for row in edits if key in row]
    by_number = {row[key]: row for row in rows}
    columns = set(rows[0]) | {"overlay"}
    empty = dict.fromkeys(rows[0], "")
    for row in changes:
        number = row.get(key) or ""
        if not number.isdigit() or (odd := set(row) - columns):
            what = f"unknown columns {sorted(odd)}" if number.isdigit() else f"no {key}"
            raise CatalogueError(f"{path}, row {row}: {what}; the columns are {sorted(columns)}")
        said = {column: value for column, value in row.items() if value}
        by_number[number] = {**by_number.get(number, empty), **said}
    return list(by_number.values())


def _read(path: Path) -> list[Row]:
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file, restkey="without a name"))
    except OSError as error:
        raise CatalogueError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise CatalogueError(f"{path} cannot be read: {error}") from error


def _each(rows: list[Row], name: str, make: Callable[[Row], _T]) -> list[_T]:
    made = []
    for row in rows:
        try:
            made.append(make(row))
        except (KeyError, ValueError, AttributeError) as error:
            where = row.get("overlay") or name
            raise CatalogueError(f"{where}, row {list(row.values())[:3]}: {error}") from error
    return made


def _xid(row: Row) -> CatalogueEntry:
    return CatalogueEntry(
        number=int(row["xid"]),
        mnemonic=row["mnemonic"],
        description=row["short_description"],
        fault=_FAULTS.get(row["class"], "hardware"),
        action=_action(row, "immediate_action"),
        follow_up=_follow_up(row["follow_up_action"]),
        unused=row["nvidia_marks_unused"] == "yes",
        warning=row["severity"] in ("info", "warning", "not listed"),
        source=f"site overlay {row['overlay']}" if "overlay" in row else "xid-catalogue",
        of_site="overlay" in row,
    )


def _sxid(row: Row) -> SxidEntry:
    return SxidEntry(
        number=int(row["sxid"]),
        description=row["short_description"] or row["name"],
        group=row["group"],
        action=_action(row, "immediate_action"),
        warning=row["severity"] in ("info", "warning"),
        source=f"site overlay {row['overlay']}" if "overlay" in row else "sxid-catalogue",
    )


def _registers(row: Row) -> RegisterRule:
    other = row["register_word"] == "any"
    return RegisterRule(
        word=-1 if other else _WORDS.index(row["register_word"]),
        bits=frozenset() if other else frozenset(int(bit) for bit in row["bits_lsb0"].split(";")),
        group=row["group"],
        action=_action(row, "action"),
        note=row["note"],
    )


def _units(row: Row) -> list[UnitRule]:
    """A row may have a second interrupt word, for which another action holds."""
    statuses = frozenset[int]()
    if row["error_status"] != "any":
        statuses = frozenset(int(one, 16) for one in row["error_status"].split("|"))
    rules = []
    for prefix, column in (("", "immediate_action"), ("alt_", "alt_action")):
        if row[column]:
            layouts = tuple(
                Layout(
                    mask=int(row[f"{prefix}{version}_mask"], 16),
                    value=int(row[f"{prefix}{version}_value"], 16),
                )
                for version in ("v1", "v2")
            )
            rules.append(
                UnitRule(
                    xid=int(row["xid"]),
                    units=frozenset(row["unit"].split("/")),
                    layouts=layouts,
                    statuses=statuses,
                    action=_action(row, column),
                    follow_up=_follow_up(row["follow_up_action"]),
                )
            )
    return rules


def _action(row: Row, column: str) -> str:
    word = row[column]
    action = _ACTIONS.get(word, word)
    if action not in (*ACTIONS, XID_154):
        raise ValueError(f"{column}: unknown action {word!r}; use one of {', '.join(ACTIONS)}")
    return action


def _follow_up(word: str) -> str:
    """In our words where there is one, else the vendor's; "" for none."""
    plain = word.split(" (")[0]
    if plain in ("", "none given", "IGNORE"):
        return ""
    found = _ACTIONS.get(plain, "undecodable")
    return plain.lower() if found in ("undecodable", XID_154) else found
