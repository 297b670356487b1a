"""The messages between a node agent and the control plane: their one definition.

The agent encodes them, `controlplane.ingest` decodes them. Everything travels as JSON over HTTP.
This module must stay importable with msgspec alone: no Django, no torch, no I/O.

Paths (all POST, all under the ingest address):

    /v1/enroll             Enroll         -> EnrollAnswer      proves itself by a join token
    /v1/beat               Beat           -> BeatAnswer        replaceable, never in Postgres
    /v1/report             Report         -> Accepted          the full inventory, on change
    /v1/events             Events         -> Accepted          committed before it is answered
    /v1/commands/poll      CommandPoll    -> Commands          long poll
    /v1/commands/result    CommandResult  -> Accepted          committed before it is answered

Every request but `enroll` is signed by the node's own Ed25519 key; see `signing_input`. A refused
request is answered with a `Problem` (4xx or 5xx).
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

import msgspec

PROTOCOL = 1

#: A request body above this many bytes is refused with 413 (`body_too_large`).
MAX_BODY_BYTES = 1_048_576
#: Longest wait that a `CommandPoll` may ask for, in seconds.
MAX_POLL_S = 25.0
#: A signed request whose `Drydock-Time` is further than this from the server's clock is refused.
MAX_CLOCK_SKEW_S = 300.0
#: From SIGTERM to SIGKILL, unless a command says otherwise; ranks are told.
GRACE_S = 10.0

HEADER_NODE = "Drydock-Node"
HEADER_TIME = "Drydock-Time"
HEADER_SIGNATURE = "Drydock-Signature"

Name = Annotated[
    str, msgspec.Meta(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?\Z")
]
Id = Annotated[
    str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:-]*\Z")
]
PortName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,40}/[0-9]{1,3}\Z")]
Text = Annotated[str, msgspec.Meta(max_length=8192)]
Short = Annotated[str, msgspec.Meta(max_length=255)]
RackName = Annotated[str, msgspec.Meta(max_length=63)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
#: Seconds since the Unix epoch, by the sender's clock.
UnixTime = Annotated[float, msgspec.Meta(ge=0, le=1e11)]


def signing_input(path: str, node_id: str, time: str, body: bytes) -> bytes:
    """The bytes that a node signs for one request; `time` is the header's text, verbatim."""
    digest = hashlib.sha256(body).hexdigest()
    return f"drydock-request-v1\n{path}\n{node_id}\n{time}\n{digest}".encode()


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message from an agent: unknown fields are refused, so that a typo cannot pass unseen."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to an agent: unknown fields are ignored, so that an older agent keeps working."""


# --- what a node is ---------------------------------------------------------------------------


class GpuInfo(Message, frozen=True):
    """One card. A card is known by its UUID and serial, wherever it is plugged in."""

    index: Annotated[int, msgspec.Meta(ge=0, le=63)]
    uuid: Id
    serial: Id
    model: Short
    pci_address: Short
    memory_bytes: Bytes


class Inventory(Message, frozen=True):
    """The hardware of one node: its cards, logical CPUs, bytes of memory, and versions.

    `simulated` is true where the cards do not exist and software stands in for them.
    """

    gpus: Annotated[list[GpuInfo], msgspec.Meta(max_length=64)]
    cpus: Count
    memory_bytes: Count
    kernel: Short
    driver_version: Short
    simulated: bool = False


class GpuReading(Message, frozen=True):
    """One card's sensors. `None` means "could not be read", which is never the same as zero."""

    uuid: Id
    temperature_c: float | None = None
    power_w: float | None = None
    utilization: float | None = None
    sm_clock_mhz: float | None = None
    memory_used_bytes: float | None = None
    ecc_corrected: float | None = None
    ecc_uncorrected: float | None = None
    pcie_replays: float | None = None
    #: 1 where it is so, 0 where it is not: a row waits for a reset to be remapped, one could not
    #: be remapped, uncorrectable errors of SRAM are beyond the vendor's threshold.
    remap_pending: float | None = None
    remap_failed: float | None = None
    sram_over_threshold: float | None = None
    #: What the driver wants: NVML's GPU_RECOVERY_ACTION, as in an XID 154. 0 for nothing.
    recovery_action: float | None = None
    #: Rows of its memory remapped in its life after uncorrectable errors, and banks that have no
    #: spare row left.
    remapped_rows: float | None = None
    exhausted_banks: float | None = None
    #: The card's own limit, at which it slows its clocks.
    slowdown_c: float | None = None
    #: What holds its clocks back now: NVML's clocks event reasons, a bit mask.
    throttle_reasons: float | None = None
    #: All its active NVLinks together, by the speed that they trained to, in MB/s; errors since
    #: the last reset that its links recovered from (by replay, or by training anew).
    nvlink_mb_s: float | None = None
    nvlink_errors: float | None = None
    pcie_lanes: float | None = None
    #: As many as card and slot could have.
    pcie_lanes_max: float | None = None


