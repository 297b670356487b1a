"""The vendor's catalogue of XID codes, as triage uses it: read once, checked when read.

Collected from NVIDIA's XID catalogue and other public lists; each row of data/xid.csv names its
sources and where they disagree.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from workers.triage import ACTIONS, CatalogueEntry, Fault

DATA = Path(__file__).parent / "data"

#: NVIDIA's words for the immediate action, in ours.
_ACTIONS: dict[str, str] = {
    "IGNORE": "ignore",
    "RESTART_APP": "restart_app",
    "RESTART_BM": "reboot",
    "RESTART_VM": "reboot",
    "RESET_GPU": "reset_gpu",
    "CONTACT_SUPPORT": "contact_vendor",
    "CHECK_MECHANICALS": "check_mechanicals",
    "UPDATE_SWFW": "update_software",
    "WORKFLOW_XID_45": "follow_primary",
    "WORKFLOW_XID_48": "drain_and_reset",
    "FOLLOW_XID_48": "follow_primary",
    "WORKFLOW_NVLINK_ERR": "undecodable",
    "WORKFLOW_NVLINK5_ERR": "undecodable",
    "XID_154": "undecodable",
    "CHECK_UVM": "undecodable",
    "UNKNOWN": "undecodable",
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


class CatalogueError(Exception):
    """The catalogue's file has a row that cannot be understood; the message names it."""


@cache
def xids() -> dict[int, CatalogueEntry]:
    """Every known XID by number. Raises CatalogueError."""
    with (DATA / "xid.csv").open(newline="") as file:
        return {entry.number: entry for entry in map(_entry, csv.DictReader(file))}


def _entry(row: dict[str, str]) -> CatalogueEntry:
    action = _ACTIONS.get(row["immediate_action"])
    if action not in ACTIONS:
        raise CatalogueError(f"xid {row['xid']}: unknown action {row['immediate_action']!r}")
    return CatalogueEntry(
        number=int(row["xid"]),
        mnemonic=row["mnemonic"],
        description=row["short_description"],
        fault=_FAULTS.get(row["class"], "hardware"),
        action=action,
        unused=row["nvidia_marks_unused"] == "yes",
    )
