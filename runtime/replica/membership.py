"""A member's side of the protocol: what it does when the coordinator speaks.

Knows neither torch nor sockets, so that it can be run against a simulated network and clock. Grants
itself nothing: epochs come from the coordinator alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, Protocol

from runtime.replica.reach import NEWCOMER_TRY_S, TRY_S

log = logging.getLogger("drydock.replica")

#: Whoever hears one of these while it trains has no epoch any more.
REJOINS = ("evicted", "sync", "load", "refused", "probe")
MAX_DOUBTS = 3  # without a step between them, and without anybody to blame
MAX_REFUSALS = 3  # as a newcomer, before a person is told


class Severed(RuntimeError):
    """The collective did not happen everywhere; its buffer must not be used again."""


class Silent(Severed):
    """It did not happen because a peer's machine answers nothing: it is gone, or the way to it."""


class CannotFollow(RuntimeError):
    """No peer can hand over what this replica needs to hold the members' state."""


class Trainer(Protocol):
    """What a replica does with its state when its membership changes.

    `donors` are named by the addresses of their ranks.
    """

    @property
    def committed(self) -> int:
        """The last step applied; -1 before the first."""

    @property
    def held(self) -> Collection[int]:
        """Shards of the next step whose gradient is summed here."""

    def digest(self) -> str:
        """Of the whole state, at an edge."""

    @property
    def trained_in(self) -> int:
        """The epoch in which the last step was made; 0 for none."""

    @property
    def loaded(self) -> bool:
        """Whether the state is from a checkpoint, an import or peers, and not the script's own."""

    @property
    def seen_epoch(self) -> int:
        """The latest of which a checkpoint was there when one was looked for, or anything else
        told; 0 for none."""

    def load(self, holders: list[list[str]]) -> None:
        """The job begins: the newest checkpoint, else what is in memory. `holders`: the addresses
        of those on nodes of which nobody came, one for each rank; they may have it."""

    def take(self, step: int, digest: str, donors: list[list[str]]) -> None:
        """Replace the state by the one that peers hold ready. Raises CannotFollow."""

    def follow(self, donors: list[list[str]]) -> None:
        """Begin to hear of the steps that peers commit, one `made` message each."""

    def stop_following(self) -> None:
        """Hear of no more steps."""

    def proven(self) -> None:
        """What is held is what the members hold: there could be a place for us at any time."""

    def make(self, reduced: Any) -> None:
        """Commit a step that peers committed, from its reduced gradient, and if it is marked show
        what is held after it. Raises CannotFollow."""

    def replay(self, step: int, donors: list[list[str]]) -> None:
        """Commit what peers committed, up to this step. Raises CannotFollow, and Severed if our
        epoch breaks meanwhile."""

    def connect(self, grant: dict[str, Any]) -> None:
        """Begin to build the epoch's group. Raises Severed if the epoch breaks meanwhile."""

    def enter(self, grant: dict[str, Any]) -> None:
        """Take up an epoch whose state is held: who computes what."""

    def stage(self) -> None:
        """At an edge: hold a copy of the state ready for newcomers, and say so."""

    def release(self, *, log: bool) -> None:
        """Nobody takes the copy any more; with `log`, nobody follows either."""

    def unreached(self, addresses: list[list[str]], try_s: float) -> list[int]:
        """The places in this list of those replicas whose machines do not answer ours within twice
        that time."""

    def forget(self) -> None:
        """What was computed of the next step is not wanted."""

    def heard_of_loss(self, message: dict[str, Any]) -> None:
        """A member is gone."""

    def trouble(self, kind: str, text: str, subject: str = "") -> None:
        """Tell an engineer. `subject`: what it is about, of several of a kind."""