class PortReading(Message, frozen=True):
    """One port of a fabric adapter, as Linux counts it. Counters rise from when the driver loaded.

    `None` means "could not be read".
    """

    name: PortName  # "mlx5_0/1": device and port
    up: float  # 1 or 0
    symbol_errors: float | None = None
    link_recoveries: float | None = None
    link_downs: float | None = None
    receive_errors: float | None = None
    discards: float | None = None


class ProcessInfo(Message, frozen=True):
    """A process that the agent started (or adopted after its own restart) and that still runs."""

    kind: Literal["rank", "coordinator"]
    job: Id
    placement: Id
    pid: Count
    started_at: UnixTime
    replica: int | None = None
    rank: int | None = None


# --- requests ---------------------------------------------------------------------------------


class Enroll(Message, frozen=True):
    """The request by which a node joins the fleet, with a join token in place of a signature."""

    join_token: Short
    name: Name
    #: Ed25519 public key, 32 raw bytes in base64.
    public_key: Annotated[str, msgspec.Meta(min_length=44, max_length=44)]
    boot_id: Id
    #: Host name or address at which other nodes reach this one.
    address: Short
    agent_version: Short
    inventory: Inventory
    rack: RackName = ""


class Beat(Message, frozen=True):
    """A node's sign of life, with its latest sensor values; a newer beat replaces an older one.

    `seq` rises with each beat of a boot. `at` is Unix time in seconds by the node's clock.
    """

    boot_id: Id
    seq: Count
    at: UnixTime
    #: Digest of the last full report; the server asks for a report when it knows another one.
    report_digest: Short = ""
    readings: Annotated[list[GpuReading], msgspec.Meta(max_length=64)] = []
    ports: Annotated[list[PortReading], msgspec.Meta(max_length=64)] = []


class Report(Message, frozen=True):
    """All that a node is and runs: its inventory and its processes; sent whenever that changes.

    `digest` names this content; later beats repeat it, so that the server notices a missed report.
    """

    boot_id: Id
    at: UnixTime
    digest: Short
    agent_version: Short
    inventory: Inventory
    #: The switch that its fabric hangs on, by whatever name the site has for it.
    switch: Short = ""
    #: Whether the vendor's field diagnostic is set up on it.
    field_diagnostic: bool = False
    processes: Annotated[list[ProcessInfo], msgspec.Meta(max_length=256)] = []


EventKind = Literal[
    "boot",  # the agent's first word after a boot; boot_id is new
    "kernel_line",  # raw is the kernel's line, verbatim
    "process_exited",  # data: kind, job, replica, rank, placement, pid, exit_code, signal
    "coordinator_restarted",  # data: job, placement, address
    "gpu_unreadable",  # the card does not answer
]


class Event(Message, frozen=True):
    """One thing that happened. Never replaceable: the agent spools it until it is accepted."""

    id: Id
    kind: EventKind
    at: UnixTime
    boot_id: Id
    source: Short
    gpu_uuid: Short = ""
    raw: Text = ""
    data: dict[str, Any] = {}


class Events(Message, frozen=True):
    """One to 500 events in one request; they are committed before the request is answered."""

    events: Annotated[list[Event], msgspec.Meta(min_length=1, max_length=500)]


class CommandPoll(Message, frozen=True):
    """A node's question for commands; the server answers at once if there are any."""

    boot_id: Id
    #: How long the server may hold the request when it has nothing, in seconds.
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_POLL_S)] = 20.0


class CommandResult(Message, frozen=True):
    """What became of one command; `error` is the reason if it was not done."""

    id: Id
    #: `refused`: its expiry or the node's own list said no; it was not and will not be executed.
    state: Literal["done", "failed", "refused"]
    at: UnixTime
    output: dict[str, Any] = {}
    error: Text = ""


# --- answers ----------------------------------------------------------------------------------


class EnrollAnswer(Answer, frozen=True):
    """What an enrolled node must keep: its id, the keys of its commander, and times in seconds.

    A beat is due every `beat_interval_s`. A node that was not heard for `lease_s` is no longer
    believed alive.
    """

    node_id: str
    #: The control plane's Ed25519 public keys, base64; a command must verify under one of them.
    command_keys: list[str]
    beat_interval_s: float
    lease_s: float


class BeatAnswer(Answer, frozen=True):
    """When the next beat is due, in seconds, and whether the server wants a full report.

    `want_report` is true if the server knows no report of this boot, or one with another digest.
    """

    next_in_s: float
    want_report: bool = False


class Accepted(Answer, frozen=True):
    """The answer to a request whose messages were committed."""

    #: Ids that are now safe in Postgres; the sender may forget them.
    ids: list[str] = []


