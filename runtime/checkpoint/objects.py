"""Checkpoints in an object store (S3 and whatever else fsspec reaches), in the format of a folder.

What is put there is seen whole or not at all, and nothing can be renamed: so the manifest, which
makes a checkpoint one, is put last, and only after everything else was read back. Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import posixpath
import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import xxhash

from runtime.checkpoint import compression, store
from runtime.checkpoint.compression import Stored
from runtime.checkpoint.manifest import (
    MANIFEST,
    DataFile,
    Manifest,
    Packed,
    Part,
    Run,
    chunks_in,
    hash_of_part,
    layout_of,
    part_name,
)
from runtime.checkpoint.meter import Meter
from runtime.checkpoint.packing import Packer
from runtime.checkpoint.threads import run_in_threads
from runtime.image import CHUNK_BYTES, Damaged, Staged, Table, hash_of, pages

#: Objects that are written or read at once: one connection alone is far from what a store can do.
STREAMS = 4
#: Manifests that are read at once: what takes long of each is the answer's way.
SMALL_STREAMS = 8
MAX_UNREADABLE = 8  # manifests that a store refuses; of more it is not they that are wrong
#: Bytes that are asked for at once, a multiple of a chunk.
BLOCK_BYTES = 16 << 20
#: Bytes of one part that is put; s3fs holds several copies of it at once. S3 wants at least 5 MiB;
#: this is what AWS's own tools take.
PUT_BYTES = 8 << 20
#: What is only compared is read chunk by chunk, for each is held in memory beside three buffers.
COMPARED_BYTES = CHUNK_BYTES
#: Where nothing was put for so many seconds no writer is at work. A store shows an object only once
#: it is whole, so this is longer than the largest takes.
IDLE_S = 6 * 3600.0
#: Seconds. By its defaults botocore, and s3fs around it, would hold a job's start up for a quarter
#: of an hour for each request to a store that hangs.
_PATIENCE = {"connect_timeout": 5, "read_timeout": 20}
#: So often botocore makes a request in all: where a job waits for it, and for a writer, for which
#: nobody waits, and which gives up what all ranks have saved.
TRIES, WRITERS_TRIES = 2, 5
_STEP = re.compile(r"/step-(\d+)[./:]")
_GIVE = "give the store's URL and the job, as s3://bucket/prefix/JOB"
#: Kinds whose first name is a bucket, which may be misspelt, or not be restored yet.
_WITH_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az"})


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

    path: str
    manifest: Manifest

    @property
    def age(self) -> tuple[int, int, float]:
        """Later is larger."""
        manifest = self.manifest
        return store.epoch_of(manifest), manifest.step, store.saved_at(manifest)


def found_at(url: str) -> tuple[ObjectStore, list[Found | Damaged]]:
    """The store of a job that a person names as s3://bucket/prefix/JOB, and what it has; or the one
    checkpoint that is named, as `ObjectStore.url_of` does. Raises Damaged if there is none, OSError
    and ValueError."""
    place, _, last = url.rstrip("/").rpartition("/")
    one = last if store.is_name(last) else ""
    of_job = (place if one else url).rstrip("/").removesuffix("/checkpoints")
    root, _, job = of_job.rpartition("/")
    if not root.partition("://")[2]:
        raise ValueError(f"{url} names no job's place: {_GIVE}")
    objects = ObjectStore(root, job)
    found = objects.found()
    if one:
        found = [each for each in found if _is_of(each, one)]
    if not found:
        raise Damaged(f"{url} has no checkpoint: {_GIVE}")
    return objects, found


def _is_of(found: Found | Damaged, name: str) -> bool:
    """Whether it has this name, or is what is wrong with one that has."""
    if isinstance(found, Found):
        return posixpath.basename(found.path) == name
    return f"/{name}/" in str(found) or f"/{name}:" in str(found)


def _options(protocol: str, tries: int) -> dict[str, Any]:
    """Of fsspec, for this kind of store."""
    retries = {"total_max_attempts": tries, "mode": "standard"}
    kinds: dict[str, dict[str, Any]] = {
        "s3": {"config_kwargs": {**_PATIENCE, "retries": retries}, "default_cache_type": "none"},
        "file": {"auto_mkdir": True},
    }
    return kinds.get(protocol, {})


def step_of(damaged: Damaged) -> int:
    """Of the checkpoint that is told of; -1 if none is named."""
    named = _STEP.search(str(damaged))
    return -1 if named is None else int(named[1])


class ObjectStore:
    """The checkpoints of one job, by the URL of its place: s3://bucket/prefix."""

    def __init__(self, url: str, job: str, tries: int = TRIES) -> None:
        """Reaches for nothing yet. `tries`: so often a request is made to a store that is busy or
        does not answer. Raises ValueError for a URL that cannot be used."""
        import fsspec  # takes longer than all else here, and few need it

        protocol, _, place = url.partition("://")
        if "@" in place.partition("/")[0]:  # it is told, logged and kept
            raise ValueError(
                "the object store's URL holds a user's name: credentials belong in the "
                "environment, as its library wants them"
            )
        fresh = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            self._files, root = fsspec.core.url_to_fs(url, **fresh, **_options(protocol, tries))
        except (ImportError, ValueError) as error:
            raise ValueError(f"the object store {url!r} cannot be used: {error}") from error
        if hasattr(self._files, "retries"):
            self._files.retries = 1  # around those of botocore
        self.url = url.rstrip("/")
        self._bucket = root.strip("/").partition("/")[0] if protocol in _WITH_BUCKETS else ""
        self._job = job
        self._root = posixpath.join(root, job, "checkpoints")
        #: by rank, what was last written of it, and where
        self._before: dict[int, tuple[str, Part]] = {}

    def url_of(self, found: Found) -> str:
        """Where it is, for a person."""
        return f"{self.url}/{self._job}/checkpoints/{posixpath.basename(found.path)}"

    # --- what there is --------------------------------------------------------------------------

    def found(self, progress: store.Progress = store.unseen) -> list[Found | Damaged]:
        """All complete ones, or why one that has a manifest cannot be read; the newest first.
        `progress`: see `store.read`. Raises OSError."""
        manifests = self._manifests(progress)
        damaged = [one for one in manifests.values() if isinstance(one, Damaged)]
        return [*_newest_first(manifests), *damaged]

    def named(self, save: str, progress: store.Progress = store.unseen) -> Found:
        """`progress`: see `store.read`. Raises Damaged if it is gone, OSError."""
        for one in self.found(progress):
            if isinstance(one, Found) and one.manifest.save == save:
                return one
        raise Damaged(f"the save {save} is gone")

    def read(self, save: str, rank: int, progress: store.Progress = store.unseen) -> Staged:
        """One rank's image, each chunk compared. `progress`: see `store.read`. Raises Damaged,
        naming tensors and object; OSError."""
        found = self.named(save, progress)
        part = self._part(found, rank)
        if part.packed:
            compression.demand(posixpath.join(found.path, part.name))
        buffer = pages(part.table.bytes)
        for finding in self._compare(found.path, part, buffer, progress):
            raise Damaged(f"{found.path}: {finding}")
        return Staged(part.step, part.table, buffer, part.hashes)

    def verify(self, found: Found, progress: store.Progress = store.unseen) -> list[str]:
        """All that is wrong with a checkpoint, reading every byte of it. `progress`: see
        `store.read`. Raises, where nothing else is wrong, OSError, and NotInstalled if it is packed
        and nothing here unpacks it."""
        findings: list[str] = []
        not_checked: list[Exception] = []
        for expected in found.manifest.parts:
            try:
                part = self._part(found, expected.rank)
                wrong = self._compare(found.path, part, progress=progress)
                findings += [f"{found.path}: {one}" for one in wrong]
            except (compression.NotInstalled, OSError) as error:
                not_checked.append(error)
            except Damaged as error:
                findings.append(str(error))
        if not_checked and not findings:
            raise not_checked[0]
        return [*findings, *(f"{found.path}: {one}" for one in not_checked)]

    # --- writing --------------------------------------------------------------------------------

    def write(
        self,
        rank: int,
        table: Table,
        image: memoryview,
        *,
        step: int,
        save: str,
        ready: Callable[[int], object],
        packer: Packer | None = None,
    ) -> int:
        """Put one rank's image there and read it back; how many bytes were put. Objects of frozen
        weights that hold what those of the rank's last checkpoint hold are copied by the store.
        `ready` is called, on any thread, with the end of what is read of the image next, and
        returns once it is there; what it raises is raised. `packer` says what is packed, and learns
        how quick the store is.

        Raises OSError, Damaged. What was put of ours by then is removed, as far as the store does
        it, but not once all of it was there: another rank may have made it a checkpoint.
        """
        folder = self._folder(step, save)
        files = layout_of(table, rank, STREAMS)
        before = self._before.get(rank) or self._last_part(rank)
        putting = _Putting(table, image, files, ready, packer)
        try:
            self._put(folder, putting, before)
            part = putting.part(step, save, rank)
            findings = self._compare(folder, part)
            if findings and putting.copied:
                # What the store copied was damaged where it was.
                putting = _Putting(table, image, files, ready, packer)
                self._put(folder, putting, None)
                part = putting.part(step, save, rank)
                findings = self._compare(folder, part)
            if findings:
                raise Damaged(f"{folder}: {store.shortened(tuple(map(str, findings)))}")
        except BaseException:
            # The first that fails ends it: one that hangs takes its time for each, and the buffer
            # is held, and nobody hears that the save failed. What is left goes with older ones.
            with contextlib.suppress(OSError):
                for file in files:
                    self._remove_one(posixpath.join(folder, file.name))
            raise
        self._put_small(posixpath.join(folder, part.name), part.to_json())
        self._before[rank] = (folder, part)
        if packer is not None:
            packer.note(putting.meter)
        return putting.meter.bytes

    def _put(self, folder: str, putting: _Putting, before: tuple[str, Part] | None) -> None:
        """Several at once."""

        def put(file: DataFile, stopped: threading.Event) -> None:
            path = posixpath.join(folder, file.name)
            if before is not None and file.first * CHUNK_BYTES + file.bytes <= putting.table.frozen:
                putting.hash(chunks_in(file))
                if self._copy(file, putting.hashes, before, path):
                    putting.copied.append(file)
                    for chunk in chunks_in(file):
                        putting.packed[chunk] = before[1].packing_of(chunk)
                    return
            stored = putting.stored(file)
            with self._opened(path, putting.meter) as out, contextlib.closing(stored):
                for data in stored:
                    if stopped.is_set():
                        raise _GivenUp
                    with self._asking(path), putting.meter.request(len(data)):
                        out.write(data)

        _do_all([partial(put, file) for file in putting.files])

    def _copy(self, file: DataFile, hashes: list[str], before: tuple[str, Part], path: str) -> bool:
        """Whether the store made this object one like that of an earlier checkpoint, for it is to
        hold the same."""
        folder, part = before
        chunks = slice(file.first, file.first + file.chunks)
        if file not in part.files or tuple(hashes[chunks]) != part.hashes[chunks]:
            return False
        if part.packs(file) and not compression.is_installed():
            return False  # it could not be read back
        try:
            with self._asking(path):
                self._files.cp_file(posixpath.join(folder, file.name), path)
        except OSError:  # that checkpoint is gone, or the store copies nothing
            return False
        return True

    def _last_part(self, rank: int) -> tuple[str, Part] | None:
        """This rank's of the newest checkpoint that is there, and where; None if none can be read:
        then all is put anew."""
        with contextlib.suppress(OSError, Damaged):
            for found in self.found():
                if isinstance(found, Found):
                    return found.path, self._part(found, rank)
        return None

    def _part(self, found: Found, rank: int) -> Part:
        expected = found.manifest.part(rank)
        path = posixpath.join(found.path, expected.name)
        try:
            data = self._small(path)
        except FileNotFoundError as error:
            raise Damaged(
                f"{path} is missing: the tensors of rank {rank} are expected there"
            ) from error
        return store.checked_part(data, found.manifest, expected, path)

    def publish(self, step: int, save: str, ranks: int, facts: dict[str, Any]) -> Found | None:
        """Make it a checkpoint if the parts of all ranks are there, by whoever sees that first; it,
        once it is one. Raises OSError, Damaged."""
        folder = self._folder(step, save)
        path = posixpath.join(folder, MANIFEST)
        # It is damaged where a store shows what is half written: then it is written anew.
        with contextlib.suppress(FileNotFoundError, Damaged):
            return Found(folder, Manifest.from_json(self._small(path), path))
        parts = []
        for rank in range(ranks):
            part = posixpath.join(folder, part_name(rank))
            try:
                data = self._small(part)
            except FileNotFoundError:
                return None
            parts.append(hash_of_part(Part.from_json(data, part), data))
        manifest = Manifest(step=step, save=save, parts=tuple(parts), facts=facts)
        self._put_small(path, manifest.to_json())
        # As it is there: another rank may have put its own at the same time.
        return Found(folder, Manifest.from_json(self._small(path), path))

    def is_whole(self, step: int, save: str) -> bool:
        """Whether this save became a checkpoint. Raises OSError."""
        path = posixpath.join(self._folder(step, save), MANIFEST)
        try:
            Manifest.from_json(self._small(path), path)
        except (FileNotFoundError, Damaged):
            return False
        return True

    def give_up(self, step: int, save: str) -> None:
        """Remove what is there of a save that will not be completed. Raises OSError."""
        self._remove(self._folder(step, save))

    def prune(self, newest: Found, keep: int, keep_for_s: float = 0.0) -> None:
        """Remove all but those that stay (see `store.stays`), and what is of an earlier step than
        `newest` and will not be completed any more. What is damaged is not counted, and goes
        once it is older than all that are kept. Raises OSError."""
        manifests = self._manifests()
        for path, found in manifests.items():
            if isinstance(found, Manifest) and store.is_passed_over(found, newest.manifest):
                manifests[path] = Damaged("the job did not go on from it")
        manifests[newest.path] = newest.manifest
        now = math.inf
        with contextlib.suppress(OSError):  # it does not say when anything was put there
            now = self._changed(posixpath.join(newest.path, MANIFEST)).timestamp()
        kept = {
            one.path: one.manifest.step
            for place, one in enumerate(_newest_first(manifests))
            if store.stays(place, one.manifest, newest.manifest, keep, keep_for_s, now=now)
        }
        for path, found in manifests.items():
            step = store.numbers_in(posixpath.basename(path))[0]
            if isinstance(found, store.NOT_JUDGED):
                goes = False  # whoever can read it decides
            elif isinstance(found, Manifest):
                goes = path not in kept
            elif found is None:
                goes = step < newest.manifest.step and self._is_abandoned(path, newest)
            else:
                goes = len(kept) >= keep and step < min(kept.values())
            if goes:
                self._remove(path)

    def _is_abandoned(self, folder: str, newest: Found) -> bool:
        """Whether nobody puts anything there any more, by the store's own clock: a job that went
        back writes steps that came before those of the writers that outlived it. Where the store
        does not say when, nobody knows."""
        try:
            now = self._changed(posixpath.join(newest.path, MANIFEST))
            put = [*map(self._changed, self._ls(folder))]
        except OSError:
            return False
        return all(one < now - timedelta(seconds=IDLE_S) for one in put)

    # --- requests -------------------------------------------------------------------------------

    def _manifests(
        self, progress: store.Progress = store.unseen
    ) -> dict[str, Manifest | Damaged | None]:
        """By the folder: what it holds, why that cannot be read, or None if it has no manifest.
        Raises OSError if none can be read, or many cannot: then it is the store that is ill."""
        folders = self._folders()
        found: dict[str, Manifest | Damaged | None] = dict.fromkeys(folders)
        failed: dict[str, OSError] = {}

        def read(folder: str) -> None:
            path = posixpath.join(folder, MANIFEST)
            try:
                data = self._small(path)
                progress(len(data))
                found[folder] = Manifest.from_json(data, path)
            except FileNotFoundError:
                return
            except Damaged as error:
                found[folder] = error
            except OSError as error:
                failed[folder] = error
                if len(failed) > MAX_UNREADABLE:
                    raise

        run_in_threads(read, folders, min(SMALL_STREAMS, len(folders)), "drydock-manifests")
        if failed:  # a store that is busy refuses a request now and then
            again = [*failed]
            failed.clear()
            run_in_threads(read, again, min(SMALL_STREAMS, len(again)), "drydock-manifests")
        if failed and not any(isinstance(one, Manifest) for one in found.values()):
            raise next(iter(failed.values()))
        return found | {one: store.Unreadable(f"{one}: {why}") for one, why in failed.items()}

    def _folder(self, step: int, save: str) -> str:
        """All ranks find the same, and no other save of this step does."""
        number = xxhash.xxh32_intdigest(save.encode()) or 1
        return posixpath.join(self._root, f"step-{step:08d}.{number}")

    def _folders(self) -> list[str]:
        try:
            listed = self._ls(self._root)
        except FileNotFoundError:
            self._demand_bucket()
            return []
        return [path for path in listed if store.is_name(posixpath.basename(path))]

    def _ls(self, folder: str) -> list[str]:
        with self._asking(folder):
            return [str(path).rstrip("/") for path in self._files.ls(folder, detail=False)]

    def _size(self, path: str) -> float:
        """Of a store that does not say that, infinity."""
        with self._asking(path):
            found: int | None = self._files.size(path)
        return math.inf if found is None else found

    def _changed(self, path: str) -> datetime:
        with self._asking(path):
            found: datetime = self._files.modified(path)
        return found

    def _demand_bucket(self) -> None:
        """Nothing is there: is that so because the bucket is not? Raises OSError."""
        if not self._bucket:
            return
        with self._asking(self._bucket):
            there = self._files.exists(self._bucket)
        if not there:
            raise OSError(f"{self.url}: there is no bucket {self._bucket!r}, or it cannot be seen")

    @contextlib.contextmanager
    def _opened(self, path: str, meter: Meter) -> Iterator[Any]:
        """To be written; not there at all if anything fails."""
        with self._asking(path), meter.request():
            out = self._files.open(path, "wb", block_size=PUT_BYTES)
        try:
            yield out
            with self._asking(path), meter.request():
                out.close()
        except BaseException:
            with contextlib.suppress(Exception):  # some kinds know no such thing
                try:
                    out.discard()
                finally:
                    out.closed = True  # else it is put there when it is removed from memory
            raise

    def _piece(self, path: str, run: Run, stopped: threading.Event) -> memoryview:
        """What is in an object there. Of thousands of answers one may break off on its way: it is
        asked for once more, unless another request has failed. Raises OSError."""

        def ask() -> memoryview:
            with self._asking(path):
                return memoryview(self._files.cat_file(path, start=run.start, end=run.end))

        try:
            return ask()
        except (PermissionError, FileNotFoundError):
            raise
        except OSError:
            if stopped.is_set():
                raise
            return ask()

    def _small(self, path: str) -> bytes:
        with self._asking(path):
            return bytes(self._files.cat_file(path))

    def _put_small(self, path: str, data: bytes) -> None:
        with self._asking(path):
            self._files.pipe_file(path, data)

    def _remove_one(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._asking(path):
            self._files.rm_file(path)

    def _remove(self, folder: str) -> None:
        """The manifest first, so that what is left of it when we die is no checkpoint."""
        self._remove_one(posixpath.join(folder, MANIFEST))
        # Not `rm` of the folder, which takes the name of a job that has brackets for a pattern.
        with contextlib.suppress(FileNotFoundError):
            left = self._ls(folder)
            run_in_threads(
                self._remove_one, left, min(SMALL_STREAMS, len(left)), "drydock-removals"
            )
        # Where a folder is a thing of its own; another rank may put something there just now.
        with contextlib.suppress(OSError), self._asking(folder):
            self._files.rmdir(folder)

    def _compare(
        self,
        folder: str,
        part: Part,
        into: memoryview | None = None,
        progress: store.Progress = store.unseen,
    ) -> list[store.Finding]:
        """Read the objects of a part, each chunk compared; what is wrong with them. If `into` is
        given they are to be used, and nothing more is asked for once something is wrong. Raises,
        where nothing else is wrong, OSError, and NotInstalled if some are packed and nothing here
        unpacks them."""
        longest = COMPARED_BYTES if into is None else BLOCK_BYTES
        judging = _Judging(part, at_first=into is not None)

        def look(file: DataFile, _stopped: threading.Event) -> None:
            """Kinds of stores answer each in its own way who asks for what lies behind the end."""
            with judging.of(file):
                size = self._size(posixpath.join(folder, file.name))
                judging.demand(file, size, part.stored_of(file))

        def get(file: DataFile, run: Run, stopped: threading.Event) -> None:
            with judging.of(file):
                block = self._piece(posixpath.join(folder, file.name), run, stopped)
                progress(len(block))
                judging.demand(file, run.start + len(block), run.end)
                for chunk, stored in part.cut(run, block):
                    data = compression.chunk_in(part, chunk, stored)
                    if data is None:
                        judging.wrong[file.name].append(chunk)
                    elif into is not None:
                        start = chunk * CHUNK_BYTES
                        into[start : start + len(data)] = data

        try:
            if into is None:
                _do_all([partial(look, file) for file in part.files])
            unpacks = compression.is_installed()
            there = [one for one in part.files if one.name not in judging.cut]
            readable = [one for one in there if unpacks or not part.packs(one)]
            runs = [(file, run) for file in readable for run in part.runs_of(file, longest)]
            _do_all([partial(get, *one) for one in runs])
        except _Enough:
            pass
        except OSError as error:
            if not judging.has_found():
                raise
            judging.unread = error
        findings = judging.findings()
        if part.packed and not findings:
            compression.demand(posixpath.join(folder, part.name))
        return findings

    @contextlib.contextmanager
    def _asking(self, path: str) -> Iterator[None]:
        """Each kind of store has errors of its own: they become OSError."""
        try:
            yield
        except (OSError, Damaged):
            raise
        except Exception as error:
            raise OSError(f"{self.url}, {path}: {error}") from error


def _newest_first(manifests: dict[str, Manifest | Damaged | None]) -> list[Found]:
    there = [Found(path, one) for path, one in manifests.items() if isinstance(one, Manifest)]
    return sorted(there, key=lambda one: one.age, reverse=True)


class _Putting:
    """One rank's image while it is put there: what becomes known of its chunks."""

    def __init__(
        self,
        table: Table,
        image: memoryview,
        files: tuple[DataFile, ...],
        ready: Callable[[int], object],
        packer: Packer | None,
    ) -> None:
        self.table = table
        self.files = files
        self.hashes = [""] * table.chunks
        self.packed: list[Packed | None] = [None] * table.chunks
        self.copied: list[DataFile] = []  # by the store, from an earlier checkpoint
        self.meter = Meter()
        self._image = image
        self._ready = ready
        self._packer = packer

    def part(self, step: int, save: str, rank: int) -> Part:
        """What is there, once all is."""
        return Part(
            step=step, save=save, rank=rank, table=self.table, hashes=tuple(self.hashes),
            files=self.files, packed=tuple(self.packed) if any(self.packed) else (),
        )  # fmt: skip

    def hash(self, chunks: range) -> None:
        for chunk in chunks:
            self._ready(min((chunk + 1) * CHUNK_BYTES, len(self._image)))
            self.hashes[chunk] = hash_of(self._chunk(chunk))

    def stored(self, file: DataFile) -> Generator[Stored]:
        """What is to be put of each of its chunks, which are hashed on the way."""
        if self._packer is None or not self._packer.may_pay():
            for chunk in chunks_in(file):
                self.hash(range(chunk, chunk + 1))
                yield self._chunk(chunk)
            return
        found = self._packer.chunks(self._image, self.table, file, self._ready)
        for chunk, (data, how) in zip(chunks_in(file), found, strict=True):
            self.packed[chunk] = how
            self.hash(range(chunk, chunk + 1))
            yield data

    def _chunk(self, chunk: int) -> memoryview:
        return self._image[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]


class _Judging:
    """What is found wrong with the objects of a part while they are read, on several threads."""

    def __init__(self, part: Part, *, at_first: bool) -> None:
        """`at_first`: nothing more is to be read once something is wrong."""
        self.cut: dict[str, str] = {}  # by the object: how it is not all there
        #: its chunks that are not what was saved
        self.wrong: dict[str, list[int]] = {file.name: [] for file in part.files}
        self.unread: OSError | None = None  # what ended it before all was read
        self._part = part
        self._at_first = at_first

    @contextlib.contextmanager
    def of(self, file: DataFile) -> Iterator[None]:
        """What is wrong with the object as such is noted. Raises _Enough, OSError."""
        try:
            yield
        except FileNotFoundError:
            self.cut[file.name] = f"it is missing, {self._part.stored_of(file)} bytes expected"
        except EOFError as error:
            self.cut[file.name] = str(error)
        if self._at_first and (file.name in self.cut or self.wrong[file.name]):
            raise _Enough

    def demand(self, file: DataFile, size: float, expected: int) -> None:
        """Raises EOFError."""
        if size < expected:
            raise EOFError(f"it ends after {size} of {self._part.stored_of(file)} bytes")

    def has_found(self) -> bool:
        return bool(self.cut) or any(self.wrong.values())

    def findings(self) -> list[store.Finding]:
        part, findings = self._part, []
        least = "at least " if self._at_first or self.unread is not None else ""
        for file in part.files:
            chunks: Sequence[int] = sorted(self.wrong[file.name])
            what = f"{least}{len(chunks)} chunks are not what was saved" if chunks else ""
            if file.name in self.cut:
                chunks, what = chunks_in(file), self.cut[file.name]
            if what:
                names = store.names_in(part, *chunks)
                findings.append(store.Finding(file.name, part.rank, names, what))
        if self.unread is not None:
            what = f"the rest could not be read: {self.unread}"
            findings.append(store.Finding(part.name, part.rank, (), what, not_judged=True))
        return findings


class _GivenUp(Exception):
    """Another request failed, so that this one is of no use."""


class _Enough(Exception):
    """What is wrong is enough to know for whoever wants to use it."""


def _do_all(tasks: Sequence[Callable[[threading.Event], None]]) -> None:
    """Several at once. Raises what one raises; then no more are begun, and those under way are told
    by the event."""
    stopped = threading.Event()

    def do(task: Callable[[threading.Event], None]) -> None:
        try:
            task(stopped)
        except _GivenUp:
            return
        except BaseException:
            stopped.set()
            raise

    run_in_threads(do, tasks, STREAMS, "drydock-objects")
