"""Whatever is done with a checkpoint is done with one of which chunks are packed."""

from __future__ import annotations

import json
import mmap
import os
import random
import re
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

from runtime.checkpoint import Checkpointer, compression, disk, store
from runtime.checkpoint.__main__ import main
from runtime.checkpoint.disk import read_small
from runtime.checkpoint.draft import Draft, write_small
from runtime.checkpoint.draft import write as write_plain
from runtime.checkpoint.interchange import foreign_state, whole_state
from runtime.checkpoint.manifest import Manifest, Packed, Part, opened, sealed
from runtime.checkpoint.objects import Found, ObjectStore
from runtime.checkpoint.packing import Packer
from runtime.checkpoint.writer import PACKET_BYTES, Writer
from runtime.checkpoint.writer_handle import WRITER_MODULE
from runtime.client import CheckpointSaved
from runtime.image import CHUNK_BYTES, Damaged, Staged, aligned, pages
from runtime.snapshot import Copying, stage
from tests.runtime.checkpoint.one_rank import OneRank
from tests.runtime.checkpoint.states import due, flip_a_bit
from tests.runtime.checkpoint.test_corruption import KINDS, Corrupt, is_named
from tests.runtime.checkpoint.test_interchange import same
from tests.runtime.checkpoint.test_resharding import part as part_of_tensor

Capture = pytest.CaptureFixture[str]
SLOW = 1e3
CHUNKS = 8  # after the first
ROWS = 700_000  # of the weights: 2.8 MB


def state_of(step: int, rank: int = 0) -> dict[str, Any]:
    """Weights that pack well, and noise that does not."""
    chance = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(256, (2 * CHUNK_BYTES,), generator=chance, dtype=torch.uint8)
    return {
        "step": step,
        "base": torch.arange(400_000, dtype=torch.float32),
        "model": {
            "weight": torch.randn(ROWS, generator=chance) * 0.02,
            "sparse": torch.zeros(700_000, dtype=torch.bfloat16),
            "noise": ids,
        },
    }


def staged_at(step: int, rank: int = 0) -> Staged:
    return Copying(state_of(step, rank), step, due=due).finish()


def save(
    folder: Path, step: int, ranks: int = 1, shares: int = 1, before: Part | None = None
) -> tuple[Path, Part]:
    """A checkpoint in a slow folder, and what was written last of it."""
    for rank in range(ranks):
        for share in range(shares):
            draft = Draft(folder, step, f"save{step}", ranks, {"epoch": 1}, shares)
            staged = staged_at(step, rank)
            written = draft.write(
                rank, staged.table, memoryview(staged.buffer), before,
                share=share, packer=Packer(SLOW),
            )  # fmt: skip
            draft.publish()
            draft.close()
    return draft.path, written.whole or written.part


def plain(folder: Path, step: int) -> Path:
    return write_plain(folder, staged_at(step), facts={"epoch": 1})


def test_it_is_the_same_state_in_fewer_bytes(tmp_path: Path) -> None:
    path, part = save(tmp_path, 7)

    staged, manifest = store.read(path), store.manifest_of(path)
    assert bytes(staged.buffer) == bytes(staged_at(7).buffer)
    assert store.verify(path) == []
    assert staged.digest == manifest.digest == store.manifest_of(plain(tmp_path, 7)).digest
    sizes = {file.name: (path / file.name).stat().st_size for file in part.files}
    assert sizes == {file.name: part.stored_of(file) for file in part.files}
    assert manifest.stored == sum(sizes.values()) < 0.85 * manifest.size
    assert manifest.size == staged.table.bytes


