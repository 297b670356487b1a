"""Torch's files are compared with the checksums that they carry, and read as they lie or not at
all."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint.interchange import foreign_state, size_of
from runtime.checkpoint.records import Odd

State = dict[str, torch.Tensor]


@pytest.fixture
def state() -> State:
    torch.manual_seed(0)
    return {"w": torch.arange(1000.0), "zeros": torch.zeros(5000), "b": torch.randn(3, 3)}


@pytest.fixture
def path(tmp_path: Path, state: State) -> Path:
    torch.save(state, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def written_anew(path: Path, change: Callable[[str, bytes], bytes], packed: int) -> Path:
    """By another tool, with checksums that fit."""
    other = path.with_name("other.pt")
    with zipfile.ZipFile(path) as given, zipfile.ZipFile(other, "w", packed) as made:
        for name in given.namelist():
            made.writestr(name, change(name, given.read(name)))
    return other


def as_it_is(_name: str, data: bytes) -> bytes:
    return data


@pytest.mark.parametrize("packed", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_what_another_tool_packed_is_not_taken_for_numbers(path: Path, packed: int) -> None:
    other = written_anew(path, as_it_is, packed)

    with pytest.raises(Odd, match=r"other.pt is damaged: its record .* is packed"):
        foreign_state(other)


def test_what_another_tool_wrote_as_it_lies_is_read(path: Path, state: State) -> None:
    found = foreign_state(written_anew(path, as_it_is, zipfile.ZIP_STORED))["model"]

    assert all(torch.equal(found[name], one) for name, one in state.items())


def test_a_record_that_is_too_short_is_not_filled_from_the_next(path: Path) -> None:
    def shorter(name: str, data: bytes) -> bytes:
        return data[:100] if name.endswith("data/0") else data

    with pytest.raises(Odd, match=r"4000 bytes of a tensor are expected in a record of its own"):
        foreign_state(written_anew(path, shorter, zipfile.ZIP_STORED))


def refused_by_zip(data: bytes) -> bool:
    try:
        zipfile.ZipFile(io.BytesIO(data)).close()
    except Exception:  # of many kinds
        return True
    return False


def test_a_flip_in_its_directory_switches_no_checksum_off(path: Path) -> None:
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        start = archive.start_dir
    flipped = (
        data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        for at in range(start, len(data))
        for bit in (0, 3, 7)
    )
    refused = [one for one in flipped if refused_by_zip(one)]

    assert len(refused) > 10
    for one in refused:
        path.write_bytes(one)
        with pytest.raises(Odd, match=r"model.pt is damaged: .*: get it anew"):
            foreign_state(path)


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "pytorch_model.bin",
        "model.safetensors.index.json",
        "pytorch_model.bin.index.json",
        ".metadata",
    ],
)
def test_of_what_lies_in_place_of_a_file_nobody_waits_for_a_word(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)

    with pytest.raises(Odd, match="is no regular file"):
        foreign_state(tmp_path)


def test_lists_that_are_shared_are_counted_once() -> None:
    nested: list[Any] = [torch.ones(2)]
    for _ in range(100):
        nested = [nested, nested]

    assert size_of(nested) == 8
