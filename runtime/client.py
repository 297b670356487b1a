"""What a rank tells the control plane, and what it hears back: plain dataclasses and a sender.

`controlplane.ingest` imports the dataclasses, so this module imports neither torch nor Django.
The data plane never waits for the control plane: messages are kept in a bounded queue, sent by a
background thread, and sent again until they are answered.

One POST to `{DRYDOCK_URL}/v1/runtime` carries a JSON `Batch`, authorised by
`Authorization: Bearer {DRYDOCK_TOKEN}`; the answer is a JSON `Reply`. Every message has a natural
key, so a batch that is sent twice changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

log = logging.getLogger("drydock.client")

INTERVAL_S = 1.0
MAX_BACKOFF_S = 15.0
ASK_S = 15.0  # on average, between two questions of who has no news
POST_TIMEOUT_S = 5.0
UNHEARD_S = 10.0  # a restart of the control plane takes less
SAID_S = 600.0  # no more often than this is the log told that we are not heard
MAX_QUEUED = 10_000
MAX_TEXT = 8192  # characters
MAX_PER_POST = 100
OBEYED_KEPT = 256  # directives that are not said any more, in case they are said once more
#: Answers that no repetition will change.
REFUSALS = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.CONFLICT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)

#: The environment that a launcher (the node agent, or a person) gives to each rank.
ENV_JOB = "DRYDOCK_JOB"
ENV_REPLICA = "DRYDOCK_REPLICA"
ENV_RANK = "DRYDOCK_RANK"
ENV_RANKS = "DRYDOCK_RANKS"  # how many ranks the replica has; 1 if it is not said
ENV_WORLD_REPLICAS = "DRYDOCK_WORLD_REPLICAS"  # how many replicas the job starts with
ENV_PLACEMENT = "DRYDOCK_PLACEMENT"  # names this start of this rank
ENV_NODES = "DRYDOCK_NODES"  # on how many nodes the replica is; 1 if it is not said
ENV_STANDBY = "DRYDOCK_STANDBY"  # "migrate" or "spare": it trains later, in a member's place
ENV_COORDINATOR = "DRYDOCK_COORDINATOR"  # host:port
ENV_TOKEN = "DRYDOCK_TOKEN"  # noqa: S105 - the variable's name
ENV_URL = "DRYDOCK_URL"  # ingest; absent: no control plane
ENV_OPTIONS = "DRYDOCK_OPTIONS"  # JSON object for the training script
ENV_STATE_DIR = "DRYDOCK_STATE_DIR"  # where checkpoints of this job live
ENV_LOCAL_DIR = "DRYDOCK_LOCAL_DIR"  # the same on this node's own disk; absent: none there
ENV_OBJECT_STORE = "DRYDOCK_OBJECT_STORE"  # URL of a place for checkpoints: s3://bucket/prefix
ENV_HOLDER_DIR = "DRYDOCK_HOLDER_DIR"  # where this node's holder of peers' checkpoints is found
ENV_DOMAIN = "DRYDOCK_DOMAIN"  # what fails together, down to the node: "hall-1/rack-7/node-12"
ENV_GRACE_S = "DRYDOCK_GRACE_S"  # seconds from SIGTERM to SIGKILL; 30 if it is not said
#: A file in which whoever sends SIGTERM may say before in how many seconds SIGKILL follows.
ENV_NOTICE_FILE = "DRYDOCK_NOTICE_FILE"
ENV_NETWORK = "DRYDOCK_NETWORK"  # an interface, a network or an address: where peers reach us
ENV_RATE_CAP = "DRYDOCK_RATE_CAP"  # bytes of state per second for newcomers, as 200M

#: How a loss was noticed: its connection was reset, its agent said so, it fell silent, or others
#: cannot reach it.
How = Literal["reset", "agent", "heartbeat", "unreached"]


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The rank's process is up and about to join. One that stands by says once more when it holds
    its peers' state and follows their steps, and when it has made its first step in a replica's
    place: of the replica that the batch names. Key: placement and stage."""

    type: ClassVar[str] = "hello"
    pid: int
    at: float
    stage: Literal["up", "follows", "entered"] = "up"


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
    whole: bool = False  # it lives and dies as one: no second process can follow a replica of it


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
    duplicated: list[list[int]] = field(
        default_factory=list
    )  # [step, shard] whose count was over 1
    #: shards that policy gave up, in each of these steps
    dropped: list[int] = field(default_factory=list)
    #: [replica, its first shard, and before which it ends], in each of these steps
    computed: list[list[int]] = field(default_factory=list)
    #: where only sums are left of many steps: shards lost, duplicated and dropped in all of them
    merged: list[int] = field(default_factory=list)
    #: running hash, up to the last step, over what travelled; see `runtime.ledger`
    proof: str = ""
    #: how to make the samples' ids: `Batches.state_dict`
    order: dict[str, int] = field(default_factory=dict)


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
    """A new epoch committed its first step; not told when a job begins. Key: (job, epoch)."""

    type: ClassVar[str] = "regrouped"
    epoch: int
    replicas: list[int]
    lost: list[int]  # who died, or left alone
    joined: list[int]
    started_at: float  # when the old epoch was found broken, or its planned edge was reached
    committed_at: float  # first commit of the new epoch
    step: int  # that commit's step
    gap_s: float  # between the last commit of the old epoch and the first of the new
    taken_over: list[int] = field(default_factory=list)  # shards of that step taken over
    #: the placements of those that joined, in their order; "" if unknown
    entered: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint is complete and verified. Key: (job, step, tier)."""

    type: ClassVar[str] = "checkpoint"
    step: int
    tier: Literal["peer", "local", "shared", "object"]
    path: str
    bytes: int
    digest: str
    stall_s: float  # what the training thread paid
    seconds: float  # from request until durable
    at: float
    every_s: float | None = None  # the interval of this tier by now
    ettr: float | None = None  # the share of time that is kept, as expected with it
    stored: int | None = None  # bytes that it takes there, some of it packed perhaps


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something an engineer should know. Key: (placement, kind, subject, at)."""

    type: ClassVar[str] = "trouble"
    kind: str
    text: str
    at: float
    subject: str = ""  # what it is about, of several of a kind: which tier of checkpoints


