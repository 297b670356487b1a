"""To other tools and back: every bit arrives, and what is none of theirs is said in a sentence."""

from __future__ import annotations

import argparse
import errno
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import safetensors
import torch
from torch import nn

from runtime.checkpoint import store
from runtime.checkpoint.__main__ import main
from runtime.checkpoint.difference import differences, unchanged
from runtime.checkpoint.draft import Draft, sync, write
from runtime.checkpoint.interchange import (
    EXPORTS,
    foreign_state,
    to_dcp,
    to_safetensors,
    whole_state,
)
from runtime.checkpoint.records import Odd
from runtime.checkpoint.tiers import next_epoch, run_of
from runtime.data import Batches
from runtime.replica.state import TrainingState
from runtime.snapshot import stage, state_of
from tests.runtime.checkpoint.states import flip_a_bit
from tests.runtime.checkpoint.test_resharding import part

Capture = pytest.CaptureFixture[str]


def model() -> nn.Module:
    torch.manual_seed(1)
    built = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8), nn.Linear(8, 30, bias=False))
    built[2].weight = built[0].weight  # tied
    return built.to(torch.float32)


def trained() -> TrainingState:
    built = model()
    state = TrainingState(built, [torch.optim.AdamW(built.parameters())], Batches(samples=24))
    built(torch.arange(8)).sum().backward()
    state.optimizers[0].step()
    state.committed = 4
    return state


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "job" / "checkpoints", trained().copy())


