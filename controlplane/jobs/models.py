"""Training jobs: what they are, where they run, how far they got, and what interrupted them."""

from __future__ import annotations

from functools import partial

from django.db import models
from django.db.models import F, Q

from controlplane.fleet.models import Cluster, Node
from controlplane.ids import new_id
from controlplane.jobs.choices import (
    REPLICA_COLOURS,
    JobState,
    PlacementState,
    ReplicaState,
    Tier,
)
from runtime.client import TOLD_TO_END

#: How the end of a process reads that left of its own will, before the reason that it gave.
LEFT = "left: "
#: And if it was told to by a SIGTERM.
SENT_AWAY = f"{LEFT}{TOLD_TO_END}"
#: What a replica has of its own: the process that trains, and one that is to replace it.
IN_ITS_PLACE = ~Q(standby=True, warm=True)


class Job(models.Model):
    """A training job: a number of data-parallel replicas that run one program."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "job"))
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT, related_name="jobs")
    name = models.CharField(max_length=63)
    state = models.CharField(max_length=16, choices=JobState.choices, default=JobState.PENDING)
    program = models.CharField(max_length=63)
    options = models.JSONField(default=dict)
    world_replicas = models.PositiveIntegerField()
    min_replicas = models.PositiveIntegerField(default=1)
    gpus_per_replica = models.PositiveIntegerField(default=8)
    #: One that is on several starts on all of them together, and lives and dies as one.
    nodes_per_replica = models.PositiveIntegerField(default=1)
    #: How many processes are to hold its state beside those that train, for whichever replica dies.
    warm_spares = models.PositiveIntegerField(default=0)
    #: It lives and dies as one, as its processes tell: nothing can follow it while it trains.
    whole = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    coordinator_node = models.ForeignKey(
        Node, null=True, on_delete=models.PROTECT, related_name="coordinated_jobs"
    )
    coordinator_address = models.CharField(max_length=255, blank=True)
    coordinator_placement = models.CharField(max_length=40, blank=True)

    #: The newest committed step that has been told, and what the job looked like then.
    step = models.BigIntegerField(default=-1)
    step_at = models.DateTimeField(null=True)
    epoch = models.BigIntegerField(default=0)
    loss = models.FloatField(null=True)
    samples_per_s = models.FloatField(null=True)
    #: The sample ledger is held without a gap up to this step.
    ledger_step = models.BigIntegerField(default=-1)
    #: Steps committed once, rolled back to a checkpoint, and trained again.
    recomputed_steps = models.BigIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["cluster", "name"], name="job_once_per_cluster"),
            models.CheckConstraint(condition=Q(state__in=JobState.values), name="job_state_known"),
            models.CheckConstraint(
                condition=Q(min_replicas__gte=1) & Q(min_replicas__lte=F("world_replicas")),
                name="job_min_replicas_fit",
            ),
            models.CheckConstraint(
                condition=Q(nodes_per_replica=1) | Q(nodes_per_replica__gt=1, world_replicas=1),
                name="job_nodes_fit",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def gpus_per_node(self) -> int:
        """The cards that a replica needs on each of its nodes."""
        return -(-self.gpus_per_replica // self.nodes_per_replica)

    @property
    def held_warm_spares(self) -> models.QuerySet[Placement]:
        """The processes that hold its state for whichever replica dies, the oldest first."""
        there = Placement.objects.filter(replica__job=self, standby=True, warm=True)
        alive = there.exclude(state=PlacementState.ENDED)
        return alive.select_related("node").order_by("created_at")


class Replica(models.Model):
    """One data-parallel group of a job: the unit that drops and rejoins."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "rpl"))
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="replicas")
    index = models.PositiveIntegerField()
    state = models.CharField(
        max_length=16, choices=ReplicaState.choices, default=ReplicaState.PENDING
    )
    state_since = models.DateTimeField()

    class Meta:
        ordering = ["index"]
        constraints = [
            models.UniqueConstraint(fields=["job", "index"], name="replica_once_per_job"),
            models.CheckConstraint(
                condition=Q(state__in=ReplicaState.values), name="replica_state_known"
            ),
        ]

    @property
    def colour(self) -> str:
        return REPLICA_COLOURS[self.state]

    @property
    def alive(self) -> models.QuerySet[Placement]:
        """What it has of its own and has not ended, by node."""
        own = self.placements.filter(IN_ITS_PLACE).exclude(state=PlacementState.ENDED)
        return own.select_related("node__lease").order_by("node_rank", "created_at")


class Placement(models.Model):
    """One stay of a replica on a node: one start of its process there.

    A replica that is on several nodes has one on each, by `node_rank`; they start and end together.

    One that stands by holds the replica's state beside the process that trains, and takes its place
    at a step's edge: that is how a replica moves. It never outlives what it stands beside as such:
    once that has ended it is the replica's own. A warm spare stands by for whichever replica of its
    job dies: `replica` is a formality until it has the place of one.
    """

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "plc"))
    replica = models.ForeignKey(Replica, on_delete=models.CASCADE, related_name="placements")
    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="placements")
    #: Which of its replica's nodes this is.
    node_rank = models.PositiveIntegerField(default=0)
    state = models.CharField(
        max_length=16, choices=PlacementState.choices, default=PlacementState.STARTING
    )
    standby = models.BooleanField(default=False)
    #: It was started as a warm spare.
    warm = models.BooleanField(default=False)
    #: A warm spare's node was one of its cluster's spares, and is one again when it ends.
    from_spares = models.BooleanField(default=False)
    #: The placement that it was started to replace while that trained; of a warm spare the one
    #: whose place it took.
    moved_from = models.ForeignKey(
        "self", null=True, on_delete=models.SET_NULL, related_name="successors"
    )
    pid = models.PositiveIntegerField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True)  # its process said hello
    follows_since = models.DateTimeField(null=True)  # one that stands by: it holds the state
    joined_at = models.DateTimeField(null=True)  # its first committed step
    ended_at = models.DateTimeField(null=True)
    end_reason = models.TextField(blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["replica", "node_rank", "standby"],
                condition=~Q(state=PlacementState.ENDED) & IN_ITS_PLACE,
                name="placement_one_alive_per_place",
            ),
            models.UniqueConstraint(
                fields=["node"],
                condition=~Q(state=PlacementState.ENDED),
                name="placement_one_alive_per_node",
            ),
        ]