#: Why a rank leaves: its job is over for all ("over"), or a SIGTERM told it to and its job is not
#: ("told"); "" if it leaves alone and nobody knows why.
Because = Literal["", "over", "told"]
TOLD_TO_END = "told to end"  # the reason, in words, of one that a SIGTERM told to end


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The rank leaves of its own will. Key: placement."""

    type: ClassVar[str] = "stopped"
    step: int
    reason: str  # in words
    at: float
    clean: bool = True  # False: an exception carried it out of its loop
    because: Because = ""


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
    ledger_epoch: int = -1  # the epoch of that step
    directives: list[dict[str, Any]] = field(default_factory=list)
    #: How often nodes of this fleet fail, for who saves checkpoints; None if it was not looked up.
    failures_per_node_day: float | None = None


#: Not the script's generator: what it draws must not depend on when the control plane is away.
_jitter = random.Random()  # noqa: S311


class Unheard:
    """That the control plane does not hear us, said in this process's log once it has lasted; now
    and then again, if the reason is another."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._said_at = -math.inf
        self._said = ""

    def by(self, error: Exception) -> None:
        """Nothing was heard, for this reason."""
        text, now = str(error) or repr(error), time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since < UNHEARD_S or now - self._said_at < SAID_S or text == self._said:
            return
        self._said_at, self._said = now, text
        log.warning(
            "control_plane_unheard error=%s: the training goes on, and is told of later; is %s the "
            "control plane's address, and %s this job's?",
            text,
            ENV_URL,
            ENV_TOKEN,
        )


class Rejected(RuntimeError):
    """The control plane will never accept this batch as it is."""