def weights(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = state_of(store.read(path))["model"]
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("kind", sorted(EXPORTS))
def test_what_is_exported_comes_back(path: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    assert main(["export", str(path), str(out), "--to", kind]) == 0

    assert same(foreign_state(out)["model"], weights(path))
    assert {one.name for one in tmp_path.iterdir()} == {"job", "out"}


def told(capsys: Capture, *arguments: str, status: int = 0) -> dict[str, Any]:
    """The one object that the command answers with."""
    assert main([*arguments, "--json"]) == status
    ((found),) = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_programs_are_told_what_was_exported_and_imported(
    path: Path, tmp_path: Path, capsys: Capture
) -> None:
    out, new = tmp_path / "out.pt", tmp_path / "new"

    exported = told(capsys, "export", str(path), str(out), "--to", "torch")
    brought = told(capsys, "import", str(out), str(new))

    assert exported == {"path": str(path), "out": str(out), "to": "torch", "left_out": []}
    (there,) = store.candidates(new / "checkpoints")
    assert brought == {
        "source": str(out), "path": str(there), "tensors": len(weights(path)),
        "left_out": [name for name in whole_state(path) if name != "model"],
    }  # fmt: skip


def test_what_an_import_leaves_out_is_said(tmp_path: Path, capsys: Capture) -> None:
    theirs = {"model": Counting(2, 2).state_dict(), "optimizer": {"lr": 1.0}, "epoch": 3}
    torch.save(theirs, tmp_path / "theirs.pt")
    torch.save(theirs["model"], tmp_path / "weights.pt")

    assert main(["import", str(tmp_path / "theirs.pt"), str(tmp_path / "new")]) == 0
    tensors, without = capsys.readouterr().out.splitlines()
    alone = told(capsys, "import", str(tmp_path / "weights.pt"), str(tmp_path / "newer"))

    assert tensors.startswith("2 tensors are in ")
    assert without == "without optimizer, epoch: a job begins from weights alone"
    assert (alone["tensors"], alone["left_out"]) == (2, [])


@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_what_has_room_for_it_has_the_optimizer_too(path: Path, tmp_path: Path, kind: str) -> None:
    EXPORTS[kind](whole_state(path), tmp_path / "out")

    found = foreign_state(tmp_path / "out")
    by_number = {str(n): one for n, one in found["optimizers"]["0"]["state"].items()}  # DCP's are
    moment = state_of(store.read(path))["optimizers"]["0"]["state"][0]["exp_avg"]
    assert torch.equal(by_number["0"]["exp_avg"], moment)
    assert found["step"] == 4


def test_safetensors_are_cut_and_indexed_as_hugging_face_does(path: Path, tmp_path: Path) -> None:
    to_safetensors(whole_state(path), tmp_path / "out", shard_bytes=1000)

    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert index["weight_map"].keys() == weights(path).keys()
    (length,) = struct.unpack("<Q", (tmp_path / "out" / files[0]).read_bytes()[:8])
    header = json.loads((tmp_path / "out" / files[0]).read_bytes()[8 : 8 + length])
    assert header["0.weight"]["shape"] == [30, 8]
    assert same(foreign_state(tmp_path / "out")["model"], weights(path))


def test_what_was_divided_is_exported_whole(tmp_path: Path) -> None:
    tensor = torch.randn(7, 3)
    of_three_ranks(tmp_path, [{"weight": part(tensor, rank, 3)} for rank in range(3)])

    assert main(["export", str(tmp_path), str(tmp_path / "out.pt"), "--to", "torch"]) == 0
    assert torch.equal(foreign_state(tmp_path / "out.pt")["model"]["weight"], tensor)


def of_three_ranks(folder: Path, models: list[dict[str, Any]]) -> None:
    draft = Draft(folder, 4, "s", 3, {})
    for rank, one in enumerate(models):
        image = stage({"step": 4, "model": one}, 4)
        draft.write(rank, image.table, memoryview(image.buffer))
    assert draft.publish()
    draft.close()


@pytest.mark.parametrize(
    "state",
    [
        {"as_saved": True, "model": {"weight": torch.ones(2)}},
        {"model": {"weight": part(torch.ones(9, 3), 0, 2)}},
    ],
)
def test_the_part_of_one_rank_is_not_exported_as_the_whole(
    tmp_path: Path, capsys: Capture, state: dict[str, Any]
) -> None:
    """As it lies on a node's disk."""
    path = write(tmp_path / "disk", stage(state, 1), facts={"ranks": 2})

    assert main(["export", str(path), str(tmp_path / "out"), "--to", "torch"]) == 2

    said = f"{path} has the part of one rank of 2 alone: give that step in the shared folder"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_of_what_does_not_make_a_whole_the_path_is_said(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path, stage({"model": {"weight": part(torch.ones(9, 3), 0, 2)}}, 1))

    assert main(["export", str(path), str(tmp_path / "out"), "--to", "torch"]) == 2

    said = f"{path}: of model.weight, [9, 3], only 5 were saved\n"
    assert capsys.readouterr().err == said


def imported(source: Path, folder: Path, *more: str) -> TrainingState:
    """A new job that begins from what was imported."""
    assert main(["import", str(source), str(folder), *more]) == 0
    (found,) = store.candidates(folder / "checkpoints")
    state = trained()
    state.committed = -1
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.zero_()
    state.restore(state_of(store.read(found)))
    return state


def test_a_job_begins_from_what_was_imported(path: Path, tmp_path: Path) -> None:
    EXPORTS["torch"](whole_state(path), tmp_path / "weights.pt")

    state = imported(tmp_path / "weights.pt", tmp_path / "new")

    assert same(state.model.state_dict(), weights(path))
    assert state.committed == -1  # its first step is step 0


def test_what_was_imported_lies_as_any_copy_of_it(path: Path, tmp_path: Path) -> None:
    EXPORTS["torch"](whole_state(path), tmp_path / "weights.pt")
    imported(tmp_path / "weights.pt", tmp_path / "new")

    (found,) = store.candidates(tmp_path / "new" / "checkpoints")
    copy = stage({"model": foreign_state(tmp_path / "weights.pt")["model"]}, 0)
    staged = store.read(found)
    assert (staged.table.bytes, staged.table.trained) == (copy.table.bytes, 0)
    assert staged.digest == copy.digest


@pytest.mark.parametrize(("written", "tied"), [("0.weight", "2.weight"), ("2.weight", "0.weight")])
def test_a_tied_weight_that_was_written_once_is_put_back_by_all_its_names(
    tmp_path: Path, written: str, tied: str
) -> None:
    given = {name: one + 1 for name, one in model().state_dict().items()}
    del given[tied]
    torch.save(given, tmp_path / "theirs.pt")

    state = imported(tmp_path / "theirs.pt", tmp_path / "new")

    assert same(state.model.state_dict(), {**given, tied: given[written]})


def test_what_is_missing_and_tied_to_nothing_is_another_model_s(tmp_path: Path) -> None:
    given = model().state_dict()
    del given["1.bias"], given["2.weight"]
    torch.save(given, tmp_path / "theirs.pt")

    with pytest.raises(ValueError, match=r'another model .* in state_dict: "1\.bias"\.\)'):
        imported(tmp_path / "theirs.pt", tmp_path / "new")


@pytest.mark.parametrize("begin", [run_of, partial(next_epoch, above=0)])
def test_where_a_job_has_begun_nothing_is_imported(
    tmp_path: Path, capsys: Capture, begin: Callable[[Path], object]
) -> None:
    """Its nodes' disks may have checkpoints of it, which are later than any import."""
    begin(tmp_path / "job" / "checkpoints")
    torch.save(model().state_dict(), tmp_path / "theirs.pt")

    assert main(["import", str(tmp_path / "theirs.pt"), str(tmp_path / "job")]) == 2

    told = capsys.readouterr().err
    assert "is of a job that has begun (" in told
    assert told.endswith("begin in another folder\n")
    assert store.candidates(tmp_path / "job" / "checkpoints") == []


def test_where_nothing_can_be_imported_nothing_is_read(
    path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(model().state_dict(), tmp_path / "theirs.pt")
    monkeypatch.setattr(torch, "load", read_by_nobody)

    assert main(["import", str(tmp_path / "theirs.pt"), str(tmp_path / "job")]) == 2
    assert "has checkpoints (step-00000004, …): begin in another" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model-00002-of-00003.safetensors", "is one of the 3 files of a model"),
        ("pytorch_model-00001-of-00002.bin", "is one of the 2 files of a model"),
        ("model.safetensors.index.json", "is the index of a model's files"),
        ("__0_0.distcp", "is a file of a DCP folder"),
        (".metadata", "is a file of a DCP folder"),
    ],
)
def test_of_one_file_of_several_it_is_said_that_they_belong_together(
    tmp_path: Path, capsys: Capture, name: str, said: str
) -> None:
    for there in ("pytorch_model.bin.index.json", name):
        with (tmp_path / there).open("wb") as file:
            torch.save({"w": torch.ones(1)}, file)

    assert main(["import", str(tmp_path / name), str(tmp_path / "new")]) == 2

    told = capsys.readouterr().err
    assert told == (
        f"{tmp_path / name} {said}: give its folder: python -m runtime.checkpoint import {tmp_path}"
        " STATE_DIR\n"
    )


def test_of_one_file_of_several_without_the_others_it_is_said_what_is_lacking(
    tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "pytorch_model-00001-of-00002.bin"
    torch.save({"w": torch.ones(1)}, path)

    assert main(["import", str(path), str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == (
        f"{path} is one of the 2 files of a model, and beside it is no index of them: get all of "
        "them with the index, or if it is a model of its own rename it, as to model.bin\n"
    )


def test_one_file_that_is_all_is_imported_whatever_its_number(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model-00001-of-00001.bin")

    found = foreign_state(tmp_path / "pytorch_model-00001-of-00001.bin")

    assert same(found["model"], {"w": torch.ones(1)})


@pytest.mark.parametrize("within", [".", "checkpoints", "checkpoints/step-00000004"])
def test_of_a_checkpoint_of_ours_it_is_said_how_it_is_imported(
    path: Path, tmp_path: Path, capsys: Capture, within: str
) -> None:
    assert path == tmp_path / "job" / "checkpoints" / "step-00000004"
    ours = tmp_path / "job" / within

    assert main(["import", str(ours), str(tmp_path / "new")]) == 2

    assert capsys.readouterr().err == (
        f"{ours} is of Drydock itself: write it for other tools first, and import that: python -m "
        f"runtime.checkpoint export {ours} OUT --to torch\n"
    )


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda found: {"state_dict": found, "epoch": 3},
        lambda found: {"model_state_dict": found},
        lambda found: found,
    ],
)
def test_weights_are_found_where_others_keep_them(tmp_path: Path, wrapped: Any) -> None:
    found = {f"module.{name}": one for name, one in model().state_dict().items()}
    torch.save(wrapped(found), tmp_path / "theirs.pt")

    state = imported(tmp_path / "theirs.pt", tmp_path / "new", "--strip", "module.")
    assert same(state.model.state_dict(), model().state_dict())


class Counting(nn.Linear):
    """A module that keeps something else beside its weights."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"seen": 3}


def test_what_modules_keep_beside_their_weights_is_imported_with_them(tmp_path: Path) -> None:
    torch.save(Counting(2, 2).state_dict(), tmp_path / "theirs.pt")

    assert main(["import", str(tmp_path / "theirs.pt"), str(tmp_path / "new")]) == 0

    (found,) = store.candidates(tmp_path / "new" / "checkpoints")
    assert state_of(store.read(found))["model"]["_extra_state"] == {"seen": 3}


def test_what_an_export_to_safetensors_leaves_out_is_said(tmp_path: Path, capsys: Capture) -> None:
    torch.save(Counting(2, 2).state_dict(), tmp_path / "theirs.pt")
    main(["import", str(tmp_path / "theirs.pt"), str(tmp_path / "new")])
    (found,) = map(str, store.candidates(tmp_path / "new" / "checkpoints"))
    capsys.readouterr()

    assert main(["export", found, str(tmp_path / "out"), "--to", "safetensors"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    answers = [told(capsys, "export", found, str(tmp_path / to), "--to", to) for to in EXPORTS]

    assert "without _extra_state, which safetensors cannot keep" in said
    names = {answer["to"]: answer["left_out"] for answer in answers}
    assert names == {"dcp": [], "safetensors": ["_extra_state"], "torch": []}


def test_a_folder_of_bin_files_is_read_by_its_index(tmp_path: Path) -> None:
    given = model().state_dict()
    for number, name in enumerate(given):
        torch.save({name: given[name]}, tmp_path / f"part-{number}.bin")
    where = {name: f"part-{number}.bin" for number, name in enumerate(given)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))

    assert same(foreign_state(tmp_path)["model"], dict(given))
    (tmp_path / "part-1.bin").unlink()
    assert main(["import", str(tmp_path), str(tmp_path / "new")]) == 2


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"b": torch.ones(1), "a": torch.zeros(1)}, "part-1.bin has a, which is in part-0.bin as "),
        ({"c": torch.ones(1)}, "says that part-1.bin has b: "),
        ({"b": torch.ones(1), "c": torch.ones(1)}, "part-1.bin has c, of which "),
    ],
)
def test_files_of_two_saves_are_not_taken_for_one(
    tmp_path: Path, capsys: Capture, other: dict[str, torch.Tensor], said: str
) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "part-0.bin")
    torch.save(other, tmp_path / "part-1.bin")
    where = {"a": "part-0.bin", "b": "part-1.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))

    assert main(["import", str(tmp_path), str(tmp_path / "new")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_a_bit_that_was_flipped_on_the_way_is_not_imported(
    path: Path, tmp_path: Path, capsys: Capture, kind: str
) -> None:
    out = tmp_path / "out"
    EXPORTS[kind](whole_state(path), out)
    content = bytes(weights(path)["1.weight"].view(torch.uint8).flatten().tolist())
    (file,) = [one for one in (out, *out.rglob("*.distcp")) if one.is_file()]
    flip_a_bit(file, file.read_bytes().index(content) + 9)

    assert main(["import", str(out), str(tmp_path / "new")]) == 2
    assert "is damaged: the record " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("method", [8, 1])  # packed, in a way that there is or is not
def test_a_bit_that_was_flipped_in_the_directory_of_a_file_is_not_imported(
    tmp_path: Path, capsys: Capture, method: int
) -> None:
    torch.save(model().state_dict(), tmp_path / "theirs.pt")
    data = bytearray((tmp_path / "theirs.pt").read_bytes())
    data[data.index(b"PK\x01\x02") + 10] = method
    (tmp_path / "theirs.pt").write_bytes(data)

    assert main(["import", str(tmp_path / "theirs.pt"), str(tmp_path / "new")]) == 2

    told = capsys.readouterr().err
    assert "theirs.pt is damaged: " in told
    assert told.count("\n") == 1


class Evil:
    """What a pickle may do."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("was-run"),))


def test_what_is_none_of_theirs_is_said_in_a_sentence(
    path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Evil()}, tmp_path / "evil.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"loss": 3.0}, tmp_path / "loss.pt")
    (tmp_path / "text.safetensors").write_text("no tensors")
    (tmp_path / "empty").mkdir()
    cases = {
        "evil.pt": "no torch file that can be read safely",
        "list.pt": "holds a list; expected a dict of tensors by name",
        "loss.pt": "has no model's weights",
        "text.safetensors": "cannot be read",
        "empty": "has none of model.safetensors",
        "nowhere": "does not exist",
    }
    for name, words in cases.items():
        assert main(["import", str(tmp_path / name), str(tmp_path / "new")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "was-run").exists()
    assert not (tmp_path / "new").exists()

    torch.save(model().state_dict(), tmp_path / "good.pt")
    for arguments, words in {
        ("import", "good.pt", "job"): "has checkpoints (step-00000004, …): begin in another",
        ("import", "good.pt", "new", "--strip", "net."): "no tensor's name begins with 'net.'",
        ("export", "job", "good.pt", "--to", "torch"): "good.pt exists: give another name",
        ("export", "empty", "out", "--to", "torch"): "holds no checkpoint",
    }.items():
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


def calling(module: str, name: str) -> bytes:
    """A pickle that calls this with the name of a folder, found as the fourth protocol finds it."""
    words = [b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name, "was-run")]
    return b"\x80\x04" + words[0] + words[1] + b"\x93" + words[2] + b"\x85R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "mkdir"),
        ("torch.distributed.checkpoint.filesystem", "os.mkdir"),  # what a module imports
        ("torch", "os.mkdir"),
        ("torch.distributed.checkpoint.metadata", "os.mkdir"),
    ],
)
def test_a_dcp_folder_runs_nothing(
    path: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    EXPORTS["dcp"](whole_state(path), tmp_path / "theirs")
    (tmp_path / "theirs" / ".metadata").write_bytes(calling(module, name))

    assert main(["import", "theirs", "new"]) == 2
    assert f"its metadata names {module}.{name}, which is none of DCP's" in capsys.readouterr().err
    assert not (tmp_path / "was-run").exists()


def test_plain_values_of_a_dcp_folder_run_nothing(tmp_path: Path, capsys: Capture) -> None:
    to_dcp({"model": {"weight": torch.ones(2)}, "odd": Evil()}, tmp_path / "theirs")

    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "new")]) == 2
    assert "cannot be read safely as a DCP folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("torch", "(it holds argparse.Namespace, which is neither a tensor nor a plain value): "),
        ("dcp", "args: it holds argparse.Namespace, which is neither a tensor nor a plain value"),
    ],
)
def test_what_is_not_unpickled_is_named(
    tmp_path: Path, capsys: Capture, kind: str, said: str
) -> None:
    state = {"model": {"weight": torch.ones(2)}, "args": argparse.Namespace(lr=0.1)}
    EXPORTS[kind](state, tmp_path / "theirs")

    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "new")]) == 2

    told = capsys.readouterr().err
    assert said in told
    assert "trust" not in told


