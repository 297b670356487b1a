"""Reads a folder of `torch.distributed.checkpoint` (DCP) without believing what it holds.

torch unpickles its metadata and its plain values as they are, which runs whatever they say; here
only tensors and plain values come through. Uses torch's private parts, as the pinned version has
them.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from runtime.checkpoint.manifest import refuse_odd_name

_METADATA = ".metadata"
MOST_ITEMS = 1_000_000  # of a list
#: All that DCP's metadata is made of, by module. A pickle may name what a module merely imports, as
#: in "filesystem" "os.system": so each name is listed.
_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its metadata names {module}.{name}, which is none of DCP's")


class _Reader(FileSystemReader):
    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        with (Path(self.path) / _METADATA).open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        refuse_odd(metadata)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(_EmptyStateDictLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        found = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], found)


def refuse_odd(metadata: Metadata) -> None:
    """Raises ValueError if its tensors would not be whole, or lie outside of the folder."""
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
    for place in (metadata.storage_data or {}).values():
        refuse_odd_name(place.relative_path, "its metadata")
    for path in (metadata.planner_data or {}).values():
        if odd := [key for key in path if isinstance(key, int) and not 0 <= key < MOST_ITEMS]:
            raise ValueError(f"it has a list with an item number {odd[0]}")


def read(source: Path) -> dict[str, Any]:
    """All that is in the folder, nested as it was saved. Raises whatever is wrong with it."""
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=_Reader(source), planner=_Planner(), no_dist=True)  # type: ignore[no-untyped-call]
    return state
