"""When to save, and where to: what the training thread has to do with checkpoints.

It pays for the copying of what it is about to change, at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from runtime.checkpoint import peer, store
from runtime.checkpoint.copy_buffers import COPY_BUFFERS, SLACK_BYTES, CopyBuffers
from runtime.checkpoint.dispatch import Dispatcher, Save
from runtime.checkpoint.peer import Place, in_turn
from runtime.checkpoint.sources import Sources
from runtime.checkpoint.suspects import State, suspect
from runtime.checkpoint.tiers import TIERS, Folders, Interval, Packing, TierName, tiers_of
from runtime.job import Job
from runtime.snapshot import Copying, TooSmall, pin

FINISH_S = 30.0  # how long the end of a job waits for its last checkpoint


class Checkpointer:
    """Saves the state of a job to its tiers: at intervals, when the control plane asks, at the end.

    Args:
        job: what `runtime.join` returned.
        every_s: seconds between two saves: one value for all tiers, or one for each by its name
            ("peer", "local", "shared", "object"). "auto" computes the best interval from what saves
            cost and how often a job of this size fails.
        keep: how many checkpoints the shared folder and the object store keep; at least 1.
        failures_per_node_day: failure rate for "auto"; None: what the control plane has seen.
        pack: whether checkpoints for the shared folder and the object store are compressed: "auto"
            where that is measured to pay, False never.
        keep_for_s: the shared folder and the object store also keep what was saved within so many
            seconds before the newest.

    Raises:
        ValueError: for an unknown tier, or a number that is out of range.
    """

    def __init__(
        self,
        job: Job,
        *,
        every_s: Interval | Mapping[str, Interval] = "auto",
        keep: int = store.KEEP,
        failures_per_node_day: float | None = None,
        pack: Packing = "auto",
        keep_for_s: float = 0.0,
    ) -> None:
        self.job = job
        self.tiers = tiers_of(job, every_s, keep, failures_per_node_day, pack, keep_for_s)
        self.folders = Folders(job)
        self.sources = Sources(job, self.tiers, self.folders)
        self._last = dict.fromkeys(self.tiers, time.monotonic())
        self._late: set[TierName] = set()  # an engineer was told, and it was never on time since
        self._held_up: set[TierName] = set()  # their next save has waited for the one before
        self._again: set[TierName] = set()  # there was too little room, and more is being made
        #: where states are copied to; copies for newcomers are made in them too
        self.copy_buffers = CopyBuffers(
            lambda why: job.trouble("no_room_for_checkpoints", why),
            COPY_BUFFERS + ("object" in self.tiers),
            pin,
        )
        #: to the writers, and what they say
        self.dispatcher = Dispatcher(job, self.tiers, self.folders, self.copy_buffers)
        self.dispatcher.on_keeper = self._note_keeper
        self._own_holder: peer.OwnHolder | None = None  # it keeps what peers save
        self._near = False  # an engineer was told that it is no farther than this node
        self._placements: set[str] = set()  # of the members

    # --- peers' memory --------------------------------------------------------------------------

    def open_holder(self, host: str) -> dict[str, str]:
        """Start this node's holder unless it runs, to be reached at `host`; see `holder`."""
        folder, job = self.job.holder_dir, self.job
        if folder is not None:
            try:
                self._own_holder = peer.OwnHolder(
                    folder, job.name, job.token, host, self.sources.look_into
                )
            except OSError as error:
                job.trouble("no_holder", f"peers cannot save to this node's memory: {error}")
            else:
                self.sources.look_into(self._own_holder.address)
        return self.holder

    @property
    def holder(self) -> dict[str, str]:
        """How peers are told of this node's holder; {} if there is none."""
        if self._own_holder is None:
            return {}
        return Place(self._own_holder.address, self.job.domain).describe()

    def meet(self, members: Sequence[Mapping[str, Any]], replica: int) -> None:
        """The members of an epoch, as its grant names them: one of them keeps what we save."""
        placements, before = {str(member["placement"]) for member in members}, self._placements
        self.dispatcher.regrouped(came=bool(placements - before), gone=bool(before - placements))
        self._placements = placements
        if "peer" not in self.tiers:
            return
        self.dispatcher.keepers.meet(members, replica)
        self._note_keeper()

    def meet_nodes(self, holders: Sequence[Mapping[str, str]]) -> list[str]:
        """The holders of a job that lives and dies as one, as each rank names that of its node, {}
        if it has none: one of another node keeps our part, and ours too, so that all parts are left
        wherever one node is lost. Unless each node has one, of several, memory is no tier of this
        job. Returns the addresses of the others."""
        nodes = {Place(**one) for one in holders if one}
        if len(nodes) < 2 or not all(holders):
            self.tiers.pop("peer", None)
            self.dispatcher.leave_out("peer")
            return []
        others = in_turn(nodes, Place(**holders[self.job.rank]))
        self.dispatcher.own_holder = lambda: self.sources.holder
        self.dispatcher.keepers.follow(others)
        self._note_keeper()
        return [place.address for place in others]

    def _note_keeper(self) -> None:
        """Another keeps what we save, perhaps, or has kept it."""
        keepers, domain = self.dispatcher.keepers, self.job.domain
        keeper = keepers.keeper
        if keeper is None:
            return
        near = keeper.domain == domain
        if near and not self._near:
            self._near = True
            text = f"no member is on another node than {domain}: its memory is lost with it"
            self.job.trouble("checkpoint_not_apart", text)
        elif self._near and not near and keepers.keeps():
            self._near = False
            text = f"{keeper.domain} keeps in memory what {domain} saved there"
            self.job.trouble("checkpoint_apart", text)

    # --- saving ---------------------------------------------------------------------------------

    def due(self) -> set[TierName]:
        """The tiers whose interval is over, or whose last save is to be tried again."""
        now = time.monotonic()
        over = [n for n, tier in self.tiers.items() if now - self._last[n] >= tier.pace.every_s]
        return self._again.union(over)

    def again(self) -> set[TierName]:
        """Those to which no copy could be made for want of room, which is being made."""
        return set(self._again)

    def agreed(self, tiers: Collection[TierName]) -> None:
        """All members are to save to these now, as soon as each has room: the next save is due an
        interval later, also if we are not the one that writes."""
        now = time.monotonic()
        self._last.update({name: now for name in tiers if name in self.tiers})

    def ready(self, wanted: Collection[TierName]) -> set[TierName]:
        """Those of the wanted tiers that have finished the save before: however long one store
        takes, it never holds both buffers. An engineer is told that one is late, once until a save
        to it has waited for none."""
        late = self.dispatcher.busy(wanted)
        self._tell_late(late, "the store is slower than checkpoints are due")
        return set(wanted) - late

    def is_free(self, tier: TierName) -> bool:
        """Whether a save to it could begin at once."""
        return not self.dispatcher.busy([tier]) and self.copy_buffers.any_free()

    def can_share(self) -> bool:
        """Whether our share of one could, in a folder in which we see what others write."""
        return self.dispatcher.sees_others and self.is_free("shared")

    def prepare(self, size: Callable[[], int], wanted: Collection[TierName] = ()) -> bool:
        """Whether a state can be taken at once. Begins to make room for it and starts the writers,
        so that the first save costs what the others do. `size` tells how many bytes it takes; it is
        asked only if there is no room yet. `wanted`: the tiers that are late if there is none."""
        if not self.dispatcher.start():
            return False
        if not self.copy_buffers.made():
            try:
                needed = size()
            except Exception:  # so does the copy, which tells why
                needed = 0
            self.copy_buffers.prepare(needed)
            return False
        if self.copy_buffers.lacks():
            self.copy_buffers.complete()
        if self.copy_buffers.any_free():
            return True
        self._tell_late(set(wanted), f"no room for a copy is free, {self._who_has_room()} has it")
        return False

    def _tell_late(self, tiers: set[TierName], why: str) -> None:
        self._held_up |= tiers
        if new := tiers - self._late:
            self._late |= new
            for name in sorted(new):
                self.job.trouble("checkpoint_late", f"{name}: {why}", name)

    def save(
        self,
        begin: Callable[[memoryview | None], Copying],
        name: str,
        tiers: Collection[TierName] = TIERS,
        *,
        replica: int | None = None,
        epoch: int = 0,
        share: tuple[int, int] = (0, 1),
        last: bool = False,
    ) -> Copying | None:
        """Begin a copy and see that it is written to these tiers; None if there is no room for it,
        which an engineer is told unless more room is being made.

        `begin` begins the copy in the memory that it is given. No step may be applied before the
        copy is finished. `name` is the same on all ranks, and new; `replica` is the number that we
        have by now, `epoch` that of the last step; `share`: which share of how many we write where
        the replicas share a tier out. The `last` one of all waits for room, for FINISH_S.
        """
        asked = time.monotonic()
        wanted = tuple(self.tiers[one] for one in TIERS if one in tiers and one in self.tiers)
        names = {tier.name for tier in wanted}
        if not wanted or not self.dispatcher.start():
            return None
        if not self.copy_buffers.made():
            self.copy_buffers.prepare(0)  # how much is needed turns out below
        while (buffer := self.copy_buffers.take(FINISH_S if last else 0.0)) is not None:
            # What describes the copy lies behind it, and may have grown since the last one.
            behind = self.dispatcher.described + SLACK_BYTES // 2
            try:
                copying = begin(buffer.memory[: max(0, len(buffer.memory) - behind)])
            except TooSmall as error:
                self.copy_buffers.give_back(buffer)
                self.copy_buffers.prepare(error.needed + behind, at_once=last)
                self._again |= names
                if not last:
                    return None
                continue
            except BaseException as error:
                self.copy_buffers.give_back(buffer)
                if not isinstance(
                    error, Exception
                ):  # an interrupt; else it is not worth the training
                    raise
                self._began(names)
                for one in wanted:
                    self.dispatcher.failed(one.name, f"no copy could be made: {error!r}")
                return None
            self._began(names)
            self._late -= names - self._held_up
            self._held_up -= names
            paid_s = time.monotonic() - asked
            number = self.job.replica if replica is None else replica
            self.dispatcher.give(
                Save(
                    name, copying.step, copying, buffer, asked, paid_s, number, epoch, wanted, share
                )
            )
            return copying
        self._tell_skipped(names)
        return None

    def _tell_skipped(self, tiers: Collection[TierName]) -> None:
        what = f"nothing was saved to {', '.join(sorted(tiers))}"
        if self.copy_buffers.made():
            text = (
                f"{what}: {self._who_has_room()} has the memory for copies. What was saved before "
                "stays; if a store has it look why that is slow, or save to it less often (every_s)"
            )
        else:
            text = (
                f"{what}: there was no memory for a copy in time. What was saved before stays; "
                "free memory on this node, or raise its limit"
            )
        self.job.trouble("checkpoint_skipped", text)

    def _who_has_room(self) -> str:
        return ", ".join(sorted(self.dispatcher.busy(self.tiers))) or "a newcomer"

    def suspect(self, state: State) -> None:
        """This state leads to NaN, and nobody is to load it again. An engineer is told if that
        cannot be noted."""
        folders = self.folders
        try:
            folders.watched["shared"].call(partial(suspect, folders.shared, state))
        except OSError as error:  # another replica, or a person, has to
            what = f"{folders.shared} cannot be told, and the next start may load it: {error}"
            self.job.trouble("suspect_not_noted", what)

    def finish(self) -> None:
        """Wait until everything handed over is durable or was refused, for FINISH_S at most. What
        is not goes on without us."""
        if self._own_holder is not None:
            self._own_holder.close()
        if late := self.dispatcher.close(FINISH_S):
            text = (
                f"not durable after {FINISH_S:g} s: {', '.join(late)}. The writers finish what "
                "they were given without this process: leave the node up meanwhile, and see what "
                "came whole with `python -m runtime.checkpoint ls`"
            )
            self.job.trouble("checkpoint_unfinished", text)
        self.copy_buffers.close()

    def _began(self, tiers: Collection[TierName]) -> None:
        self._last.update(dict.fromkeys(tiers, time.monotonic()))
        self._again.difference_update(tiers)