@pytest.mark.parametrize(
    "path_class",
    ["pathlib._local\nPosixPath", "pathlib\nWindowsPath", "pathlib._local\nWindowsPath"],
)
def test_a_dcp_folder_of_another_python_or_system_is_read(tmp_path: Path, path_class: str) -> None:
    to_dcp({"model": {"weight": torch.ones(2)}}, tmp_path / "theirs")
    file = tmp_path / "theirs" / ".metadata"
    metadata = pickle.loads(file.read_bytes())  # noqa: S301 - it was written here
    ours = b"cpathlib\nPosixPath\n"
    words = pickle.dumps(metadata, protocol=3)
    assert ours in words
    file.write_bytes(words.replace(ours, f"c{path_class}\n".encode()))

    assert torch.equal(foreign_state(tmp_path / "theirs")["model"]["weight"], torch.ones(2))


@pytest.mark.parametrize("metadata", [b"", pickle.dumps({}), calling("os", "mkdir")])
def test_odd_metadata_of_a_dcp_folder_is_said_in_one_line(
    path: Path, tmp_path: Path, metadata: bytes
) -> None:
    EXPORTS["dcp"](whole_state(path), tmp_path / "theirs")
    (tmp_path / "theirs" / ".metadata").write_bytes(metadata)

    ended = command("import", tmp_path / "theirs", tmp_path / "new")

    assert ended.returncode == 2
    assert ended.stderr.count(b"\n") == 1