class ProgressSample(models.Model):
    """Committed steps as one rank reported them, about one row a second; old ones are thinned."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="progress")
    step = models.BigIntegerField()
    steps = models.PositiveIntegerField()
    epoch = models.BigIntegerField()
    at = models.DateTimeField()
    loss = models.FloatField(null=True)
    grad_norm = models.FloatField(null=True)
    step_s = models.FloatField()
    max_gap_s = models.FloatField()
    samples = models.PositiveIntegerField()
    replicas = models.JSONField(default=list)
    #: It stands for all that was told of its epoch in its minute: `step` and `at` are the last.
    thinned = models.BooleanField(default=False)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["job", "step"], name="progress_once_per_step")
        ]
        indexes = [
            models.Index(fields=["job", "at"], name="progress_by_time"),
            models.Index(fields=["at"], condition=Q(thinned=False), name="progress_to_thin"),
        ]


class LedgerRange(models.Model):
    """Which shards of the committed steps `step_from..step_to` were applied, and which were not."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="ledger")
    step_from = models.BigIntegerField()
    step_to = models.BigIntegerField()
    epoch = models.BigIntegerField()
    samples = models.PositiveBigIntegerField()
    lost = models.JSONField(default=list)
    duplicated = models.JSONField(default=list)
    dropped = models.JSONField(default=list)
    #: [replica, its first shard, and before which it ends], in each of these steps
    computed = models.JSONField(default=list)
    #: where only sums are left of many steps: shards lost, duplicated and dropped in all of them
    merged = models.JSONField(default=list)
    #: running hash up to the last step; "" where a roll-back cut the range: the next one proves it
    proof = models.CharField(max_length=32, blank=True)
    #: how to make the samples' ids
    order = models.JSONField(default=dict)
    recorded_at = models.DateTimeField(auto_now_add=True)  # the last of these steps

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["job", "step_from"], name="ledger_once_per_step"),
            models.CheckConstraint(
                condition=Q(step_to__gte=F("step_from")), name="ledger_in_order"
            ),
        ]


class Interruption(models.Model):
    """An epoch that ended: by a loss, or at a planned edge to let a replica in."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="interruptions")
    epoch = models.BigIntegerField()  # the epoch that began
    lost = models.JSONField(default=list)
    joined = models.JSONField(default=list)
    entered = models.JSONField(default=list)  # the placements of those that joined
    replicas = models.JSONField(default=list)
    taken_over = models.JSONField(default=list)
    started_at = models.DateTimeField()
    committed_at = models.DateTimeField()
    step = models.BigIntegerField()
    gap_s = models.FloatField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["job", "epoch"], name="interruption_once_per_epoch")
        ]


class Checkpoint(models.Model):
    """A checkpoint that a job said is complete and verified."""

    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="checkpoints")
    step = models.BigIntegerField()
    tier = models.CharField(max_length=16, choices=Tier.choices)
    path = models.TextField()
    bytes = models.PositiveBigIntegerField()
    #: of these, what its tier holds, where chunks are packed; None if that was not said
    stored = models.PositiveBigIntegerField(null=True)
    digest = models.CharField(max_length=128)
    stall_s = models.FloatField()
    seconds = models.FloatField()
    at = models.DateTimeField()
    #: the tier's interval by then, and the share of time that the job is expected to keep with it
    every_s = models.FloatField(null=True)
    ettr = models.FloatField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["job", "step", "tier"], name="checkpoint_once_per_tier")
        ]
        indexes = [models.Index(fields=["at", "id"], name="checkpoint_by_time")]

    @property
    def packed_to(self) -> float | None:
        """The share of its bytes that its tier holds, 0 to 1; None if that is all, or unknown."""
        if self.stored is None or self.stored >= self.bytes:
            return None
        return self.stored / self.bytes


class Directive(models.Model):
    """An order to a job's runtime, carried down in the answer to its messages."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "dir"))
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="directives")
    verb = models.CharField(max_length=32)
    args = models.JSONField(default=dict)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()


class NodeExclusion(models.Model):
    """A node that a job must not be placed on, because its scheduler or owner said so."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "exc"))
    job = models.ForeignKey(Job, on_delete=models.CASCADE, related_name="exclusions")
    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="exclusions")
    reason = models.TextField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["created_at"]
        constraints = [
            models.UniqueConstraint(fields=["job", "node"], name="exclusion_once_per_node")
        ]


class SpareReservation(models.Model):
    """A spare that is kept for one job, or for whoever asked, until it is used or time is up."""

    id = models.CharField(primary_key=True, max_length=40, default=partial(new_id, "srv"))
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT)
    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="spare_reservations")
    job = models.ForeignKey(Job, null=True, on_delete=models.CASCADE)
    holder = models.CharField(max_length=150)
    reason = models.TextField(blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    released_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["node"], condition=Q(released_at=None), name="spare_reserved_once"
            )
        ]
