"""The states of a job, of its replicas, and of a replica's stay on a node."""

from __future__ import annotations

from django.db.models import TextChoices


class JobState(TextChoices):
    PENDING = "pending", "Pending"  # registered, waiting for nodes
    STARTING = "starting", "Starting"
    RUNNING = "running", "Running"
    STOPPING = "stopping", "Stopping"
    STOPPED = "stopped", "Stopped"
    FAILED = "failed", "Failed"


JOB_ACTIVE = frozenset({JobState.PENDING, JobState.STARTING, JobState.RUNNING})
#: One that is told to stop holds its nodes until its last rank has left.
JOB_UNFINISHED = JOB_ACTIVE | {JobState.STOPPING}


class ReplicaState(TextChoices):
    PENDING = "pending", "Pending"  # has no process
    STARTING = "starting", "Starting"  # its process is being started
    JOINING = "joining", "Joining"  # its process is up, fetching state
    ACTIVE = "active", "Active"  # commits steps
    LOST = "lost", "Lost"


REPLICA_COLOURS: dict[str, str] = {
    ReplicaState.PENDING: "quiet",
    ReplicaState.STARTING: "busy",
    ReplicaState.JOINING: "busy",
    ReplicaState.ACTIVE: "good",
    ReplicaState.LOST: "bad",
}


class PlacementState(TextChoices):
    STARTING = "starting", "Starting"
    RUNNING = "running", "Running"
    ENDED = "ended", "Ended"


class Tier(TextChoices):
    PEER = "peer", "Peer memory"
    LOCAL = "local", "Local disk"
    SHARED = "shared", "Shared storage"
    OBJECT = "object", "Object store"


#: What is saved there is there for whoever starts anywhere, also when all the job's nodes are gone.
OF_ALL_NODES = (Tier.SHARED, Tier.OBJECT)