class SignedCommand(Answer, frozen=True):
    """One command as its signed text; it must be verified before it is decoded."""

    #: JSON text of a `Command`, exactly as signed.
    payload: str
    #: Ed25519 over `COMMAND_CONTEXT + payload`, base64.
    signature: str


class Commands(Answer, frozen=True):
    """The commands that wait for a node; the list is empty if the poll's time ran out."""

    commands: list[SignedCommand] = []


class Problem(Answer, frozen=True):
    """Why a request was refused, after RFC 9457. `code` is stable, `field` names what to mend."""

    status: int
    code: str
    title: str
    detail: str
    field: str = ""


# --- commands ---------------------------------------------------------------------------------

COMMAND_CONTEXT = b"drydock-command-v1\n"


class StartCoordinator(Message, frozen=True, tag="start_coordinator", tag_field="verb"):
    """Start `python -m runtime.replica.coordinator` for a job.

    Result output: `address` ("host:port") and `pid`.
    """

    job: Id
    placement: Id
    token: Short
    min_replicas: Annotated[int, msgspec.Meta(ge=1)]
    #: 0 lets the node choose; a restart names the port it had.
    port: Port = 0


class Together(Message, frozen=True):
    """A start of a replica's program on several nodes at once, whose processes find each other."""

    nodes: Annotated[int, msgspec.Meta(ge=2)]
    #: Which of them this one is; the first is 0.
    node_rank: Count
    #: Of the first node, where the others find it.
    address: Short
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    #: Names this start: what is left of an earlier one never meets it.
    start: Id


class StartRank(Message, frozen=True, omit_defaults=True, tag="start_rank", tag_field="verb"):
    """Start one rank of a replica, or the launcher of all ranks that the replica has on this node.

    Result output: `pid`, `started_at`. A field at its default is not sent, because an agent that
    does not know a field refuses the message.
    """

    job: Id
    placement: Id
    replica: Count
    rank: Count
    world_replicas: Annotated[int, msgspec.Meta(ge=1)]
    coordinator: Short
    token: Short
    ingest_url: Short
    #: A name from the agent's own table of allowed programs, never a path or a shell line.
    program: Name
    #: Handed to the program as DRYDOCK_OPTIONS (a JSON object).
    options: dict[str, Any] = {}
    #: Handed to the program as DRYDOCK_STANDBY. "migrate": it takes the replica's place from the
    #: process that has it, once it holds the state; "spare": that of whichever replica dies.
    standby: Literal["", "migrate", "spare"] = ""
    #: Where the replica is on several nodes.
    together: Together | None = None


class StopProcess(Message, frozen=True, tag="stop_process", tag_field="verb"):
    """Send SIGTERM to a process, then SIGKILL after `grace_s` seconds. The command is idempotent.

    It is done once nothing of the placement runs, and also if nothing ran. It fails if the kernel
    does not let go of the process after SIGKILL. Result output: `stopped` (true).
    """

    placement: Id
    grace_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = GRACE_S


class Diagnose(Message, frozen=True, tag="diagnose", tag_field="verb"):
    """Run the node's diagnostics.

    Result output: `passed` (bool), `tests` (list of {name, outcome, detail, seconds}); an outcome
    is "passed", "failed" or "skipped", and a skipped test is not a passed one.
    """

    level: Literal[1, 2] = 1


class ResetGpus(Message, frozen=True, tag="reset_gpus", tag_field="verb"):
    """Reset cards, all of the node's where none is named. Fails while a rank runs on the node.

    Result output: `reset` (list of UUIDs). What the kernel's log said of these cards before no
    longer speaks against them in a later diagnostic.
    """

    uuids: Annotated[list[Id], msgspec.Meta(max_length=64)] = []


class FieldDiagnose(Message, frozen=True, tag="field_diagnose", tag_field="verb"):
    """Run the vendor's field diagnostic on one card. Fails while a rank runs on the node.

    Result output: `uuid`, `outcome` ("passed"; "failed": the card is defective; "absent": the
    driver does not list it, so there is nothing to examine), and unless it is absent `status` (the
    tool's exit status), `seconds`, `log` (the file on the node with all that the tool wrote) and
    `said` (its last words). A tool that gives no verdict is a command that failed.
    """

    uuid: Id
    limit_s: Annotated[float, msgspec.Meta(gt=0, le=7 * 86_400)]


Verb = StartCoordinator | StartRank | StopProcess | Diagnose | ResetGpus | FieldDiagnose


class Command(Message, frozen=True):
    """What the control plane signs. `id` is the fence: a journal refuses an id it has seen."""

    id: Id
    node_id: Id
    issued_at: UnixTime
    expires_at: UnixTime
    action: Verb