def test_the_json_of_a_part_says_how_each_chunk_is_packed(tmp_path: Path) -> None:
    path, part = save(tmp_path, 7)

    found = json.loads((path / "rank-0.json").read_bytes())
    assert found["version"] == json.loads((path / "manifest.json").read_bytes())["version"] == 4
    assert Part.from_json((path / "rank-0.json").read_bytes(), "it") == part
    weight = next(one for one in part.table.pieces if one.name == ".model.weight")
    assert part.packing_of(weight.offset // CHUNK_BYTES + 1) is not None
    noise = next(one for one in part.table.pieces if one.name == ".model.noise")
    assert part.packing_of(noise.offset // CHUNK_BYTES + 1) is None


def test_what_is_not_packed_older_readers_read(tmp_path: Path) -> None:
    path = plain(tmp_path, 7)

    for name in ("manifest.json", "rank-0.json"):
        assert json.loads((path / name).read_bytes())["version"] == 3
        assert b"packed" not in (path / name).read_bytes()
        assert b"stored" not in (path / name).read_bytes()


@pytest.mark.parametrize("shares", [2, 3])
def test_several_write_it_together(tmp_path: Path, shares: int) -> None:
    path, part = save(tmp_path, 7, ranks=2, shares=shares)

    assert store.verify(path) == []
    for rank in (0, 1):
        assert bytes(store.read(path, rank).buffer) == bytes(staged_at(7, rank).buffer)
    assert part.stored < 0.85 * part.table.bytes


def test_an_older_drydock_that_packs_nothing_writes_its_share(tmp_path: Path) -> None:
    """As while the replicas of a job are started anew, one after another, with a later one."""
    ours, theirs = (Draft(tmp_path, 7, "save7", 1, {"epoch": 1}, 2) for _ in range(2))
    staged = staged_at(7)
    theirs.write(0, staged.table, memoryview(staged.buffer), share=0)
    said = opened(read_small("rank-0-share-0.json", theirs.handle), "it")
    del said["packed"], said["self"]
    write_small("rank-0-share-0.json", sealed(said), theirs.handle)

    ours.write(0, staged.table, memoryview(staged.buffer), share=1, packer=Packer(SLOW))
    ours.publish()

    assert store.read(ours.path).digest == staged.digest
    ours.close()
    theirs.close()


def test_what_is_frozen_is_written_once(tmp_path: Path) -> None:
    first, before = save(tmp_path, 1)
    second, after = save(tmp_path, 2, before=before)

    name = after.files[0].name
    assert (second / name).stat().st_ino == (first / name).stat().st_ino
    assert (second / name).stat().st_size < 0.85 * after.files[0].bytes
    assert store.verify(second) == []
    assert bytes(store.read(second).buffer) == bytes(staged_at(2).buffer)


def test_a_tier_that_is_quick_by_now_keeps_what_is_frozen_packed(tmp_path: Path) -> None:
    _path, before = save(tmp_path, 1)
    draft, staged = Draft(tmp_path, 2, "save2", 1, {}), staged_at(2)
    written = draft.write(0, staged.table, memoryview(staged.buffer), before)
    draft.publish()
    draft.close()

    assert [written.part.packs(file) for file in written.part.files] == [True, False]
    assert store.read(draft.path).digest == staged.digest


# --- damage ---------------------------------------------------------------------------------------


def tensors_at(part: Part, name: str, before: bytes, after: bytes) -> set[str]:
    """Whose chunks in this file are not what they were."""
    (file,) = [one for one in part.files if one.name == name]
    runs = [*part.runs_of(file, 1)]
    changed = [run for run in runs if before[run.start : run.end] != after[run.start : run.end]]
    return {*store.names_in(part, *(chunk for run in changed for chunk in run.chunks))}


@pytest.mark.parametrize("times", [8, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_corruption_is_found_and_its_file_rank_and_tensors_named(
    tmp_path: Path, kind: Corrupt, times: int
) -> None:
    chance = random.Random(kind.__name__)  # noqa: S311 - which bytes, not secrecy
    older, newer = save(tmp_path, 1, ranks=2)[0], save(tmp_path, 2, ranks=2)[0]
    files = sorted(path for path in newer.iterdir() if path.suffix == ".bin")
    parts = [store.part_of(newer, store.manifest_of(newer), rank) for rank in (0, 1)]
    missed = []

    for _ in range(times):
        path = chance.choice(files[1:])
        whole = path.read_bytes()
        corrupted = kind(bytearray(whole), bytearray((older / path.name).read_bytes()), chance)
        after = bytes(corrupted or b"")
        part = parts[int(path.name.split("-")[1])]
        tensors = tensors_at(part, path.name, whole, after)
        path.unlink()
        path.write_bytes(after)
        findings = store.verify(newer)
        named = [found for found in findings if is_named(found, path, tensors)]
        refused = store.verified(newer, part.rank) is None
        missed += [] if (named and refused) or after == whole else [(path.name, findings)]
        path.write_bytes(whole)

    assert missed == []
    assert store.verify(newer) == []


def harmed(part: Part, chunk: int, **changed: Any) -> Part:
    how = part.packing_of(chunk)
    assert how is not None
    packed = [*part.packed]
    packed[chunk] = replace(how, **changed)
    return replace(part, packed=tuple(packed))


def put_part(path: Path, part: Part) -> None:
    """With a manifest that believes it."""
    from runtime.checkpoint.manifest import hash_of_part

    data, manifest = part.to_json(), store.manifest_of(path)
    (path / part.name).write_bytes(data)
    changed = Manifest(
        step=manifest.step, save=manifest.save, parts=(hash_of_part(part, data),), facts={}
    )
    (path / "manifest.json").write_bytes(changed.to_json())


@pytest.mark.parametrize("by", [-1, 1])
def test_a_length_that_is_wrong_is_a_finding_whether_the_file_has_it_or_not(
    tmp_path: Path, by: int
) -> None:
    path, part = save(tmp_path, 7)
    chunk = next(n for n, how in enumerate(part.packed) if how and n > part.files[1].first)
    put_part(path, harmed(part, chunk, bytes=part.packed[chunk].bytes + by))  # type: ignore[union-attr]

    (finding,) = store.verify(path)
    file = path / part.files[1].name
    os.truncate(file, file.stat().st_size + by)
    (moved,) = store.verify(path)

    assert "bytes" in str(finding)
    assert ".model.weight" in moved.tensors
    with pytest.raises(Damaged, match=r"rank-0-0001.bin \(rank 0\), tensors"):
        store.read(path)


def test_who_loads_unpacks_no_more_once_a_chunk_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "REQUESTS", 1)
    path, part = save(tmp_path, 7)
    put_part(path, harmed(part, 3, size=2))
    seen: list[int] = []

    with pytest.raises(Damaged, match=r"at least 1 of \d+ chunks are not what was saved"):
        store.read(path, progress=seen.append)

    assert sum(seen) < part.table.bytes


def test_elements_of_another_size_are_a_finding(tmp_path: Path) -> None:
    path, part = save(tmp_path, 7)
    put_part(path, harmed(part, 3, size=2))

    (finding,) = store.verify(path)

    assert finding.tensors == (".model.weight",)


def test_a_chunk_that_would_unpack_to_more_is_a_finding(tmp_path: Path) -> None:
    import zstandard

    path, part = save(tmp_path, 7)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    chunk = 3
    (run,) = [run for run in part.runs_of(part.files[1], 1) if chunk in run.chunks]
    data = bytearray((path / part.files[1].name).read_bytes())
    data[run.start : run.end] = bomb
    (path / part.files[1].name).write_bytes(data)
    put_part(path, harmed(part, chunk, bytes=len(bomb)))

    (finding,) = store.verify(path)

    assert finding.tensors == (".model.weight",)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ([None], "of 1 chunks how they are packed"),
        ([[4, 0], *[None] * CHUNKS], "chunk 0 is packed to 0 bytes"),
        ([[4, CHUNK_BYTES], *[None] * CHUNKS], "chunk 0 is packed to 1048576 bytes"),
        ([[0, 5], *[None] * CHUNKS], "chunk 0 is sorted by 0 bytes"),
        ([[17, 5], *[None] * CHUNKS], "chunk 0 is sorted by 17 bytes"),
        ([[4], *[None] * CHUNKS], "is missing or wrong"),
        ([4, *[None] * CHUNKS], "is missing or wrong"),
        ([["4", 5], *[None] * CHUNKS], "is missing or wrong"),
        ([[4, -5], *[None] * CHUNKS], "is missing or wrong"),
    ],
)
def test_what_is_said_of_chunks_that_cannot_be_is_refused(changed: list[Any], said: str) -> None:
    from runtime.checkpoint.manifest import layout_of

    staged = staged_at(1)
    assert staged.table.chunks == CHUNKS + 1
    part = Part(
        step=1, save="s", rank=0, table=staged.table, hashes=staged.hashes,
        files=layout_of(staged.table, 0), packed=(Packed(4, 5), *[None] * CHUNKS),
    )  # fmt: skip
    found = json.loads(part.to_json())
    del found["self"]

    with pytest.raises(Damaged, match=said):
        Part.from_json(sealed({**found, "packed": changed}), "it")


# --- without zstandard ----------------------------------------------------------------------------


INSTALL = "pip install zstandard"


def without_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "is_installed", lambda: False)


