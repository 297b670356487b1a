"""Where the checkpoints of a job are kept: in the memory of a peer's node, on each node's own disk,
in a folder that all share, and in an object store.

Memory and the own disk are quick, the one is gone with the peer's node, the other with ours; the
shared folder is slow and outlives both, the object store the whole site. A state has the same name
of its save in all. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from runtime.checkpoint import store
from runtime.checkpoint.draft import make_folder, sync
from runtime.checkpoint.interval import FAILURES_PER_NODE_DAY, Pace, nodes_of
from runtime.checkpoint.manifest import Manifest
from runtime.checkpoint.objects import ObjectStore
from runtime.checkpoint.watched_store import WatchedStore
from runtime.image import Damaged

if TYPE_CHECKING:  # a tenth of the memory of writers, of which each rank has some
    from runtime.job import Job

TierName = Literal["peer", "local", "shared", "object"]
#: Seconds between two saves, or as many as are best.
Interval = float | Literal["auto"]
#: Whether chunks are packed where that is measured to pay, or never.
Packing = Literal["auto", False]
#: The quickest first: of two checkpoints of one state it is loaded.
TIERS: tuple[TierName, ...] = ("peer", "local", "shared", "object")
KEEP_LOCAL = 2
_RUN = "run"
_NAME = "name"  # in a folder of that name, on a file system without links
_EPOCH = "epoch-"  # and the number of the last start, or of the members' epoch, that was counted


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One of them, as this rank writes to it."""

    name: TierName
    pace: Pace
    keep: int
    #: Each rank of each replica keeps its part in a folder of its own; else all ranks of a replica
    #: write into one folder.
    own: bool
    #: Chunks may be packed: it may be slow, and outlives the nodes.
    pack: bool = False
    #: Kept beside the newest `keep` is what was saved so many seconds before the newest.
    keep_for_s: float = 0.0

    @property
    def shared_out(self) -> bool:
        """Whether the replicas may share a save out; else one of them writes, or each its own."""
        return self.name == "shared"


def tiers_of(
    job: Job,
    every_s: Interval | Mapping[str, Interval],
    keep: int,
    failures_per_node_day: float | None,
    pack: Packing = "auto",
    keep_for_s: float = 0.0,
) -> dict[TierName, Tier]:
    """Those that this job has. `every_s`: seconds between two saves, or "auto", of all or by tier.

    Raises ValueError for a tier that is none, for an interval, a `keep`, a `keep_for_s`, a `pack`
    or `failures_per_node_day` that is none, and for an object store that cannot be used.
    """
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep is {keep!r}; give a whole number, 1 or more")
    if not _is_amount(keep_for_s) or keep_for_s == math.inf:
        raise ValueError(f"keep_for_s is {keep_for_s!r}; give a number of seconds, 0 or more")
    if pack not in ("auto", False):
        raise ValueError(f"pack is {pack!r}; give 'auto' or False")
    packs = pack == "auto"
    if isinstance(every_s, Mapping) and (odd := set(every_s) - set(TIERS)):
        raise ValueError(f"every_s names {sorted(odd)}; the tiers are {', '.join(TIERS)}")
    failures = failures_per_node_day
    if failures is not None and not _is_amount(failures):
        raise ValueError(f"failures_per_node_day is {failures!r}; give a number above 0")
    nodes = nodes_of(job.world_replicas, job.ranks, job.nodes)

    def rate() -> float:
        if failures_per_node_day is not None:
            return failures_per_node_day
        return job.sender.failures_per_node_day or FAILURES_PER_NODE_DAY

    def pace_of(name: TierName) -> Pace:
        asked = every_s.get(name, "auto") if isinstance(every_s, Mapping) else every_s
        if asked == "auto":
            return Pace(None, nodes, rate)
        if not _is_amount(asked):
            raise ValueError(
                f"every_s is {asked!r} for {name}; give a number of seconds, 0 or more, or 'auto'"
            )
        return Pace(float(asked), nodes, rate)

    shared = Tier(
        name="shared", pace=pace_of("shared"), keep=keep, own=False, pack=packs,
        keep_for_s=keep_for_s,
    )  # fmt: skip
    tiers: dict[TierName, Tier] = {"shared": shared}
    if job.local_dir is not None:
        # Of one alone some ranks may have the next already, and others not yet, as a node dies.
        least = KEEP_LOCAL if job.ranks > 1 else keep
        tiers["local"] = Tier(
            name="local", pace=pace_of("local"), keep=min(least, KEEP_LOCAL), own=True
        )
    if job.holder_dir is not None:
        tiers["peer"] = Tier(name="peer", pace=pace_of("peer"), keep=1, own=True)
    if job.object_store:
        ObjectStore(job.object_store, job.name)  # refused now, not at the first save
        tiers["object"] = replace(shared, name="object", pace=pace_of("object"))
    return tiers


