"""The states of an incident, of a playbook run and of its steps."""

from __future__ import annotations

from django.db.models import TextChoices


class IncidentState(TextChoices):
    OPEN = "open", "Open"
    ACKNOWLEDGED = "acknowledged", "Acknowledged"
    MITIGATING = "mitigating", "Mitigating"  # automation or a person is at work
    RESOLVED = "resolved", "Resolved"
    CLOSED = "closed", "Closed"


INCIDENT_UNRESOLVED = frozenset(
    {IncidentState.OPEN, IncidentState.ACKNOWLEDGED, IncidentState.MITIGATING}
)
INCIDENT_COLOURS: dict[str, str] = {
    IncidentState.OPEN: "bad",
    IncidentState.ACKNOWLEDGED: "warn",
    IncidentState.MITIGATING: "busy",
    IncidentState.RESOLVED: "good",
    IncidentState.CLOSED: "quiet",
}


class Severity(TextChoices):
    CRITICAL = "critical", "Critical"  # a job stands still
    MAJOR = "major", "Major"  # a job runs with less
    MINOR = "minor", "Minor"  # nothing is lost yet


class Mode(TextChoices):
    """How far a playbook may go by itself in a cluster, boldest first."""

    AUTOMATIC = "automatic", "Automatic"
    APPROVE = "approve", "Asks for approval"  # a person signs the exact plan
    DRY_RUN = "dry_run", "Dry run"  # shows what it would do, and does nothing disruptive
    OFF = "off", "Off"


class Scope(TextChoices):
    """What a limit on the blast radius is counted over."""

    CLUSTER = "cluster", "Nodes of the cluster"
    RACK = "rack", "Nodes of one rack"
    JOB = "job", "Nodes of one job"
    CODE = "code", "Nodes with one failure code"


class ApprovalState(TextChoices):
    WAITING = "waiting", "Waiting"
    APPROVED = "approved", "Approved"
    REJECTED = "rejected", "Rejected"
    VOID = "void", "Void"  # the world changed before it was used


APPROVAL_COLOURS: dict[str, str] = {
    ApprovalState.WAITING: "bad",
    ApprovalState.APPROVED: "good",
    ApprovalState.REJECTED: "quiet",
    ApprovalState.VOID: "quiet",
}


class CaseState(TextChoices):
    """Where a card that is out for replacement stands."""

    OPEN = "open", "Open"  # evidence collected, not yet with the vendor
    SENT = "sent", "With the vendor"
    CLOSED = "closed", "Closed"  # the card has left the fleet, or came back


CASE_COLOURS: dict[str, str] = {
    CaseState.OPEN: "bad",
    CaseState.SENT: "warn",
    CaseState.CLOSED: "quiet",
}


class EntryKind(TextChoices):
    """What a line of the timeline is."""

    SIGNAL = "signal", "Signal"
    TRIAGE = "triage", "Triage"
    STEP = "step", "Playbook"
    NODE = "node", "Node"
    JOB = "job", "Job"
    STATE = "state", "Incident"
    NOTE = "note", "Note"


class RunState(TextChoices):
    PENDING = "pending", "Pending"
    RUNNING = "running", "Running"
    WAITING = "waiting", "Waiting"
    PAUSED = "paused", "Paused"
    NEEDS_OPERATOR = "needs_operator", "Needs a person"
    SUCCEEDED = "succeeded", "Succeeded"
    FAILED = "failed", "Failed"
    CANCELLED = "cancelled", "Cancelled"


RUN_ACTIVE = frozenset({RunState.PENDING, RunState.RUNNING, RunState.WAITING})
#: These go on only when a person says so.
RUN_STOPPED = frozenset({RunState.PAUSED, RunState.NEEDS_OPERATOR})
RUN_UNFINISHED = RUN_ACTIVE | RUN_STOPPED
RUN_COLOURS: dict[str, str] = {
    RunState.PENDING: "quiet",
    RunState.RUNNING: "busy",
    RunState.WAITING: "busy",
    RunState.PAUSED: "warn",
    RunState.NEEDS_OPERATOR: "bad",
    RunState.SUCCEEDED: "good",
    RunState.FAILED: "bad",
    RunState.CANCELLED: "quiet",
}


class StepState(TextChoices):
    BLOCKED = "blocked", "To come"  # an earlier step is not finished
    READY = "ready", "Ready"
    RUNNING = "running", "Running"
    WAITING = "waiting", "Waiting"  # for an event, or for `wake_at`
    DONE = "done", "Done"
    SKIPPED = "skipped", "Skipped"
    FAILED = "failed", "Failed"
    NEEDS_OPERATOR = "needs_operator", "Needs a person"


STEP_FINISHED = frozenset({StepState.DONE, StepState.SKIPPED})
STEP_COLOURS: dict[str, str] = {
    StepState.BLOCKED: "quiet",
    StepState.READY: "quiet",
    StepState.RUNNING: "busy",
    StepState.WAITING: "busy",
    StepState.DONE: "good",
    StepState.SKIPPED: "quiet",
    StepState.FAILED: "bad",
    StepState.NEEDS_OPERATOR: "bad",
}


class Effect(TextChoices):
    """What may happen if a step is tried twice."""

    NONE = "none", "Reads and decides only"
    IDEMPOTENT = "idempotent", "May be repeated"
    FENCED = "fenced", "The agent's journal refuses a repeated command"
    NON_REPEATABLE = "non_repeatable", "Looks first whether it already happened"