@pytest.mark.parametrize("verb", ["diff", "export", "prune"])
def test_where_nothing_unpacks_it_what_to_install_is_said(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    folder = tmp_path / "checkpoints"
    before, path = plain(folder, 6), save(folder, 7)[0]
    without_zstandard(monkeypatch)
    asked = {
        "diff": [str(before), str(path)],
        "export": [str(folder), str(tmp_path / "out"), "--to", "torch"],
        "prune": [str(folder), "--keep", "1"],
    }

    assert main([verb, *asked[verb]]) == 2

    assert f"{path} is packed with zstd, which is not installed here: {INSTALL}" in (
        capsys.readouterr().err
    )
    assert store.candidates(folder) == [path, before]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["ls", "inspect"])
def test_what_needs_nothing_unpacked_is_told_without(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    save(tmp_path, 7)
    without_zstandard(monkeypatch)

    assert main([verb, str(tmp_path)]) == 0

    assert "packed to" in capsys.readouterr().out


def test_what_cannot_be_checked_is_said_and_the_others_are(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain(tmp_path, 5)
    path, _part = save(tmp_path, 6)
    plain(tmp_path, 7)
    without_zstandard(monkeypatch)

    assert main(["verify", str(tmp_path)]) == 2

    newest, packed, why, oldest = capsys.readouterr().out.splitlines()
    assert (newest.split()[1:], oldest.split()[1:]) == (["well"], ["well"])
    assert packed.split() == ["step-00000006", "NOT", "CHECKED"]
    assert why.strip() == f"{path} is packed with zstd, which is not installed here: {INSTALL}"
    assert main(["verify", str(tmp_path), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert [one["not_checked"] for one in told] == ["", why.strip(), ""]
    assert [one["findings"] for one in told] == [[], [], []]


def test_what_is_damaged_counts_beside_what_cannot_be_checked(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_bit(plain(tmp_path, 6) / "rank-0-0001.bin", 5000)
    save(tmp_path, 7)
    without_zstandard(monkeypatch)

    assert main(["verify", str(tmp_path)]) == 1

    told = capsys.readouterr().out
    assert "step-00000007    NOT CHECKED" in told
    assert "step-00000006    DAMAGED" in told


def gone(path: Path) -> None:
    path.unlink()


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("name", ["rank-0.json", "rank-0-0001.bin"])
@pytest.mark.parametrize("damage", [gone, shorter])
def test_what_shows_without_unpacking_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], name: str
) -> None:
    path, _part = save(tmp_path, 7, ranks=2)
    damage(path / name)
    without_zstandard(monkeypatch)

    (finding,) = store.verify(path)

    assert (finding.file, finding.rank) == (name, 0)


def test_nothing_older_is_taken_for_the_newest_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain(tmp_path, 6)
    path, _part = save(tmp_path, 7)
    without_zstandard(monkeypatch)

    with pytest.raises(compression.NotInstalled, match=re.escape(f"{path} is packed with zstd")):
        store.newest(tmp_path)


class Old:
    """An installed version that packs, and cannot be asked to refuse what lies behind a frame."""

    ZstdCompressor = zstandard.ZstdCompressor

    class ZstdDecompressor:
        def decompress(self, data: bytes, max_output_size: int = 0) -> bytes:
            return zstandard.decompress(data, max_output_size)


def test_what_is_too_old_to_unpack_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", Old)
    compression.is_installed.cache_clear()

    packs = Packer(SLOW).may_pay()

    compression.is_installed.cache_clear()
    assert not packs


def test_where_nothing_packs_it_is_saved_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_zstandard(monkeypatch)
    path, part = save(tmp_path, 7)

    assert part.packed == ()
    assert store.verify(path) == []


def test_what_could_not_be_read_back_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _path, before = save(tmp_path, 1)
    without_zstandard(monkeypatch)
    path, part = save(tmp_path, 2, before=before)

    assert part.packed == ()
    assert store.verify(path) == []


# --- the command ----------------------------------------------------------------------------------


def test_the_ratio_is_said_to_people_and_programs(tmp_path: Path, capsys: Capture) -> None:
    plain(tmp_path, 6)
    path, part = save(tmp_path, 7)
    percent = f"{part.stored / part.table.bytes:.0%}"

    for verb in ("ls", "inspect"):
        assert main([verb, str(tmp_path)]) == 0
        told = capsys.readouterr().out
        assert told.count(f" bytes, packed to {part.stored:,} ({percent})") == 1
        assert main([verb, str(tmp_path), "--json"]) == 0
        newest, *older = json.loads(capsys.readouterr().out)
        assert (newest["bytes"], newest["stored"]) == (part.table.bytes, part.stored)
        assert newest["ratio"] == pytest.approx(part.stored / part.table.bytes, abs=1e-4)
        assert [one["ratio"] for one in older] == [1.0] * len(older)
    assert store.verify(path) == []


def test_packed_or_not_there_is_no_difference(tmp_path: Path, capsys: Capture) -> None:
    packed, other = save(tmp_path / "a", 7)[0], plain(tmp_path / "b", 7)

    assert main(["diff", str(packed), str(other)]) == 0
    assert "no difference" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp"])
def test_it_is_exported_and_imported_as_any_other(tmp_path: Path, kind: str) -> None:
    path, _part = save(tmp_path / "job", 7)
    assert main(["export", str(path), str(tmp_path / "out"), "--to", kind]) == 0
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "new")]) == 0

    expected = state_of(7)["model"]
    assert same(foreign_state(tmp_path / "out")["model"], expected)
    (new,) = store.candidates(tmp_path / "new" / "checkpoints")
    assert same(whole_state(new)["model"], expected)


