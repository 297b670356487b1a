"""Makes rows for tests: each factory gives a valid object of its own, told only what matters."""

from __future__ import annotations

import base64
import secrets
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from django.contrib.auth.hashers import make_password
from django.db.models import Model
from django.utils import timezone
from factory.declarations import (
    LazyAttribute,
    LazyFunction,
    RelatedFactory,
    SelfAttribute,
    Sequence,
    SubFactory,
)
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

Row = TypeVar("Row", bound=Model)


class RowFactory(DjangoModelFactory[Row]):
    """Calling a factory makes the row; factory_boy itself types only `create` and `build` so."""

    class Meta:
        abstract = True

    if TYPE_CHECKING:
        # Its metaclass answers the call, so no factory is ever an instance of its own class.
        def __new__(cls, **fields: Any) -> Row: ...  # type: ignore[misc]


@cache
def _hashed(password: str) -> str:
    """Made once: a good hash takes its time."""
    return make_password(password)


_now = LazyFunction(timezone.now)


def _in(**span: float) -> LazyFunction:
    return LazyFunction(lambda: timezone.now() + timedelta(**span))


# --- Accounts -------------------------------------------------------------------------------------


class UserFactory(RowFactory[accounts.User]):
    class Meta:
        model = accounts.User

    username = Sequence(lambda n: f"user-{n}")
    password = LazyFunction(lambda: _hashed(PASSWORD))


class GrantFactory(RowFactory[accounts.Grant]):
    class Meta:
        model = accounts.Grant

    user = SubFactory(UserFactory)
    role = Role.VIEWER


class ApiTokenFactory(RowFactory[accounts.ApiToken]):
    """A token whose text nobody knows; `accounts.actions.create_token` gives one that works."""

    class Meta:
        model = accounts.ApiToken

    user = SubFactory(UserFactory)
    name = Sequence(lambda n: f"program-{n}")
    prefix = LazyFunction(lambda: secrets.token_hex(5))
    hash = LazyFunction(lambda: secrets.token_hex(32))
    scope = Role.VIEWER
    expires_at = _in(days=30)


class AuditEventFactory(RowFactory[accounts.AuditEvent]):
    class Meta:
        model = accounts.AuditEvent

    actor_kind = ActorKind.SYSTEM
    actor_id = "drydock"
    verb = "test.done"
    object_type = "test"
    object_id = Sequence(str)


# --- Fleet ----------------------------------------------------------------------------------------


class ClusterFactory(RowFactory[fleet.Cluster]):
    class Meta:
        model = fleet.Cluster

    name = Sequence(lambda n: f"cluster-{n}")


class RackFactory(RowFactory[fleet.Rack]):
    class Meta:
        model = fleet.Rack

    cluster = SubFactory(ClusterFactory)
    name = Sequence(lambda n: f"rack-{n}")


class JoinTokenFactory(RowFactory[fleet.JoinToken]):
    class Meta:
        model = fleet.JoinToken

    cluster = SubFactory(ClusterFactory)
    hash = LazyFunction(lambda: secrets.token_hex(32))
    expires_at = _in(hours=1)


class NodeFactory(RowFactory[fleet.Node]):
    """A node that may take work, heard a moment ago."""

    class Meta:
        model = fleet.Node
        skip_postgeneration_save = True

    cluster = SubFactory(ClusterFactory)
    name = Sequence(lambda n: f"node-{n:02d}")
    address = "127.0.0.1"
    state = NodeState.AVAILABLE
    state_since = _now
    admitted_at = _in(hours=-1)
    public_key = LazyFunction(lambda: base64.b64encode(secrets.token_bytes(32)).decode())
    boot_id = LazyFunction(lambda: secrets.token_hex(16))
    booted_at = _in(hours=-1)

    lease = RelatedFactory("tests.factories.LeaseFactory", factory_related_name="node")


class LeaseFactory(RowFactory[fleet.Lease]):
    class Meta:
        model = fleet.Lease

    node = SubFactory(NodeFactory, lease=None)
    last_beat_at = _now
    deadline = _in(seconds=30)


class GpuFactory(RowFactory[fleet.Gpu]):
    class Meta:
        model = fleet.Gpu

    uuid = LazyFunction(lambda: f"GPU-{secrets.token_hex(8)}")
    serial = Sequence(lambda n: f"16501{n:08d}")
    model = "NVIDIA H200"
    memory_bytes = 141 * 2**30
    node = SubFactory(NodeFactory)
    index = Sequence(lambda n: n % 8)


