"""What stands in a checkpoint's JSON files. docs/checkpoint-format.md is written for other readers.

    step-00001234/manifest.json      the checkpoint: which parts it has, and their hashes
    step-00001234/rank-0.json        one part: its tensors, the hashes of its chunks, its files
    step-00001234/rank-0-0000.bin    bytes

Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from runtime.image import CHUNK_BYTES, Damaged, Table, aligned

FORMAT = "drydock-checkpoint"
VERSION = 3
FORMATTED = {"format": FORMAT, "version": VERSION}
MANIFEST = "manifest.json"
#: Bytes of one file of tensors at most.
FILE_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """Consecutive chunks of an image."""

    name: str
    first: int  # chunk
    chunks: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rank's image."""

    step: int
    save: str  # names this save: parts of two saves of one step are never mixed
    rank: int
    table: Table
    hashes: tuple[str, ...]
    files: tuple[DataFile, ...]

    @property
    def name(self) -> str:
        return part_name(self.rank)

    @property
    def digest(self) -> str:
        return self.table.digest(self.hashes)

    def file_of(self, chunk: int) -> str:
        return next(f.name for f in self.files if f.first <= chunk < f.first + f.chunks)

    def to_json(self) -> bytes:
        return sealed(
            {
                **FORMATTED,
                "step": self.step,
                "save": self.save,
                "rank": self.rank,
                "chunk_bytes": CHUNK_BYTES,
                **self.table.describe(),
                "chunks": list(self.hashes),
                "files": [asdict(file) for file in self.files],
            }
        )

    @staticmethod
    def from_json(data: bytes, what: str) -> Part:
        """Raises Damaged, which begins with `what` and says what is wrong."""
        found = opened(data, what)
        with naming_flaws(what):
            part = Part(
                step=int(found["step"]),
                save=str(found["save"]),
                rank=int(found["rank"]),
                table=Table.restore(found),
                hashes=tuple(found["chunks"]),
                files=tuple(DataFile(**file) for file in found["files"]),
            )
        if found["chunk_bytes"] != CHUNK_BYTES:
            raise Damaged(
                f"{what}: chunks of {found['chunk_bytes']} bytes, this version reads {CHUNK_BYTES}"
            )
        covered = [c for f in part.files for c in range(f.first, f.first + f.chunks)]
        if covered != list(range(part.table.chunks)) or len(part.hashes) != part.table.chunks:
            raise Damaged(f"{what}: its files do not hold each of {part.table.chunks} chunks once")
        return part


@dataclass(frozen=True, kw_only=True)
class PartHash:
    """What the manifest says of a part."""

    name: str
    rank: int
    bytes: int  # of its image
    hash: str  # xxh3-128 of its JSON file
    digest: str  # of its image


def hash_of_part(part: Part, data: bytes) -> PartHash:
    """`data`: its JSON file."""
    return PartHash(
        name=part.name,
        rank=part.rank,
        bytes=part.table.bytes,
        hash=xxhash.xxh3_128_hexdigest(data),
        digest=part.digest,
    )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A complete checkpoint."""

    step: int
    save: str
    parts: tuple[PartHash, ...]  # by rank
    #: who made it of what: job, replicas, ranks, versions; see `facts.py`
    facts: dict[str, Any]

    @property
    def digest(self) -> str:
        return digest_of_all([part.digest for part in self.parts])

    def part(self, rank: int) -> PartHash:
        """Raises Damaged if there is none of this rank."""
        for part in self.parts:
            if part.rank == rank:
                return part
        raise Damaged(
            f"this checkpoint is of replicas of {len(self.parts)} ranks and has no rank {rank}"
        )

    def to_json(self) -> bytes:
        return sealed(
            {
                **FORMATTED,
                "step": self.step,
                "save": self.save,
                "digest": self.digest,
                "parts": [asdict(part) for part in self.parts],
                "facts": self.facts,
            }
        )

    @staticmethod
    def from_json(data: bytes, what: str) -> Manifest:
        """Raises Damaged, which begins with `what` and says what is wrong."""
        found = opened(data, what)
        with naming_flaws(what):
            manifest = Manifest(
                step=int(found["step"]),
                save=str(found["save"]),
                parts=tuple(PartHash(**part) for part in found["parts"]),
                facts=dict(found["facts"]),
            )
        if [part.rank for part in manifest.parts] != list(range(len(manifest.parts))):
            raise Damaged(f"{what}: its parts are not of the ranks 0 to {len(manifest.parts) - 1}")
        if manifest.digest != found["digest"]:
            raise Damaged(f"{what}: its digest is not that of its parts")
        return manifest


@contextlib.contextmanager
def naming_flaws(what: str) -> Iterator[None]:
    """Say which key of a JSON file is missing or wrong. Raises Damaged."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{what}: {error!r} is missing or wrong") from error


def part_name(rank: int) -> str:
    return f"rank-{rank}.json"


def digest_of_all(digests: Sequence[str]) -> str:
    """Of the images of all ranks: of a single one its own."""
    if len(digests) == 1:
        return digests[0]
    return xxhash.xxh3_128_hexdigest("-".join(digests).encode())


def layout_of(table: Table, rank: int, shares: int = 1) -> tuple[DataFile, ...]:
    """The files of an image: what is not trained has files of its own, which later checkpoints
    that hold the same can share. Of so many `shares` each gets as much."""
    files: list[DataFile] = []
    share = max(1, -(-(table.bytes - table.frozen) // shares))
    trained = aligned(-(-share // -(-share // FILE_BYTES)), CHUNK_BYTES)  # all are as large
    runs = ((0, table.frozen, FILE_BYTES), (table.frozen, table.bytes, trained))
    for start, end, most in runs:
        for first in range(start, end, most) if start < end else ():
            size = min(most, end - first)
            files.append(
                DataFile(
                    name=f"rank-{rank}-{len(files):04d}.bin",
                    first=first // CHUNK_BYTES,
                    chunks=-(-size // CHUNK_BYTES),
                    bytes=size,
                )
            )
    return tuple(files)


_SEAL = ', "self": "{}"}}'
_SEAL_BYTES = len(_SEAL.format("0" * 32))


def sealed(found: dict[str, Any]) -> bytes:
    """JSON whose last key holds a hash of all bytes before it. `found` is not empty."""
    body = json.dumps(found)[:-1]
    return (body + _SEAL.format(xxhash.xxh3_128_hexdigest(body.encode()))).encode()


def opened(data: bytes, what: str) -> dict[str, Any]:
    """The reverse. Raises Damaged for anything else."""
    try:
        found = json.loads(data)
        kind, version = found["format"], found["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{what} is no checkpoint's JSON: {error!r}") from error
    if kind != FORMAT:
        raise Damaged(f"{what} has the format {kind!r}, not {FORMAT!r}")
    if version != VERSION:
        raise Damaged(
            f"{what} is of format version {version}, this Drydock reads {VERSION}: read it with "
            "the Drydock that wrote it, or a later one (pip install --upgrade drydock-fleet)"
        )
    body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if seal != _SEAL.format(xxhash.xxh3_128_hexdigest(body)).encode():
        raise Damaged(f"{what} was changed after it was written")
    return dict(found)