def test_old_ones_are_pruned(tmp_path: Path) -> None:
    before: Part | None = None
    for step in (1, 2, 3):
        path, before = save(tmp_path, step, before=before)

    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0

    assert store.candidates(tmp_path) == [path]
    assert store.verify(path) == []


def test_what_ranks_divided_is_put_together(tmp_path: Path) -> None:
    tensor = torch.randn(3, 900_000)
    for rank in (0, 1):
        staged = stage({"step": 7, "model": {"weight": part_of_tensor(tensor, rank, 2)}}, 7)
        draft = Draft(tmp_path, 7, "save7", 2, {})
        draft.write(rank, staged.table, memoryview(staged.buffer), packer=Packer(SLOW))
        draft.publish()
        draft.close()

    assert store.manifest_of(draft.path).stored < 0.95 * store.manifest_of(draft.path).size
    assert torch.equal(whole_state(draft.path)["model"]["weight"], tensor)


# --- an object store ------------------------------------------------------------------------------


def put(objects: ObjectStore, step: int, packer: Packer | None) -> Found:
    staged = staged_at(step)
    objects.write(
        0, staged.table, memoryview(staged.buffer),
        step=step, save=f"save{step}", ready=lambda _end: None, packer=packer,
    )  # fmt: skip
    found = objects.publish(step, f"save{step}", 1, {})
    assert found is not None
    return found


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path / 'objects'}", "j")


