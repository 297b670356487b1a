"""What a dataset holds in memory, in a few words: tells datasets of one class and length apart.

Looks at the arrays that lie in its attributes, and at a bounded part of each. Must never ask for a
sample, run code of the dataset's, or compare what may differ between nodes: numbers, texts, paths.
"""

from __future__ import annotations

import array
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
import xxhash
from torch.utils.data import Dataset, Subset

from runtime.snapshot import bytes_of

END_BYTES = 1 << 20  # of an array's beginning, and of its end, are looked at
PIECES = 64  # evenly spaced between them, for the disk that has a memmap each is a read
PIECE_BYTES = 1 << 12
MAX_BYTES = 256 << 20  # of all arrays; of those after that only what they are
MAX_ENTRIES = 1000  # of one list or dict
MAX_PARTS = 100_000  # of a dataset
#: Of what has no type of its own in memory: numbers, as the module struct names them.
_NUMBERS = frozenset("?cbBhHiIlLqQnNefd")


@dataclass(frozen=True)
class _Numbers:
    """An array, whoever made it."""

    what: str
    count: int
    size: int  # of one, in bytes
    #: the bytes of those from the first to before the second; copies no others
    read: Callable[[int, int], Any]


def fingerprint_of(dataset: Any) -> str:
    """What it says itself of its samples, in a text of that name; "" if nothing."""
    try:
        said = getattr(dataset, "fingerprint", "")
    except Exception:  # a property of the script's own
        return ""
    return said if isinstance(said, str) else ""


def content_of(dataset: Any) -> str:
    """How many bytes it holds in arrays, and a hash of a part of them; "" if it holds none.

    Found in its attributes and in those of the datasets that lie there, such as torch's wrappers
    have; where one has a fingerprint that stands for it.
    """
    hashed, size, left = xxhash.xxh3_128(), 0, MAX_BYTES
    known = False
    for part in itertools.islice(_parts(dataset), MAX_PARTS):
        if type(part) is str:
            known = True
            hashed.update(f"fingerprint {part};".encode())
        elif (numbers := _numbers(part)) is not None:
            known = True
            hashed.update(f"{numbers.what};".encode())
            size += numbers.count * numbers.size
            left -= _add(hashed, numbers) if left > 0 else 0
    return f"{size:,} bytes ({hashed.hexdigest()[:12]})" if known else ""


def _parts(dataset: Any) -> Iterator[Any]:
    """What lies in a dataset's attributes, breadth first, and the fingerprints, as texts."""
    waiting, seen = deque([dataset]), {id(dataset)}
    while waiting:
        one = waiting.popleft()
        # By the type, for an object may answer for another that it first has to load.
        kind = type(one)
        inner: Iterable[Any] = ()
        if issubclass(kind, list | tuple):
            inner = itertools.islice(one, MAX_ENTRIES)
        elif issubclass(kind, dict):
            inner = _values(one)
        elif one is dataset or issubclass(kind, Dataset):
            if said := "" if one is dataset else fingerprint_of(one):
                yield said
                continue
            own = getattr(one, "__dict__", {})
            if issubclass(kind, Subset) and isinstance(own.get("indices"), list | tuple | range):
                yield _of_indices(own["indices"])
            inner = [own[name] for name in sorted(own)]
        if not issubclass(kind, str):
            yield one
        for other in inner:
            if id(other) not in seen:
                seen.add(id(other))
                waiting.append(other)


def _values(entries: dict[Any, Any]) -> list[Any]:
    """In an order that does not hang on where they were found first. Of many none, for it would
    take long."""
    if len(entries) > MAX_ENTRIES:
        return []
    return [entries[name] for name in sorted(entries, key=_place)]


def _place(name: Any) -> tuple[str, Any]:
    """Where a key is sorted; what is of no such kind stays as it lies, behind one another."""
    kind = type(name)
    if kind in (int, float):
        return "0", name
    return ("1", str(name)) if kind is str or issubclass(kind, PurePath) else ("2", 0)


def _of_indices(indices: Any) -> _Numbers:
    """Which samples of another dataset a subset has."""

    def read(first: int, end: int) -> bytes:
        return array.array("q", indices[first:end]).tobytes()

    return _Numbers(f"indices {len(indices)}", len(indices), 8, read)


def _numbers(part: Any) -> _Numbers | None:
    """How to read it, if it is an array."""
    kind = type(part)
    try:
        if issubclass(kind, _Numbers):
            return part  # type: ignore[no-any-return]
        if issubclass(kind, torch.Tensor):
            return _of_torch(part)
        if all(hasattr(kind, name) for name in ("__array_interface__", "dtype", "flat")):
            return _of_numpy(part)
        return None if issubclass(kind, bytes) else _of_memory(part)
    except Exception:  # whatever one of a kind that we do not know raises
        return None


def _of_torch(tensor: torch.Tensor) -> _Numbers | None:
    if tensor.dim() == 0:
        return None
    what = f"{tensor.dtype} {tuple(tensor.shape)}"
    plain = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)
    if not plain or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        # Nothing of it can be read without its whole, or without other processes.
        return _Numbers(what, 0, 1, lambda _first, _end: b"")
    values = tensor.detach()

    def read(first: int, end: int) -> memoryview:
        if values.is_contiguous():
            piece = values.view(-1)[first:end]
        else:
            places = torch.arange(first, end, device=values.device)
            piece = values[torch.unravel_index(places, values.shape)]
        return bytes_of(piece.resolve_conj().resolve_neg().contiguous().cpu())

    return _Numbers(what, values.numel(), values.element_size(), read)


def _of_numpy(given: Any) -> _Numbers | None:
    """Memory-mapped ones too. Without its module, which a script need not have."""
    if not given.shape or given.dtype.hasobject:
        return None
    # `flat` copies what is asked for alone, however the array lies in memory.
    return _Numbers(
        f"{given.dtype.str} {tuple(given.shape)}",
        int(given.size),
        int(given.itemsize),
        lambda first, end: given.flat[first:end].tobytes(),
    )


def _of_memory(given: Any) -> _Numbers | None:
    """Anything else that lies in one piece: array.array, mmap, bytearray."""
    try:
        with memoryview(given) as view:
            format_, shape, size = view.format.lstrip("@=<>!"), view.shape, view.itemsize
            if not shape or format_ not in _NUMBERS or not view.c_contiguous:
                return None
            count = view.nbytes // size
    except TypeError:
        return None

    def read(first: int, end: int) -> bytes:
        with memoryview(given) as view, view.cast("B") as flat:
            return bytes(flat[first * size : end * size])

    return _Numbers(f"{format_} {shape}", count, size, read)


def _add(hashed: xxhash.xxh3_128, numbers: _Numbers) -> int:
    """Hash a part of an array; how many bytes that were. Nothing more of one that cannot be
    read."""
    added = 0
    try:
        for first, end in _spans(numbers.count, max(1, numbers.size)):
            hashed.update(numbers.read(first, end))
            added += (end - first) * numbers.size
    except Exception:
        hashed.update(b"not read;")
    return added


def _spans(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Which of so many numbers of this size are looked at."""
    ends, piece = -(-END_BYTES // size), -(-PIECE_BYTES // size)
    between = count - 2 * ends
    if between <= PIECES * piece:
        yield 0, count
        return
    yield 0, ends
    for place in range(PIECES):
        first = ends + place * between // PIECES
        yield first, first + piece
    yield count - ends, count
