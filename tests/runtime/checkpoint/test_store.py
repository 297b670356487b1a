"""A checkpoint named complete restores bit for bit; a damaged one is never chosen."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import xxhash

from runtime.checkpoint import disk, store
from runtime.checkpoint.draft import HOST, write
from runtime.checkpoint.manifest import sealed
from runtime.image import CHUNK_BYTES, Damaged
from runtime.snapshot import stage, state_of
from tests.runtime.checkpoint.states import flip_a_bit, staged_at, unreadable

FILES = ["rank-0-0000.bin", "rank-0-0001.bin", "rank-0.json", "manifest.json"]
ILL = [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES]


def newest_step(folder: Path) -> int:
    found = store.newest(folder)
    assert found is not None
    return found[1].step


def names(folder: Path) -> list[str]:
    return [path.name for path in store.candidates(folder)]


def test_what_is_read_equals_what_was_staged(tmp_path: Path) -> None:
    staged = staged_at(7)

    read = store.read(write(tmp_path, staged))
    state = state_of(read)

    assert read.digest == staged.digest
    assert bytes(read.buffer) == bytes(staged.buffer)
    assert state["optimizer"][0][1] == 0.25
    assert state["model"]["empty"].shape == (0, 3)
    assert torch.equal(state["scalar"], torch.tensor(7))


def test_a_state_without_tensors_is_read_too(tmp_path: Path) -> None:
    assert state_of(store.read(write(tmp_path, stage({"step": 3}, 3)))) == {"step": 3}


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(5):
        write(tmp_path, staged_at(step), keep=3)

    assert names(tmp_path) == ["step-00000004", "step-00000003", "step-00000002"]


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_makes_the_next_older_one_chosen(tmp_path: Path, name: str) -> None:
    write(tmp_path, staged_at(1))
    newer = write(tmp_path, staged_at(2))
    whole = (newer / name).read_bytes()
    places = random.Random(4)  # noqa: S311 - which bits, not secrecy

    chosen = set()
    for _ in range(50):
        flip_a_bit(newer / name, places.randrange(1 << 30))
        chosen.add(newest_step(tmp_path))
        (newer / name).write_bytes(whole)

    assert chosen == {1}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99, 1.01])
def test_a_file_of_another_length_is_never_chosen(tmp_path: Path, name: str, share: float) -> None:
    write(tmp_path, staged_at(1))
    newer = write(tmp_path, staged_at(2))
    data = (newer / name).read_bytes()

    (newer / name).unlink()
    (newer / name).write_bytes((data + bytes(len(data)))[: int(len(data) * share)])

    assert newest_step(tmp_path) == 1


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_never_chosen(tmp_path: Path, name: str) -> None:
    newer = write(tmp_path, staged_at(2))

    (newer / name).unlink()

    assert store.newest(tmp_path) is None


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_checkpoint_is_found(tmp_path: Path, name: str) -> None:
    older = write(tmp_path / "other", stage({"weight": torch.ones(500_000)}, 1))
    newer = write(tmp_path, stage({"weight": torch.zeros(500_000)}, 2))
    shared = {path.name for path in older.iterdir()} & {name}

    for one in shared or {"rank-0-0000.bin"}:
        shutil.copy(older / one, newer / one)

    assert store.verify(newer) != []
    assert store.newest(tmp_path) is None


def test_findings_name_tensors_rank_and_file(tmp_path: Path) -> None:
    path = write(tmp_path, staged_at(2))
    flip_a_bit(path / "rank-0-0001.bin", 80)

    (finding,) = store.verify(path)

    assert (finding.file, finding.rank) == ("rank-0-0001.bin", 0)
    assert finding.tensors == (".model.weight", ".model.empty")
    with pytest.raises(Damaged, match=r"rank-0-0001.bin \(rank 0\), tensors model\.weight"):
        store.read(path)


def test_who_loads_reads_no_further_than_to_the_first_wrong_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "REQUESTS", 1)
    monkeypatch.setattr(disk, "BLOCK_BYTES", CHUNK_BYTES)
    path = write(tmp_path, stage({"weight": torch.zeros(4 * CHUNK_BYTES // 4)}, 2))
    for chunk in (1, 2):
        flip_a_bit(path / "rank-0-0000.bin", chunk * CHUNK_BYTES)
    seen: list[int] = []

    with pytest.raises(Damaged, match=r"at least 1 of 4 chunks are not what was saved"):
        store.read(path, progress=seen.append)

    (finding,) = store.verify(path)
    assert seen == [CHUNK_BYTES] * 2
    assert finding.what == "2 of 4 chunks are not what was saved"


@pytest.mark.parametrize("ending", ["1", "-x", ".bad", ""])
def test_what_has_not_a_checkpoint_s_name_is_none(tmp_path: Path, ending: str) -> None:
    write(tmp_path, staged_at(7))
    (tmp_path / f"step-{ending}").mkdir()

    assert names(tmp_path) == ["step-00000007"]


def test_a_checkpoint_under_another_step_s_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path, staged_at(7)).rename(tmp_path / "step-00000009")

    with pytest.raises(Damaged, match="holds step 7: it was renamed"):
        store.read(tmp_path / "step-00000009")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path, "does not exist; a checkpoint is a folder.*m runtime.checkpoint ls"),
        (lambda path: path.mkdir(), "is no checkpoint: its manifest.json cannot be read"),
        (lambda path: write(path, staged_at(1)), "holds 1 checkpoints and is none; give one"),
    ],
)
def test_what_is_no_checkpoint_is_said(tmp_path: Path, make: object, said: str) -> None:
    path = tmp_path / "thing"
    make(path)  # type: ignore[operator]

    with pytest.raises(Damaged, match=said):
        store.read(path)


def test_a_newer_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path, staged_at(2)) / "manifest.json"
    newer = {**json.loads(path.read_bytes()), "version": 99}
    path.write_bytes(sealed(newer))

    with pytest.raises(
        Damaged, match="version 99, this Drydock reads 3 and 4: read it with the Drydock"
    ):
        store.read(path.parent)


def test_a_file_that_is_missing_is_said_with_its_size_and_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path, staged_at(2))
    file = min(path.glob("*.bin"))
    size = file.stat().st_size
    file.unlink()

    with pytest.raises(Damaged) as error:
        store.read(path)

    assert f"it is missing, {size} bytes expected" in str(error.value)
    assert f"python -m runtime.checkpoint verify {path}" in str(error.value)


def test_a_rank_that_it_does_not_have_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, staged_at(2))

    with pytest.raises(Damaged, match="of replicas of 1 ranks and has no rank 3") as error:
        store.read(path, 3)

    assert str(error.value).endswith(f": python -m runtime.checkpoint inspect {path}")


def unlinked(path: Path) -> None:
    path.unlink()


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def changed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": 3'))


def another_s(path: Path) -> None:
    path.write_text('{"loss": 0.5}')


@pytest.mark.parametrize(
    ("name", "break_it", "words"),
    [
        (
            "manifest.json",
            cut_in_half,
            r"is no checkpoint's JSON: .* expected, found \d+ bytes",
        ),
        ("manifest.json", another_s, r"expected, found an object with the keys \['loss'\]"),
        ("manifest.json", changed, "was changed after .*: .* expected at its end, found "),
        ("rank-0.json", unlinked, "the tensors of rank 0 are expected there, found: No such file"),
        ("rank-0.json", cut_in_half, r"is no checkpoint's JSON: .* expected, found \d+ bytes"),
        ("rank-0.json", changed, "was changed after .*: .* expected at its end, found "),
    ],
)
def test_what_is_not_as_it_was_written_is_said_with_what_to_do(
    tmp_path: Path, name: str, break_it: Callable[[Path], None], words: str
) -> None:
    path = write(tmp_path, staged_at(2))
    break_it(path / name)
    looked_into = {"manifest.json": tmp_path, "rank-0.json": path}[name]

    with pytest.raises(Damaged, match=words) as error:
        store.read(path)

    said = str(error.value)
    assert said.startswith(f"{path / name} ")
    assert said.endswith(f": python -m runtime.checkpoint verify {looked_into}")
    assert said.count("python -m") == 1


def forged(path: Path, **also: object) -> None:
    """Somebody changes a part, and then what the manifest says of its bytes."""
    part = path / "rank-0.json"
    raw = json.loads(part.read_bytes())
    del raw["self"]
    part.write_bytes(sealed(raw | also))
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["self"]
    manifest["parts"][0]["hash"] = xxhash.xxh3_128_hexdigest(part.read_bytes())
    (path / "manifest.json").write_bytes(sealed(manifest))


def test_parts_of_two_saves_are_not_one_checkpoint_whatever_the_manifest_says(
    tmp_path: Path,
) -> None:
    path, other = (write(tmp_path / name, staged_at(step)) for name, step in (("a", 1), ("b", 2)))
    for name in FILES[:3]:
        (path / name).unlink()
        shutil.copy(other / name, path / name)
    forged(path)

    with pytest.raises(Damaged, match=r"is rank 0 of save \w+ at step 2, not of this checkpoint"):
        store.read(path)


def test_a_part_with_another_state_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, stage({"one": 1, "w": torch.ones(3)}, 1))
    forged(path, skeleton={"$dict": [["two", 1], ["w", {"$tensor": 0}]]})

    with pytest.raises(
        Damaged, match=r"is an image of .* bytes, digest .*; its manifest\.json has"
    ):
        store.read(path)


def test_a_part_that_was_changed_with_its_seal_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, staged_at(1))
    raw = json.loads((path / "rank-0.json").read_bytes())
    del raw["self"]
    (path / "rank-0.json").write_bytes(sealed({**raw, "note": "mine"}))

    with pytest.raises(Damaged, match=r"was changed after its manifest.json was written: hash \w"):
        store.read(path)


def test_whoever_verifies_is_not_told_to_verify(tmp_path: Path) -> None:
    path = write(tmp_path, staged_at(2))
    unlinked(path / "rank-0.json")

    (finding,) = store.verify(path)

    assert "python -m" not in str(finding)


def test_what_cannot_be_read_is_not_counted_among_those_kept(tmp_path: Path) -> None:
    for step in (7, 8, 9):
        write(tmp_path, staged_at(step))
    (tmp_path / "step-00000009" / "manifest.json").unlink()

    write(tmp_path, staged_at(10), keep=2)

    assert names(tmp_path) == ["step-00000010", "step-00000009", "step-00000008"]


@pytest.mark.parametrize("code", ILL)
def test_a_later_one_that_could_not_be_read_is_not_set_aside(tmp_path: Path, code: int) -> None:
    """Step 2, shared out, took long; step 3, written alone, was complete before it."""
    for step in (1, 2, 3):
        write(tmp_path, staged_at(step), keep=9)

    with unreadable(tmp_path / "step-00000003", code):
        store.prune(tmp_path, tmp_path / "step-00000002", keep=1)

    assert names(tmp_path) == ["step-00000003", "step-00000002"]
    assert newest_step(tmp_path) == 3


def test_an_earlier_step_that_could_not_be_read_may_be_of_later_training(tmp_path: Path) -> None:
    """The job went back, and a writer from before that was late."""
    for step, epoch in ((1, 2), (2, 1), (3, 1)):
        write(tmp_path, staged_at(step), keep=9, facts={"epoch": epoch})

    with unreadable(tmp_path / "step-00000001"):
        store.prune(tmp_path, tmp_path / "step-00000003", keep=1)

    assert names(tmp_path) == ["step-00000003", "step-00000001"]


def test_what_could_not_be_read_of_another_replica_s_stays(tmp_path: Path) -> None:
    write(tmp_path / "ours", staged_at(5))
    for step in (1, 2):
        write(tmp_path / "other", staged_at(step))

    with unreadable(tmp_path / "other" / "step-00000001"):
        store.prune_others(tmp_path / "ours", [tmp_path / "other"], keep=1)

    assert names(tmp_path / "other") == ["step-00000001"]


def test_instead_of_one_that_could_not_be_read_the_next_is_loaded_and_that_is_said(
    tmp_path: Path,
) -> None:
    for step in (1, 2):
        write(tmp_path, staged_at(step))

    with unreadable(tmp_path / "step-00000002"):
        loaded = newest_step(tmp_path)
        (finding,) = store.verify(tmp_path / "step-00000002")

    assert loaded == 1
    assert "manifest.json could not be read (Input/output error): it may be whole" in str(finding)


def test_what_is_the_same_is_shared_and_outlives_the_first(tmp_path: Path) -> None:
    first, second = (write(tmp_path, staged_at(step), keep=1) for step in (1, 2))

    assert not first.exists()
    assert store.verify(second) == []


def test_a_step_that_is_saved_again_leaves_the_first_one_whole(tmp_path: Path) -> None:
    first = write(tmp_path, staged_at(7))
    second = write(tmp_path, staged_at(7))

    assert names(tmp_path) == ["step-00000007.1", "step-00000007"]
    assert (store.verify(first), store.verify(second)) == ([], [])


def test_a_step_is_saved_beside_one_that_came_from_an_object_store(tmp_path: Path) -> None:
    """Whose number is a hash, as `aws s3 sync` brings it."""
    brought = write(tmp_path, staged_at(7)).rename(tmp_path / "step-00000007.4294967295")

    path = write(tmp_path, staged_at(7))

    assert path.name == "step-00000007.4294967296"
    assert (store.verify(brought), store.verify(path)) == ([], [])


def test_what_is_newer_than_a_new_checkpoint_is_set_aside(tmp_path: Path) -> None:
    """The job went on from step 100, for the newer ones could not be loaded."""
    for step in (100, 200, 300):
        write(tmp_path, staged_at(step), keep=9, facts={"epoch": 1})

    for step in (120, 140):
        write(tmp_path, staged_at(step), keep=2, facts={"epoch": 2})

    assert names(tmp_path) == ["step-00000140", "step-00000120"]
    (left,) = tmp_path.glob(".damaged-*")
    assert "step-00000300" in left.name  # the furthest that was ever trained


@pytest.mark.parametrize("step", [295, 300, 311])
def test_what_the_job_did_not_begin_from_does_not_take_the_place_of_what_it_did(
    tmp_path: Path, step: int
) -> None:
    """300 was damaged, or did not train; by the next save the job may be beyond it."""
    for before in (290, 300):
        write(tmp_path, staged_at(before), keep=9, facts={"epoch": 1})
    began = {"epoch": 1, "step": 290, "first": 2}

    newest = write(tmp_path, staged_at(step), keep=2, facts={"epoch": 2, "began": began})

    assert names(tmp_path) == [newest.name, "step-00000290"]
    (left,) = tmp_path.glob(".damaged-*")
    assert left.name.startswith(".damaged-step-00000300-")


def test_what_was_saved_since_the_job_began_is_not_set_aside(tmp_path: Path) -> None:
    began = {"epoch": 1, "step": 290, "first": 2}
    for step, epoch in ((290, 1), (310, 2), (320, 3)):
        write(tmp_path, staged_at(step), keep=9, facts={"epoch": epoch, "began": began})

    assert names(tmp_path) == ["step-00000320", "step-00000310", "step-00000290"]


@pytest.mark.parametrize(
    "began", [None, {}, {"epoch": 1}, {"epoch": "1", "step": 2, "first": 3}, 7]
)
def test_who_does_not_say_what_its_job_began_from_passes_nothing_over(
    tmp_path: Path, began: Any
) -> None:
    for step, epoch in ((300, 1), (320, 2)):
        write(tmp_path, staged_at(step), keep=9, facts={"epoch": epoch, "began": began})

    assert names(tmp_path) == ["step-00000320", "step-00000300"]


def test_an_import_that_the_job_began_from_is_not_passed_over(tmp_path: Path) -> None:
    """It is of weights alone, from which a job begins before its first step."""
    write(tmp_path, staged_at(0), facts={"epoch": 0, "imported": "model.pt"})
    began = {"epoch": 0, "step": -1, "first": 1}

    write(tmp_path, staged_at(20), facts={"epoch": 1, "began": began})

    assert names(tmp_path) == ["step-00000020", "step-00000000"]


def test_what_is_set_aside_stays_though_a_clock_was_ahead_before(tmp_path: Path) -> None:
    path = write(tmp_path, staged_at(7))
    (tmp_path / f".damaged-step-00000003-{time.time_ns() + 10**12}").mkdir()

    store.set_aside(path)

    (left,) = tmp_path.glob(".damaged-*")
    assert "step-00000007" in left.name


def test_of_those_set_aside_the_last_one_stays_to_be_looked_at(tmp_path: Path) -> None:
    write(tmp_path, staged_at(1))
    for step in (300, 200):
        write(tmp_path, staged_at(step), keep=9)
        store.set_aside(tmp_path / f"step-{step:08d}")

    (left,) = tmp_path.glob(".damaged-*")
    assert "step-00000200" in left.name


def test_a_writer_that_was_late_takes_nothing_from_what_came_since(tmp_path: Path) -> None:
    for step in (200, 300, 100):
        write(tmp_path, staged_at(step), keep=3, facts={"epoch": 2})

    assert names(tmp_path) == ["step-00000300", "step-00000200", "step-00000100"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_what_cannot_be_put_out_of_sight_is_not_removed_by_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    for step in (1, 2):
        write(tmp_path, staged_at(step))
    monkeypatch.setattr(Path, "rename", refusing(code))

    left = store.prune(tmp_path, tmp_path / "step-00000002", keep=1)

    assert left == [tmp_path / "step-00000001"]
    assert store.verify(left[0]) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_too_full_for_another_name_makes_room_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    for step in (1, 2):
        write(tmp_path, staged_at(step))
    monkeypatch.setattr(Path, "rename", refusing(code))

    assert store.prune(tmp_path, tmp_path / "step-00000002", keep=1) == []
    assert [*tmp_path.glob("step-*")] == [tmp_path / "step-00000002"]


def test_what_is_out_of_sight_is_removed_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, staged_at(1))
    store.set_aside(tmp_path / "step-00000001")
    monkeypatch.setattr(Path, "rename", refusing(errno.ENOSPC))

    store.drop_aside(tmp_path)

    assert [*tmp_path.iterdir()] == []


def test_what_another_host_removed_first_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To us it may be there yet, for a while."""
    path = write(tmp_path, staged_at(1))
    monkeypatch.setattr(Path, "rename", refusing(errno.ENOENT))

    assert store.remove(path) is None
    assert store.verify(path) == []


