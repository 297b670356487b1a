"""A checkpoint while it is written, by one writer or several for each of its parts.

Whoever finishes last makes it visible by a rename. Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from runtime.checkpoint import compression, disk, store
from runtime.checkpoint.compression import Stored
from runtime.checkpoint.manifest import (
    MANIFEST,
    DataFile,
    Manifest,
    Packed,
    Part,
    chunks_in,
    formatted,
    hash_of_part,
    layout_of,
    naming_flaws,
    opened,
    packings,
    part_name,
    sealed,
)
from runtime.checkpoint.meter import Meter
from runtime.checkpoint.packing import Packer
from runtime.image import CHUNK_BYTES, Damaged, Staged, Table, hash_of, pages

log = logging.getLogger("drydock.checkpoint")


def _host() -> str:
    """What a lock says of who took it, for on some file systems locks are seen on their own host
    alone. A container that shares the folder is another host; containers of one name on two
    machines are told apart by when these were started."""
    try:
        started = disk.read_small(Path("/proc/sys/kernel/random/boot_id")).decode().strip()
    except OSError:
        started = ""
    return f"{socket.gethostname()} {started}".strip()


HOST = _host()
IDLE_S = 600.0  # a draft in which nothing changed for so long will not be finished any more
_PREFIX = ".writing-"
_VERIFIED = "verified"
_SHARE = "-share-"


def _shifted(ready: Callable[[int], object], by: int, end: int) -> None:
    ready(by + end)


@dataclass(frozen=True)
class Written:
    """What one writer wrote."""

    part: Part  # its files, and the hashes of their chunks
    whole: Part | None  # the part with the files of all, for whoever saw that all are there
    bytes: int  # that were written, and not shared with an earlier checkpoint


class Draft:
    """A checkpoint that is being written: by a writer for each of its parts, or by several that
    share each part out, because all have the same state."""

    def __init__(
        self,
        folder: Path,
        step: int,
        save: str,
        ranks: int,
        facts: dict[str, Any],
        shares: int = 1,
    ) -> None:
        """`save` is the same for all its writers, and never used again. Raises OSError."""
        self.folder = folder
        self.step = step
        self.save = save
        self.ranks = ranks
        self.facts = facts
        self.shares = shares
        self.path = folder / f"{_PREFIX}{step:08d}-{save}"
        make_folder(folder)
        self.path.mkdir(exist_ok=True)
        # By its handle it is found also after another writer made it visible.
        self.handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self._locks: list[int] = []
        self._began = time.monotonic()
        #: what we wrote of the JSON files that a checkpoint has
        self._described: dict[str, bytes] = {}

    def close(self) -> None:
        for handle in [*self._locks, self.handle]:
            os.close(handle)

    def write(
        self,
        rank: int,
        table: Table,
        image: memoryview,
        before: Part | None = None,
        *,
        share: int = 0,
        ready: Callable[[int], object] = disk.all_there,
        progress: store.Progress = store.unseen,
        packer: Packer | None = None,
    ) -> Written:
        """Write our share of one rank's image, durably.

        Files that hold what those of the part `before` hold are shared with it. `ready` is called
        with the end of what is read of the image next, on any thread, and returns once it is
        there; what it raises is raised. `progress` is told of the bytes of each file that is
        written. `packer` says what is packed, and learns how quick the folder is. Raises OSError,
        Damaged.
        """
        name = _share_name(rank, share) if self.shares > 1 else part_name(rank)
        self._lock(name)
        layout = layout_of(table, rank, self.shares)
        files = layout[share :: self.shares]
        hashes = [""] * table.chunks
        packed: list[Packed | None] = [None] * table.chunks
        meter = Meter()
        written = 0

        def hash_file(file: DataFile) -> None:
            for chunk in chunks_in(file):
                start, end = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, len(image))
                ready(end)
                hashes[chunk] = hash_of(image[start:end])

        def pieces(file: DataFile, packer: Packer) -> Generator[Stored]:
            found = packer.chunks(image, table, file, ready)
            for chunk, (data, how) in zip(chunks_in(file), found, strict=True):
                packed[chunk] = how
                yield data

        with ThreadPoolExecutor(1, "drydock-hash") as pool:
            hashing = [pool.submit(hash_file, file) for file in files]
            for file, hashed in zip(files, hashing, strict=True):
                start = file.first * CHUNK_BYTES
                if before is not None and file.first + file.chunks <= table.frozen // CHUNK_BYTES:
                    hashed.result()
                    if self._share(file, hashes, before):
                        for chunk in chunks_in(file):
                            packed[chunk] = before.packing_of(chunk)
                        continue
                if packer is not None and packer.may_pay():
                    found = pieces(file, packer)
                    with contextlib.closing(found):
                        written += disk.write_pieces(
                            file.name, found, file.bytes, self.handle, meter
                        )
                else:
                    data, there = image[start : start + file.bytes], partial(_shifted, ready, start)
                    disk.write(file.name, data, self.handle, there, meter)
                    written += file.bytes
                progress(file.bytes)
            for hashed in hashing:
                hashed.result()
        ours = Part(
            step=self.step, save=self.save, rank=rank, table=table, hashes=tuple(hashes),
            files=files, packed=tuple(packed) if any(packed) else (),
        )  # fmt: skip
        if packer is not None:
            packer.note(meter)
        if self.shares == 1:
            self._describe(name, ours.to_json())
            return Written(ours, ours, written)
        said = {
            **formatted(packs=bool(ours.packed)), "table": table.digest(()), "hashes": ours.hashes,
            "packed": ours.packed_in_json,
        }  # fmt: skip
        write_small(name, sealed(said), self.handle)
        return Written(ours, self._whole(ours, layout), written)

    def _whole(self, ours: Part, layout: tuple[DataFile, ...]) -> Part | None:
        """The part, once all who share it out have said what they wrote; several may see that."""
        hashes = list(ours.hashes)
        packed = [ours.packing_of(chunk) for chunk in range(len(hashes))]
        for share in range(self.shares):
            name = _share_name(ours.rank, share)
            try:
                found = opened(disk.read_small(name, self.handle), f"{self.path}/{name}")
            except FileNotFoundError:
                return None
            with naming_flaws(name):
                table, theirs = found["table"], [str(one) for one in found["hashes"]]
                how = packings(found.get("packed", ())) or [None] * len(hashes)
            if table != ours.table.digest(()):
                raise Damaged(f"{name} is of another state than ours: the replicas differ")
            hashes = [mine or other for mine, other in zip(hashes, theirs, strict=True)]
            packed = [mine or other for mine, other in zip(packed, how, strict=True)]
        known = tuple(packed) if any(packed) else ()
        part = replace(ours, hashes=tuple(hashes), files=layout, packed=known)
        self._describe(part.name, part.to_json())
        return part

    def _describe(self, name: str, data: bytes) -> None:
        self._described[name] = data
        try:
            write_small(name, data, self.handle)
        except OSError:
            if self.where() is None:
                raise  # else another writer was faster, and has written the same

    def verify(self, part: Part, progress: store.Progress = store.unseen) -> list[store.Finding]:
        """Read all that we wrote again, from the disk: the files of our part, and the JSON files;
        what is wrong with it. `progress`: see `store.read`. Raises NotInstalled."""
        return [*store.verify_part(part, self.handle, progress), *self._verify_described()]

    def _verify_described(self) -> list[store.Finding]:
        findings = []
        ranks = {part_name(rank): rank for rank in range(self.ranks)}  # the manifest is of all
        for name, data in self._described.items():
            try:
                found = read_back(name, self.handle)
            except (OSError, EOFError) as error:
                findings.append(store.Finding(name, ranks.get(name), (), str(error)))
                continue
            if found != data and not self._is_another_s(name, found):
                what = "its bytes are not what was saved"
                findings.append(store.Finding(name, ranks.get(name), (), what))
        return findings

    def _is_another_s(self, name: str, found: bytes) -> bool:
        """Whether it is the manifest as another writer made it, that saw all parts when we did: its
        facts are its own."""
        with contextlib.suppress(Damaged):
            return name == MANIFEST and Manifest.from_json(found, name).save == self.save
        return False

    def describe_again(self, names: Collection[str]) -> None:
        """Write those of these JSON files anew that are ours. Raises OSError."""
        for name, data in self._described.items():
            if name in names:
                write_small(name, data, self.handle)

    def note_verified(self, rank: int, share: int = 0) -> Manifest | None:
        """Note that what we wrote was read back. The checkpoint, for the one writer with which all
        of it was."""
        if self.ranks * self.shares > 1:
            self._create(f"{_VERIFIED}-{rank}-{share}")
            names = os.listdir(self.handle)  # noqa: PTH208 - by its handle: its name may change
            noted = [name for name in names if name.startswith(_VERIFIED + "-")]
            if len(noted) < self.ranks * self.shares:
                return None
            try:
                self._create(_VERIFIED, os.O_EXCL)
            except FileExistsError:
                return None
            for name in names:  # what only its writers needed
                if name in noted or name.endswith(".lock") or _SHARE in name:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=self.handle)
        return Manifest.from_json(disk.read_small(MANIFEST, self.handle), f"{self.path}/{MANIFEST}")

    def _create(self, name: str, flags: int = 0) -> None:
        os.close(os.open(name, os.O_CREAT | flags, 0o644, dir_fd=self.handle))

    def publish(self) -> bool:
        """Make it visible if all its parts are there. Raises OSError.

        True for the one writer that did it; the draft has another name then.
        """
        parts = []
        for rank in range(self.ranks):
            try:
                data = disk.read_small(part_name(rank), self.handle)
            except FileNotFoundError:
                return False
            part = Part.from_json(data, f"{self.path}/{part_name(rank)}")
            parts.append(hash_of_part(part, data))
        manifest = Manifest(step=self.step, save=self.save, parts=tuple(parts), facts=self.facts)
        if (theirs := self._written_by_another(manifest)) is None:
            self._describe(MANIFEST, manifest.to_json())
        else:  # who wrote it reads it back too, so it is left alone
            self._described[MANIFEST] = theirs
        os.fsync(self.handle)
        used = [n for step, n in map(store.number_of, store.candidates(self.folder))
                if step == self.step]  # fmt: skip
        number = max(used, default=-1)
        while True:
            number += 1
            name = f"step-{self.step:08d}" + (f".{number}" if number else "")
            try:
                self.path.rename(self.folder / name)
            except FileNotFoundError:
                return False  # another writer was faster
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                continue  # another save of this step was made visible just now
            self.path = self.folder / name
            sync(self.folder)
            return True

    def _written_by_another(self, manifest: Manifest) -> bytes | None:
        """The same manifest as another writer that saw all parts has written it already, if one
        has: its facts are its own."""
        try:
            data = disk.read_small(MANIFEST, self.handle)
            found = Manifest.from_json(data, MANIFEST)
        except (OSError, Damaged):  # another may write it just now
            return None
        same = (found.save, found.parts) == (manifest.save, manifest.parts)
        return data if same else None

    def where(self) -> Path | None:
        """The checkpoint that it became, whichever writer made it visible; None if none did."""
        path = Path(f"/proc/self/fd/{self.handle}").readlink()
        if store.is_named(path):
            return path
        for path, found in store.listed(self.folder):  # another host's rename is not seen above
            if isinstance(found, Manifest) and found.save == self.save:
                return path
        return None

    def is_given_up(self) -> bool:
        """Whether another writer failed, so that it will never be complete."""
        if Path(f"/proc/self/fd/{self.handle}").readlink().name.startswith(store.GONE):
            return True
        return not self.path.exists() and self.where() is None  # another host's rename

    def is_overdue(self) -> bool:
        """Whether it is so old that others may have taken it for abandoned, though none failed: on
        other hosts our lock is not seen."""
        return time.monotonic() - self._began > IDLE_S

    def give_up(self) -> None:
        """It cannot be completed any more. First out of sight, for another writer may be about to
        make it visible: only one of the two renames succeeds."""
        gone = self.folder / f"{store.GONE}{self.path.name}-{uuid.uuid4().hex}"
        try:
            self.path.rename(gone)
        except OSError:
            with contextlib.suppress(OSError):
                if (visible := self.where()) is not None:  # the other was faster
                    store.set_aside(visible)
        else:
            store.remove(gone)

    def _lock(self, written: str) -> None:
        """Show that what ends with this file is being written, for as long as we live."""
        name = f".lock-{written}-{os.getpid()}"
        lock = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=self.handle)
        self._locks.append(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: its age will tell
        else:
            os.write(lock, HOST.encode())
        here = self.handle  # it is seen once it is locked
        there = Path(written).with_suffix(".lock").name
        os.rename(name, there, src_dir_fd=here, dst_dir_fd=here)

    def _share(self, file: DataFile, hashes: list[str], before: Part) -> bool:
        """Whether this file is now that of an earlier checkpoint, because it holds the same."""
        end = file.first + file.chunks
        same = tuple(hashes[file.first : end]) == before.hashes[file.first : end]
        if file not in before.files or not same:
            return False
        if before.packs(file) and not compression.is_installed():
            return False  # it could not be read back
        for path, found in store.listed(self.folder):
            if isinstance(found, Manifest) and found.save == before.save:
                with contextlib.suppress(OSError):
                    os.link(path / file.name, file.name, dst_dir_fd=self.handle)
                    return True
        return False  # the file system has no links, or that checkpoint is gone


def write(
    folder: Path,
    staged: Staged,
    keep: int = store.KEEP,
    facts: dict[str, Any] | None = None,
    progress: store.Progress = store.unseen,
) -> Path:
    """A checkpoint of one part, here and now; where it is. `progress` is told of each file's bytes
    when they are written, and again when they are read back. Raises OSError, or Damaged if what was
    written cannot be read back."""
    draft = Draft(folder, staged.step, uuid.uuid4().hex[:12], 1, facts or {})
    try:
        image = memoryview(staged.buffer)
        written = draft.write(0, staged.table, image, progress=progress)
        draft.publish()
        if findings := draft.verify(written.part, progress):
            raise Damaged("; ".join(map(str, findings)))
    except BaseException as error:
        if (visible := draft.where()) is None:
            draft.give_up()
        elif isinstance(error, Damaged):
            store.set_aside(visible)
        else:
            store.remove(visible)
        raise
    finally:
        draft.close()
    try:
        store.prune(folder, draft.path, keep)
        sweep(folder)
    except (OSError, Damaged) as error:  # it is complete all the same
        log.warning("checkpoint_not_cleaned folder=%s error=%s", folder, error)
    return draft.path


def sweep(folder: Path, *, sparing: str = "") -> list[Path]:
    """Remove drafts that no writer will finish, and what is left of what was removed; what of that
    could not be. `sparing`: the name of the save that is under way: of several writers some may
    have come to their end already."""
    newest = next((store.number_of(path)[0] for path in store.candidates(folder)), -1)
    for path in folder.glob(f"{_PREFIX}*"):
        if sparing and path.name.endswith(f"-{sparing}"):
            continue
        if path.is_dir() and is_abandoned(path, newest):
            store.remove(path)
    left = map(store.remove, folder.glob(f"{store.GONE}*"))
    return [path for path in left if path is not None]


def is_abandoned(draft: Path, newest: int = -1) -> bool:
    """Whether nobody writes it any more: on this host that shows, however long a store hangs, else
    by its age. `newest`: the step of a checkpoint that is complete; none that is older is begun any
    more."""
    try:
        changed = max(p.stat().st_mtime for p in [draft, *draft.iterdir()])
        locks = [*draft.glob("*.lock")]
        ours = [lock for lock in locks if _is_ours(lock)]
        free = [lock for lock in ours if not is_locked(lock)]
        if any(not lock.with_suffix(".json").exists() for lock in free):
            return True
        if free != ours:
            return False
        step = draft.name.removeprefix(_PREFIX).partition("-")[0]
        if free and free == locks and step.isdigit() and int(step) < newest:
            return True
    except FileNotFoundError:
        return False  # it was made visible, or removed, meanwhile
    return now_at(draft.parent) - changed > IDLE_S


def now_at(folder: Path) -> float:
    """By the clock that dates what is written there: a server's, of which ours may be far from."""
    probe = folder / f"{store.GONE}now-{uuid.uuid4().hex}"
    try:
        file = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
    except OSError:
        return time.time()
    try:
        return os.fstat(file).st_mtime
    finally:
        os.close(file)
        with contextlib.suppress(OSError):
            probe.unlink()