def _is_amount(given: object) -> bool:
    return isinstance(given, Real) and not isinstance(given, bool) and float(given) >= 0


class Folders:
    """The folders of this rank's tiers. Each may hang: who reads there asks through `watched`."""

    def __init__(self, job: Job) -> None:
        self.shared = Path(job.state_dir).absolute() / "checkpoints"
        self._local = None if job.local_dir is None else Path(job.local_dir).absolute() / job.name
        self._rank = job.rank
        self.watched = {
            "shared": WatchedStore(str(self.shared)),
            "local": WatchedStore(str(self._local)),
        }
        #: the name of the job's run, as the shared folder told it, or as long as that cannot as it
        #: is believed to be; "" before it was asked
        self.run = ""

    def to_write(self, tier: Tier, replica: int) -> dict[str, str]:
        """Where we keep ours, as the writer is told: on a disk of ours "within" a folder of the
        job's run, of which the shared folder has the name; that one may hang, and then it is "run",
        if that is known. Raises OSError."""
        shared = str(self.shared)
        if not tier.own:
            return {"folder": shared}
        if self._local is None:
            raise FileNotFoundError("this job has no folder on its nodes' disks")
        within = f"replica-{replica}-rank-{self._rank}"
        return {
            "folder": str(self._local), "within": within, "shared": shared, "run": self.run,
        }  # fmt: skip

    def to_read(self, name: str, unless: Callable[[], object] = lambda: None) -> list[Path]:
        """Where there may be some that we can load: the state is the same in all replicas, so also
        those of another one that was on this node. Changes nothing anywhere. `unless`: see
        `WatchedStore.call`.

        Raises ValueError if this disk has some and the shared folder knows of no run of the job:
        either it is not mounted, or somebody wants to begin anew; OSError.
        """
        if name == "shared":
            return [self.shared]
        if self._local is None:
            return []
        watched = self.watched["local"]
        runs = watched.call(partial(_runs_in, self._local), unless=unless)
        if not runs:
            return []
        run = self.known_run(believed=runs[0].name, unless=unless)  # the last that was used here
        if not run and watched.call(partial(_any_saved_in, runs), unless=unless):
            raise ValueError(
                f"{self._local} has checkpoints of this job and {self.shared} has none: if it "
                f"is not mounted, mount it; to begin anew remove {self._local} on all nodes"
            )
        if not run:
            return []
        ours = (self._local / run).glob(f"replica-*-rank-{self._rank}")
        return watched.call(partial(sorted, ours), unless=unless)

    def listed(
        self, name: str, unless: Callable[[], object] = lambda: None
    ) -> list[tuple[Path, Manifest | Damaged]]:
        """What there is in those; see `store.listed`. `unless`: see `WatchedStore.call`. Raises
        ValueError and OSError as they do."""
        folders, watched = self.to_read(name, unless), self.watched[name]

        def look() -> list[tuple[Path, Manifest | Damaged]]:
            found = []
            for one in itertools.chain.from_iterable(map(store.listed, folders)):
                watched.alive()
                found.append(one)
            return found

        return watched.call(look, unless=unless)

    def known_run(self, believed: str, unless: Callable[[], object] = lambda: None) -> str:
        """See `known_run`, of the shared folder; as long as that cannot tell, what it told before,
        or else what is `believed`. `unless`: see `WatchedStore.call`."""
        try:
            run = self.watched["shared"].call(partial(known_run, self.shared), unless=unless)
        except OSError:
            run = self.run or believed
        self.run = run or self.run
        return run


