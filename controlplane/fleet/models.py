"""Clusters, racks, nodes and cards as they are believed to be, and the commands sent to nodes."""

from __future__ import annotations

from functools import partial

from django.db import models
from django.db.models import F, Q

from controlplane.fleet.choices import (
    COLOURS,
    COMMAND_PENDING,
    TRANSIENT,
    CommandState,
    NodeState,
    Rung,
)
from controlplane.ids import new_id


class Cluster(models.Model):
    """A set of nodes under one scheduler. Each visible change takes the next `change_seq`."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "clu"))
    name = models.SlugField(unique=True)
    gpu_hour_price = models.DecimalField(max_digits=8, decimal_places=2, default=2)
    currency = models.CharField(max_length=3, default="USD")
    change_seq = models.BigIntegerField(default=0)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(
                condition=Q(gpu_hour_price__gte=0), name="cluster_price_positive"
            )
        ]

    def __str__(self) -> str:
        return self.name


class Changed(models.Model):
    """The cluster's change number at which an object was last written; see `fleet.changes`."""

    cluster = models.ForeignKey(Cluster, on_delete=models.CASCADE, related_name="changed")
    object_type = models.CharField(max_length=32)
    object_id = models.CharField(max_length=64)
    seq = models.BigIntegerField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["cluster", "object_type", "object_id"], name="changed_once_per_object"
            )
        ]
        indexes = [models.Index(fields=["cluster", "seq"], name="changed_by_number")]


class Rack(models.Model):
    """A failure domain inside a cluster."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "rck"))
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT, related_name="racks")
    name = models.CharField(max_length=63)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["cluster", "name"], name="rack_once_per_cluster")
        ]

    def __str__(self) -> str:
        return self.name


class JoinToken(models.Model):
    """Lets a new node of one cluster in. Only an HMAC of the token is kept."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "jtk"))
    cluster = models.ForeignKey(Cluster, on_delete=models.CASCADE)
    hash = models.CharField(max_length=64, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    max_uses = models.PositiveIntegerField(default=1)
    uses = models.PositiveIntegerField(default=0)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(uses__lte=F("max_uses")), name="join_token_not_overused"
            )
        ]


class Node(models.Model):
    """A machine. `state` changes only through `fleet.actions.transition`."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "nod"))
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT, related_name="nodes")
    rack = models.ForeignKey(Rack, null=True, on_delete=models.PROTECT, related_name="nodes")
    name = models.CharField(max_length=63)
    address = models.CharField(max_length=255)

    state = models.CharField(max_length=20, choices=NodeState.choices, default=NodeState.ENROLLED)
    state_since = models.DateTimeField()
    state_reason = models.TextField(blank=True)
    #: A transient state falls into its failed twin at this moment.
    state_deadline = models.DateTimeField(null=True, blank=True)
    #: When it first passed its diagnostics; nobody ever counted on one that has not.
    admitted_at = models.DateTimeField(null=True, blank=True)
    spare = models.BooleanField(default=False)
    #: A person said: hands off.
    hold_reason = models.TextField(blank=True)
    #: Who drained it: ours are "drydock/<incident>", anybody else's is never lifted by us.
    drained_by = models.CharField(max_length=150, blank=True)
    #: Why its cards want a reset once it is idle.
    reset_pending = models.TextField(blank=True)

    public_key = models.CharField(max_length=44, unique=True)
    key_revoked_at = models.DateTimeField(null=True, blank=True)
    boot_id = models.CharField(max_length=64)
    booted_at = models.DateTimeField()
    agent_version = models.CharField(max_length=255, blank=True)
    #: The switch that its fabric hangs on, as its agent's configuration says.
    switch = models.CharField(max_length=255, blank=True)
    report_digest = models.CharField(max_length=255, blank=True)
    report = models.JSONField(default=dict)
    enrolled_at = models.DateTimeField(auto_now_add=True)

    bmc_url = models.CharField(max_length=255, blank=True)
    bmc_username = models.CharField(max_length=63, blank=True)
    bmc_password_sealed = models.TextField(blank=True)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.UniqueConstraint(fields=["cluster", "name"], name="node_once_per_cluster"),
            models.CheckConstraint(
                condition=Q(state__in=NodeState.values), name="node_state_known"
            ),
            models.CheckConstraint(
                condition=Q(state__in=sorted(TRANSIENT), state_deadline__isnull=False)
                | Q(state__in=[s for s in NodeState if s not in TRANSIENT], state_deadline=None),
                name="node_transient_has_deadline",
            ),
        ]
        indexes = [
            models.Index(
                fields=["state_deadline"],
                condition=Q(state_deadline__isnull=False),
                name="node_by_deadline",
            ),
            # Lists walk these instead of sorting the whole fleet for one page.
            models.Index(fields=["name", "id"], name="node_by_name"),
            models.Index(fields=["state_since", "id"], name="node_by_state_since"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def colour(self) -> str:
        return COLOURS[NodeState(self.state)]

    @property
    def can_examine(self) -> bool:
        """Whether the vendor's field diagnostic is set up on it, as its agent says."""
        return bool(self.report.get("field_diagnostic"))

    @property
    def reachable(self) -> bool:
        """Whether it is heard; one without a lease was never expected to beat."""
        return not hasattr(self, "lease") or self.lease.reachable


