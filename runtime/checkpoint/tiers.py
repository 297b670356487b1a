"""Where the checkpoints of a job are kept: on each node's own disk, and in a folder that all share.

The own disk is quick and is gone with its node; the shared folder is slow and outlives it. A state
is in both under the same name of its save. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.checkpoint import store
from runtime.job import Job

TierName = Literal["local", "shared"]
#: The quickest first: of two checkpoints of one state it is loaded.
TIERS: tuple[TierName, ...] = ("local", "shared")
KEEP_LOCAL = 2
_RUN = "run"


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One of them, as this rank writes to it."""

    name: TierName
    every_s: float
    keep: int
    #: Each rank of each replica keeps its part in a folder of its own; else one replica writes, all
    #: its ranks into one folder.
    own: bool


def tiers_of(job: Job, every_s: float | Mapping[str, float], keep: int) -> dict[TierName, Tier]:
    """Those that this job has. `every_s`: seconds between two saves, of all or by tier.

    Raises ValueError for a tier that is none.
    """
    if isinstance(every_s, Mapping) and (odd := set(every_s) - set(TIERS)):
        raise ValueError(f"every_s names {sorted(odd)}; the tiers are {', '.join(TIERS)}")
    default = 20.0
    seconds = {
        name: float(every_s.get(name, default) if isinstance(every_s, Mapping) else every_s)
        for name in TIERS
    }
    shared = Tier(name="shared", every_s=seconds["shared"], keep=keep, own=False)
    tiers: dict[TierName, Tier] = {"shared": shared}
    if job.local_dir is not None:
        tiers["local"] = Tier(
            name="local", every_s=seconds["local"], keep=min(keep, KEEP_LOCAL), own=True
        )
    return tiers


class Folders:
    """The folders of this rank's tiers."""

    def __init__(self, job: Job) -> None:
        self.shared = Path(job.state_dir).absolute() / "checkpoints"
        self._local = None if job.local_dir is None else Path(job.local_dir).absolute()
        self._rank = job.rank
        self._run = ""

    def to_write(self, tier: Tier, replica: int) -> Path:
        """Where we keep ours. Raises OSError if the job's run cannot be told."""
        if not tier.own:
            return self.shared
        return self._of_run() / f"replica-{replica}-rank-{self._rank}"

    def to_read(self, name: str) -> list[Path]:
        """Where there may be some that we can load: the state is the same in all replicas, so also
        those of another one that was on this node. Raises OSError."""
        if name == "shared":
            return [self.shared]
        base = self._of_run()
        return sorted(base.glob(f"replica-*-rank-{self._rank}"))

    def _of_run(self) -> Path:
        """Ours among the folders of the node's disk, where an earlier job of this name may have
        left some: a job that begins anew, in an empty shared folder, is another run.

        Where the shared folder cannot be asked it is the last that was used here. Raises OSError.
        """
        if self._local is None:
            raise OSError("this job has no folder on its nodes' disks")
        if not self._run:
            try:
                self._run = run_of(self.shared)
            except OSError:
                known = [path for path in self._local.glob("*") if path.is_dir()]
                if not known:
                    raise
                return max(known, key=lambda path: path.stat().st_mtime)
        path = self._local / self._run
        path.mkdir(parents=True, exist_ok=True)
        for other in self._local.iterdir():  # of jobs that were begun anew since
            if other != path and other.is_dir():
                for folder in other.glob("replica-*-rank-*"):
                    for old in store.candidates(folder):
                        store.remove(old)
        return path


def run_of(folder: Path) -> str:
    """The name of the run whose checkpoints are in this folder; all its ranks find the same.
    Raises OSError."""
    path = folder / _RUN
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{_RUN}-{uuid.uuid4().hex}"
    draft.write_text(uuid.uuid4().hex[:12])
    try:
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)  # whole or not at all, and once
    except OSError:  # a file system without links
        if not path.exists():
            draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)
    return path.read_text().strip()