class RepairRecordFactory(RowFactory[fleet.RepairRecord]):
    class Meta:
        model = fleet.RepairRecord

    gpu = SubFactory(GpuFactory)
    node = SelfAttribute("gpu.node")
    rung = Rung.RESET_GPU
    step_id = LazyFunction(lambda: new_id("stp"))
    at = _now


class CommandFactory(RowFactory[fleet.Command]):
    class Meta:
        model = fleet.Command

    node = SubFactory(NodeFactory)
    verb = "start_rank"
    payload = "{}"
    signature = "unsigned"
    requester = LazyFunction(lambda: new_id("stp"))
    expires_at = _in(minutes=5)


# --- Jobs -----------------------------------------------------------------------------------------


class JobFactory(RowFactory[jobs.Job]):
    """A running job, without replicas of its own: make those that the test is about."""

    class Meta:
        model = jobs.Job

    cluster = SubFactory(ClusterFactory)
    name = Sequence(lambda n: f"job-{n}")
    state = JobState.RUNNING
    program = "train"
    world_replicas = 4
    started_at = _in(minutes=-10)


class ReplicaFactory(RowFactory[jobs.Replica]):
    class Meta:
        model = jobs.Replica

    job = SubFactory(JobFactory)
    index = Sequence(int)
    state = ReplicaState.ACTIVE
    state_since = _now


class PlacementFactory(RowFactory[jobs.Placement]):
    class Meta:
        model = jobs.Placement

    replica = SubFactory(ReplicaFactory)
    node = SubFactory(
        NodeFactory, cluster=SelfAttribute("..replica.job.cluster"), state="allocated"
    )
    state = PlacementState.RUNNING
    pid = Sequence(lambda n: 4000 + n)
    started_at = _now
    joined_at = _now


class ProgressSampleFactory(RowFactory[jobs.ProgressSample]):
    """Ten committed steps a second; `step` tells the time as well."""

    class Meta:
        model = jobs.ProgressSample

    class Params:
        began = _in(minutes=-10)

    job = SubFactory(JobFactory)
    step = Sequence(lambda n: n * 10 + 9)
    steps = 10
    epoch = 1
    at = LazyAttribute(lambda o: o.began + timedelta(seconds=o.step / 10))
    loss = LazyAttribute(lambda o: 4 / (1 + o.step / 1000))
    grad_norm = 1.0
    step_s = 0.1
    max_gap_s = 0.12
    samples = 480
    replicas = [0, 1, 2, 3]


class LedgerRangeFactory(RowFactory[jobs.LedgerRange]):
    class Meta:
        model = jobs.LedgerRange

    job = SubFactory(JobFactory)
    step_from = Sequence(lambda n: n * 100)
    step_to = LazyAttribute(lambda o: o.step_from + 99)
    epoch = 1
    samples = 4800


class InterruptionFactory(RowFactory[jobs.Interruption]):
    class Meta:
        model = jobs.Interruption

    job = SubFactory(JobFactory)
    epoch = Sequence(lambda n: n + 2)
    started_at = _now
    committed_at = LazyAttribute(lambda o: o.started_at + timedelta(seconds=o.gap_s))
    step = 1000
    gap_s = 0.3


class CheckpointFactory(RowFactory[jobs.Checkpoint]):
    class Meta:
        model = jobs.Checkpoint

    job = SubFactory(JobFactory)
    step = Sequence(lambda n: n * 500)
    tier = Tier.LOCAL
    path = LazyAttribute(lambda o: f"/var/lib/drydock/step-{o.step}")
    bytes = 64 * 2**20
    digest = "xxh3:00"
    stall_s = 0.012
    seconds = 0.4
    at = _now


class DirectiveFactory(RowFactory[jobs.Directive]):
    class Meta:
        model = jobs.Directive

    job = SubFactory(JobFactory)
    verb = "checkpoint"
    expires_at = _in(minutes=5)


# --- Health and incidents -------------------------------------------------------------------------


class SignalFactory(RowFactory[health.Signal]):
    class Meta:
        model = health.Signal

    id = LazyFunction(lambda: new_id("sig"))
    kind = SignalKind.KERNEL_LINE
    source = "kmsg"
    node = SubFactory(NodeFactory)
    observed_at = _now


class FailureFactory(RowFactory[health.Failure]):
    class Meta:
        model = health.Failure

    fault_class = FaultClass.HARDWARE
    code = "xid-79"
    summary = "GPU has fallen off the bus"
    needed = "power_cycle"
    rule = "xid-79"
    node = SubFactory(NodeFactory)
    observed_at = _now


