"""Makes rows for tests: each factory gives a valid object of its own, told only what matters."""

from __future__ import annotations

import base64
import secrets
from datetime import timedelta
from functools import cache

import factory
from django.contrib.auth.hashers import make_password
from django.utils import timezone
from factory.django import DjangoModelFactory

from controlplane.accounts import models as accounts
from controlplane.accounts.choices import ActorKind, Role
from controlplane.fleet import models as fleet
from controlplane.fleet.choices import NodeState, Rung
from controlplane.health import models as health
from controlplane.health.choices import FaultClass, SignalKind
from controlplane.ids import new_id
from controlplane.incidents import models as incidents
from controlplane.incidents.choices import Effect, EntryKind, RunState, Severity, StepState
from controlplane.jobs import models as jobs
from controlplane.jobs.choices import JobState, PlacementState, ReplicaState, Tier

PASSWORD = "a long enough password"


@cache
def _hashed(password: str) -> str:
    """Made once: a good hash takes its time."""
    return make_password(password)


_now = factory.LazyFunction(timezone.now)


def _in(**span: float) -> factory.LazyFunction:
    return factory.LazyFunction(lambda: timezone.now() + timedelta(**span))


# --- Accounts -------------------------------------------------------------------------------------


class UserFactory(DjangoModelFactory[accounts.User]):
    class Meta:
        model = accounts.User

    username = factory.Sequence(lambda n: f"user-{n}")
    password = factory.LazyFunction(lambda: _hashed(PASSWORD))


class GrantFactory(DjangoModelFactory[accounts.Grant]):
    class Meta:
        model = accounts.Grant

    user = factory.SubFactory(UserFactory)
    role = Role.VIEWER


class AuditEventFactory(DjangoModelFactory[accounts.AuditEvent]):
    class Meta:
        model = accounts.AuditEvent

    actor_kind = ActorKind.SYSTEM
    actor_id = "drydock"
    verb = "test.done"
    object_type = "test"
    object_id = factory.Sequence(str)


# --- Fleet ----------------------------------------------------------------------------------------


class ClusterFactory(DjangoModelFactory[fleet.Cluster]):
    class Meta:
        model = fleet.Cluster

    name = factory.Sequence(lambda n: f"cluster-{n}")


class RackFactory(DjangoModelFactory[fleet.Rack]):
    class Meta:
        model = fleet.Rack

    cluster = factory.SubFactory(ClusterFactory)
    name = factory.Sequence(lambda n: f"rack-{n}")


class JoinTokenFactory(DjangoModelFactory[fleet.JoinToken]):
    class Meta:
        model = fleet.JoinToken

    cluster = factory.SubFactory(ClusterFactory)
    hash = factory.LazyFunction(lambda: secrets.token_hex(32))
    expires_at = _in(hours=1)


class NodeFactory(DjangoModelFactory[fleet.Node]):
    """A node that may take work, heard a moment ago."""

    class Meta:
        model = fleet.Node
        skip_postgeneration_save = True

    cluster = factory.SubFactory(ClusterFactory)
    name = factory.Sequence(lambda n: f"node-{n:02d}")
    address = "127.0.0.1"
    state = NodeState.AVAILABLE
    state_since = _now
    public_key = factory.LazyFunction(lambda: base64.b64encode(secrets.token_bytes(32)).decode())
    boot_id = factory.LazyFunction(lambda: secrets.token_hex(16))
    booted_at = _in(hours=-1)

    lease = factory.RelatedFactory("tests.factories.LeaseFactory", factory_related_name="node")


class LeaseFactory(DjangoModelFactory[fleet.Lease]):
    class Meta:
        model = fleet.Lease

    node = factory.SubFactory(NodeFactory, lease=None)
    last_beat_at = _now
    deadline = _in(seconds=30)


class GpuFactory(DjangoModelFactory[fleet.Gpu]):
    class Meta:
        model = fleet.Gpu

    uuid = factory.LazyFunction(lambda: f"GPU-{secrets.token_hex(8)}")
    serial = factory.Sequence(lambda n: f"16501{n:08d}")
    model = "NVIDIA H200"
    memory_bytes = 141 * 2**30
    node = factory.SubFactory(NodeFactory)
    index = factory.Sequence(lambda n: n % 8)


class RepairRecordFactory(DjangoModelFactory[fleet.RepairRecord]):
    class Meta:
        model = fleet.RepairRecord

    gpu = factory.SubFactory(GpuFactory)
    node = factory.SelfAttribute("gpu.node")
    rung = Rung.RESET_GPU
    step_id = factory.LazyFunction(lambda: new_id("stp"))
    at = _now


class CommandFactory(DjangoModelFactory[fleet.Command]):
    class Meta:
        model = fleet.Command

    node = factory.SubFactory(NodeFactory)
    verb = "start_rank"
    payload = "{}"
    signature = "unsigned"
    requester = factory.LazyFunction(lambda: new_id("stp"))
    expires_at = _in(minutes=5)


# --- Jobs -----------------------------------------------------------------------------------------


class JobFactory(DjangoModelFactory[jobs.Job]):
    """A running job, without replicas of its own: make those that the test is about."""

    class Meta:
        model = jobs.Job

    cluster = factory.SubFactory(ClusterFactory)
    name = factory.Sequence(lambda n: f"job-{n}")
    state = JobState.RUNNING
    program = "train"
    world_replicas = 4
    started_at = _in(minutes=-10)


class ReplicaFactory(DjangoModelFactory[jobs.Replica]):
    class Meta:
        model = jobs.Replica

    job = factory.SubFactory(JobFactory)
    index = factory.Sequence(int)
    state = ReplicaState.ACTIVE
    state_since = _now


