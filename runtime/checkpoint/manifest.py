"""What stands in a checkpoint's JSON files. docs/checkpoint-format.md is written for other readers.

    step-00001234/manifest.json      the checkpoint: which parts it has, and their hashes
    step-00001234/rank-0.json        one part: its tensors, the hashes of its chunks, its files
    step-00001234/rank-0-0000.bin    bytes

Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from runtime.image import CHUNK_BYTES, Damaged, Table, aligned

FORMAT = "drydock-checkpoint"
#: Of what has packed chunks; older readers refuse it, and read all else.
VERSION = 4
PLAIN_VERSION = 3
MANIFEST = "manifest.json"
#: Bytes of one file of tensors at most.
FILE_BYTES = 1 << 30
#: Bytes of an element. Of types smaller than a byte, and of what torch may have besides, nothing is
#: known here.
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "bool": 1, "complex128": 16, "complex64": 8, "complex32": 4,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}  # fmt: skip
LARGEST_ITEM = max(ITEM_BYTES.values())
#: What a file system and its encoding take.
_NAME_OF_FILE = re.compile(r"[^/\0\ud800-\udfff]+")
#: Readers in other languages have whole numbers of 64 bits.
MOST = (1 << 63) - 1
#: Of what is found in a file, in a message.
SHOWN = 80
#: Facts are a few words each; what is deeper no one of those who show them could follow.
DEEPEST = 32


class OtherVersion(Damaged):
    """The checkpoint is intact, but this version does not know its format."""


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """Consecutive chunks of an image."""

    name: str
    first: int  # chunk
    chunks: int
    bytes: int


@dataclass(frozen=True)
class Packed:
    """How a chunk is stored smaller than it is: see `compression`."""

    size: int  # of the elements by which its bytes are sorted
    bytes: int  # that are stored


@dataclass(frozen=True)
class Run:
    """Consecutive chunks as they lie in a file, from `start` to `end`."""

    chunks: range
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """One rank's image: where its tensors lie, its chunks' hashes, and its files."""

    step: int
    save: str  # names this save: parts of two saves of one step are never mixed
    rank: int
    table: Table
    hashes: tuple[str, ...]
    files: tuple[DataFile, ...]
    #: of each chunk, None for one that is stored as it is; empty if all are
    packed: tuple[Packed | None, ...] = ()

    @property
    def name(self) -> str:
        return part_name(self.rank)

    @property
    def digest(self) -> str:
        return self.table.digest(self.hashes)

    def file_of(self, chunk: int) -> str:
        return next(f.name for f in self.files if f.first <= chunk < f.first + f.chunks)

    @property
    def stored(self) -> int:
        """Bytes in its files."""
        return sum(map(self.stored_of, self.files))

    def stored_of(self, file: DataFile) -> int:
        """How long it is."""
        return sum(map(self._stored_in, chunks_in(file))) if self.packed else file.bytes

    def packs(self, file: DataFile) -> bool:
        """Whether any chunk of it is packed."""
        return any(self.packing_of(chunk) for chunk in chunks_in(file))

    def packing_of(self, chunk: int) -> Packed | None:
        return self.packed[chunk] if self.packed else None

    def length_of(self, chunk: int) -> int:
        """Of the chunk itself, in bytes."""
        return min(CHUNK_BYTES, self.table.bytes - chunk * CHUNK_BYTES)

    def _stored_in(self, chunk: int) -> int:
        how = self.packing_of(chunk)
        return self.length_of(chunk) if how is None else how.bytes

    def runs_of(self, file: DataFile, longest: int) -> Iterator[Run]:
        """How a file is read: in runs of so many bytes at most, or of one chunk."""
        first, start, end = file.first, 0, 0
        for chunk in chunks_in(file):
            stored = self._stored_in(chunk)
            if chunk > first and end + stored - start > longest:
                yield Run(range(first, chunk), start, end)
                first, start = chunk, end
            end += stored
        if file.chunks:
            yield Run(range(first, file.first + file.chunks), start, end)

    def cut(self, run: Run, block: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Each chunk of a run, and what is stored of it."""
        start = 0
        for chunk in run.chunks:
            end = start + self._stored_in(chunk)
            yield chunk, block[start:end]
            start = end

    @property
    def packed_in_json(self) -> list[list[int] | None]:
        return [None if one is None else [one.size, one.bytes] for one in self.packed]

    def to_json(self) -> bytes:
        """Return the content of the part's JSON file, sealed by a hash of itself.

        The version is VERSION if some chunks are packed, else PLAIN_VERSION, which older readers
        know.
        """
        packed = self.packed_in_json
        return sealed(
            {
                **formatted(packs=bool(packed)),
                "step": self.step,
                "save": self.save,
                "rank": self.rank,
                "chunk_bytes": CHUNK_BYTES,
                **self.table.describe(),
                "chunks": list(self.hashes),
                "files": [asdict(file) for file in self.files],
                **({"packed": packed} if packed else {}),
            }
        )

    @staticmethod
    def from_json(data: bytes, what: str) -> Part:
        """Raises Damaged, which begins with `what` and says what is wrong."""
        found = opened(data, what)
        with naming_flaws(what):
            part = Part(
                step=_count(found["step"]),
                save=str(found["save"]),
                rank=_count(found["rank"]),
                table=Table.restore(found),
                hashes=tuple(found["chunks"]),
                files=tuple(DataFile(**file) for file in found["files"]),
                packed=packings(found.get("packed", ())),
            )
            chunk_bytes = found["chunk_bytes"]
        if chunk_bytes != CHUNK_BYTES:
            raise Damaged(
                f"{what}: chunks of {shown(chunk_bytes)} bytes, this version reads {CHUNK_BYTES}"
            )
        with naming_flaws(what):
            _refuse_odd_skeleton(part.table, what)
            _refuse_odd_tensors(part.table, what)
            _refuse_odd_files(part, what)
            _refuse_odd_packing(part, what)
        return part