class MaintenanceWindow(models.Model):
    """Work announced on a cluster, a rack or a node: automation keeps its hands off meanwhile."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "mnt"))
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT, related_name="maintenance")
    #: Narrower than the cluster where one of them is set.
    rack = models.ForeignKey(Rack, null=True, blank=True, on_delete=models.PROTECT)
    node = models.ForeignKey(
        Node, null=True, blank=True, on_delete=models.PROTECT, related_name="maintenance"
    )
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    owner = models.CharField(max_length=150)
    reason = models.TextField()
    closed_at = models.DateTimeField(null=True, blank=True)  # ended before its time

    class Meta:
        ordering = ["-starts_at"]
        constraints = [
            models.CheckConstraint(
                condition=Q(ends_at__gt=F("starts_at")), name="maintenance_ends_after_start"
            ),
            models.CheckConstraint(
                condition=Q(rack=None) | Q(node=None), name="maintenance_rack_or_node"
            ),
        ]


class Lease(models.Model):
    """A node's right to be believed alive: narrow, because it is written every second."""

    node = models.OneToOneField(
        Node, primary_key=True, on_delete=models.CASCADE, related_name="lease"
    )
    last_beat_at = models.DateTimeField()
    deadline = models.DateTimeField()
    reachable = models.BooleanField(default=True)
    unreachable_since = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [
            models.Index(fields=["deadline"], condition=Q(reachable=True), name="lease_by_deadline")
        ]


class Gpu(models.Model):
    """A card. The record follows the card: its key is the UUID, its node may change."""

    uuid = models.CharField(primary_key=True, max_length=64)
    serial = models.CharField(max_length=64)
    model = models.CharField(max_length=255)
    memory_bytes = models.BigIntegerField()
    node = models.ForeignKey(Node, null=True, on_delete=models.SET_NULL, related_name="gpus")
    index = models.PositiveSmallIntegerField(null=True)
    pci_address = models.CharField(max_length=255, blank=True)
    first_seen_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["node", "index"],
                condition=Q(node__isnull=False),
                name="gpu_once_per_slot",
            )
        ]


class RepairRecord(models.Model):
    """What was done to a card, by its UUID, whichever node it sat in; `gpu` empty: to the node."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "rep"))
    gpu = models.ForeignKey(Gpu, null=True, on_delete=models.PROTECT, related_name="repairs")
    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="repairs")
    rung = models.CharField(max_length=20, choices=Rung.choices)
    #: The playbook step that did it; with the card, the key that keeps one attempt one row.
    step_id = models.CharField(max_length=40)
    at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["gpu", "node", "step_id", "rung"],
                nulls_distinct=False,
                name="repair_once_per_step",
            )
        ]


#: How who asks for orders to end what hangs is called: they are counted, and kept.
ENDING = "end/"


class Command(models.Model):
    """An order to one node, signed; executed at most once by the agent's journal."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "cmd"))
    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="commands")
    verb = models.CharField(max_length=32)
    payload = models.TextField()
    signature = models.CharField(max_length=128)
    state = models.CharField(
        max_length=16, choices=CommandState.choices, default=CommandState.QUEUED
    )
    #: Who asked: one command per requester and verb, so that a step that is tried again finds it.
    requester = models.CharField(max_length=64)
    created_at = models.DateTimeField(auto_now_add=True)
    delivered_at = models.DateTimeField(null=True, blank=True)
    expires_at = models.DateTimeField()
    finished_at = models.DateTimeField(null=True, blank=True)
    output = models.JSONField(default=dict)
    error = models.TextField(blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["requester", "verb"], name="command_once_per_requester"
            ),
            models.CheckConstraint(
                condition=Q(state__in=CommandState.values), name="command_state_known"
            ),
        ]
        indexes = [
            models.Index(
                fields=["node", "created_at"],
                condition=Q(state__in=COMMAND_PENDING),
                name="command_pending",
            ),
            models.Index(
                fields=["expires_at"],
                condition=Q(state__in=COMMAND_PENDING),
                name="command_by_expiry",
            ),
            models.Index(
                fields=["finished_at"],
                condition=Q(finished_at__isnull=False) & ~Q(requester__startswith=ENDING),
                name="command_by_end",
            ),
            # By how its asker's name begins: the unique index serves that in the C collation alone.
            models.Index(
                fields=["requester"], opclasses=["text_pattern_ops"], name="command_by_asker"
            ),
        ]