class Member:
    """Where this replica stands: a newcomer (epoch 0), or a member of an epoch."""

    def __init__(
        self,
        replica: int,
        say: Callable[..., object],
        trainer: Trainer,
        *,
        placement: str = "",
        standby: str = "",
    ) -> None:
        """`say`: sends a message to the coordinator, or drops it if there is no connection.
        `standby`: see `runtime.job.Job`."""
        self.replica = replica  # for a standby: until it is given the number of another
        self.placement = placement
        self.standby = standby
        self.epoch = 0
        self.newcomer = True  # what it commits, others have made
        self.members: dict[int, str] = {}  # replica -> placement, of the current epoch
        self.lease_s = 0.0  # how long the members may train without a word from the coordinator
        self.wants_regroup = False
        self.wants_stage = 0  # so many are to copy the state at one edge, we among them; 0: not we
        self.stages = False  # we copy it at the edge that comes
        self.wants_compare = False
        self.wants_proof = False  # we are to mark a step, and to hash what we hold after it
        self.last_report: dict[str, Any] | None = None  # to be said again after a reconnect
        self._say = say
        self._trainer = trainer
        self._following = False
        self.order = 0  # number of the last order to get a state
        self._caught_up: int | None = None  # the step of which we said so last
        #: after which step we were not given the next one, and by whom
        self._not_handed: tuple[int, list[list[str]]] | None = None
        self._unreached: list[list[str]] = []  # whom we could not reach last
        self._refusals = 0  # how often we were not let in, as we heard last
        self._doubts = (-1, 0)  # after which step, and how many that found nobody
        #: after which step of which members epochs broke, and how many in a row
        self._broke_at: tuple[int, dict[int, str]] = (-1, {})
        self._breaks = 0

    # --- what we say ----------------------------------------------------------------------------

    def report(
        self,
        *,
        planned: bool,
        leaving: bool = False,
        over: bool = False,
        silent: bool = False,
        why: str = "",
    ) -> None:
        """How far we are, once our epoch broke or its edge was reached. `leaving`: we go at this
        edge; `over`: all do, for the job is over. `silent`: it broke here, for a peer that answers
        nothing; `why`, as far as is known here."""
        if not (planned or silent):
            self._note_break(why)
        self.last_report = {
            "epoch": self.epoch,
            "step": self._trainer.committed,
            "held": sorted(self._trainer.held),
            "planned": planned,
            "leaving": leaving,
            "over": over,
            "silent": silent,
        }
        self._say("report", **self.last_report)

    def agree_to_stage(self, ready: int) -> None:
        """So many of those that were asked are ready to copy the state. Whoever asks from here on
        asks for another copy."""
        self.stages = 0 < self.wants_stage <= ready
        if self.stages:
            self.wants_stage = 0

    def standing(self) -> dict[str, Any]:
        """How we introduce ourselves, at first and after each reconnect."""
        return {
            "replica": self.replica,
            "standby": self.standby,
            "epoch": self.epoch,
            "step": self._trainer.committed,
            "members": self.members,
        }

    # --- what we hear while an epoch is awaited -------------------------------------------------

    def hear(self, message: dict[str, Any]) -> bool:
        """Obey one message; True if it brought us into an epoch, and training goes on."""
        if message["op"] == "epoch":
            # One that was on its way as our connection ended is said again on the next.
            return int(message["epoch"]) > self.epoch and self._adopt(message)
        asked: dict[str, Callable[[dict[str, Any]], None]] = {
            "load": self._on_load,
            "sync": self._on_sync,
            "donors": self._on_donors,
            "catch_up": self._on_catch_up,
            "made": self._on_made,
            "up_to_date": self._on_up_to_date,
            "cannot_follow": self._on_cannot_follow,
            "differs": self._on_differs,
            "proven": self._on_proven,
            "evicted": self._on_evicted,
            "probe": self._on_probe,
            "stage": self._on_stage,
        }
        asked.get(message["op"], self.overhear)(message)
        return False

    def _adopt(self, message: dict[str, Any]) -> bool:
        self._stop_following()
        self.epoch = int(message["epoch"])
        self.members = {int(m["replica"]): str(m["placement"]) for m in message["members"]}
        numbers = {placement: replica for replica, placement in self.members.items()}
        self.replica, self.standby = numbers.get(self.placement, self.replica), ""
        self.lease_s = float(message["lease_s"])
        self.last_report = None
        self._want_nothing()
        step = int(message["step"])
        if self._trainer.committed < step and self._is_not_handed(message["donors"]):
            self._start_over(CannotFollow(f"nobody hands over step {step}"))
            return False
        try:
            # The group first: whoever is behind replays while the others compute.
            self._trainer.connect(message)
            self._trainer.replay(step, message["donors"])
        except Severed as error:
            log.info("severed epoch=%s error=%s", self.epoch, error)
            self.report(planned=False, silent=isinstance(error, Silent), why=str(error))
            return False
        except CannotFollow as error:
            self._could_not_follow(error, message["donors"])
            return False
        if self._trainer.committed > step:
            self._start_over(CannotFollow(f"{self._trainer.committed} is beyond step {step}"))
            return False
        self._trainer.enter(message)
        self.newcomer = False
        self._not_handed, self._refusals = None, 0
        return True

    def _on_load(self, message: dict[str, Any]) -> None:
        self._stop_following()
        self.order = int(message["order"])
        self._trainer.load(list(message["holders"]))
        self._say_ready(message)

    def _on_sync(self, message: dict[str, Any]) -> None:
        """Take the state that peers hold ready, prove that it is theirs, and follow them."""
        self._stop_following()
        self.order = int(message["order"])
        donors = list(message["donors"])
        if not self._reaches(list(message["members"])):
            self._say("again", epoch=self.epoch, order=self.order)
            return
        before, self._refusals = self._refusals, int(message["refusals"])
        if before < MAX_REFUSALS <= self._refusals:
            self._trainer.trouble(
                "cannot_rejoin",
                f"not let in {self._refusals} times in a row, the last time: {message['why']}. It "
                "tries on, later each time; its log and the members' (not_staged, not_compared, "
                "diverged) say what to mend; else start it on another node",
            )
        try:
            self._trainer.take(int(message["step"]), str(message["digest"]), donors)
        except CannotFollow as error:
            log.warning("cannot_take_over error=%s", error)
            self._say("again", epoch=self.epoch, order=self.order)
            return
        self._say_ready(message)
        self._following = True
        self._trainer.follow(donors)

    def _on_made(self, message: dict[str, Any]) -> None:
        """Peers made a step; so do we."""
        if not self._following:
            return
        try:
            self._trainer.make(message["reduced"])
        except CannotFollow as error:
            self._start_over(error)

    def _on_up_to_date(self, message: dict[str, Any]) -> None:
        """Peers have nothing newer than what we were given up to now."""
        step = self._trainer.committed
        if self._following and message["step"] == step and self._caught_up != step:
            self._caught_up = step
            self._say("caught_up", step=step)

    def _on_donors(self, message: dict[str, Any]) -> None:
        """Others are members now; those that we follow may be gone."""
        if self._following:
            self._trainer.follow(list(message["donors"]))

    def _on_catch_up(self, message: dict[str, Any]) -> None:
        """All members wait at an edge after this step, and will go: it is settled."""
        try:
            self._trainer.replay(int(message["step"]), list(message["donors"]))
        except CannotFollow as error:
            self._start_over(error)
            return
        self._caught_up = self._trainer.committed
        self._say("caught_up", step=self._trainer.committed)

    def _on_cannot_follow(self, message: dict[str, Any]) -> None:
        if self._following:
            self._start_over(CannotFollow(message["error"]))

    def _on_proven(self, _message: dict[str, Any]) -> None:
        """We made of a step what the members made of it: whoever stands by is ready."""
        if self._following:
            self._trainer.proven()

    def _on_differs(self, message: dict[str, Any]) -> None:
        """We made something else of a step than the members did: we are not let in."""
        self._trainer.trouble(
            "diverged",
            f"after step {message['step']}, which it was given by the members, {self.placement} "
            f"holds {brief(message['said'])} and replica {message['witness']} "
            f"{brief(message['held'])}: a card or memory erred in silence, or an optimizer or "
            "schedule does something of its own; it is not let in, and begins anew with the "
            "members' state",
        )

    def _on_evicted(self, message: dict[str, Any]) -> None:
        """Others went on without us: we are a newcomer, our gradients are theirs by now."""
        if self.epoch:
            self._trainer.trouble(
                "evicted",
                f"epoch {self.epoch} went on without this replica, which seemed gone: silent, out "
                "of reach, or dead by its agent's word. Nothing need be done, it comes back by "
                "itself; if it is told again look at its node, its network, the coordinator's "
                "--silence",
            )
            log.warning("evicted epoch=%s now=%s", self.epoch, message["epoch"])
        self._leave_epoch()

    def _on_probe(self, message: dict[str, Any]) -> None:
        """A member found another silent: all look whom they reach."""
        peers = {int(replica): list(where) for replica, where in message["peers"].items()}
        missed = self._trainer.unreached(list(peers.values()), TRY_S)
        told = [list(peers)[place] for place in missed]
        log.warning("probed epoch=%s unreached=%s", self.epoch, told)
        self._note_doubt(told)
        self._say("unreached", epoch=self.epoch, replicas=told)

    def _note_doubt(self, unreached: list[int]) -> None:
        """Tell an engineer if members fall silent again and again, and yet all answer: no step is
        made then, and nobody is to blame."""
        step = self._trainer.committed
        before = self._doubts[1] if self._doubts[0] == step else 0
        self._doubts = (step, 0 if unreached else before + 1)
        self._breaks = 0  # that is why it broke, also for those who saw nothing of it
        if self._doubts[1] == MAX_DOUBTS:
            self._trainer.trouble(
                "silent_network",
                f"after step {step} collectives failed {MAX_DOUBTS} times in a row because nothing "
                "was acknowledged, and yet all replicas answer each other: look for a limit on the "
                "size of packets, or a firewall that lets only some ports through",
            )

    def _note_break(self, why: str) -> None:
        """Tell an engineer if epochs of the same members break again and again: no step is made
        then, and the next one will break too."""
        here = (self._trainer.committed, dict(self.members))
        self._breaks = self._breaks + 1 if here == self._broke_at else 1
        self._broke_at = here
        if self._breaks == MAX_DOUBTS:
            self._trainer.trouble(
                "epochs_break",
                f"after step {here[0]} the epoch of replicas {sorted(self.members)} broke "
                f"{MAX_DOUBTS} times in a row, and all of them came back; no step is made until "
                f"the cause is mended, which the logs of its ranks name (severed), here: {why}",
            )

    def _reaches(self, peers: list[list[str]]) -> bool:
        """Whether all these answer us: whom one member does not reach would break the epoch that
        it enters."""
        before, self._unreached = (
            self._unreached,
            [peers[place] for place in self._trainer.unreached(peers, NEWCOMER_TRY_S)],
        )
        if self._unreached and self._unreached != before:
            where = ", ".join(sorted({a for addresses in self._unreached for a in addresses}))
            self._trainer.trouble(
                "cannot_reach",
                f"nothing answers at {where}: mend the network between this node and those; this "
                "replica joins again once it reaches all others",
            )
        return not self._unreached

    def _on_stage(self, message: dict[str, Any]) -> None:
        if message["now"]:
            self._trainer.stage()
        else:
            self.overhear(message)

    def _could_not_follow(self, error: CannotFollow, donors: list[list[str]]) -> None:
        """No peer of the epoch that began hands over what we lack. If who made it has just died,
        the next epoch begins without that step, and what we computed of it counts. If that is not
        so, we begin anew."""
        self._not_handed = (self._trainer.committed, donors)
        log.warning("not_handed epoch=%s error=%s", self.epoch, error)
        self.report(planned=False, why=str(error))

    def _is_not_handed(self, donors: list[list[str]]) -> bool:
        """Whether one of these did not hand over the next step in the epoch before, and lives."""
        if self._not_handed is None:
            return False
        step, before = self._not_handed
        return step == self._trainer.committed and any(donor in before for donor in donors)

    def _start_over(self, error: CannotFollow) -> None:
        """We hold an old state and cannot come by the newer one step by step."""
        log.warning("cannot_follow error=%s", error)
        self._stop_following()
        epoch = self.epoch
        self._leave_epoch()
        self._say("again", epoch=epoch, order=self.order)

    def _leave_epoch(self) -> None:
        self.epoch = 0
        self.newcomer = True
        self.members = {}
        self.last_report = self._not_handed = None
        self._want_nothing()
        self._trainer.forget()

    def _want_nothing(self) -> None:
        self.wants_regroup = self.wants_compare = self.wants_proof = self.stages = False
        self.wants_stage = 0

    def _stop_following(self) -> None:
        if self._following:
            self._trainer.stop_following()
        self._following, self._caught_up = False, None

    def _say_ready(self, ordered: dict[str, Any]) -> None:
        step, digest = self._trainer.committed, self._trainer.digest()
        self._say(
            "ready",
            order=ordered["order"],
            step=step,
            trained_in=self._trainer.trained_in,
            seen=self._trainer.seen_epoch,
            loaded=self._trainer.loaded,
            digest=digest,
        )

    # --- what we hear while we train ------------------------------------------------------------

    def overhear(self, message: dict[str, Any]) -> None:
        """Note what can wait until the next edge; what is in REJOINS cannot."""
        op = message["op"]
        if op == "stage":
            self.wants_stage = int(message["holders"])
        elif op == "compare":
            self.wants_compare = True
        elif op == "prove":
            self.wants_proof = True
        elif op == "release":
            self.wants_stage = 0
            self._trainer.release(log=bool(message["log"]))
        elif op == "edge" and int(message["epoch"]) == self.epoch:
            self.wants_regroup = True
        elif op == "lost":
            self._trainer.heard_of_loss(message)
        elif op == "diverged":
            blamed = [f"replica {one}" for one in message.get("odd", [])]
            for subject in blamed or [""]:
                self._trainer.trouble("diverged", difference_in(message), subject)
        elif op == "undecided":
            self._trainer.trouble("coordinator_undecided", str(message["text"]))


def difference_in(message: dict[str, Any]) -> str:
    """Of the members' states, in words."""
    states = ", ".join(f"{r}: {brief(digest)}" for r, digest in message["states"].items())
    odd = ", ".join(map(str, message.get("odd", [])))
    if not odd:
        return (
            f"after step {message['step']} the replicas hold different states ({states}), and none "
            "that most hold: go back to a checkpoint that was saved before"
        )
    return (
        f"after step {message['step']} replica {odd} does not hold what the others hold "
        f"({states}): its card or memory erred in silence, or its script does something of its "
        "own, such as to change extra outside of after_step; else take its node out, and it comes "
        "back with the others' state"
    )


def brief(digest: str) -> str:
    """The beginning of a digest, or of each part's."""
    return "-".join(part[:12] for part in digest.split("-"))