def _refuse_odd_skeleton(table: Table, what: str) -> None:
    """Raises Damaged, or TypeError or ValueError for what is no number, text or pair."""
    left = [table.skeleton]
    while left:
        found = left.pop()
        if isinstance(found, list):
            raise Damaged(f"{what}: its state has a list that is not named as one")
        if not isinstance(found, dict):
            continue
        ((kind, inner),) = found.items()
        if kind == "$tensor":
            if _count(inner) >= len(table.pieces):
                raise Damaged(f"{what}: no tensor {shown(inner)} is among {len(table.pieces)}")
        elif kind == "$dict":
            for key, item in inner:
                hash(key)
                left.append(item)
        elif kind in ("$list", "$tuple"):
            left += inner
        elif kind == "$float":
            float(inner)
        else:
            raise Damaged(f"{what}: its state has {shown(kind)}, which is no kind of value")


def _refuse_odd_tensors(table: Table, what: str) -> None:
    """Raises Damaged, or TypeError or ValueError for what is no number or text."""
    _count(table.bytes)
    for piece in table.pieces:
        name = piece.name.removeprefix(".")
        if not isinstance(piece.dtype, str):
            raise TypeError(f"tensor {name}: the dtype {shown(piece.dtype)}, a text expected,")
        elements = math.prod(_count(size) for size in piece.shape)
        each = ITEM_BYTES.get(piece.dtype)
        if each is not None and _count(piece.bytes) != each * elements:
            raise Damaged(
                f"{what}: tensor {name}, {piece.dtype} of {shown(piece.shape)}, has {piece.bytes} "
                f"bytes, {each * elements} expected"
            )
        if _count(piece.offset) + _count(piece.bytes) > table.bytes:
            raise Damaged(f"{what}: tensor {name} does not lie in the image's {table.bytes} bytes")


