"""The only writers of incidents, runs and what people decide about the automation."""

from __future__ import annotations

from controlplane.incidents.actions.automation import (
    approve,
    close_breaker,
    open_breaker_on_burst,
    publish_playbooks,
    reject,
    request_approval,
    set_limit,
    set_mode,
)
from controlplane.incidents.actions.incidents import (
    acknowledge,
    add_note,
    open_or_merge,
    resolve,
    resolve_by_hand,
    save_postmortem,
    set_cause,
    set_mitigated,
    set_restored,
    tell,
)
from controlplane.incidents.actions.requests import (
    admit_node,
    bring_back,
    order_node,
    repair_node,
    restart_job,
    restore_coordinator,
    start_job,
)
from controlplane.incidents.actions.rma import (
    close_case,
    open_case,
    readmit_replaced,
    send_case,
)
from controlplane.incidents.actions.runs import (
    cancel_run,
    pause_overdue_runs,
    pause_run,
    request_run,
    resume_run,
    retry_run,
)

__all__ = [
    "acknowledge",
    "add_note",
    "admit_node",
    "approve",
    "bring_back",
    "cancel_run",
    "close_breaker",
    "close_case",
    "open_breaker_on_burst",
    "open_case",
    "open_or_merge",
    "order_node",
    "pause_overdue_runs",
    "pause_run",
    "publish_playbooks",
    "readmit_replaced",
    "reject",
    "repair_node",
    "request_approval",
    "request_run",
    "resolve",
    "resolve_by_hand",
    "restart_job",
    "restore_coordinator",
    "resume_run",
    "retry_run",
    "save_postmortem",
    "send_case",
    "set_cause",
    "set_limit",
    "set_mitigated",
    "set_mode",
    "set_restored",
    "start_job",
    "tell",
]