def test_objects_are_packed_and_copied_by_the_store(objects: ObjectStore, tmp_path: Path) -> None:
    first, second = put(objects, 1, Packer(SLOW)), put(objects, 2, Packer(SLOW))

    later = put(ObjectStore(objects.url, "j"), 3, None)  # quick by now: what is frozen is copied

    for step, found in ((1, first), (2, second), (3, later)):
        assert bytes(objects.read(f"save{step}", 0).buffer) == bytes(staged_at(step).buffer)
        assert store.verify(Path(found.path)) == []
        in_files = sum(path.stat().st_size for path in Path(found.path).glob("*.bin"))
        assert in_files == found.manifest.stored
    assert first.manifest.stored == pytest.approx(second.manifest.stored, rel=0.01)
    assert second.manifest.stored < 0.85 * second.manifest.size
    assert second.manifest.stored < later.manifest.stored < later.manifest.size


def cut(path: Path, _where: int) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("damage", [flip_a_bit, cut])
def test_an_object_that_was_damaged_is_refused_by_name(
    objects: ObjectStore, damage: Callable[[Path, int], None]
) -> None:
    found = put(objects, 7, Packer(SLOW))
    damage(Path(found.path) / "rank-0-0002.bin", 5000)

    with pytest.raises(Damaged, match=r"rank-0-0002.bin"):
        objects.read("save7", 0)