def _refuse_odd_files(part: Part, what: str) -> None:
    """Raises Damaged, or TypeError for what is no number or text."""
    table, chunk, as_laid_out = part.table, 0, True
    for file in part.files:
        refuse_odd_name(file.name, what)
        size = min(_count(file.chunks) * CHUNK_BYTES, table.bytes - chunk * CHUNK_BYTES)
        as_laid_out &= _count(file.first) == chunk and _count(file.bytes) == size
        chunk += file.chunks
    if not as_laid_out or (chunk, len(part.hashes)) != (table.chunks, table.chunks):
        raise Damaged(f"{what}: its files do not hold each of {table.chunks} chunks once")


def _refuse_odd_packing(part: Part, what: str) -> None:
    """Raises Damaged, or TypeError for what is no number."""
    if part.packed and len(part.packed) != part.table.chunks:
        raise Damaged(
            f"{what}: it says of {len(part.packed)} chunks how they are packed, {part.table.chunks}"
            " expected"
        )
    for chunk, how in enumerate(part.packed):
        if how is None:
            continue
        if not 1 <= _count(how.size) <= LARGEST_ITEM:
            raise Damaged(f"{what}: chunk {chunk} is sorted by {shown(how.size)} bytes")
        if not 1 <= _count(how.bytes) < part.length_of(chunk):
            raise Damaged(f"{what}: chunk {chunk} is packed to {shown(how.bytes)} bytes")


def refuse_odd_name(name: object, what: str) -> None:
    """A file lies in its checkpoint's folder, wherever that is moved. Raises Damaged."""
    if not isinstance(name, str) or not _NAME_OF_FILE.fullmatch(name) or name in (".", ".."):
        raise Damaged(f"{what} names {shown(name)}, which is no file in its folder")


def _count(value: object) -> int:
    """Raises TypeError, ValueError."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{shown(value)}, a whole number expected,")
    if value < 0:
        raise ValueError(f"{shown(value)}, below 0,")
    if value > MOST:
        raise ValueError(f"a number above {MOST}")
    return value


def shown(value: object) -> str:
    """For a message: not all of what may be megabytes."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


@dataclass(frozen=True, kw_only=True)
class PartHash:
    """What the manifest says of a part."""

    name: str
    rank: int
    bytes: int  # of its image
    hash: str  # xxh3-128 of its JSON file
    digest: str  # of its image
    stored: int | None = None  # bytes in its files, where some are packed

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {key: value for key, value in vars(self).items() if value is not None}