class IncidentFactory(RowFactory[incidents.Incident]):
    class Meta:
        model = incidents.Incident

    cluster = SubFactory(ClusterFactory)
    subject = Sequence(lambda n: f"node/nod_{n}")
    title = Sequence(lambda n: f"Incident {n}")
    severity = Severity.MAJOR
    occurred_at = _in(minutes=-1)


class TimelineEntryFactory(RowFactory[incidents.TimelineEntry]):
    class Meta:
        model = incidents.TimelineEntry

    incident = SubFactory(IncidentFactory)
    key = Sequence(lambda n: f"entry-{n}")
    at = _now
    kind = EntryKind.SIGNAL
    text = "something was seen"


class PlaybookRunFactory(RowFactory[incidents.PlaybookRun]):
    class Meta:
        model = incidents.PlaybookRun

    incident = SubFactory(IncidentFactory)
    cluster = SelfAttribute("incident.cluster")
    playbook = "replica-lost"
    version = 1
    title = "Bring a lost replica back"
    subject = Sequence(lambda n: f"replica-lost/job/{n}")
    state = RunState.RUNNING
    deadline = _in(minutes=30)


class PlaybookStepFactory(RowFactory[incidents.PlaybookStep]):
    """A step; while `running` it is locked, as the table demands."""

    class Meta:
        model = incidents.PlaybookStep

    run = SubFactory(PlaybookRunFactory)
    position = Sequence(int)
    key = Sequence(lambda n: f"step-{n}")
    title = "Do a thing"
    effect = Effect.IDEMPOTENT
    state = StepState.BLOCKED
    timeout_s = 60
    lock_token = LazyAttribute(lambda o: new_id("lck") if o.state == "running" else "")


class ReservationFactory(RowFactory[incidents.Reservation]):
    class Meta:
        model = incidents.Reservation

    run = SubFactory(PlaybookRunFactory)
    cluster = SelfAttribute("run.cluster")
    node = SubFactory(NodeFactory, cluster=SelfAttribute("..run.cluster"))


class MaintenanceWindowFactory(RowFactory[fleet.MaintenanceWindow]):
    """Work that is going on, on the whole cluster."""

    class Meta:
        model = fleet.MaintenanceWindow

    cluster = SubFactory(ClusterFactory)
    starts_at = _in(minutes=-5)
    ends_at = _in(hours=1)
    owner = "1"
    reason = "cabling"


class NodeExclusionFactory(RowFactory[jobs.NodeExclusion]):
    class Meta:
        model = jobs.NodeExclusion

    job = SubFactory(JobFactory)
    node = SubFactory(NodeFactory, cluster=SelfAttribute("..job.cluster"))
    reason = "slow"


class SpareReservationFactory(RowFactory[jobs.SpareReservation]):
    class Meta:
        model = jobs.SpareReservation

    cluster = SubFactory(ClusterFactory)
    node = SubFactory(NodeFactory, cluster=SelfAttribute("..cluster"), spare=True)
    holder = "scheduler"
    expires_at = _in(hours=1)


class BreakerFactory(RowFactory[incidents.Breaker]):
    class Meta:
        model = incidents.Breaker

    cluster = SubFactory(ClusterFactory)
    code = "xid-79"
    reason = "five nodes within ten minutes"


class PlaybookFactory(RowFactory[incidents.Playbook]):
    class Meta:
        model = incidents.Playbook

    name = Sequence(lambda n: f"playbook-{n}")
    version = 1
    summary = "Does a thing."
    deadline_s = 1800.0
    steps = LazyFunction(
        lambda: [{"key": "do", "title": "Do it", "disruptive": True, "does": ["reboot {node}"]}]
    )


class ApprovalFactory(RowFactory[incidents.Approval]):
    class Meta:
        model = incidents.Approval

    run = SubFactory(PlaybookRunFactory)
    cluster = SelfAttribute("run.cluster")
    plan: dict[str, Any] = {
        "playbook": "replica-lost",
        "version": 1,
        "title": "Bring a lost replica back",
        "node": {},
        "steps": [],
        "jobs": [],
        "gpu_hours_at_stake": 1.5,
        "money": "3.00 USD",
        "objections": [],
        "budgets": [],
        "mode": "approve",
        "notes": [],
    }
    digest = "0" * 64


class RmaCaseFactory(RowFactory[incidents.RmaCase]):
    class Meta:
        model = incidents.RmaCase

    gpu = SubFactory(GpuFactory)
    node = SelfAttribute("gpu.node")
    cluster = SelfAttribute("gpu.node.cluster")
    reason = "the second XID 79 after its repair"