def _runs_in(folder: Path) -> list[Path]:
    """What this disk has of runs of the job, the one that was used last first."""
    there = [path for path in folder.iterdir() if path.is_dir()] if folder.exists() else []
    return sorted(there, key=lambda path: path.stat().st_mtime, reverse=True)


def _any_saved_in(runs: list[Path]) -> bool:
    return any(store.candidates(path) for run in runs for path in run.iterdir())


def known_run(folder: Path) -> str:
    """The name of the run whose checkpoints are in this folder; "" if there is none. Raises OSError
    if that cannot be told."""
    path = folder / _RUN
    try:
        text = (path / _NAME if path.is_dir() else path).read_text(errors="replace")
    except FileNotFoundError:
        return ""
    if not (found := text.strip()).isalnum():
        raise OSError(f"{path} is damaged: it holds {found[:40]!r}")
    return found


def run_of(folder: Path, name: str = "") -> str:
    """The same, given that name or a new one if it has none; all ranks find the same. Raises
    OSError."""
    path = folder / _RUN
    if found := known_run(folder):
        return found
    make_folder(folder)
    draft = folder / f".{_RUN}-{uuid.uuid4().hex}"
    with draft.open("x") as file:
        file.write(name or uuid.uuid4().hex[:12])
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)  # whole or not at all, and once
    except FileExistsError:
        pass
    except OSError:  # a file system without links: there a folder takes no other's place
        _rename_once(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync(folder)
    return known_run(folder)


def _rename_once(draft: Path, path: Path) -> None:
    """A file as the only one in a folder of that path, unless there is one. Raises OSError."""
    within = draft.with_name(f"{draft.name}.d")
    within.mkdir()
    try:
        draft.rename(within / _NAME)
        sync(within)
        within.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
    finally:
        shutil.rmtree(within, ignore_errors=True)


def next_epoch(folder: Path, above: int) -> int:
    """The number of a start of the job whose checkpoints are in this folder: above that one, and
    above those of all starts before it, also of those that left nothing here. No other start has
    it, however many there are at once. Durable. Raises OSError."""
    make_folder(folder)
    while True:
        above = max([above, *epochs_taken(folder)]) + 1
        try:
            (folder / f"{_EPOCH}{above}").touch(exist_ok=False)
        except FileExistsError:  # another start was quicker
            continue
        taken = epochs_taken(folder)
        if max(taken, default=0) <= above:
            break
        # What we saw at first was old: ours may have been another's, and removed since.
    sync(folder)
    _forget_before(folder, above, taken)
    return above


def note_epoch(folder: Path, epoch: int) -> None:
    """That the members of this epoch train, so that none later has its number or a lower one.
    Durable. Raises OSError, also if there is no such folder, which is made with the first save."""
    (folder / f"{_EPOCH}{epoch}").touch()
    sync(folder)
    _forget_before(folder, epoch, epochs_taken(folder))


def _forget_before(folder: Path, epoch: int, taken: Iterable[int]) -> None:
    for number in taken:
        if number < epoch:
            with contextlib.suppress(OSError):
                (folder / f"{_EPOCH}{number}").unlink()


def epochs_taken(folder: Path) -> list[int]:
    """The last number that a start or an epoch took there, and some before it. Raises OSError."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    numbers = [name.removeprefix(_EPOCH) for name in names if name.startswith(_EPOCH)]
    return [int(number) for number in numbers if number.isdecimal()]
