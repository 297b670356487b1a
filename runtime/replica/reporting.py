"""What the training loop tells the control plane: sums up commits, names losses and regroupings.

Called by the training thread, read by the sender's thread; never waits for the network.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from runtime.client import Hello, Ledger, Message, PeerLost, Progress, Regrouped
from runtime.job import Job
from runtime.ledger import SampleLedger


@dataclass(frozen=True, kw_only=True)
class Committed:
    """One applied step, as all members saw it."""

    step: int
    epoch: int
    loss: float
    grad_norm: float
    samples: int
    at: float  # Unix time
    coverage: list[int]
    members: list[int]
    computed: list[int] = field(default_factory=list)  # which replica each shard; -1 for none


class Reporter:
    """Speaks for the replica; most things are told by the lowest live one only."""

    def __init__(
        self, job: Job, ledger: SampleLedger, tokens_per_sample: int, *, whole: bool = False
    ) -> None:
        self.job = job
        self.whole = whole
        self.replica = job.replica
        self.ledger = ledger
        self.tokens_per_sample = tokens_per_sample
        self.members: list[int] = []
        self._placements: dict[int, str] = {}  # of the members
        self._stands_by = bool(job.standby)
        self._told_following = False
        self._lock = threading.Lock()
        self._told_lost: set[tuple[int, int]] = set()
        self._lost_now: set[int] = set()
        self._grant: dict[str, Any] | None = None  # an epoch whose first commit is awaited
        self._last_commit = 0.0  # monotonic; 0 before the first
        self._steps = self._samples = 0
        self._loss = self._gaps = self._max_gap = 0.0
        self._last = (-1, 0, 0.0, 0.0)  # step, epoch, gradient's norm, Unix time
        job.sender.gather = self._gather
        job.sender.ledger = self._ledger_since

    def speaks(self) -> bool:
        return bool(self.members) and self.replica == self.members[0]

    @property
    def present(self) -> list[int]:
        """The members that are not known to be gone."""
        return [member for member in self.members if member not in self._lost_now]

    def follows(self) -> None:
        """We hold our peers' state, as was proven; who stands by says so, once."""
        if self._stands_by and not self._told_following:
            self._told_following = True
            self.job.sender.tell(Hello(pid=os.getpid(), at=time.time(), stage="follows"))

    def granted(self, message: dict[str, Any], committed: int, replica: int) -> None:
        """A new epoch was adopted, in which we are this replica."""
        self.replica = self.job.sender.replica = replica
        old_epoch = int(message["epoch"]) - 1
        for entry in message["lost"]:
            self.lost({"epoch": old_epoch, **entry}, committed)
        with self._lock:
            self.members = [int(m["replica"]) for m in message["members"]]
            self._placements = {int(m["replica"]): m["placement"] for m in message["members"]}
            self._lost_now = set()
            self._grant = None if message["begins"] else _since_commit(self._grant, message)
        self.job.sender.speaks = self.speaks()

    def lost(self, message: dict[str, Any], committed: int) -> None:
        """A member of the epoch is gone; the lowest survivor tells it."""
        epoch, replica = int(message["epoch"]), int(message["replica"])
        self._lost_now.add(replica)
        if self.present[:1] != [self.replica] or (epoch, replica) in self._told_lost:
            return
        self._told_lost.add((epoch, replica))
        self.job.sender.tell(
            PeerLost(
                epoch=epoch,
                replica=replica,
                placement=str(message["placement"]),
                step=committed + 1,
                at=float(message["at"]),
                how=message["how"],
            )
        )

    def committed(self, step: int, epoch: int, loss: float, grad_norm: float, samples: int) -> None:
        """A step was applied."""
        now = time.monotonic()
        gap = now - self._last_commit if self._last_commit else 0.0
        self._last_commit = now
        if self._stands_by:
            self._stands_by = False
            self.job.sender.tell(Hello(pid=os.getpid(), at=time.time(), stage="entered"))
        if self._grant is not None and int(self._grant["epoch"]) == epoch:
            # Before any word of the steps that it makes: who makes them is known by then.
            self._tell_regrouped(self._grant, step, gap)
            self._grant = None
        with self._lock:
            self._steps += 1
            self._loss += loss
            self._samples += samples
            self._max_gap = max(self._max_gap, gap)
            self._gaps += gap
            self._last = (step, epoch, grad_norm, time.time())

    def _tell_regrouped(self, grant: dict[str, Any], step: int, gap_s: float) -> None:
        joined = [int(r) for r in grant["joined"]]
        old_hands = [m for m in self.members if m not in joined] or self.members
        if old_hands[:1] != [self.replica]:
            return
        self.job.sender.tell(
            Regrouped(
                epoch=int(grant["epoch"]),
                replicas=self.members,
                lost=[*(int(one["replica"]) for one in grant["lost"]), *grant.get("left", [])],
                joined=joined,
                started_at=float(grant["started_at"]),
                committed_at=time.time(),
                step=step,
                gap_s=gap_s,
                taken_over=[int(shard) for shard in grant["taken_over"]],
                entered=[self._placements[replica] for replica in joined],
            )
        )

    def _gather(self) -> list[Message]:
        with self._lock:
            if self._steps == 0:
                return []
            step, epoch, grad_norm, at = self._last
            progress = Progress(
                step=step,
                steps=self._steps,
                epoch=epoch,
                at=at,
                loss=self._loss / self._steps,
                grad_norm=grad_norm,
                step_s=self._gaps / self._steps,
                max_gap_s=self._max_gap,
                samples=self._samples,
                tokens=self._samples * self.tokens_per_sample,
                replicas=list(self.members),
                whole=self.whole,
            )
            self._steps = self._samples = 0
            self._loss = self._gaps = self._max_gap = 0.0
        return [progress] if self.speaks() else []

    def _ledger_since(self, step: int, epoch: int) -> list[Ledger]:
        return self.ledger.since(step, epoch) if self.speaks() else []


def _since_commit(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """A grant, with whom an epoch before it lost or let in that broke without a commit."""
    if before is None:
        return now
    members = {int(member["replica"]) for member in now["members"]}
    return {
        **now,
        "lost": [*before["lost"], *now["lost"]],
        "left": [*before.get("left", []), *now.get("left", [])],
        "joined": sorted(members & {*before["joined"]} | {*now["joined"]}),
        "started_at": before["started_at"],
    }
