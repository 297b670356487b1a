"""One replica's process: the real Member and Link, and the training loop of leader.py mirrored.

The loop must do what `Leader` does about membership, in the same order, and nothing else.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from runtime.replica.link import Refused
from runtime.replica.membership import REJOINS, Member, Severed, Silent
from tests.runtime.simulation.clock import Process, Thread
from tests.runtime.simulation.group import Group
from tests.runtime.simulation.history import RunRecord, State, Violation
from tests.runtime.simulation.link import SimulatedLink
from tests.runtime.simulation.trainer import SimulatedTrainer

if TYPE_CHECKING:
    from tests.runtime.simulation.fleet import Fleet

LEAVE_S = 5.0
ALL_TOLD_S = 2.0
STOP, ALONE = "the job is over", "told to end"
SAVE_CHANCE = 0.05  # that a step's state is saved for all
HOLD_CHANCE = 0.1  # that it is given to the holder on another's node
READY_CHANCE = 0.7  # that a member has made room for a copy


class Replica(Process):
    """One start of a replica."""

    def __init__(self, fleet: Fleet, number: int, name: str, standby: str) -> None:
        super().__init__(fleet.clock, name)
        self.fleet = fleet
        self.stop = False  # it is to end, and all with it
        self.told_at: float | None = None  # when it was told to end, it alone unless all are
        self.left = False
        self.stood_by = bool(standby)
        self.epoch_entered = 0
        self.group: Group | None = None
        self.broken_epoch = -1
        self.trainer = SimulatedTrainer(self)
        self.link = SimulatedLink(fleet.network, self, self._introduce, self._on_break)
        self.member = Member(number, self.link.say, self.trainer, placement=name, standby=standby)
        self._why = ""
        self._postponed: deque[dict[str, Any]] = deque()
        self.thread: Thread = self.start(self._train)
        self.link.waiter = self.thread
        self.link.start()

    @property
    def number(self) -> int:
        return self.member.replica

    @property
    def holder(self) -> str:
        """The one on our node; it outlives us."""
        return f"h{self.number}"

    @property
    def ending(self) -> bool:
        """It was told to stop the job, or all have agreed to."""
        return self.stop or self._why == STOP

    @property
    def is_to_end(self) -> bool:
        return self.stop or self.told_at is not None

    @property
    def state(self) -> State:
        return self.trainer.state

    def counts(self, *, as_member: bool) -> bool:
        peer = self.fleet.coordinator.peer(self)
        return peer is not None and (peer.phase == "member" or not as_member)

    def holds_its_number(self) -> bool:
        """Nobody was started as the same replica after us."""
        return [r for r in self.fleet.replicas if r.number == self.number][-1] is self

    def wish_stop(self) -> None:
        self.stop = True
        self.link.inbox.put({"op": "wished"})

    def wish_leave(self) -> None:
        self.told_at = self.clock.now
        self.link.inbox.put({"op": "wished"})

    def entered(self, grant: dict[str, Any]) -> None:
        self.epoch_entered = int(grant["epoch"])
        self.fleet.history.entered(self, self.epoch_entered)
        self.note("enters epoch %s at step %s", self.epoch_entered, self.state.step)

    def break_group(self) -> None:
        """Our sockets to our peers are gone."""
        if self.group is not None:
            self.group.hurt(self)

    def note(self, text: str, *given: object) -> None:
        self.clock.note(f"{self.name} {text}", *given)

    def trouble(self, kind: str, text: str) -> None:
        self.note("%s: %s", kind, text)
        if kind == "diverged":
            raise Violation(f"{self.name} is told that {text}")

    def failed(self, error: BaseException) -> None:
        if not isinstance(error, Refused):
            raise error
        self.note("ends: %s", error)
        others = [replica for replica in self.fleet.replicas if replica is not self]
        if not any(other.number == self.number or other.stood_by for other in others):
            raise Violation(f"{self.name} alone was ever started as {self.number}: {error}")
        self.fleet.end(self)
        self.clock.at(1.0, self.fleet.replace, self.number)

    # --- leader.py, Leader ----------------------------------------------------------------------

    def _train(self) -> None:
        self._await_epoch()
        while not self.left:
            try:
                self._compute()
                self._edge(self._finish_step())
            except Severed as error:
                self.note("is severed in epoch %s: %s", self.member.epoch, error)
                self._regroup(planned=False, silent=isinstance(error, Silent))

    def _compute(self) -> None:
        for shard in self.trainer.shares[self.number]:
            if self.broken_epoch >= self.member.epoch:
                raise Severed("a member is gone")
            if shard not in self.trainer.held:
                self.thread.sleep(self.fleet.shard_s())
                self.trainer.compute(shard)

    def _finish_step(self) -> dict[str, bool]:
        self._pump()
        member = self.member
        wishes = {
            "regroup": member.wants_regroup,
            "stop": self.stop,
            "told": self.told_at is not None,
            "leaves": self.told_at is not None and self.clock.now - self.told_at >= ALL_TOLD_S,
            "stage": member.wants_stage > 0 and self.clock.random.random() < READY_CHANCE,
            "prove": member.wants_proof and self.clock.random.random() < READY_CHANCE,
        }
        if self.broken_epoch >= member.epoch:
            raise Severed("a member is gone")
        self.trainer.await_group()
        assert self.group is not None
        mine = (list(self.trainer.gradients.values()), wishes)
        brought = self.group.reduce(self.thread, mine, lambda: self.broken_epoch >= member.epoch)
        parts = sorted((part for parts, _ in brought for part in parts), key=lambda p: p.shard)
        together = {wish: [theirs[wish] for _, theirs in brought] for wish in wishes}
        agreed = {wish: any(one) for wish, one in together.items()}
        member.agree_to_stage(sum(together["stage"]))
        self._await_lease()
        made = RunRecord(self.state.step + 1, member.epoch, tuple(parts), agreed["prove"])
        self.trainer.apply(made, own=True)
        all_told = all(together["told"]) and len(brought) == len(member.members)
        return agreed | {
            "ours": wishes["prove"],
            "stop": agreed["stop"] or all_told,
            "over": agreed["stop"],
            "leaving": wishes["leaves"],
        }

    def _edge(self, wishes: dict[str, bool]) -> None:
        self._pump()
        if wishes["stop"]:
            self._stop(over=wishes["over"])
            return
        if self.number == min(self.member.members) and self.clock.random.random() < SAVE_CHANCE:
            self.fleet.saved = self.state
        if self.clock.random.random() < HOLD_CHANCE:
            others = [one for one in self.member.members if one != self.number]
            self.fleet.held[f"h{self.clock.random.choice(others or [self.number])}"] = self.state
        if self.member.stages:
            self.trainer.stage()
        if wishes["ours"]:
            self.trainer.prove()
        if wishes["regroup"] or wishes["leaves"]:
            self._regroup(planned=True, leaving=wishes["leaving"])

    def _regroup(self, *, planned: bool, leaving: bool = False, silent: bool = False) -> None:
        if leaving:
            self._why = ALONE
        self.member.report(planned=planned, leaving=leaving, silent=silent)
        self._await_epoch()

    def _await_epoch(self) -> None:
        while not self.left:
            message = self._next()
            if message["op"] in ("dismissed", "replaced"):
                self._leave()
            elif message["op"] == "refused":
                raise Refused(str(message["error"]))
            elif message["op"] != "wished" and self.member.hear(message):
                self._why = ""
                return

    def _await_lease(self) -> None:
        while self.link.silent_s() > self.member.lease_s:
            self.note("holds step %s", self.state.step + 1)
            self.link.await_word(self.member.lease_s)
            self._pump()
            if self.is_to_end:
                raise Severed("told to stop, and out of the coordinator's reach")

    def _next(self) -> dict[str, Any]:
        if self._postponed:
            return self._postponed.popleft()
        if self.is_to_end and not self.member.epoch:
            return {"op": "dismissed"}
        inbox = self.link.inbox
        limit = LEAVE_S if self.is_to_end or self._why else None
        if not self.thread.wait(lambda: not inbox.empty(), limit):
            return {"op": "dismissed"}
        return inbox.get()

    def _pump(self) -> None:
        while not self.link.inbox.empty():
            message = self.link.inbox.get()
            if message["op"] in REJOINS:
                self._postponed.append(message)
                raise Severed("the coordinator ended our epoch")
            if message["op"] != "wished":
                self.member.overhear(message)

    def _stop(self, *, over: bool) -> None:
        self._why = STOP if over else ALONE
        self.fleet.saved = self.state
        self.member.report(planned=True, leaving=True, over=over)
        self._await_epoch()

    def _leave(self) -> None:
        self.left = True
        self.note("leaves at step %s", self.state.step)
        self.link.close(goodbye=True)
        self.clock.at(0.0, self.fleet.end, self)
        if self.told_at is not None:  # an agent brings it back
            self.clock.at(1.0, self.fleet.replace, self.number)

    # --- on the link's thread -------------------------------------------------------------------

    def _on_break(self, epoch: int, _message: dict[str, Any]) -> None:
        self.broken_epoch = max(self.broken_epoch, epoch)
        if epoch >= self.member.epoch:
            self.break_group()

    def _introduce(self) -> list[dict[str, Any]]:
        join = {
            "op": "join",
            "token": "t",
            "job": "j",
            **self.member.standing(),
            "placement": self.name,
            "addresses": [self.name],
            "gloo": [self.name],
            "holders": [{"address": self.holder, "domain": self.holder}],
            "shards": self.fleet.shards,
            "shape": {"mode": "drop" if self.fleet.drops else "cover"},
            "world": self.fleet.world,
        }
        report = self.member.last_report
        return [join] if report is None else [join, {"op": "report", **report}]