def test_where_nothing_unpacks_objects_what_to_install_is_said(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(objects, 7, Packer(SLOW))
    without_zstandard(monkeypatch)

    with pytest.raises(Damaged, match=re.escape(INSTALL)):
        objects.read("save7", 0)


def test_an_object_that_is_missing_shows_where_nothing_unpacks(
    objects: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = put(objects, 7, Packer(SLOW))
    without_zstandard(monkeypatch)
    with pytest.raises(compression.NotInstalled, match=re.escape(INSTALL)):
        objects.verify(found)
    (Path(found.path) / "rank-0-0002.bin").unlink()

    (finding,) = objects.verify(found)

    assert "rank-0-0002.bin (rank 0), tensors" in finding
    assert "it is missing" in finding


# --- the writer's process -------------------------------------------------------------------------


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneRank]:
    """A rank whose writers find every disk and store slow."""
    monkeypatch.setenv(WRITER_MODULE, "tests.runtime.checkpoint.slow_writer")
    one = OneRank(tmp_path, own_disk=True, object_store=f"file://{tmp_path / 'objects'}")
    yield one
    one.saver.finish()


def copy(step: int, into: memoryview | None) -> Copying:
    return Copying(state_of(step), step, into, due)


def saved(trainer: OneRank, step: int) -> dict[str, CheckpointSaved]:
    """By tier."""
    assert trainer.save(step, begin=copy) is not None

    def found() -> dict[str, CheckpointSaved]:
        told = [one for one in trainer.told.messages if isinstance(one, CheckpointSaved)]
        return {one.tier: one for one in told if one.step == step}

    trainer.told.until(lambda: len(found()) == 3)
    trainer.told.until(lambda: not trainer.saver.dispatcher._asked)
    return found()


def test_a_tier_that_proved_slow_is_packed_and_a_disk_of_the_node_never(slow: OneRank) -> None:
    first, second = saved(slow, 1), saved(slow, 2)

    size = staged_at(1).table.bytes
    assert {one.stored for one in first.values()} == {size}
    assert second["local"].stored == size
    for tier in ("shared", "object"):
        told = second[tier]
        assert told.stored is not None
        assert told.stored < 0.9 * size
        assert told.bytes == size
    assert {one.digest for one in second.values()} == {staged_at(2).digest}
    found = slow.saver.sources
    for tier in ("shared", "object", "local"):
        assert found.read("save2", tier, 0).digest == staged_at(2).digest  # type: ignore[arg-type]


def test_what_is_not_on_the_disk_as_it_was_packed_is_written_again_and_told(tmp_path: Path) -> None:
    trainer, writers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    draft, staged = Draft(tmp_path, 7, "save7", 1, {}), staged_at(7)
    image = memoryview(staged.buffer)
    part = draft.write(0, staged.table, image, packer=Packer(SLOW)).part
    draft.publish()
    flip_a_bit(draft.path / "rank-0-0001.bin", 5000)

    with trainer, writers:
        Writer(writers)._verify(draft, part, image)
        said = json.loads(trainer.recv(PACKET_BYTES))

    assert said["kind"] == "checkpoint_damaged"
    assert "written again" in said["text"]
    assert store.verify(draft.path) == []
    draft.close()


def test_what_nobody_packs_to_the_same_again_is_shared_once_and_then_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another zstandard packed what is frozen, and the disk has damaged it since."""
    trainer, writers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    writer = Writer(writers)
    writer._packer = Packer(SLOW)

    def said_of(step: int) -> list[str]:
        staged = staged_at(step)
        size, start = len(staged.buffer), aligned(len(staged.buffer), mmap.PAGESIZE)
        described = json.dumps({"step": step, "save": f"save{step}", **staged.table.describe()})
        writer._copy_buffers[0] = pages(start + len(described))
        writer._copy_buffers[0][:size] = staged.buffer
        writer._copy_buffers[0][start:] = described.encode()
        trainer.send(json.dumps({"op": "copied", "save": f"save{step}", "bytes": size}).encode())
        writer._save(
            {
                "buffer": 0, "image": size, "described": len(described), "step": step,
                "save": f"save{step}", "facts": {}, "folder": str(tmp_path), "rank": 0, "ranks": 1,
                "share": 0, "shares": 1, "keep": 9, "keep_for_s": 0, "common": None, "pack": True,
            }
        )  # fmt: skip
        heard: list[str] = []
        while not heard or heard[-1] != "done":
            heard.append(json.loads(trainer.recv(PACKET_BYTES))["op"])
        return heard

    with trainer, writers:
        first = said_of(1)
        flip_a_bit(tmp_path / "step-00000001" / "rank-0-0000.bin", 5000)
        monkeypatch.setattr(compression, "LEVEL", 19)
        failed, again = said_of(2), said_of(3)

    assert first == again == ["durable", "verified", "done"]
    assert "failed" in failed
    assert store.verify(tmp_path / "step-00000003") == []


def test_it_can_be_forbidden(tmp_path: Path) -> None:
    job = OneRank(tmp_path, object_store=f"file://{tmp_path / 'objects'}").saver.job
    packs = {name: one.pack for name, one in Checkpointer(job).tiers.items()}
    never = {name: one.pack for name, one in Checkpointer(job, pack=False).tiers.items()}

    assert packs == {"shared": True, "object": True}
    assert never == {"shared": False, "object": False}
    with pytest.raises(ValueError, match="pack is True; give 'auto' or False"):
        Checkpointer(job, pack=True)  # type: ignore[arg-type]
