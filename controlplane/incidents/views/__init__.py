"""Pages about incidents, runs and approvals, and what a person does there."""

from __future__ import annotations

from controlplane.incidents.views.incidents import (
    acknowledge,
    bring_back,
    close,
    export,
    incident,
    incidents,
    note,
    postmortem,
    resolve,
)

__all__ = [
    "acknowledge",
    "bring_back",
    "close",
    "export",
    "incident",
    "incidents",
    "note",
    "postmortem",
    "resolve",
]
