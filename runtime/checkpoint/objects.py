"""Checkpoints in an object store (S3 and whatever else fsspec reaches), in the format of a folder.

What is put there is seen whole or not at all, and nothing can be renamed: so the manifest, which
makes a checkpoint one, is put last, and only after everything else was read back. Imports no torch.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import xxhash

from runtime.checkpoint import store
from runtime.checkpoint.manifest import (
    MANIFEST,
    DataFile,
    Manifest,
    Part,
    hash_of_part,
    layout_of,
    part_name,
)
from runtime.image import CHUNK_BYTES, Damaged, Staged, Table, chunks_of, hash_of, pages

#: Objects that are written or read at once: one connection alone is far from what a store can do.
STREAMS = 4
#: Bytes of one request, a multiple of a chunk. S3 wants at least 5 MiB, and 10,000 at most.
BLOCK_BYTES = 16 << 20
#: Seconds. The defaults of botocore would hold a job's start up for minutes.
_PATIENCE = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 4}}
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": _PATIENCE, "default_cache_type": "none"},
    "file": {"auto_mkdir": True},
}


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

    path: str
    manifest: Manifest

    @property
    def age(self) -> tuple[int, int]:
        """Later is larger."""
        return store.epoch_of(self.manifest), self.manifest.step


class ObjectStore:
    """The checkpoints of one job, by the URL of its place: s3://bucket/prefix."""

    def __init__(self, url: str, job: str) -> None:
        """Reaches for nothing yet. Raises ValueError for a URL of a kind that cannot be used."""
        import fsspec  # takes longer than all else here, and few need it

        protocol = url.partition("://")[0]
        fresh = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            self._files, root = fsspec.core.url_to_fs(url, **fresh, **_OPTIONS.get(protocol, {}))
        except (ImportError, ValueError) as error:
            raise ValueError(f"the object store {url!r} cannot be used: {error}") from error
        self._url = url.rstrip("/")
        self._job = job
        self._root = posixpath.join(root, job, "checkpoints")

    def url_of(self, found: Found) -> str:
        """Where it is, for a person."""
        name = posixpath.basename(found.path)
        return f"{self._url}/{self._job}/checkpoints/{name}"

    # --- what there is --------------------------------------------------------------------------

    def found(self) -> list[Found | Damaged]:
        """All complete ones, or why one that has a manifest cannot be read; the newest first.
        Raises OSError."""
        there: list[Found] = []
        damaged: list[Damaged] = []
        for path in self._folders():
            try:
                data = self._small(posixpath.join(path, MANIFEST))
            except FileNotFoundError:
                continue
            try:
                there.append(Found(path, Manifest.from_json(data, f"{path}/{MANIFEST}")))
            except Damaged as error:
                damaged.append(error)
        return [*sorted(there, key=lambda one: one.age, reverse=True), *damaged]

    def named(self, save: str) -> Found:
        """Raises Damaged if it is gone, OSError."""
        for one in self.found():
            if isinstance(one, Found) and one.manifest.save == save:
                return one
        raise Damaged(f"the save {save} is gone")

    def read(self, save: str, rank: int) -> Staged:
        """One rank's image, each chunk compared. Raises Damaged, naming tensors and object;
        OSError."""
        found = self.named(save)
        expected = found.manifest.part(rank)
        path = posixpath.join(found.path, expected.name)
        with _missing_is_damage(path):
            part = store.checked_part(self._small(path), found.manifest, expected, path)
        buffer = pages(part.table.bytes)
        self._compare(found.path, part, buffer)
        return Staged(part.step, part.table, buffer, part.hashes)

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
    ) -> Part:
        """Put one rank's image there and read it back. `ready` is called, on any thread, with the
        end of what is read of the image next, and returns once it is there; what it raises is
        raised. Raises OSError, Damaged."""
        folder = self._folder(step, save)
        files = layout_of(table, rank, STREAMS)
        hashes = [""] * table.chunks

        def put(file: DataFile) -> None:
            start = file.first * CHUNK_BYTES
            path = posixpath.join(folder, file.name)
            with self._opened(path) as out:
                for first in range(start, start + file.bytes, BLOCK_BYTES):
                    end = min(first + BLOCK_BYTES, start + file.bytes)
                    ready(end)
                    for chunk, data in enumerate(chunks_of(image[first:end]), first // CHUNK_BYTES):
                        hashes[chunk] = hash_of(data)
                    with self._asking(path):
                        out.write(image[first:end])

        with ThreadPoolExecutor(STREAMS, "drydock-put") as pool:
            for done in [pool.submit(put, file) for file in files]:
                done.result()
        part = Part(step=step, save=save, rank=rank, table=table, hashes=tuple(hashes), files=files)
        self._compare(folder, part)
        self._put_small(posixpath.join(folder, part.name), part.to_json())
        return part

    def publish(self, step: int, save: str, ranks: int, facts: dict[str, Any]) -> Found | None:
        """Make it a checkpoint if the parts of all ranks are there, by whoever sees that: several
        may, and do the same. Raises OSError, Damaged."""
        folder = self._folder(step, save)
        parts = []
        for rank in range(ranks):
            path = posixpath.join(folder, part_name(rank))
            try:
                data = self._small(path)
            except FileNotFoundError:
                return None
            parts.append(hash_of_part(Part.from_json(data, path), data))
        manifest = Manifest(step=step, save=save, parts=tuple(parts), facts=facts)
        self._put_small(posixpath.join(folder, MANIFEST), manifest.to_json())
        return Found(folder, manifest)

    def prune(self, keep: int, newest: Found) -> None:
        """Remove all but the newest `keep`, and what died before `newest` and was never complete:
        each rank saves one after another. Raises OSError."""
        there = [one for one in self.found() if isinstance(one, Found)]
        complete = {one.path for one in there}
        for path in self._folders():
            step = store.numbers_in(posixpath.basename(path))[0]
            if path not in complete and step < newest.manifest.step:
                self._remove(path)
        for old in there[keep:]:
            if old.path != newest.path:
                self._remove(old.path)

    def give_up(self, step: int, save: str) -> None:
        """It cannot be completed any more."""
        with contextlib.suppress(OSError):
            self._remove(self._folder(step, save))

    # --- requests -------------------------------------------------------------------------------

    def _folder(self, step: int, save: str) -> str:
        """All ranks find the same, and no other save of this step does."""
        number = xxhash.xxh32_intdigest(save.encode()) or 1
        return posixpath.join(self._root, f"step-{step:08d}.{number}")

    def _folders(self) -> list[str]:
        try:
            with self._asking(self._root):
                listed = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        named = (str(path).rstrip("/") for path in listed)
        return [path for path in named if store.is_name(posixpath.basename(path))]

    @contextlib.contextmanager
    def _opened(self, path: str) -> Iterator[Any]:
        """To be written; not there at all if anything fails."""
        with self._asking(path):
            out = self._files.open(path, "wb", block_size=BLOCK_BYTES)
        try:
            yield out
        except BaseException:
            with contextlib.suppress(Exception):  # some kinds know no such thing
                out.discard()
                out.closed = True
            raise
        with self._asking(path):
            out.close()

    def _small(self, path: str) -> bytes:
        with self._asking(path):
            return bytes(self._files.cat_file(path))

    def _put_small(self, path: str, data: bytes) -> None:
        with self._asking(path):
            self._files.pipe_file(path, data)

    def _remove(self, folder: str) -> None:
        """The manifest first, so that what is left of it when we die is no checkpoint."""
        with contextlib.suppress(FileNotFoundError), self._asking(folder):
            self._files.rm_file(posixpath.join(folder, MANIFEST))
        with contextlib.suppress(FileNotFoundError), self._asking(folder):
            self._files.rm(folder, recursive=True)

    def _compare(self, folder: str, part: Part, into: memoryview | None = None) -> None:
        """Read the objects of a part, each chunk compared. Raises Damaged, OSError."""
        wrong: list[int] = []

        def get(path: str, file: DataFile, start: int) -> None:
            end = min(start + BLOCK_BYTES, file.bytes)
            with _missing_is_damage(path), self._asking(path):
                block = memoryview(self._files.cat_file(path, start=start, end=end))
            if len(block) != end - start:
                raise Damaged(f"{path} ends after {start + len(block)} of {file.bytes} bytes")
            for chunk, data in enumerate(chunks_of(block), file.first + start // CHUNK_BYTES):
                if hash_of(data) != part.hashes[chunk]:
                    wrong.append(chunk)
            if into is not None:
                at = file.first * CHUNK_BYTES
                into[at + start : at + end] = block

        with ThreadPoolExecutor(STREAMS, "drydock-get") as pool:
            asked = [
                pool.submit(get, posixpath.join(folder, file.name), file, start)
                for file in part.files
                for start in range(0, file.bytes, BLOCK_BYTES)
            ]
            for done in asked:
                done.result()
        if wrong:
            names = sorted({part.file_of(chunk) for chunk in wrong})
            tensors = store.shortened(store.names_in(part, *sorted(wrong)))
            raise Damaged(
                f"{folder}: {', '.join(names)} (rank {part.rank}), tensors {tensors}: "
                f"{len(wrong)} chunks are not what was saved"
            )

    @contextlib.contextmanager
    def _asking(self, path: str) -> Iterator[None]:
        """Each kind of store has errors of its own: they become OSError."""
        try:
            yield
        except (OSError, Damaged):
            raise
        except Exception as error:
            raise OSError(f"{self._url}, {path}: {error}") from error


@contextlib.contextmanager
def _missing_is_damage(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise Damaged(f"{path} is missing") from error
