"""What there is to load: the checkpoints of all tiers, and one of them as a state.

Imports no torch.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from runtime.checkpoint import peer, store
from runtime.checkpoint.compression import NotInstalled
from runtime.checkpoint.facts import changed_since
from runtime.checkpoint.manifest import MANIFEST, Manifest
from runtime.checkpoint.objects import Found, ObjectStore, step_of
from runtime.checkpoint.suspects import State, suspects
from runtime.checkpoint.tiers import (
    TIERS,
    Folders,
    Tier,
    TierName,
    epochs_taken,
    next_epoch,
    note_epoch,
)
from runtime.checkpoint.watched_store import WatchedStore
from runtime.framing import PeerFailed
from runtime.image import Damaged, Staged
from runtime.job import Job

log = logging.getLogger("drydock.checkpoint")

AT_ONCE = 32  # other nodes' holders that are asked
ELSEWHERE_S = 2.0  # how long one may take to answer: its node may be gone
#: If such a tier cannot be read nobody knows whether there is something to go on from.
OF_ALL_NODES: tuple[TierName, ...] = ("shared", "object")
#: What is told of one that does not verify: the newest of its tier; one in whose stead another copy
#: or a newer one is loaded.
REFUSED, PASSED_OVER = "checkpoint_refused", "checkpoint_passed_over"
#: Epoch, step, minus the place of the tier in TIERS, name, tier.
_Found = tuple[int, int, int, str, TierName]


class Sources:
    """Where a rank's part of a checkpoint may be. What cannot be read is told."""

    def __init__(self, job: Job, tiers: Mapping[TierName, Tier], folders: Folders) -> None:
        self._job = job
        self._tiers = tiers
        self._folders = folders
        self._watched = {**folders.watched, "object": WatchedStore(job.object_store)}
        self.holder = ""  # the address of this node's own, which keeps what peers save
        #: the latest that was seen: of starts, of epochs, and of checkpoints, also if not ours
        self.latest_epoch = 0
        self._noted = 0  # the epoch of which we have left word
        self._noting = threading.Lock()  # held while we leave it
        #: name of a save -> the addresses of those who hold it, this node's own first, and its
        #: digest there
        self._holders: dict[str, list[tuple[str, str]]] = {}
        self._facts: dict[str, dict[str, Any]] = {}  # by the name of the save
        self._imported_at = 0.0  # Unix time; when a person gave the job what it is to begin from

    def look_into(self, holder: str) -> None:
        """That is the address of this node's own by now."""
        self.holder = holder

    def saves(
        self, elsewhere: Collection[str] = (), after: tuple[int, int] = (0, -1)
    ) -> list[tuple[int, str, TierName]]:
        """The step, name and tier of each checkpoint that is there, unverified: that of the latest
        training first, of several of one state the one in the quickest tier.

        `elsewhere`: the addresses of other nodes' holders, which are asked too. `after`: the epoch
        and step of what is in memory; only later training is named.

        A tier that cannot be read or does not answer in time, or has some and none that could be
        ours, is told. If nothing is in memory and there is no other checkpoint, or only in the
        object store, it is raised as ValueError, and as OSError if it is a tier of all nodes; this
        also if there is only an import.
        """
        found: list[_Found] = []
        self._facts = {}
        failed: OSError | ValueError | None = None
        out_of_reach: set[str] = set()
        for order, name in enumerate(TIERS):
            if name not in self._tiers:
                continue
            try:
                ours = self._held(elsewhere) if name == "peer" else self._ours(name)
            except (OSError, ValueError) as error:
                if name in OF_ALL_NODES or isinstance(error, ValueError):
                    failed = error
                out_of_reach.add(name)
                self._job.trouble("checkpoints_out_of_reach", f"{name}: {error}", name)
                continue
            found += [(epoch, step, -order, save, name) for epoch, step, save in ours]
            self.latest_epoch = max([self.latest_epoch, *(epoch for epoch, *_ in ours)])
        here = [save for *_, save, tier in found if tier != "object"]
        begun = [save for save in here if not self.imported(save)]
        # What the object store has is old: nobody goes back to it unasked. And what began with an
        # import while that was out of reach would be taken for older than what is in there.
        unknown = not here or isinstance(failed, OSError)
        if failed is not None and unknown and not begun and after[1] < 0:
            raise failed
        known = self._suspects(told="shared" in out_of_reach)
        trains = sorted(self._without(known, found), reverse=True)
        return [(step, save, name) for *at, step, _, save, name in trains if (*at, step) > after]

    def _suspects(self, *, told: bool) -> set[State]:
        """`told`: that the shared folder cannot be read an engineer knows."""
        try:
            return self._watched["shared"].call(partial(suspects, self._folders.shared))
        except (OSError, ValueError) as error:
            if not told:
                self._job.trouble("checkpoints_out_of_reach", str(error))
            return set()

    def _without(self, known: set[State], found: list[_Found]) -> list[_Found]:
        """Raises ValueError if nothing is left of what there is."""
        left = [one for one in found if (one[0], one[1]) not in known]
        if found and not left:
            raise ValueError(
                f"each of the {len(found)} checkpoints of this job led to NaN soon after it was "
                f"loaded: mend that and remove {self._folders.shared / 'suspects.json'}; to see "
                f"what was saved: python -m runtime.checkpoint ls {self._folders.shared}"
            )
        return left

    def next_epoch(self, above: int) -> int:
        """The number of this start of the job, which is above that one; see `tiers.next_epoch`.
        Where the shared folder cannot count it is the next one, and another start may have it."""
        try:
            return self._watched["shared"].call(partial(next_epoch, self._folders.shared, above))
        except OSError as error:  # whoever lists what is there, or saves, tells an engineer
            log.warning("start_not_counted epoch=%s error=%s", above + 1, error)
            return above + 1

    def note_epoch(self, epoch: int) -> None:
        """That we train in this epoch, for whoever begins when all that knew of it is lost; once.
        Not before the first save, which makes the folder: nobody has anything to begin from. Waits
        for nothing: a store that does not answer says so where it is saved to."""
        if epoch == self._noted or not self._noting.acquire(blocking=False):
            return  # a store that hangs is asked by one thread, whoever saves meanwhile

        def note() -> None:
            try:
                self._watched["shared"].call(partial(note_epoch, self._folders.shared, epoch))
            except FileNotFoundError:
                pass  # to be asked for again with each save
            except OSError as error:
                log.warning("epoch_not_noted epoch=%s error=%s", epoch, error)
            else:
                self._noted = epoch
            finally:
                self._noting.release()

        try:
            threading.Thread(target=note, name="drydock-epoch", daemon=True).start()
        except RuntimeError as error:  # no more threads, and whoever asks is training
            self._noting.release()
            log.warning("epoch_not_noted epoch=%s error=%s", epoch, error)

    def imported(self, name: str) -> bool:
        """Whether another tool made this one: it has weights alone."""
        return "imported" in self._facts.get(name, {})

    def ranks(self, name: str, tier: TierName, progress: store.Progress = store.unseen) -> int:
        """How many ranks have saved this checkpoint. `progress`: as in `read`. Raises Damaged if it
        is gone, OSError."""
        if tier == "object":
            watched, unless = self._watched[tier], partial(progress, 0)
            find = partial(self._objects.named, name, watched.alive)
            return len(watched.call(find, unless=unless).manifest.parts)
        if self._tiers[tier].own:
            return self._job.ranks
        return len(self._named(name, tier, progress)[0][1].parts)

    def read(
        self, name: str, tier: TierName, rank: int, progress: store.Progress = store.unseen
    ) -> Staged:
        """The part of one rank: where each rank keeps its own, ours. `progress`: see
        `store.Progress`; it is also told of 0 bytes now and then, while nothing comes, and what it
        raises ends the wait. Raises Damaged, OSError."""
        if tier == "peer":
            return self._read_held(name, rank, progress)
        watched = self._watched[tier]
        if tier == "object":
            return _read(watched, partial(self._objects.read, name, rank), progress)
        part = 0 if self._tiers[tier].own else rank

        def read(path: Path) -> Staged:
            try:
                return _read(watched, partial(store.read, path, part), progress)
            except Damaged as error:
                self._blame_disk(tier, path, error)
                raise

        *others, last = [path for path, _manifest in self._named(name, tier, progress)]
        for path in others:
            try:
                return read(path)
            except (Damaged, OSError) as error:
                self._refuse_copy(tier, error)
        return read(last)

    def loaded(self, name: str) -> None:
        """That one is what training goes on from: what has changed since it was made is told, for
        with another program or another torch the same steps give other numbers."""
        if changed := changed_since(self._facts.get(name, {})):
            self._job.trouble("changed_since", f"since {name} was saved: {changed}", "program")

    def _read_held(self, name: str, rank: int, progress: store.Progress) -> Staged:
        """Of several who hold it the first whose copy is whole; which is not is told."""
        if name not in self._holders:
            raise Damaged(f"the save {name} is gone")
        *nearer, last = self._holders[name]

        def read(holder: str, digest: str) -> Staged:
            call = partial(peer.read, holder, self._job.token, rank, name, digest)
            try:
                return _read(WatchedStore(f"the holder {holder}"), call, progress)
            except Damaged as error:
                self._blame_memory(holder, error)
                raise

        for place in nearer:
            try:
                return read(*place)
            except (Damaged, OSError) as error:
                self._refuse_copy("peer", error)
        return read(*last)

    def _refuse_copy(self, tier: TierName, error: Damaged | OSError) -> None:
        self._job.trouble(PASSED_OVER, f"{tier}: {error}; trying another's copy", tier)

    def _blame_disk(self, tier: TierName, path: Path, error: Damaged) -> None:
        """What is there is not what was saved: if nobody else writes to it, it is the disk. Not if
        it was pruned meanwhile."""
        if tier != "local" or isinstance(error, (*store.NOT_JUDGED, NotInstalled)):
            return
        try:
            there = self._watched[tier].call((path / MANIFEST).exists)
        except OSError:
            return
        if there:
            self._job.trouble("checkpoint_damaged", f"{tier}, when it was read: {error}", tier)

    def _blame_memory(self, holder: str, error: Damaged) -> None:
        """Bytes that our own node's holder gives are not those that it compared when it received
        them: nobody else writes there, and no network is between, so it is the node's memory. A
        description of them that does not fit may be one of another version."""
        if holder == self.holder and isinstance(error.__cause__, Damaged):
            self._job.trouble("checkpoint_damaged", f"peer, when it was read: {error}", "peer")

    def _named(
        self, name: str, tier: TierName, progress: store.Progress
    ) -> list[tuple[Path, Manifest]]:
        """Where it is: on a node's disk each replica that was there may have left a copy. Raises
        Damaged if it is gone, OSError."""
        listed = self._folders.listed(tier, partial(progress, 0))
        found = [(path, one) for path, one in listed if isinstance(one, Manifest)]
        named = [(path, one) for path, one in found if one.save == name]
        if not named:
            raise Damaged(f"the save {name} is gone")
        return named

    def _ours(self, tier: TierName) -> list[tuple[int, int, str]]:
        """Those on disks that could be loaded: in which epoch they were trained, the step and the
        name. Raises OSError, ValueError."""
        found = self._stored() if tier == "object" else self._written(tier)
        started: list[int] = []
        if tier == "shared":
            started = self._watched[tier].call(partial(epochs_taken, self._folders.shared))
        self.latest_epoch = max([self.latest_epoch, *started, *map(store.epoch_of, found)])
        if tier == "shared":
            imports = [store.saved_at(one) for one in found if "imported" in one.facts]
            self._imported_at = max(imports, default=0.0)
        elif tier == "object":  # it may have what a job of this name trained before that
            found = [one for one in found if store.saved_at(one) >= self._imported_at]
        if self._tiers[tier].own:
            found = [one for one in found if one.facts.get("ranks") == self._job.ranks]
        self._facts |= {one.save: one.facts for one in found}
        # Once each, of however many replicas there is a copy.
        return list(dict.fromkeys((store.epoch_of(one), one.step, one.save) for one in found))

    @functools.cached_property
    def _objects(self) -> ObjectStore:
        return ObjectStore(self._job.object_store, self._job.name)

    def _stored(self) -> list[Manifest]:
        """What is in the object store."""
        watched = self._watched["object"]
        found = watched.call(partial(self._objects.found, watched.alive))
        whole = [one.manifest for one in found if isinstance(one, Found)]
        newest = max((one.step for one in whole), default=-1)
        flaws = [one for one in found if isinstance(one, Damaged)]
        for damaged in flaws:
            kind = REFUSED if step_of(damaged) > newest else PASSED_OVER
            self._job.trouble(kind, f"object: {damaged}", "object")
        if flaws and not whole:
            raise ValueError(
                f"none of the {len(flaws)} checkpoints in {self._objects.url} can be read "
                f"({max(flaws, key=step_of)}): mend that, or to begin anew move them away"
            )
        return whole

    def _held(self, elsewhere: Collection[str]) -> list[tuple[int, int, str]]:
        """What peers saved to memory, of our rank: this node's, and others'. Raises PeerFailed,
        ValueError."""
        there: list[dict[str, Any]] = []
        try:
            there = peer.held(self.holder, self._job.token) if self.holder else []
        except PeerFailed as error:
            if not elsewhere:
                raise
            self._job.trouble("checkpoints_out_of_reach", f"peer: {error}", "peer")
        others = self._held_at(elsewhere)
        run = self._known_run(there, [one for _holder, held in others for one in held])
        mine = (run, self._job.rank, self._job.ranks)
        self._holders = {}
        found = []
        for holder, held in ((self.holder, there), *others):
            for one in held:
                if (one["run"], one["rank"], one["ranks"]) == mine:
                    save = one["save"]
                    if save not in self._holders:
                        self._facts[save] = one["facts"]
                        found.append((one["epoch"], one["step"], save))
                    self._holders.setdefault(save, []).append((holder, one["digest"]))
        return found

    def _held_at(self, holders: Collection[str]) -> list[tuple[str, list[dict[str, Any]]]]:
        """What these hold, as far as they answer: their nodes may be gone, and what only they held
        with them, which is told."""

        def ask(holder: str) -> list[dict[str, Any]]:
            try:
                return peer.held(holder, self._job.token, ELSEWHERE_S)
            except PeerFailed as error:
                text = f"{error}: what it may hold of this job is not looked at"
                self._job.trouble("holder_out_of_reach", text, holder)
                return []

        if not holders:
            return []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return [*zip(holders, pool.map(ask, holders), strict=True)]

    def _known_run(self, there: list[dict[str, Any]], elsewhere: list[dict[str, Any]]) -> str:
        """Of which run of the job those that are held must be. Raises ValueError if some are here
        and nobody knows."""
        runs = {one["run"] for one in there or elsewhere}
        # Of two the later may not be whole yet: only the folder knows which is the job's.
        run = self._folders.known_run(believed=runs.pop() if len(runs) == 1 else "")
        if there and not run:
            raise ValueError(
                f"the holder at {self.holder} has checkpoints of this job and "
                f"{self._folders.shared} does not say of which run: "
                "if it is not mounted, mount it; to begin anew end the holders on all nodes"
            )
        return run

    def _written(self, tier: TierName) -> list[Manifest]:
        listed = self._folders.listed(tier)
        found = [one for _path, one in listed]
        whole = [one for one in found if isinstance(one, Manifest)]
        newest = max((one.step for one in whole), default=-1)
        for path, damaged in listed:
            if isinstance(damaged, Damaged):
                # Where a newer one is there nothing is lost by it.
                kind = REFUSED if store.number_of(path)[0] > newest else PASSED_OVER
                self._job.trouble(kind, f"{tier}: {damaged}", tier)
                self._blame_disk(tier, path, damaged)
        if found and not whole and not self._tiers[tier].own:
            folder, which = self._folders.shared, store.WHICH_ARE_WHOLE
            why = str(found[0]).partition(f"; {which}")[0]
            raise ValueError(
                f"none of the {len(found)} checkpoints in {folder} can be read ({why}): mend that, "
                f"or to begin anew move that folder away; {which} {folder}"
            )
        return whole


def _read(
    watched: WatchedStore, call: Callable[[store.Progress], Staged], progress: store.Progress
) -> Staged:
    def heard(size: int) -> None:
        watched.alive(size)
        progress(size)

    return watched.call(partial(call, heard), unless=partial(progress, 0))