def refusing(code: int) -> Callable[[Path, Path], NoReturn]:
    def rename(path: Path, _to: Path) -> NoReturn:
        raise OSError(code, os.strerror(code), str(path))

    return rename


def test_a_step_saved_often_is_numbered_on(tmp_path: Path) -> None:
    for _ in range(5):
        write(tmp_path, staged_at(7), keep=2)

    assert names(tmp_path) == ["step-00000007.4", "step-00000007.3"]


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(NotADirectoryError):
        store.candidates(tmp_path / "file")
    assert store.candidates(tmp_path / "absent") == []


def draft_of(folder: Path, host: str) -> Path:
    draft = folder / ".writing-00000009-abc"
    draft.mkdir(parents=True)
    (draft / "rank-0.lock").write_text(host)
    return draft


def test_a_draft_of_a_dead_writer_is_not_seen_and_goes(tmp_path: Path) -> None:
    draft = draft_of(tmp_path, HOST)

    write(tmp_path, staged_at(1))

    assert not draft.exists()
    assert newest_step(tmp_path) == 1


def test_a_draft_of_a_living_writer_stays(tmp_path: Path) -> None:
    draft = draft_of(tmp_path, HOST)
    with (draft / "rank-0.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        write(tmp_path, staged_at(1))

    assert draft.exists()


def test_a_draft_of_another_host_goes_by_its_age_only(tmp_path: Path) -> None:
    draft = draft_of(tmp_path, "elsewhere")
    write(tmp_path, staged_at(1))
    fresh = draft.exists()
    for path in (draft / "rank-0.lock", draft):
        os.utime(path, (1.0, 1.0))

    write(tmp_path, staged_at(2))

    assert (fresh, draft.exists()) == (True, False)


def test_what_cannot_be_kept_without_pickle_is_refused() -> None:
    with pytest.raises(TypeError, match="state_dict"):
        stage({"thing": object()}, 0)


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.json"])
def test_what_is_far_too_large_to_describe_anything_hides_no_older_one(
    tmp_path: Path, name: str
) -> None:
    for step in (1, 2):
        write(tmp_path, staged_at(step))
    with (tmp_path / "step-00000002" / name).open("wb") as file:
        file.truncate(1 << 40)

    found = store.newest(tmp_path)

    assert found is not None
    assert found[0] == tmp_path / "step-00000001"
    assert "1,099,511,627,776 bytes" in "; ".join(
        map(str, store.verify(tmp_path / "step-00000002"))
    )
