"""Incidents with their timeline, and playbook runs and steps: the memory of the automation."""

from __future__ import annotations

import hashlib
from functools import partial

from django.conf import settings
from django.db import models
from django.db.models import Q

from controlplane.fleet.models import Cluster, Gpu, Node, Rack
from controlplane.health.models import Failure
from controlplane.ids import new_id
from controlplane.incidents.choices import (
    APPROVAL_COLOURS,
    CASE_COLOURS,
    INCIDENT_COLOURS,
    INCIDENT_UNRESOLVED,
    RUN_COLOURS,
    RUN_UNFINISHED,
    STEP_COLOURS,
    ApprovalState,
    CaseState,
    Effect,
    EntryKind,
    IncidentState,
    Mode,
    RunState,
    Scope,
    Severity,
    StepState,
)
from controlplane.jobs.models import Job


class Incident(models.Model):
    """One thing an engineer handles: failures that share a cause, and what was done."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "inc"))
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT, related_name="incidents")
    #: What it is about, as "job/<id>/<replica>" or "node/<id>"; one unresolved incident for each.
    subject = models.CharField(max_length=100)
    title = models.CharField(max_length=200)
    severity = models.CharField(max_length=16, choices=Severity.choices)
    state = models.CharField(
        max_length=16, choices=IncidentState.choices, default=IncidentState.OPEN
    )
    #: What automation found, in one sentence; empty until it has.
    cause = models.TextField(blank=True)
    failures = models.ManyToManyField(Failure, related_name="incidents")
    job = models.ForeignKey(Job, null=True, on_delete=models.PROTECT, related_name="incidents")
    replica = models.PositiveIntegerField(null=True)
    node = models.ForeignKey(Node, null=True, on_delete=models.PROTECT, related_name="incidents")
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL
    )
    occurred_at = models.DateTimeField()  # first observation, by the observer's clock
    opened_at = models.DateTimeField(auto_now_add=True)
    mitigated_at = models.DateTimeField(null=True)  # the job commits steps again
    restored_at = models.DateTimeField(null=True)  # the job has all its replicas again
    resolved_at = models.DateTimeField(null=True)
    gpu_seconds_lost = models.FloatField(null=True)
    #: What the loss is made of: [{"part": words, "gpu_seconds": float}], see `incidents.pricing`.
    impact = models.JSONField(default=list)
    #: The code of the failure that caused it, e.g. "xid-79"; empty until it is found.
    code = models.CharField(max_length=64, blank=True)
    postmortem = models.TextField(blank=True)

    class Meta:
        ordering = ["-opened_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["subject"],
                condition=Q(state__in=sorted(INCIDENT_UNRESOLVED)),
                name="incident_one_unresolved_per_subject",
            ),
            models.CheckConstraint(
                condition=Q(state__in=IncidentState.values), name="incident_state_known"
            ),
        ]
        indexes = [
            models.Index(fields=["cluster", "-opened_at"], name="incident_by_cluster"),
            models.Index(
                fields=["-resolved_at"],
                condition=Q(resolved_at__isnull=False),
                name="incident_by_end",
            ),
        ]

    def __str__(self) -> str:
        return self.title

    @property
    def colour(self) -> str:
        return INCIDENT_COLOURS[self.state]

    @property
    def unresolved(self) -> bool:
        return self.state in INCIDENT_UNRESOLVED

    @property
    def postmortem_digest(self) -> str:
        """Names the post-mortem's present text, for whoever edits it."""
        return hashlib.sha256(self.postmortem.encode()).hexdigest()


class TimelineEntry(models.Model):
    """One line of an incident's story. `key` keeps a repeated telling from standing twice."""

    incident = models.ForeignKey(Incident, on_delete=models.CASCADE, related_name="timeline")
    key = models.CharField(max_length=120)
    at = models.DateTimeField()
    kind = models.CharField(max_length=16, choices=EntryKind.choices)
    text = models.TextField()
    data = models.JSONField(default=dict)

    class Meta:
        ordering = ["at", "id"]
        constraints = [
            models.UniqueConstraint(fields=["incident", "key"], name="timeline_once_per_key")
        ]