class PlacementFactory(DjangoModelFactory[jobs.Placement]):
    class Meta:
        model = jobs.Placement

    replica = factory.SubFactory(ReplicaFactory)
    node = factory.SubFactory(
        NodeFactory, cluster=factory.SelfAttribute("..replica.job.cluster"), state="allocated"
    )
    state = PlacementState.RUNNING
    pid = factory.Sequence(lambda n: 4000 + n)
    started_at = _now
    joined_at = _now


class ProgressSampleFactory(DjangoModelFactory[jobs.ProgressSample]):
    """Ten committed steps a second; `step` tells the time as well."""

    class Meta:
        model = jobs.ProgressSample

    class Params:
        began = _in(minutes=-10)

    job = factory.SubFactory(JobFactory)
    step = factory.Sequence(lambda n: n * 10 + 9)
    steps = 10
    epoch = 1
    at = factory.LazyAttribute(lambda o: o.began + timedelta(seconds=o.step / 10))
    loss = factory.LazyAttribute(lambda o: 4 / (1 + o.step / 1000))
    grad_norm = 1.0
    step_s = 0.1
    max_gap_s = 0.12
    samples = 480
    replicas = [0, 1, 2, 3]


class LedgerRangeFactory(DjangoModelFactory[jobs.LedgerRange]):
    class Meta:
        model = jobs.LedgerRange

    job = factory.SubFactory(JobFactory)
    step_from = factory.Sequence(lambda n: n * 100)
    step_to = factory.LazyAttribute(lambda o: o.step_from + 99)
    epoch = 1
    samples = 4800


class InterruptionFactory(DjangoModelFactory[jobs.Interruption]):
    class Meta:
        model = jobs.Interruption

    job = factory.SubFactory(JobFactory)
    epoch = factory.Sequence(lambda n: n + 2)
    started_at = _now
    committed_at = factory.LazyAttribute(lambda o: o.started_at + timedelta(seconds=o.gap_s))
    step = 1000
    gap_s = 0.3


class CheckpointFactory(DjangoModelFactory[jobs.Checkpoint]):
    class Meta:
        model = jobs.Checkpoint

    job = factory.SubFactory(JobFactory)
    step = factory.Sequence(lambda n: n * 500)
    tier = Tier.LOCAL
    path = factory.LazyAttribute(lambda o: f"/var/lib/drydock/step-{o.step}")
    bytes = 64 * 2**20
    digest = "xxh3:00"
    stall_s = 0.012
    seconds = 0.4
    at = _now


class DirectiveFactory(DjangoModelFactory[jobs.Directive]):
    class Meta:
        model = jobs.Directive

    job = factory.SubFactory(JobFactory)
    verb = "checkpoint"
    expires_at = _in(minutes=5)


# --- Health and incidents -------------------------------------------------------------------------


class SignalFactory(DjangoModelFactory[health.Signal]):
    class Meta:
        model = health.Signal

    id = factory.LazyFunction(lambda: new_id("sig"))
    kind = SignalKind.KERNEL_LINE
    source = "kmsg"
    node = factory.SubFactory(NodeFactory)
    observed_at = _now


class FailureFactory(DjangoModelFactory[health.Failure]):
    class Meta:
        model = health.Failure

    fault_class = FaultClass.HARDWARE
    code = "xid-79"
    summary = "GPU has fallen off the bus"
    needed = "power_cycle"
    rule = "xid-79"
    node = factory.SubFactory(NodeFactory)
    observed_at = _now


class IncidentFactory(DjangoModelFactory[incidents.Incident]):
    class Meta:
        model = incidents.Incident

    cluster = factory.SubFactory(ClusterFactory)
    subject = factory.Sequence(lambda n: f"node/nod_{n}")
    title = factory.Sequence(lambda n: f"Incident {n}")
    severity = Severity.MAJOR
    occurred_at = _in(minutes=-1)


class TimelineEntryFactory(DjangoModelFactory[incidents.TimelineEntry]):
    class Meta:
        model = incidents.TimelineEntry

    incident = factory.SubFactory(IncidentFactory)
    key = factory.Sequence(lambda n: f"entry-{n}")
    at = _now
    kind = EntryKind.SIGNAL
    text = "something was seen"


class PlaybookRunFactory(DjangoModelFactory[incidents.PlaybookRun]):
    class Meta:
        model = incidents.PlaybookRun

    incident = factory.SubFactory(IncidentFactory)
    cluster = factory.SelfAttribute("incident.cluster")
    playbook = "replica-lost"
    version = 1
    title = "Bring a lost replica back"
    subject = factory.Sequence(lambda n: f"replica-lost/job/{n}")
    state = RunState.RUNNING
    deadline = _in(minutes=30)


class PlaybookStepFactory(DjangoModelFactory[incidents.PlaybookStep]):
    """A step; while `running` it is locked, as the table demands."""

    class Meta:
        model = incidents.PlaybookStep

    run = factory.SubFactory(PlaybookRunFactory)
    position = factory.Sequence(int)
    key = factory.Sequence(lambda n: f"step-{n}")
    title = "Do a thing"
    effect = Effect.IDEMPOTENT
    state = StepState.BLOCKED
    timeout_s = 60
    lock_token = factory.LazyAttribute(lambda o: new_id("lck") if o.state == "running" else "")


class ReservationFactory(DjangoModelFactory[incidents.Reservation]):
    class Meta:
        model = incidents.Reservation

    run = factory.SubFactory(PlaybookRunFactory)
    cluster = factory.SelfAttribute("run.cluster")
    node = factory.SubFactory(NodeFactory, cluster=factory.SelfAttribute("..run.cluster"))
