"""Signals as they were observed, kept verbatim, and the failures that triage makes of them."""

from __future__ import annotations

from datetime import datetime
from functools import partial

from django.db import models
from django.db.models import Q

from controlplane.fleet.models import Gpu, Node
from controlplane.health.choices import Action, FaultClass, SignalKind, Urgency
from controlplane.ids import new_id
from workers import triage


class Signal(models.Model):
    """One observation. Its id is the sender's, so that a repeated delivery is the same row."""

    id = models.CharField(primary_key=True, max_length=64)
    kind = models.CharField(max_length=32, choices=SignalKind.choices)
    source = models.CharField(max_length=255)
    node = models.ForeignKey(Node, null=True, on_delete=models.PROTECT, related_name="signals")
    gpu = models.ForeignKey(Gpu, null=True, on_delete=models.PROTECT, related_name="signals")
    #: The job and replica it speaks of, where it does; the job's app comes later, so ids only.
    job_id = models.CharField(max_length=40, blank=True)
    replica = models.PositiveIntegerField(null=True)
    placement_id = models.CharField(max_length=40, blank=True)
    raw = models.TextField(blank=True)
    data = models.JSONField(default=dict)
    boot_id = models.CharField(max_length=64, blank=True)
    observed_at = models.DateTimeField()  # the observer's clock
    #: How often it was observed, and when last if more than once: repeats have no rows of theirs.
    count = models.PositiveIntegerField(default=1)
    repeated_at = models.DateTimeField(null=True)
    recorded_at = models.DateTimeField(auto_now_add=True)  # ours
    triaged_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(
                fields=["recorded_at"], condition=Q(triaged_at=None), name="signal_to_triage"
            ),
            models.Index(fields=["node", "-observed_at"], name="signal_by_node"),
            # Ends are also looked for by a placement of the same query, of which the database does
            # not know that its id is not empty.
            models.Index(
                fields=["placement_id"],
                condition=Q(kind=SignalKind.PROCESS_EXITED) | ~Q(placement_id=""),
                name="signal_by_placement",
            ),
            models.Index(
                fields=["job_id", "-observed_at"],
                condition=Q(kind=SignalKind.JOB_TROUBLE),
                name="signal_trouble_by_job",
            ),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(kind__in=SignalKind.values), name="signal_kind_known"
            )
        ]


def heard_since(moment: datetime) -> Q:
    """Signals observed, or repeated, from this moment on."""
    return Q(observed_at__gte=moment) | Q(repeated_at__gte=moment)


class Failure(models.Model):
    """What triage made of signals: what broke, whose fault, what is needed, which rule said so."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "flr"))
    fault_class = models.CharField(max_length=16, choices=FaultClass.choices)
    code = models.CharField(max_length=64)
    summary = models.TextField()
    #: What it calls for, and when.
    needed = models.CharField(max_length=64, choices=Action.choices)
    urgency = models.CharField(max_length=16, choices=Urgency.choices, default=Urgency.NOW)
    rule = models.CharField(max_length=64)
    node = models.ForeignKey(Node, null=True, on_delete=models.PROTECT, related_name="failures")
    gpu = models.ForeignKey(Gpu, null=True, on_delete=models.PROTECT, related_name="failures")
    job_id = models.CharField(max_length=40, blank=True)
    replica = models.PositiveIntegerField(null=True)
    signals = models.ManyToManyField(Signal, related_name="failures")
    observed_at = models.DateTimeField()
    #: Repeats of the same fault stand here, not in rows of their own.
    count = models.PositiveIntegerField(default=1)
    last_seen_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    @property
    def confidence(self) -> str:
        """How far the rule's word can be trusted: "high", "medium" or "low"."""
        return triage.confidence(self.rule, self.needed)

    @property
    def to_verify(self) -> tuple[str, ...]:
        """What must be seen before the node has work again, in words."""
        return triage.to_verify(self.needed)

    class Meta:
        ordering = ["-observed_at"]
        constraints = [
            models.CheckConstraint(
                condition=Q(fault_class__in=FaultClass.values), name="failure_class_known"
            )
        ]
        indexes = [
            models.Index(fields=["node", "-observed_at"], name="failure_by_node"),
            models.Index(fields=["gpu", "-observed_at"], name="failure_by_gpu"),
            models.Index(fields=["code", "-observed_at"], name="failure_by_code"),
        ]


class Baseline(models.Model):
    """What a card has done at its best, which it is measured against: it has no other peer."""

    gpu = models.OneToOneField(
        Gpu, primary_key=True, on_delete=models.CASCADE, related_name="baseline"
    )
    #: Where it did so: another chassis may have other links.
    node = models.ForeignKey(Node, null=True, on_delete=models.SET_NULL, related_name="+")
    nvlink_mb_s = models.FloatField()  # all its links together


class NodeSample(models.Model):
    """A node's sensors at one moment, kept now and then for its charts; beats themselves are not.

    `gpus` holds one object per card, with the fields of the agent's readings.
    """

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="samples")
    at = models.DateTimeField()
    gpus = models.JSONField(default=list)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["node", "at"], name="sample_once_per_moment")
        ]
        indexes = [models.Index(fields=["at"], name="sample_by_age")]