def command(*arguments: object) -> subprocess.CompletedProcess[bytes]:
    """What a person has of it: here a logger's words would be caught."""
    words = [sys.executable, "-m", "runtime.checkpoint", *map(str, arguments)]
    return subprocess.run(words, check=False, capture_output=True)


def without_parts(metadata: Any) -> None:
    (weight,) = metadata.state_dict_metadata.values()
    weight.chunks = []


def beyond_its_shape(metadata: Any) -> None:
    (weight,) = metadata.state_dict_metadata.values()
    weight.chunks[0].sizes = torch.Size([9])


def one_half_twice(metadata: Any) -> None:
    (weight,) = metadata.state_dict_metadata.values()
    half = replace(weight.chunks[0], sizes=torch.Size([1]))
    weight.chunks = [half, half]


def outside(metadata: Any) -> None:
    index, place = next(iter(metadata.storage_data.items()))
    metadata.storage_data[index] = replace(place, relative_path="../elsewhere.distcp")


def in_long_lists(metadata: Any) -> None:
    paths = {f"list {n}": ("lists", f"{n}", 300_000) for n in range(4)}
    metadata.planner_data.update(paths)


def before_the_first(metadata: Any) -> None:
    metadata.planner_data["odd"] = ("list", -1)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (in_long_lists, "its lists have 1,200,004 items, expected are 1,000,000 at most"),
        (before_the_first, "it has a list with an item number -1"),
        (without_parts, "its parts of model.weight have 0 of 2 elements"),
        (beyond_its_shape, "a part of model.weight lies outside of its shape [2]"),
        (one_half_twice, "two parts of model.weight overlap, and others of it are missing"),
        (outside, "names '../elsewhere.distcp', which is no file in its folder"),
    ],
)
def test_a_dcp_folder_that_is_not_whole_gives_no_weights(
    tmp_path: Path, capsys: Capture, spoil: Callable[[Any], None], said: str
) -> None:
    to_dcp({"model": {"weight": torch.ones(2)}}, tmp_path / "theirs")
    file = tmp_path / "theirs" / ".metadata"
    metadata = pickle.loads(file.read_bytes())  # noqa: S301 - it was written here
    spoil(metadata)
    file.write_bytes(pickle.dumps(metadata))

    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "new")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "new" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"model": {}}, "has no model's weights"),
        ({"model": {"lr": 1}}, "has no model's weights"),
        ({1: torch.ones(1)}, "is named 1; names are expected to be text"),
        (
            {"w": torch.ones(1), "module.w": torch.zeros(1)},
            "w and module.w of",
        ),
        ({"w": torch.ones(2).to_sparse()}, "cannot be kept: state.model.w is a torch.sparse_coo"),
    ],
)
def test_what_would_not_be_all_of_it_is_refused(
    tmp_path: Path, capsys: Capture, saved: Any, said: str
) -> None:
    torch.save(saved, tmp_path / "theirs.pt")

    asked = ["import", str(tmp_path / "theirs.pt"), str(tmp_path / "new"), "--strip", "module."]
    status = main(asked if "module.w" in saved else asked[:3])

    assert status == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    torch.save({"w": torch.ones(1)}, tmp_path / "elsewhere.bin")
    index = {"weight_map": {"w": "../elsewhere.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))

    assert main(["import", str(folder), str(tmp_path / "new")]) == 2
    assert "names '../elsewhere.bin', which is no file in its folder" in capsys.readouterr().err


def test_what_safetensors_cannot_write_is_said_in_a_line(
    path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_given: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors, "serialize_file", full)

    assert main(["export", str(path), str(tmp_path / "out"), "--to", "safetensors"]) == 2

    told = capsys.readouterr().err
    assert "out cannot be written: I/O error: No space left" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_torch_makes_of_a_full_disk_is_said_of_the_disk(
    path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_given: object) -> None:
        raise RuntimeError("[enforce fail] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)

    assert main(["export", str(path), str(tmp_path / "out"), "--to", "torch"]) == 2

    assert f"{tmp_path / 'out'} cannot be written: " in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["job"]


@pytest.mark.parametrize("to", sorted(EXPORTS))
def test_an_export_survives_a_loss_of_power(
    path: Path, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable: list[str] = []

    def noted(one: Path) -> None:
        durable.append(one.name)
        sync(one)

    monkeypatch.setattr("runtime.checkpoint.draft.sync", noted)

    EXPORTS[to](whole_state(path), tmp_path / "out")

    files = {one.name for one in (tmp_path / "out").rglob("*")}
    assert files <= set(durable)
    assert durable[-1] == tmp_path.name


@pytest.mark.parametrize("kind", sorted(EXPORTS))
def test_a_place_that_is_taken_is_refused_before_anything_is_read(
    path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "out").symlink_to("nowhere")
    monkeypatch.setattr(store, "read", read_by_nobody)

    assert main(["export", str(path), str(tmp_path / "out"), "--to", kind]) == 2
    assert "out exists: give another name, or remove it" in capsys.readouterr().err


def read_by_nobody(*_given: object) -> NoReturn:
    pytest.fail("it was read")


def test_what_writes_safetensors_is_looked_for_before_anything_is_read(
    path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "read", read_by_nobody)
    asked = ["export", str(path), str(tmp_path / "out"), "--to", "safetensors"]

    monkeypatch.delattr(safetensors, "TensorSpec")
    assert main(asked) == 2
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main(asked) == 2

    old, missing = capsys.readouterr().err.splitlines()
    assert "the package safetensors is too old to write with: pip install" in old
    assert "the package safetensors is missing: pip install" in missing


def test_what_an_export_left_that_was_killed_is_removed_by_the_next(
    path: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    program = (
        "import os, signal, torch; from runtime.checkpoint.__main__ import main; "
        "torch.save = lambda _state, file: os.kill(os.getpid(), signal.SIGKILL); "
        f"main(['export', {str(path)!r}, {str(out)!r}, '--to', 'torch'])"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob(".out.exporting-*")

    EXPORTS["torch"](whole_state(path), tmp_path / "other")
    assert left.exists()
    EXPORTS["torch"](whole_state(path), out)

    assert {one.name for one in tmp_path.iterdir()} == {"job", "other", "out"}


def test_an_export_that_is_under_way_is_left_alone(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, save = tmp_path / "out", torch.save
    left: list[bool] = []

    def meanwhile(*given: Any) -> None:
        (mine,) = tmp_path.glob(".out.exporting-*")
        monkeypatch.setattr(torch, "save", save)
        EXPORTS["torch"](whole_state(path), out)
        left.append((mine / "new").exists())
        save(*given)

    monkeypatch.setattr(torch, "save", meanwhile)

    with pytest.raises(Odd, match="out exists: give another name"):
        EXPORTS["torch"](whole_state(path), out)
    assert left == [True]
    assert {one.name for one in tmp_path.iterdir()} == {"job", "out"}


def test_an_export_to_dcp_warns_of_nothing(
    path: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    to_dcp(whole_state(path), tmp_path / "out")

    assert [str(one.message) for one in recwarn] == []


def test_an_export_takes_no_place_that_was_taken_meanwhile(
    path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, save = tmp_path / "out.pt", torch.save

    def slow(*given: Any) -> None:
        save(*given)
        out.write_text("another's")

    monkeypatch.setattr(torch, "save", slow)

    assert main(["export", str(path), str(out), "--to", "torch"]) == 2
    assert "out.pt exists: give another name" in capsys.readouterr().err
    assert out.read_text() == "another's"
    assert {one.name for one in tmp_path.iterdir()} == {"job", "out.pt"}


def test_without_links_it_does_not_either(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_paths: Path) -> NoReturn:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_link)

    EXPORTS["torch"](whole_state(path), tmp_path / "out.pt")

    assert same(foreign_state(tmp_path / "out.pt")["model"], weights(path))
    assert {one.name for one in tmp_path.iterdir()} == {"job", "out.pt"}


@pytest.mark.parametrize("verb", ["export", "import"])
def test_who_interrupts_it_is_not_told_that_it_failed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, verb: str
) -> None:
    to_dcp(whole_state(path), tmp_path / "theirs")
    words = {
        "export": [str(path), str(tmp_path / "out"), "--to", "dcp"],
        "import": [str(tmp_path / "theirs"), str(tmp_path / "new")],
    }

    def interrupted(*_given: Any, **_more: Any) -> NoReturn:
        raise KeyboardInterrupt

    for what in ("save", "load"):
        monkeypatch.setattr(torch, what, interrupted)

    assert main([verb, *words[verb]]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert {one.name for one in tmp_path.iterdir()} == {"job", "theirs"}


def test_tensors_without_a_name_of_their_own_are_not_left_out(tmp_path: Path) -> None:
    with pytest.raises(Odd, match="a of the model holds tensors that have no name of their own"):
        to_safetensors({"model": {"a": {"b": torch.ones(1)}}}, tmp_path / "theirs")
    with pytest.raises(Odd, match="the checkpoint has no model, only step"):
        to_safetensors({"step": 1}, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_a_kind_of_number_that_safetensors_does_not_have_is_said(tmp_path: Path) -> None:
    spectra = {"spectrum": torch.ones(1, dtype=torch.complex128)}

    with pytest.raises(Odd, match=r"spectrum of the model is of torch\.complex128.* --to torch or"):
        to_safetensors({"model": spectra}, tmp_path / "theirs")

    assert not (tmp_path / "theirs").exists()


def test_an_import_that_finds_no_room_leaves_nothing(
    path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    EXPORTS["torch"](whole_state(path), tmp_path / "theirs.pt")

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("runtime.checkpoint.disk.write", full)

    assert main(["import", str(tmp_path / "theirs.pt"), str(tmp_path / "new")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert [*(tmp_path / "new" / "checkpoints").iterdir()] == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Of one megabyte, where a larger state is given somewhere to go."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


SIZE = 4 * 700_000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.parametrize("kind", sorted(EXPORTS))
def test_of_a_disk_that_an_export_fills_it_is_said_how_much_is_needed_and_free(
    small_disk: Path, capsys: Capture, kind: str
) -> None:
    ours = write(small_disk.parent / "job", stage({"model": {"w": torch.ones(SIZE // 4)}}, 1))

    assert main(["export", str(ours), str(small_disk / "out"), "--to", kind]) == 2

    told = capsys.readouterr().err
    said = f"{small_disk} has 1,048,576 bytes free, and {SIZE:,} are to be written there"
    assert told.startswith(f"{said}: make room, or give another place (")
    assert told.count("\n") == 1
    assert [*small_disk.iterdir()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_of_a_disk_that_an_import_fills_it_is_said_too(small_disk: Path, capsys: Capture) -> None:
    torch.save({"w": torch.ones(SIZE // 4)}, small_disk.parent / "theirs.pt")

    assert main(["import", str(small_disk.parent / "theirs.pt"), str(small_disk / "new")]) == 2

    told = capsys.readouterr().err
    assert told.startswith(f"{small_disk / 'new' / 'checkpoints'} has 1,048,576 bytes free, and ")
    assert "No space left on device" in told


def test_what_else_an_export_fails_of_is_no_full_disk(
    path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ill(*_given: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(torch, "save", ill)

    assert main(["export", str(path), str(tmp_path / "out"), "--to", "torch"]) == 2
    assert capsys.readouterr().err == "[Errno 5] Input/output error\n"


# --- what does not fit in memory ------------------------------------------------------------------


def without_memory(monkeypatch: pytest.MonkeyPatch, left: float = 10.0) -> None:
    monkeypatch.setattr("runtime.checkpoint.memory_left.left_bytes", lambda: left)


def no_memory(*_given: object) -> NoReturn:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def no_memory_in_torch(*_given: object, **_more: object) -> Any:
    """As torch says it."""
    return torch.ones(1).expand(1 << 58).clone()


def test_a_state_that_is_too_large_for_this_machine_is_not_read(
    path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "read", read_by_nobody)
    without_memory(monkeypatch)

    assert main(["export", str(path), str(tmp_path / "out"), "--to", "torch", "--json"]) == 2

    told = capsys.readouterr()
    size = store.manifest_of(path).size
    assert json.loads(told.out)[0]["error"].startswith(
        f"{path} does not fit in memory: at least {size:,} bytes are needed, and at most 10 are "
        "left: take a machine with more, or end what else runs here ("
    )
    assert told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("verb", "at", "fails"),
    [
        ("export", "store.pages", no_memory),
        ("export", "resharding.state_of", no_memory_in_torch),
        ("diff", "interchange.state_of", no_memory_in_torch),
    ],
)
def test_nor_is_it_damaged_where_only_taking_the_memory_shows_it(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, verb: str, at: str, fails: Any
) -> None:
    ours = write(tmp_path / "job", stage({"as_saved": True, "model": {"w": torch.ones(9)}}, 1))
    monkeypatch.setattr(f"runtime.checkpoint.{at}", fails)
    words = {"diff": [str(ours)], "export": [str(tmp_path / "out"), "--to=dcp"]}

    assert main([verb, str(ours), *words[verb]]) == 2

    told = capsys.readouterr().err
    assert told.startswith(f"{ours} does not fit in memory: at least ")
    assert told.count("\n") == 1


def test_who_runs_out_of_memory_says_so_in_a_line(
    path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_left(_path: Path) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(store, "manifest_of", nothing_left)

    assert main(["inspect", str(path), "--json"]) == 2
    (said,) = json.loads(capsys.readouterr().out)
    assert said == {
        "error": "inspect needs more memory than is left here: take a machine with more"
    }


def test_what_each_rank_has_of_its_own_needs_no_memory_for_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As weights that are not divided: one copy is put together, and one more read."""
    of_three_ranks(tmp_path, [{"w": torch.ones(1000)}] * 3)
    (found,) = store.candidates(tmp_path)
    without_memory(monkeypatch, store.manifest_of(found).size * 2 / 3)

    assert same(whole_state(found)["model"], {"w": torch.ones(1000)})
    without_memory(monkeypatch, store.manifest_of(found).size / 2)
    with pytest.raises(MemoryError, match="does not fit in memory: at least 8"):
        whole_state(found)


def test_an_import_that_does_not_fit_in_memory_is_said_and_leaves_nothing(
    path: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_dcp(whole_state(path), tmp_path / "dcp")
    torch.save(model().state_dict(), tmp_path / "theirs.pt")
    without_memory(monkeypatch)

    for name in ("dcp", "theirs.pt"):
        assert main(["import", str(tmp_path / name), str(tmp_path / "new")]) == 2
        assert f"{tmp_path / name} does not fit in memory: at least " in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# --- diff and prune -------------------------------------------------------------------------------


def test_two_that_are_alike_differ_in_nothing(path: Path, capsys: Capture) -> None:
    assert main(["diff", str(path), str(path)]) == 0
    assert capsys.readouterr().out == "no difference: the same to the last bit\n"


def test_every_difference_is_named(tmp_path: Path, capsys: Capture) -> None:
    left, right = trained(), trained()
    with torch.no_grad():
        right.model.get_parameter("1.bias")[2] += 0.5
    right.committed = 5
    paths = [write(tmp_path / str(n), one.copy()) for n, one in enumerate((left, right))]

    answer = told(capsys, "diff", *map(str, paths), status=1)
    assert [one["name"] for one in answer["findings"]] == ["model.1.bias", "step"]
    assert answer["unchanged"] == ["model.0.weight", "model.1.weight", "model.2.weight"]
    assert main(["diff", *map(str, paths)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "model.1.bias: 1 of 8 elements differ, by 0.5 at most",
        "step: 4 -> 5",
        "unchanged weights: model.0.weight, model.1.weight, model.2.weight",
    ]


def test_tensors_are_compared_by_their_bits() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert not [*differences({"a": nan, "b": 1.5}, {"a": nan.clone(), "b": 1.5})]
    found = {str(one) for one in differences(
        {"a": zero, "b": zero, "c": zero, "d": zero, "f": [1]},
        {"a": -zero, "b": zero.double(), "c": zero[:0], "e": zero, "f": [True]},
    )}  # fmt: skip
    assert found == {
        "a: 1 of 1 elements differ, by 0 at most",
        "b: torch.float32 -> torch.float64",
        "c: [1] -> [0]",
        "d: only in the left one",
        "e: only in the right one",
        "f.0: 1 -> True",
    }
    assert unchanged({"model": {"w": zero}}, {"model": {"w": zero.clone()}}) == ["model.w"]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"e": {}}, {"e": []}),
        ({"f": [1]}, {"f": (1,)}),
        ({"g": {1: 2}}, {"g": {"1": 2}}),
        ({"i": 0.0}, {"i": -0.0}),
        ({"j": {1: 2, "1": 3}}, {"j": {1: 4, "1": 3}}),
        ({"k.l": 1, "k": {"l": 2}}, {"k.l": 3, "k": {"l": 2}}),
        ({"h": torch.tensor([1 + 1j])}, {"h": torch.tensor([1 + 3j])}),
        ({"m": torch.tensor([1 << 62])}, {"m": torch.tensor([(1 << 62) + 2])}),
    ],
)
def test_kinds_keys_and_both_parts_of_a_number_count(left: Any, right: Any) -> None:
    (found,) = differences(left, right)

    assert found.largest in (0.0, 2.0)
    assert not [*differences(left, left)]


def test_only_the_model_s_tensors_are_weights() -> None:
    one = {"model": {"w": torch.ones(1)}, "extra": {"model": {"x": torch.ones(1)}}}

    assert unchanged(one, one) == ["model.w"]
    assert unchanged({"rank 1": one}, {"rank 1": one}) == ["rank 1.model.w"]


def test_old_ones_are_pruned_and_the_newest_good_one_never(tmp_path: Path, capsys: Capture) -> None:
    state = trained()
    paths = []
    for step in (1, 2, 3, 4):
        state.committed = step
        paths.append(write(tmp_path, state.copy(), keep=9))
    (paths[3] / "rank-0-0000.bin").write_bytes(b"rubbish")

    assert main(["prune", str(tmp_path), "--keep", "2", "--dry-run"]) == 0
    assert capsys.readouterr().out == "would remove step-00000001\n"
    assert main(["prune", str(tmp_path), "--keep", "1", "--older-than", "1"]) == 0
    assert len(store.candidates(tmp_path)) == 4
    assert main(["prune", str(tmp_path), "--keep", "1", "--json"]) == 0
    assert [path.name for path in store.candidates(tmp_path)] == ["step-00000004", "step-00000003"]


def test_as_many_are_kept_as_are_whole(tmp_path: Path) -> None:
    state = trained()
    paths = []
    for step in range(1, 6):
        state.committed = step
        paths.append(write(tmp_path, state.copy(), keep=9))
    for bad in (paths[1], paths[3]):
        (bad / "rank-0-0000.bin").write_bytes(b"rubbish")

    assert main(["prune", str(tmp_path), "--keep", "2"]) == 0

    left = [path.name for path in store.candidates(tmp_path)]
    assert left == [
        "step-00000005",
        "step-00000004",
        "step-00000003",
    ]  # the one between may be well


def test_where_none_verifies_all_stay(path: Path, capsys: Capture) -> None:
    (path / "rank-0-0000.bin").write_bytes(b"rubbish")
    assert main(["prune", str(path.parent)]) == 2
    assert "none of the 1 checkpoints" in capsys.readouterr().err
    assert path.exists()


def test_a_folder_that_was_saved_whole_and_later_in_parts_is_refused(
    tmp_path: Path, capsys: Capture
) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-0.bin"}}))

    assert main(["import", str(tmp_path), str(tmp_path / "new")]) == 2
    assert "files of two saves" in capsys.readouterr().err
    index.write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    assert same(foreign_state(tmp_path)["model"], {"a": torch.ones(1)})


def test_no_other_file_is_taken_in_the_place_of_a_link_that_leads_nowhere(
    tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "model.safetensors").symlink_to("gone")
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")

    assert main(["import", str(tmp_path), str(tmp_path / "new")]) == 2
    assert "model.safetensors is a link that leads nowhere" in capsys.readouterr().err
