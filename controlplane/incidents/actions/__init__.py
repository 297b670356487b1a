"""The only writers of incidents, runs and what people decide about the automation."""

from __future__ import annotations

from controlplane.incidents.actions.incidents import (
    acknowledge,
    add_note,
    open_or_merge,
    resolve,
    save_postmortem,
    set_cause,
    set_mitigated,
    set_restored,
    tell,
)
from controlplane.incidents.actions.requests import (
    admit_node,
    repair_node,
    restart_job,
    restore_coordinator,
    start_job,
)
from controlplane.incidents.actions.runs import (
    cancel_run,
    pause_overdue_runs,
    request_run,
    retry_run,
)

__all__ = [
    "acknowledge",
    "add_note",
    "admit_node",
    "cancel_run",
    "open_or_merge",
    "pause_overdue_runs",
    "repair_node",
    "request_run",
    "resolve",
    "restart_job",
    "restore_coordinator",
    "retry_run",
    "save_postmortem",
    "set_cause",
    "set_mitigated",
    "set_restored",
    "start_job",
    "tell",
]