def hash_of_part(part: Part, data: bytes) -> PartHash:
    """`data`: its JSON file."""
    return PartHash(
        name=part.name,
        rank=part.rank,
        bytes=part.table.bytes,
        hash=xxhash.xxh3_128_hexdigest(data),
        digest=part.digest,
        stored=part.stored if part.packed else None,
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

    @property
    def size(self) -> int:
        """Bytes of the state."""
        return sum(part.bytes for part in self.parts)

    @property
    def stored(self) -> int:
        """Bytes in its files."""
        return sum(part.bytes if part.stored is None else part.stored for part in self.parts)

    def part(self, rank: int) -> PartHash:
        """Raises Damaged if there is none of this rank."""
        for part in self.parts:
            if part.rank == rank:
                return part
        raise Damaged(
            f"this checkpoint is of replicas of {len(self.parts)} ranks and has no rank {rank}"
        )

    def to_json(self) -> bytes:
        """Return the content of manifest.json, sealed by a hash of itself.

        The version is VERSION if some part has packed chunks, else PLAIN_VERSION.
        """
        packs = any(part.stored is not None for part in self.parts)
        return sealed(
            {
                **formatted(packs=packs),
                "step": self.step,
                "save": self.save,
                "digest": self.digest,
                "parts": [part.describe() for part in self.parts],
                "facts": self.facts,
            }
        )

    @staticmethod
    def from_json(data: bytes, what: str) -> Manifest:
        """Raises Damaged, which begins with `what` and says what is wrong."""
        found = opened(data, what)
        with naming_flaws(what):
            manifest = Manifest(
                step=_count(found["step"]),
                save=str(found["save"]),
                parts=tuple(PartHash(**part) for part in found["parts"]),
                facts=dict(found["facts"]),
            )
            sizes = [_count(part.bytes) for part in manifest.parts]
            _count(manifest.stored)
            ours, theirs = manifest.digest, found["digest"]
        if is_deeper(manifest.facts, DEEPEST):
            raise Damaged(f"{what}: its facts are nested in each other more than {DEEPEST} times")
        if not sizes:
            raise Damaged(f"{what}: it has no parts, one for each rank expected")
        for part in manifest.parts:
            if part.name != part_name(part.rank):
                raise Damaged(f"{what}: the part of rank {part.rank} is {shown(part.name)}")
        if [part.rank for part in manifest.parts] != list(range(len(manifest.parts))):
            raise Damaged(f"{what}: its parts are not of the ranks 0 to {len(manifest.parts) - 1}")
        if ours != theirs:
            raise Damaged(f"{what}: its digest is not that of its parts")
        return manifest


def is_deeper(value: Any, levels: int) -> bool:
    """Whether objects and lists are nested more than `levels` deep."""
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(not levels or is_deeper(one, levels - 1) for one in within)


@contextlib.contextmanager
def naming_flaws(what: str) -> Iterator[None]:
    """Say which key of a JSON file is missing or wrong. Raises Damaged."""
    try:
        yield
    except KeyError as error:
        raise Damaged(f"{what}: {error} is missing or wrong") from error
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Damaged(f"{what}: {str(error)[:SHOWN]} is missing or wrong") from error


def formatted(*, packs: bool) -> dict[str, Any]:
    """How each JSON file begins."""
    return {"format": FORMAT, "version": VERSION if packs else PLAIN_VERSION}


def packings(found: Sequence[Any]) -> tuple[Packed | None, ...]:
    """As JSON has them. Raises TypeError, ValueError."""
    return tuple(None if one is None else Packed(*one) for one in found)


def chunks_in(file: DataFile) -> range:
    """Return the numbers of the image's chunks that this file holds."""
    return range(file.first, file.first + file.chunks)


def part_name(rank: int) -> str:
    """Return the name of the JSON file of a rank's part."""
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


_LIKE = f'an object with the format "{FORMAT}" and its version'
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
    except (ValueError, RecursionError) as error:
        raise Damaged(
            f"{what} is no checkpoint's JSON: {_LIKE} expected, found {len(data)} bytes that break "
            f"off or are something else ({error})"
        ) from error
    if not isinstance(found, dict):
        raise Damaged(f"{what} is no checkpoint's JSON: {_LIKE} expected, found {shown(data)}")
    if not {"format", "version"} <= found.keys():
        keys = f"an object with the keys {shown([*found])}"
        raise Damaged(f"{what} is no checkpoint's JSON: {_LIKE} expected, found {keys}")
    kind, version = found["format"], found["version"]
    if kind != FORMAT:
        raise Damaged(f"{what} has the format {shown(kind)}, not {FORMAT!r}")
    # Before the version, which a flipped bit may have changed: all versions are sealed alike.
    body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    expected = _SEAL.format(xxhash.xxh3_128_hexdigest(body))
    if seal != expected.encode():
        raise Damaged(
            f"{what} was changed after it was written: {shown(expected)} expected at its end, "
            f"found {shown(seal.decode(errors='replace'))}"
        )
    if version not in (PLAIN_VERSION, VERSION):
        raise OtherVersion(
            f"{what} is of format version {shown(version)}, this Drydock reads {PLAIN_VERSION} and "
            f"{VERSION}: {_who_reads(version)}"
        )
    return found


def _who_reads(version: object) -> str:
    """What is to be done with an intact file of a version that is unknown here."""
    if isinstance(version, int) and version < PLAIN_VERSION:
        return (
            "it is older; take its weights out with the Drydock that wrote it (python -m "
            "runtime.checkpoint export PATH OUT --to safetensors), and begin from them with this "
            "one (python -m runtime.checkpoint import OUT STATE_DIR)"
        )
    return (
        "read it with the Drydock that wrote it, or a later one (pip install --upgrade "
        "drydock-fleet)"
    )