class PlaybookRun(models.Model):
    """One execution of a playbook: a snapshot of its version, its steps, what it learnt so far."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "run"))
    incident = models.ForeignKey(Incident, null=True, on_delete=models.CASCADE, related_name="runs")
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT)
    job = models.ForeignKey(Job, null=True, on_delete=models.PROTECT, related_name="runs")
    node = models.ForeignKey(Node, null=True, on_delete=models.PROTECT, related_name="runs")
    playbook = models.CharField(max_length=64)
    version = models.PositiveIntegerField()
    title = models.CharField(max_length=200)
    #: The user id of the person who asked for it; empty: automation did.
    requested_by = models.CharField(max_length=150, blank=True)
    #: One unfinished run for each, as "replica-lost/job_…/2".
    subject = models.CharField(max_length=150)
    state = models.CharField(max_length=16, choices=RunState.choices, default=RunState.PENDING)
    state_reason = models.TextField(blank=True)
    #: What later steps need from earlier ones.
    context = models.JSONField(default=dict)
    created_at = models.DateTimeField(auto_now_add=True)
    finished_at = models.DateTimeField(null=True)
    #: A run that is not finished by then asks for a person.
    deadline = models.DateTimeField()

    class Meta:
        ordering = ["created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["subject"],
                condition=Q(state__in=sorted(RUN_UNFINISHED)),
                name="run_one_unfinished_per_subject",
            ),
            models.CheckConstraint(condition=Q(state__in=RunState.values), name="run_state_known"),
        ]

    @property
    def colour(self) -> str:
        return RUN_COLOURS[self.state]


class PlaybookStep(models.Model):
    """One step of a run. Whoever works on it holds `lock_token` until `lock_expires_at`."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "stp"))
    run = models.ForeignKey(PlaybookRun, on_delete=models.CASCADE, related_name="steps")
    position = models.PositiveIntegerField()
    key = models.CharField(max_length=64)
    title = models.CharField(max_length=200)
    #: How a person does it by hand.
    prose = models.TextField(blank=True)
    undo = models.TextField(blank=True)
    effect = models.CharField(max_length=16, choices=Effect.choices)
    disruptive = models.BooleanField(default=False)
    state = models.CharField(max_length=16, choices=StepState.choices, default=StepState.BLOCKED)
    attempts = models.PositiveIntegerField(default=0)
    lock_token = models.CharField(max_length=40, blank=True)
    lock_owner = models.CharField(max_length=100, blank=True)
    lock_expires_at = models.DateTimeField(null=True)
    wake_at = models.DateTimeField(null=True)
    timeout_s = models.FloatField()
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    #: What the step knew when it last acted, and what came of it, in words and numbers.
    evidence = models.JSONField(default=dict)
    outcome = models.TextField(blank=True)

    class Meta:
        ordering = ["run", "position"]
        constraints = [
            models.UniqueConstraint(fields=["run", "position"], name="step_once_per_position"),
            models.CheckConstraint(
                condition=Q(state__in=StepState.values), name="step_state_known"
            ),
            models.CheckConstraint(
                condition=(Q(state=StepState.RUNNING) & ~Q(lock_token=""))
                | (~Q(state=StepState.RUNNING) & Q(lock_token="")),
                name="step_running_is_locked",
            ),
        ]
        indexes = [
            models.Index(
                fields=["wake_at"],
                condition=Q(state__in=[StepState.READY, StepState.WAITING]),
                name="step_due",
            ),
            models.Index(
                fields=["lock_expires_at"],
                condition=Q(state=StepState.RUNNING),
                name="step_lease",
            ),
            models.Index(
                fields=["-finished_at", "-id"],
                condition=Q(finished_at__isnull=False),
                name="step_by_end",
            ),
        ]

    @property
    def colour(self) -> str:
        return STEP_COLOURS[self.state]


