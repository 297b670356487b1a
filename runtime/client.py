"""What a rank tells the control plane, and what it hears back: plain dataclasses and a sender.

`controlplane.ingest` imports the dataclasses, so this module imports neither torch nor Django.
The data plane never waits for the control plane: messages are kept in a bounded queue, sent by a
background thread, and sent again until they are answered.

One POST to `{DRYDOCK_URL}/v1/runtime` carries a JSON `Batch`, authorised by
`Authorization: Bearer {DRYDOCK_TOKEN}`; the answer is a JSON `Reply`. Every message has a natural
key, so a batch that is sent twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

#: The environment that a launcher (the node agent, or a person) gives to each rank.
ENV_JOB = "DRYDOCK_JOB"
ENV_REPLICA = "DRYDOCK_REPLICA"
ENV_RANK = "DRYDOCK_RANK"
ENV_WORLD_REPLICAS = "DRYDOCK_WORLD_REPLICAS"  # how many replicas the job starts with
ENV_PLACEMENT = "DRYDOCK_PLACEMENT"  # names this start of this rank
ENV_COORDINATOR = "DRYDOCK_COORDINATOR"  # host:port
ENV_TOKEN = "DRYDOCK_TOKEN"  # noqa: S105 - the variable's name
ENV_URL = "DRYDOCK_URL"  # ingest; absent: no control plane
ENV_OPTIONS = "DRYDOCK_OPTIONS"  # JSON object for the training script
ENV_STATE_DIR = "DRYDOCK_STATE_DIR"  # where checkpoints of this job live

How = Literal["reset", "agent", "heartbeat", "directive"]


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The rank's process is up and about to join. Key: placement."""

    type: ClassVar[str] = "hello"
    pid: int
    at: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Committed steps since the last one, told by the lowest live replica. Key: (job, step)."""

    type: ClassVar[str] = "progress"
    step: int  # last committed step
    steps: int  # committed steps that this message sums up
    epoch: int
    at: float  # Unix time of the last commit
    loss: float  # mean over those steps
    grad_norm: float
    step_s: float  # mean time between commits, seconds
    max_gap_s: float  # longest time between two commits among those steps, seconds
    samples: int  # samples in those steps
    tokens: int
    replicas: list[int]


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Which samples the committed steps `step_from..step_to` trained on. Key: (job, step_from).

    Counted from the vector that travelled inside the reduced gradient, not from the plan: shard k
    of step s counts 1 there if exactly one replica's gradient for it was summed.
    """

    type: ClassVar[str] = "ledger"
    step_from: int
    step_to: int
    epoch: int
    samples: int  # samples whose gradient was applied, over all these steps
    lost: list[list[int]] = field(default_factory=list)  # [step, shard] whose count was 0
    duplicated: list[list[int]] = field(default_factory=list)  # [step, shard] whose count was over 1
    dropped: list[list[int]] = field(default_factory=list)  # [step, shard] given up by policy


@dataclass(frozen=True, kw_only=True)
class PeerLost:
    """A replica is gone from this epoch, seen by a survivor. Key: (job, epoch, replica)."""

    type: ClassVar[str] = "peer_lost"
    epoch: int  # the epoch that ended
    replica: int
    placement: str  # of the lost one, "" if unknown
    step: int  # step under way
    at: float
    how: How


@dataclass(frozen=True, kw_only=True)
class Regrouped:
    """A new epoch committed its first step. Key: (job, epoch)."""

    type: ClassVar[str] = "regrouped"
    epoch: int
    replicas: list[int]
    lost: list[int]
    joined: list[int]
    started_at: float  # when the old epoch was found broken, or its planned edge was reached
    committed_at: float  # first commit of the new epoch
    step: int  # that commit's step
    gap_s: float  # between the last commit of the old epoch and the first of the new
    taken_over: list[int] = field(default_factory=list)  # shards of that step taken over


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint is complete and verified. Key: (job, step, tier)."""

    type: ClassVar[str] = "checkpoint"
    step: int
    tier: Literal["peer", "local", "shared"]
    path: str
    bytes: int
    digest: str
    stall_s: float  # what the training thread paid
    seconds: float  # from request until durable
    at: float


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something an engineer should know. Key: (placement, kind, at)."""

    type: ClassVar[str] = "trouble"
    kind: str
    text: str
    at: float


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The rank leaves of its own will. Key: placement."""

    type: ClassVar[str] = "stopped"
    step: int
    reason: str
    at: float


Message = Hello | Progress | Ledger | PeerLost | Regrouped | CheckpointSaved | Trouble | Stopped
MESSAGES: tuple[type[Message], ...] = (
    Hello, Progress, Ledger, PeerLost, Regrouped, CheckpointSaved, Trouble, Stopped,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The body of one POST. Each message is its fields plus `type`."""

    job: str
    replica: int
    rank: int
    placement: str
    sent_at: float
    messages: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Directive:
    """An order from the control plane, obeyed at a step's edge, once per id."""

    id: str
    verb: Literal["checkpoint", "stop"]
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer to a batch: all its messages are committed."""

    #: Highest step up to which the control plane holds the ledger without a gap; -1 for none.
    ledger_step: int = -1
    directives: list[dict[str, Any]] = field(default_factory=list)