def _is_ours(lock: Path) -> bool:
    """Whether a process of this host took it. In a folder on the node's own disk there is no other,
    but this one may have been started anew since."""
    taken_by = lock.read_text(errors="replace")
    if store.OWN.fullmatch(lock.parent.parent.name):
        return taken_by.split(" ")[0] == HOST.split(" ")[0]
    return taken_by == HOST


def is_locked(path: Path) -> bool:
    """Whether another process holds this file's lock."""
    handle = os.open(path, os.O_WRONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _share_name(rank: int, share: int) -> str:
    """Where one of several writers of a part says what it wrote of it."""
    return f"rank-{rank}{_SHARE}{share}.json"


def write_small(name: str, data: bytes, folder: int) -> None:
    """There as a whole or not at all, and durable. Raises OSError."""
    draft = f".{name}-{uuid.uuid4().hex}"
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=folder)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.fsync(file)
    finally:
        os.close(file)
    os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)


def read_back(name: str, folder: int) -> bytes:
    """All of a small file, from the disk itself. Raises OSError; EOFError if it has another length
    meanwhile."""
    file = os.open(name, os.O_RDONLY, dir_fd=folder)
    try:  # of the open file: what a host knows of a name may be older, over a network
        data = pages(os.fstat(file).st_size, large=False)
    finally:
        os.close(file)
    disk.read(name, len(data), folder, lambda _offset, _block: None, data)
    return bytes(data)


def make_folder(path: Path) -> None:
    """And all that leads to it; what is new of these survives a loss of power. Raises OSError."""
    new = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in new:
        sync(one.parent)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on its disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
