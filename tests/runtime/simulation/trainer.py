"""A replica's state and what membership does with it: `membership.Trainer` without torch.

Mirrors rank.py, lead.py, peers.py, fetching.py and step.py as far as they bear on who holds what.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from runtime.replica.membership import CannotFollow, Severed, Silent
from runtime.replica.plan import divide, fixed_shares
from runtime.replica.reach import waited_s
from tests.runtime.simulation.clock import Thread
from tests.runtime.simulation.group import Group
from tests.runtime.simulation.history import BLANK, Gradient, RunRecord, State
from tests.runtime.simulation.network import Unreachable

if TYPE_CHECKING:
    from tests.runtime.simulation.replica import Replica

UNREACHED = "not built: a peer was not reached"
BUILD_S = 3.0  # for one value of the rendezvous
WAITING_CHANCE = 0.3
NO_COPY_CHANCE = 0.03  # that what is held after a marked step cannot be hashed
KEPT_STEPS = 64  # while somebody follows; two otherwise


class SimulatedTrainer:
    """Implements `membership.Trainer`."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.state: State = BLANK
        self.gradients: dict[int, Gradient] = {}  # summed here, of the next step
        self.copy: State | None = None  # held ready for newcomers
        self._offered: State | None = None  # the same, before it is hashed
        self.kept: dict[int, RunRecord] = {}
        self.followed = False
        self.shares: dict[int, list[int]] = {}
        self._usual: dict[int, list[int]] = {}
        self._follower: Follower | None = None
        self._stopped: Follower | None = None
        self._built: list[Group | str] = []

    @property
    def committed(self) -> int:
        return self.state.step

    @property
    def trained_in(self) -> int:
        return 0 if self.state.made is None else self.state.made.epoch

    @property
    def loaded(self) -> bool:
        return self.state.step >= 0

    @property
    def seen_epoch(self) -> int:
        return 0

    @property
    def held(self) -> Collection[int]:
        return self.gradients.keys()

    def digest(self) -> str:
        return self.state.digest

    # --- a newcomer -----------------------------------------------------------------------------

    def load(self, holders: list[list[str]]) -> None:
        fleet = self.replica.fleet
        self.replica.thread.sleep(fleet.clock.random.uniform(0.0, 1.0))
        own = self.replica.holder
        there = [fleet.saved, *(fleet.held.get(at, BLANK) for (at,) in ([own], *holders))]
        newest = max(there, key=_age)
        if _age(newest) > _age(self.state):
            self._replace(newest)

    def take(self, step: int, digest: str, donors: list[list[str]]) -> None:
        for (donor,) in donors:
            found = self._ask(donor, lambda peer: peer.trainer.copy)
            if found is not None and (found.step, found.digest) == (step, digest):
                self._replace(found)
                return
        raise CannotFollow(f"no peer holds step {step}")

    def follow(self, donors: list[list[str]]) -> None:
        self.stop_following()
        step = self.committed + 1
        ahead = None if self._stopped is None else self._stopped.drawn(step)
        self._stopped, self._follower = None, Follower(self.replica, donors, step, ahead)

    def proven(self) -> None:
        """Nobody is told here."""

    def stop_following(self) -> None:
        if self._follower is not None:
            self._follower.stopped = True
            self._stopped, self._follower = self._follower, None

    def make(self, reduced: RunRecord) -> None:
        if reduced.step == self.committed + 1 and self._follower is not None:
            self.apply(reduced, own=False)
            self._follower.applied(reduced.step)
            if reduced.marked:
                self.prove()

    def replay(self, step: int, donors: list[list[str]]) -> None:
        while self.committed < step:
            member = self.replica.member
            if member.epoch and self.replica.broken_epoch >= member.epoch:
                raise Severed("broke while steps were handed over")
            self.apply(self._fetch(self.committed + 1, donors), own=False)

    # --- a member -------------------------------------------------------------------------------

    def connect(self, grant: dict[str, Any]) -> None:
        """Begin to connect, beside what else we do, as gloo does; some wait until it is done, as
        with NCCL. Members leave word for each other through the coordinator."""
        replica = self.replica
        epoch, names = int(grant["epoch"]), [str(m["placement"]) for m in grant["members"]]
        replica.group = None
        self._built = built = []
        replica.start(lambda: built.append(self._build(epoch, names)))
        if replica.clock.random.random() < WAITING_CHANCE:
            self.await_group()

    def await_group(self) -> None:
        """The group that is being built. Raises Severed if the epoch has none."""
        replica, built = self.replica, self._built
        replica.thread.wait(lambda: built or replica.broken_epoch >= replica.member.epoch)
        if replica.broken_epoch >= replica.member.epoch:
            raise Severed("broke before it was built")
        if isinstance(built[0], str):
            raise (Silent if built[0] == UNREACHED else Severed)(built[0])
        replica.group = built[0]

    def _build(self, epoch: int, names: list[str]) -> Group | str:
        """On a thread of its own: the group, or why there is none."""
        replica = self.replica
        try:
            replica.link.set(epoch, replica.name, "here")
            for name in names:
                replica.link.get(epoch, name, BUILD_S)
        except (ConnectionError, TimeoutError) as error:
            return f"not built: {error!r}"
        if not replica.fleet.reaches(replica, names):
            replica.current().wait(lambda: replica.broken_epoch >= epoch, BUILD_S)
            return UNREACHED
        return replica.fleet.group_of(epoch, names)

    def enter(self, grant: dict[str, Any]) -> None:
        members = [int(m["replica"]) for m in grant["members"]]
        shards = self.replica.fleet.shards
        if self.replica.fleet.drops:
            fixed = fixed_shares(shards, int(grant["world"]))
            self._usual = {member: fixed[member] for member in members}
        else:
            self._usual = divide(range(shards), members)
        kept: Mapping[str, list[int]] = grant["held"]
        if set(self.held) != set(kept[str(self.replica.number)]):
            self.forget()
        self.shares = {m: sorted([*kept[str(m)], *grant["assign"][str(m)]]) for m in members}
        self.replica.entered(grant)

    def stage(self) -> None:
        self.copy, self._offered, self.followed = None, self.state, True
        delay = self.replica.clock.random.uniform(0.0, 0.5)
        self.replica.after(delay, self, self._hashed, self.state)

    def prove(self) -> None:
        """After a marked step: hash what we hold, and say so."""
        self.replica.member.wants_proof = False
        delay = self.replica.clock.random.uniform(0.0, 0.5)
        member = self.replica.member
        self.replica.after(delay, self, self._say_proved, member.epoch, member.order, self.state)

    def release(self, *, log: bool) -> None:
        self.copy = self._offered = None
        self.followed = self.followed and not log

    def unreached(self, addresses: list[list[str]], try_s: float) -> list[int]:
        network, own = self.replica.fleet.network, self.replica.name
        answers_s = [  # how long each takes to answer
            network.delay(own, name) + network.delay(name, own)
            if network.both_ways(own, name)
            else math.inf
            for (name,) in addresses
        ]
        self.replica.thread.sleep(min(waited_s(try_s), max(answers_s, default=0.0)))
        return [place for place, took_s in enumerate(answers_s) if took_s > waited_s(try_s)]

    def forget(self) -> None:
        self.gradients.clear()

    def heard_of_loss(self, message: dict[str, Any]) -> None:
        self.replica.note("hears that %s is lost", message["placement"])

    def trouble(self, kind: str, text: str, subject: str = "") -> None:
        self.replica.trouble(kind, text)

    # --- steps ----------------------------------------------------------------------------------

    def compute(self, shard: int) -> None:
        """Sum one shard's gradient of the next step."""
        gradient = Gradient(shard, self.committed + 1, self.state.digest, self.replica.name)
        self.gradients[shard] = gradient

    def apply(self, made: RunRecord, *, own: bool) -> None:
        """Commit a step: our own, or one that peers made."""
        replica = self.replica
        replica.note("%s step %s of epoch %s", "commits" if own else "takes", made.step, made.epoch)
        history = replica.fleet.history
        self.state = history.committed(replica, made) if own else history.took_over(replica, made)
        self.forget()
        self.shares = self._usual
        self.kept.pop(made.step, None)
        self.kept[made.step] = made
        while len(self.kept) > (KEPT_STEPS if self.followed else 2):
            del self.kept[next(iter(self.kept))]
        replica.link.step = self.committed

    def _hashed(self, state: State) -> None:
        if self._offered is state:
            self.copy = state
            self.replica.link.say("staged", step=state.step, digest=state.digest)

    def _say_proved(self, epoch: int, order: int, state: State) -> None:
        failed = self.replica.clock.random.random() < NO_COPY_CHANCE
        digest = "" if failed else state.digest
        told = {"epoch": epoch, "order": order, "step": state.step, "digest": digest}
        self.replica.link.say("proved", **told)

    def _replace(self, state: State) -> None:
        self.state = state
        self.kept.clear()  # of a history that may not be this one's
        self.forget()
        self.replica.link.step = self.committed

    def _fetch(self, step: int, donors: list[list[str]]) -> RunRecord:
        have = None if self._stopped is None else self._stopped.drawn(step)
        for (donor,) in donors:
            made: RunRecord | None = self._ask(donor, lambda peer: peer.trainer.kept.get(step))
            if made is not None:
                return made if have is None or have.epoch != made.epoch else have
        raise CannotFollow(f"nobody keeps step {step}")

    def _ask(self, donor: str, serve: Callable[[Replica], Any]) -> Any:
        """What a peer answers, or None if it does not."""
        fleet = self.replica.fleet
        peer = fleet.at(donor)
        lasts = fleet.clock.random.choice((0.0, 0.05, fleet.transfer_s))
        try:
            return fleet.network.ask(self.replica.thread, peer, lambda: serve(peer), lasts)
        except Unreachable:
            return None


