"""Reads a folder of `torch.distributed.checkpoint` (DCP) without believing what it holds.

torch unpickles its metadata and its plain values as they are, which runs whatever they say; here
only tensors and plain values come through. Uses torch's private parts, as the pinned version has
them.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from runtime.checkpoint.manifest import refuse_odd_name
from runtime.checkpoint.records import Odd, in_a_line, refuse_damaged

_METADATA = ".metadata"
MOST_ITEMS = 1_000_000  # of all lists
#: All that DCP's metadata is made of, by module. A pickle may name what a module merely imports, as
#: in "filesystem" "os.system": so each name is listed.
_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "collections": {"OrderedDict"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
}  # fmt: skip

#: Where it says that it was saved, which nobody asks; of Python 3.13 in a module of another name.
_PATH_MODULES = ("pathlib", "pathlib._local")
_PATHS = {
    "PosixPath": PurePosixPath, "PurePosixPath": PurePosixPath,
    "WindowsPath": PureWindowsPath, "PureWindowsPath": PureWindowsPath,
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in _PATH_MODULES and name in _PATHS:
            return _PATHS[name]
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which is none of DCP's")


class _Reader(FileSystemReader):
    def __init__(self, source: Path, metadata: Metadata) -> None:
        super().__init__(source)
        self._metadata = metadata

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        if self._metadata.storage_meta is None:
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class _Planner(_EmptyStateDictLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise Odd(f"{name}: {in_a_line(error)}") from error
        set_element(self.original_state_dict, self.mappings[name], found)


def refuse_odd(metadata: Metadata) -> None:
    """Raises ValueError if its tensors would not be whole, or lie outside of the folder."""
    if not isinstance(metadata, Metadata):
        raise ValueError(f"its metadata is a {type(metadata).__name__}")
    for name, one in metadata.state_dict_metadata.items():
        if not isinstance(one, TensorStorageMetadata):
            continue
        covered = 0
        for chunk in one.chunks:
            pairs = [*zip(chunk.offsets, chunk.sizes, one.size, strict=True)]
            if any(at < 0 or size < 0 or at + size > whole for at, size, whole in pairs):
                raise ValueError(f"a part of {name} lies outside of its shape {[*one.size]}")
            covered += math.prod(chunk.sizes)
        if covered != math.prod(one.size):
            raise ValueError(
                f"its parts of {name} have {covered} of {math.prod(one.size)} elements"
            )
        if overlap(one.chunks):
            raise ValueError(f"two parts of {name} overlap, and others of it are missing")
    for place in (metadata.storage_data or {}).values():
        refuse_odd_name(place.relative_path, "its metadata")
    items: dict[tuple[Any, ...], int] = {}  # of each list, by the keys that lead there
    for path in (metadata.planner_data or {}).values():
        for at, key in enumerate(path):
            if isinstance(key, int):
                if key < 0:
                    raise ValueError(f"it has a list with an item number {key}")
                items[path[:at]] = max(items.get(path[:at], 0), key + 1)
    if (found := sum(items.values())) > MOST_ITEMS:
        raise ValueError(f"its lists have {found:,} items, expected are {MOST_ITEMS:,} at most")


def overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether any two have an element in common."""
    parts = [chunk for chunk in chunks if 0 not in chunk.sizes]
    if len(parts) < 2:
        return False
    # Along the dimension in which most is cut few of them are side by side.
    along = max(range(len(parts[0].sizes)), key=lambda d: len({one.offsets[d] for one in parts}))
    beside: list[ChunkStorageMetadata] = []
    for part in sorted(parts, key=lambda one: one.offsets[along]):
        start = part.offsets[along]
        beside = [one for one in beside if one.offsets[along] + one.sizes[along] > start]
        if any(_meet(part, one) for one in beside):
            return True
        beside.append(part)
    return False


def _meet(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    pairs = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + width and b < a + size for a, size, b, width in pairs)


def read(source: Path) -> dict[str, Any]:
    """All that is in the folder, nested as it was saved. Raises whatever is wrong with it."""
    with (source / _METADATA).open("rb") as file:
        # Not in the reader: torch takes what that raises for old metadata, and says so at length.
        metadata: Metadata = _Unpickler(file).load()
    refuse_odd(metadata)
    for index, place in (metadata.storage_data or {}).items():
        with (source / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            part = io.BytesIO(file.read(place.length))
        refuse_damaged(part, f"{place.relative_path}, {index.fqn},")
    state: dict[str, Any] = {}
    reader = _Reader(source, metadata)
    _load_state_dict(state, storage_reader=reader, planner=_Planner(), no_dist=True)  # type: ignore[no-untyped-call]
    return state