def encode(message: Message) -> dict[str, Any]:
    """The JSON form of a message; JSON has no word for NaN and infinity but null. A text that is
    longer than the control plane takes loses its end."""
    values = {"type": message.type, **asdict(message)}
    return {key: _sayable(value) for key, value in values.items()}


def _sayable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[: MAX_TEXT - 3]}..."
    return value


class Sender:
    """Tells the control plane, in the background, for as long as it takes.

    What `tell` was given is kept, bounded, until it is answered. Before each POST `gather` gives
    what happened since the last one, and `ledger` what a control plane that holds everything up to
    a step of an epoch does not know yet. With no `url` everything is accepted and nothing is sent.
    """

    def __init__(
        self, url: str, token: str, *, job: str, replica: int, rank: int, placement: str
    ) -> None:
        self.job = job
        self.replica = replica
        self.rank = rank
        self.placement = placement
        #: step and epoch of the last entry that the control plane said it holds; None: unknown
        self.ledger_end: tuple[int, int] | None = None
        self.gather: Callable[[], list[Message]] = list
        self.ledger: Callable[[int, int], list[Ledger]] = _no_ledger
        #: None until the training loop listens; what is said before then is said again
        self.on_directive: Callable[[Directive], None] | None = None
        self.failures_per_node_day: float | None = None  # of this fleet, as it is known there
        #: The lowest live replica asks for directives even with no news, and obeys for all. The
        #: others ask now and then, and only whether they are to end: it may be gone, and they stand
        #: still.
        self.speaks = False
        self._url = urlsplit(url.rstrip("/") + "/v1/runtime") if url else None
        self._token = token
        self._queue: deque[Message] = deque(maxlen=MAX_QUEUED)  # the oldest give way
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._per_post = MAX_PER_POST
        self._ranges_per_post = MAX_PER_POST  # of the ledger
        self._unheard = Unheard()
        self._obeyed: dict[str, None] = {}  # the ids of directives, the oldest first
        self._asks_at = _next_question()
        self._thread = threading.Thread(target=self._run, name="drydock-sender", daemon=True)

    def start(self) -> None:
        if self._url is not None:
            self._thread.start()

    def tell(self, message: Message) -> None:
        """Queue a message and send it at once."""
        if self._url is not None:
            self._queue.append(message)
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Try once more to send what is left, for so long at most."""
        self._closing.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        backoff_s = 0.0
        while not self._closing.is_set():
            if backoff_s:
                # The door is shut: a new message is no reason to knock sooner.
                self._closing.wait(backoff_s * (0.5 + _jitter.random()))
            else:
                self._wake.wait(INTERVAL_S)
            self._wake.clear()
            backoff_s = 0.0 if self._posted() else min(max(2 * backoff_s, 0.5), MAX_BACKOFF_S)
        held = None  # of the ledger; who takes no more of it is not asked again
        while self._posted() and (self._queue or (self.ledger_end != held and self._ledger_left())):
            held = self.ledger_end

    def _ledger_left(self) -> list[Ledger]:
        return [] if self.ledger_end is None else self.ledger(*self.ledger_end)

    def _posted(self) -> bool:
        """`_post`, but whatever fails, this thread goes on: without it nothing is told at all."""
        try:
            return self._post()
        except Exception:
            log.exception("post_failed")
            return False

    def _post(self) -> bool:
        """One batch; True if the control plane holds it now, or if there was nothing to say."""
        self._queue.extend(self.gather())
        kept = list(self._queue)[: self._per_post]
        ledger = self._ledger_left()
        known = ledger[: self._ranges_per_post]
        if not kept and not known and not self._is_to_ask():
            return True
        self._asks_at = _next_question()  # also if this fails: what cannot be asked may wait
        batch = Batch(
            job=self.job,
            replica=self.replica,
            rank=self.rank,
            placement=self.placement,
            sent_at=time.time(),
            messages=[encode(message) for message in [*kept, *known]],
        )
        try:
            reply = self._request(json.dumps(asdict(batch)).encode())
        except Rejected as error:
            self._set_aside(kept, known, error)
            return False
        except (OSError, ValueError) as error:
            self._unheard.by(error)
            return False
        self._unheard = Unheard()
        self._per_post = MAX_PER_POST
        if known and len(known) == len(ledger):  # it holds all by now
            self._ranges_per_post = MAX_PER_POST
        for message in kept:
            if self._queue and self._queue[0] is message:
                self._queue.popleft()
        # One of an older version says nothing of epochs: then only the step counts.
        epoch = int(reply.get("ledger_epoch", sys.maxsize))
        self.ledger_end = (int(reply.get("ledger_step", -1)), epoch)
        self.failures_per_node_day = (
            reply.get("failures_per_node_day") or self.failures_per_node_day
        )
        said = reply.get("directives", [])
        for raw in said:
            # The others hear it at other times, and all would save anew for each of them.
            if self.speaks or raw["verb"] == "stop":
                self._obey(Directive(id=raw["id"], verb=raw["verb"], args=raw.get("args", {})))
        self._forget_obeyed({raw["id"] for raw in said})
        return True

    def _is_to_ask(self) -> bool:
        """Of a replica's ranks the first asks for all, once it can do what it hears."""
        listens = self.rank == 0 and self.on_directive is not None
        due = listens and time.monotonic() >= self._asks_at and not self._closing.is_set()
        return self.speaks or due

    def _set_aside(self, kept: list[Message], known: list[Ledger], error: Rejected) -> None:
        """Find the one message that is refused for good, and let the others pass."""
        if known:
            # Try without the ledger; the next reply says anew from where it is wanted. Then with
            # less of it, for many ranges may be too large for one body.
            log.warning("batch_refused ledger_from=%s error=%s", known[0].step_from, error)
            self.ledger_end = None
            self._ranges_per_post = max(1, len(known) // 2)
        elif self._per_post > 1:
            self._per_post = 1
        elif kept and self._queue and self._queue[0] is kept[0]:
            log.error("message_refused message=%r error=%s", self._queue.popleft(), error)

    def _obey(self, directive: Directive) -> None:
        if self.on_directive is not None and directive.id not in self._obeyed:
            self._obeyed[directive.id] = None
            self.on_directive(directive)

    def _forget_obeyed(self, said: Collection[str]) -> None:
        """Never what is said still, however many those are: it would be obeyed anew."""
        silent = [one for one in self._obeyed if one not in said]
        for one in silent[: max(0, len(silent) - OBEYED_KEPT)]:
            del self._obeyed[one]

    def _request(self, body: bytes) -> dict[str, Any]:
        """What the control plane answers. Raises OSError, ValueError, and Rejected."""
        import http.client  # a fifth of the memory of processes that tell nothing

        assert self._url is not None  # noqa: S101 - start() checked
        kind = (
            http.client.HTTPSConnection
            if self._url.scheme == "https"
            else http.client.HTTPConnection
        )
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._token}"}
        try:
            with contextlib.closing(kind(self._url.netloc, timeout=POST_TIMEOUT_S)) as connection:
                connection.request("POST", self._url.path, body, headers)
                response = connection.getresponse()
                data = response.read()
        except http.client.HTTPException as error:
            raise ValueError(f"the control plane's answer is none: {error!r}") from error
        if response.status in REFUSALS:
            raise Rejected(f"{response.status}: {data[:500]!r}")
        if response.status != HTTPStatus.OK:
            raise ValueError(f"the control plane answered {response.status}: {data[:200]!r}")
        reply: dict[str, Any] = json.loads(data)
        return reply


def _next_question() -> float:
    """At different times in all replicas, which started together."""
    return time.monotonic() + ASK_S * (0.5 + _jitter.random())


def _no_ledger(_step: int, _epoch: int) -> list[Ledger]:
    """Until the training loop listens, nothing was trained."""
    return []
