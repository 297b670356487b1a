"""A checkpoint is read by what docs/checkpoint-format.md says of it, with nothing of ours."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import xxhash
import zstandard

from runtime.checkpoint import store
from runtime.checkpoint.draft import Draft, write
from runtime.checkpoint.packing import Packer
from runtime.image import Staged
from tests.runtime.checkpoint.states import flip_a_bit, staged_at, state_of_step

KNOWN = [("drydock-checkpoint", 3), ("drydock-checkpoint", 4)]
STRUCT = {"float32": "f", "int64": "q"}  # of those dtypes that struct knows


def hash_of(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def unsealed(data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(data)
    body, seal = data.rsplit(b', "self": "', 1)
    assert hash_of(body) == seal.removesuffix(b'"}').decode() == found["self"]
    return found


def read(checkpoints: Path) -> dict[str, Any]:
    """The whole state of a job of one rank: each tensor as its dtype, shape and bytes."""
    folder = max(checkpoints.glob("step-*"))
    manifest = unsealed((folder / "manifest.json").read_bytes())
    assert (manifest["format"], manifest["version"]) in KNOWN
    assert int(folder.name.removeprefix("step-")) == manifest["step"]
    (one,) = manifest["parts"]
    data = (folder / one["name"]).read_bytes()
    assert hash_of(data) == one["hash"]
    part = unsealed(data)
    assert part["save"] == manifest["save"]
    stored = b"".join((folder / file["name"]).read_bytes() for file in part["files"])
    chunks = list(unpacked(part, stored))
    image = b"".join(chunks)
    assert [hash_of(chunk) for chunk in chunks] == part["chunks"]
    digest = json.dumps([part["skeleton"], part["pieces"], part["chunks"]], sort_keys=True)
    assert hash_of(digest.encode()) == one["digest"] == manifest["digest"]
    tensors = [
        (p["dtype"], p["shape"], image[p["offset"] : p["offset"] + p["bytes"]])
        for p in part["pieces"]
    ]
    state: dict[str, Any] = whole(part["skeleton"], tensors)
    return state


def unpacked(part: dict[str, Any], stored: bytes) -> Iterator[bytes]:
    """Each chunk, of files that follow each other without a gap."""
    for number, packed in enumerate(part.get("packed") or [None] * len(part["chunks"])):
        left = part["bytes"] - number * part["chunk_bytes"]
        length = min(part["chunk_bytes"], left)
        size, taken = packed or (1, length)
        data = stored[:taken] if packed is None else zstandard.decompress(stored[:taken])
        stored = stored[taken:]
        assert len(data) == length
        columns = [data[first * (length // size) :][: length // size] for first in range(size)]
        yield (
            bytes(chain.from_iterable(zip(*columns, strict=True))) + data[length - length % size :]
        )
    assert stored == b""


def whole(skeleton: Any, tensors: list[tuple[str, list[int], bytes]]) -> Any:
    match skeleton:
        case {"$tensor": number}:
            return tensors[number]
        case {"$dict": pairs}:
            return {key: whole(value, tensors) for key, value in pairs}
        case {"$tuple": items}:
            return tuple(whole(item, tensors) for item in items)
    return skeleton


def numbers(tensor: tuple[str, list[int], bytes]) -> list[float]:
    dtype, _shape, data = tensor
    return [number for (number,) in struct.iter_unpack(f"<{STRUCT[dtype]}", data)]


def write_packed(folder: Path, staged: Staged) -> None:
    draft = Draft(folder, staged.step, f"save{staged.step}", 1, {})
    draft.write(0, staged.table, memoryview(staged.buffer), packer=Packer(1e6))
    draft.publish()
    draft.close()
    assert store.manifest_of(draft.path).stored < staged.table.bytes


@pytest.mark.parametrize("write_it", [write, write_packed])
def test_every_tensor_and_value_is_found_again(
    tmp_path: Path, write_it: Callable[[Path, Staged], object]
) -> None:
    write_it(tmp_path, staged_at(6))
    write_it(tmp_path, staged_at(7))

    found, saved = read(tmp_path), state_of_step(7)

    assert found["text"] == "kept as it is"
    assert numbers(found["scalar"]) == [7]
    assert numbers(found["base"]) == list(range(400_000))
    weight: Any = saved["model"]
    assert found["model"]["weight"][1] == [300, 7]
    assert numbers(found["model"]["weight"]) == weight["weight"].flatten().tolist()
    assert found["model"]["empty"] == ("float32", [0, 3], b"")
    moments, plain = found["optimizer"][0]
    assert (moments[0], len(moments[2]), plain) == ("bfloat16", 10, 0.25)
    assert found["optimizer"][1] is None


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.json", "rank-0-0000.bin"])
def test_what_was_changed_is_seen(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, staged_at(7))
    flip_a_bit(path / name, 50)

    with pytest.raises((AssertionError, ValueError, KeyError)):
        read(tmp_path)