class Reservation(models.Model):
    """A share of the budgets: a run may take this node out, until it is released."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "rsv"))
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT)
    node = models.ForeignKey(Node, on_delete=models.PROTECT)
    run = models.ForeignKey(PlaybookRun, on_delete=models.CASCADE, related_name="reservations")
    #: What else it counts against: the node's rack, the job it took from, the failure's code.
    rack = models.ForeignKey(Rack, null=True, on_delete=models.PROTECT)
    job = models.ForeignKey(Job, null=True, on_delete=models.PROTECT)
    code = models.CharField(max_length=64, blank=True)
    reserved_at = models.DateTimeField(auto_now_add=True)
    released_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["node"], condition=Q(released_at=None), name="reservation_one_per_node"
            )
        ]


class Playbook(models.Model):
    """A playbook that the workers know, as pages and the API show it; the keeper writes it anew.

    `steps` holds objects with key, title, prose, undo, effect, disruptive and does (exact words of
    what a disruptive step does).
    """

    name = models.CharField(primary_key=True, max_length=64)
    version = models.PositiveIntegerField()
    summary = models.TextField()
    deadline_s = models.FloatField()
    steps = models.JSONField(default=list)

    class Meta:
        ordering = ["name"]

    @property
    def disruptive(self) -> bool:
        return any(step["disruptive"] for step in self.steps)

    @property
    def acts(self) -> bool:
        """Whether any step does more than to read and decide."""
        return any(step["effect"] != Effect.NONE.label for step in self.steps)


class PlaybookMode(models.Model):
    """How far a playbook may go by itself in one cluster; without a row it is automatic."""

    cluster = models.ForeignKey(Cluster, on_delete=models.CASCADE, related_name="playbook_modes")
    playbook = models.CharField(max_length=64)
    mode = models.CharField(max_length=16, choices=Mode.choices)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["cluster", "playbook"], name="mode_once_per_playbook_and_cluster"
            ),
            models.CheckConstraint(condition=Q(mode__in=Mode.values), name="mode_known"),
        ]


class BudgetLimit(models.Model):
    """How many nodes automation may have out at once; without a row the setting's default holds."""

    cluster = models.ForeignKey(Cluster, on_delete=models.CASCADE, related_name="budget_limits")
    scope = models.CharField(max_length=16, choices=Scope.choices)
    nodes = models.PositiveIntegerField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["cluster", "scope"], name="limit_once_per_scope"),
            models.CheckConstraint(condition=Q(scope__in=Scope.values), name="limit_scope_known"),
        ]


class Breaker(models.Model):
    """Open: a burst of one failure code stopped disruptive automation, until a person closes it."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "brk"))
    cluster = models.ForeignKey(Cluster, on_delete=models.CASCADE, related_name="breakers")
    code = models.CharField(max_length=64)
    reason = models.TextField()
    opened_at = models.DateTimeField(auto_now_add=True)
    closed_at = models.DateTimeField(null=True)
    closed_by = models.CharField(max_length=150, blank=True)

    class Meta:
        ordering = ["-opened_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["cluster", "code"],
                condition=Q(closed_at=None),
                name="breaker_open_once_per_code",
            )
        ]


class Approval(models.Model):
    """A plan that a person is asked to approve. It holds for exactly this plan, in this world."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "apr"))
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT)
    run = models.ForeignKey(PlaybookRun, on_delete=models.CASCADE, related_name="approvals")
    state = models.CharField(
        max_length=16, choices=ApprovalState.choices, default=ApprovalState.WAITING
    )
    #: What would be done, to what, at what cost: see `incidents.plans`.
    plan = models.JSONField()
    #: Over the plan's steps and the state of the world that it rests on.
    digest = models.CharField(max_length=64)
    requested_at = models.DateTimeField(auto_now_add=True)
    decided_at = models.DateTimeField(null=True)
    decided_by = models.CharField(max_length=150, blank=True)
    reason = models.TextField(blank=True)

    class Meta:
        ordering = ["requested_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["run"],
                condition=Q(state__in=[ApprovalState.WAITING, ApprovalState.APPROVED]),
                name="approval_one_valid_per_run",
            ),
            models.CheckConstraint(
                condition=Q(state__in=ApprovalState.values), name="approval_state_known"
            ),
        ]

    @property
    def colour(self) -> str:
        return APPROVAL_COLOURS[self.state]


class RmaCase(models.Model):
    """A card that goes back to its vendor, with all the evidence there is about it."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "rma"))
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT)
    gpu = models.ForeignKey(Gpu, on_delete=models.PROTECT, related_name="rma_cases")
    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="rma_cases")
    incident = models.ForeignKey(
        Incident, null=True, on_delete=models.SET_NULL, related_name="rma_cases"
    )
    state = models.CharField(max_length=16, choices=CaseState.choices, default=CaseState.OPEN)
    reason = models.TextField()
    #: Serial, failures with raw lines, repairs, diagnostics, driver: see `incidents.evidence`.
    bundle = models.JSONField(default=dict)
    vendor_reference = models.CharField(max_length=100, blank=True)
    opened_at = models.DateTimeField(auto_now_add=True)
    closed_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-opened_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["gpu"], condition=~Q(state=CaseState.CLOSED), name="rma_one_open_per_card"
            ),
            models.CheckConstraint(condition=Q(state__in=CaseState.values), name="rma_state_known"),
        ]

    @property
    def colour(self) -> str:
        return CASE_COLOURS[self.state]
