"""A checkpoint is read by what docs/checkpoint-format.md says of it, with nothing of ours."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
import zstandard

from runtime.checkpoint import store
from runtime.checkpoint.draft import Draft, write
from runtime.checkpoint.packing import Packer
from runtime.checkpoint.suspects import suspect
from runtime.image import Staged
from runtime.snapshot import Copying, any_time, stage
from tests.runtime.checkpoint.states import due, flip_a_bit, staged_at, state_of_step

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
    """The whole state of a job: each tensor as its dtype, shape and bytes."""
    folder = max(trusted(checkpoints))[-1]
    manifest = unsealed((folder / "manifest.json").read_bytes())
    assert (manifest["format"], manifest["version"]) in KNOWN
    assert numbers_of(folder)[0] == manifest["step"]
    digests = [one["digest"] for one in manifest["parts"]]
    several = hash_of("-".join(digests).encode())
    assert manifest["digest"] == (several if digests[1:] else digests[0])
    parts = [part_of(folder, manifest, one) for one in manifest["parts"]]
    state: dict[str, Any] = joined(parts)
    return state


def trusted(checkpoints: Path) -> Iterator[tuple[int, int, int, Path]]:
    """Each that did not lead to NaN, the latest training being the largest."""
    file = checkpoints / "suspects.json"
    suspects = json.loads(file.read_bytes()) if file.exists() else []
    for folder in checkpoints.glob("step-*"):
        manifest = unsealed((folder / "manifest.json").read_bytes())
        state = {"epoch": manifest["facts"].get("epoch", 0), "step": manifest["step"]}
        if state not in suspects:
            yield state["epoch"], *numbers_of(folder), folder


def numbers_of(folder: Path) -> tuple[int, int]:
    step, _, again = folder.name.removeprefix("step-").partition(".")
    return int(step), int(again or 0)


def part_of(folder: Path, manifest: dict[str, Any], one: dict[str, Any]) -> Any:
    data = (folder / one["name"]).read_bytes()
    assert hash_of(data) == one["hash"]
    part = unsealed(data)
    assert part["save"] == manifest["save"]
    stored = b"".join((folder / file["name"]).read_bytes() for file in part["files"])
    chunks = list(unpacked(part, stored))
    image = b"".join(chunks)
    assert [hash_of(chunk) for chunk in chunks] == part["chunks"]
    digest = json.dumps([part["skeleton"], part["pieces"], part["chunks"]], sort_keys=True)
    assert hash_of(digest.encode()) == one["digest"]
    tensors = [
        (p["dtype"], p["shape"], image[p["offset"] : p["offset"] + p["bytes"]])
        for p in part["pieces"]
    ]
    return whole(part["skeleton"], tensors)


def joined(parts: list[Any]) -> Any:
    """What ranks divided along the first dimension, put together; of all else the first one's."""
    match parts[0]:
        case {"part_of": of, "part": (dtype, _shape, _data)}:
            assert of["dim"] == 0
            return dtype, of["shape"], b"".join(part["part"][2] for part in parts)
        case dict() as first:
            return {key: joined([part[key] for part in parts]) for key in first}
        case list():
            return [joined([*items]) for items in zip(*parts, strict=True)]
    return parts[0]


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
        case {"$list": items}:
            return [whole(item, tensors) for item in items]
        case {"$float": text}:
            return float(text)
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


def test_plain_values_are_what_they_were(tmp_path: Path) -> None:
    state = {
        "numbers": [1, 1.0, True, 1e16, 2**70, -0.0, math.inf, -math.inf],
        "none of them": math.nan,
        "by number": {1: "one", 2.0: "two", None: "none"},
        "nested": ([], {}, ["ä", ("",)]),
    }
    write(tmp_path, stage(state, 3))

    found = read(tmp_path)

    assert repr(found) == repr(state)  # which tells 1, 1.0 and True apart


def test_what_ranks_divided_is_put_together(tmp_path: Path) -> None:
    rows = torch.arange(21, dtype=torch.float32).reshape(7, 3)
    of = {"shape": [7, 3], "stride": [3, 1], "dim": 0}
    draft = Draft(tmp_path, 4, "save4", 2, {})
    for rank, part in enumerate((rows[:4], rows[4:])):
        model = {"weight": {"part_of": of, "part": part}, "mean": torch.tensor(rank)}
        staged = stage({"model": model}, 4)
        draft.write(rank, staged.table, memoryview(staged.buffer))
    draft.publish()
    draft.close()

    model = read(tmp_path)["model"]

    assert model["weight"][1] == [7, 3]
    assert numbers(model["weight"]) == [*range(21)]
    assert numbers(model["mean"]) == [0]


def test_the_latest_training_that_did_not_lead_to_nan_is_taken(tmp_path: Path) -> None:
    for step, epoch in ((6, 2), (7, 2), (9, 1)):
        write(tmp_path, staged_at(step), keep=9, facts={"epoch": epoch})
    before = numbers(read(tmp_path)["scalar"])

    suspect(tmp_path, (2, 7))

    assert (before, numbers(read(tmp_path)["scalar"])) == ([7], [6])


def test_the_same_state_has_another_digest_where_other_weights_are_trained() -> None:
    state = state_of_step(7)

    digests = {Copying(state, 7, due=when).finish().digest for when in (any_time, due)}

    assert len(digests) == 2


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.json", "rank-0-0000.bin"])
def test_what_was_changed_is_seen(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, staged_at(7))
    flip_a_bit(path / name, 50)

    with pytest.raises((AssertionError, ValueError, KeyError)):
        read(tmp_path)
