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
RUN_UNFINISHED = RUN_ACTIVE | {RunState.PAUSED, RunState.NEEDS_OPERATOR}
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