def _age(state: State) -> tuple[int, int]:
    return (0 if state.made is None else state.made.epoch), state.step


class Follower:
    """Hears of the steps that peers commit, in a thread of its own."""

    def __init__(
        self, replica: Replica, donors: list[list[str]], step: int, ahead: RunRecord | None
    ) -> None:
        self.stopped = False
        self.room = 2  # steps that may be passed on before one is applied
        self._replica = replica
        self._step = step
        self._passed_on: list[RunRecord] = []  # and not yet applied
        self._ahead = ahead  # the next one, which may still be made anew
        self._donors = [donor for (donor,) in donors]
        replica.clock.random.shuffle(self._donors)
        self._thread: Thread = replica.start(self._run)

    def _run(self) -> None:
        while not self.stopped:
            self._thread.wait(lambda: self.room or self.stopped)
            self.room -= 1
            made = self._next()
            if self.stopped or made is None:
                return
            self._passed_on.append(made)
            self._ahead = None
            self._step += 1
            self._replica.link.inbox.put({"op": "made", "reduced": made})

    def applied(self, step: int) -> None:
        self._passed_on = [one for one in self._passed_on if one.step > step]
        self.room += 1

    def drawn(self, step: int) -> RunRecord | None:
        here = [*self._passed_on, self._ahead]
        return next((one for one in here if one is not None and one.step == step), None)

    def _next(self) -> RunRecord | None:
        fleet = self._replica.fleet
        while self._donors and not self.stopped:
            peer = fleet.at(self._donors[0])
            try:
                newest, made = fleet.network.ask(
                    self._thread, peer, functools.partial(self._look_up, peer), 0.0
                )
            except Unreachable:
                newest, made = self._step + 1, None
            if isinstance(made, RunRecord) and newest > self._step:
                before = self._ahead
                same = before is not None and before.epoch == made.epoch
                self._ahead = before if same else made
                return self._ahead
            if isinstance(made, RunRecord) and self._ahead is None:
                self._ahead = made
            if newest <= self._step:
                self._donors.append(self._donors.pop(0))
                self._tell("up_to_date", step=self._step - 1)
                self._thread.sleep(0.05)
            else:
                self._donors.pop(0)
        self._tell("cannot_follow", error="no donor is left")
        return None

    def _look_up(self, peer: Replica) -> tuple[int, RunRecord | None]:
        """The last step that it made, and ours. Those before the last surely all have made."""
        kept = peer.trainer.kept
        return next(reversed(kept), 0), kept.get(self._step)

    def _tell(self, op: str, **message: Any) -> None:
        if not self.stopped:
            self._replica.link.inbox.put({"op": op, **message})
