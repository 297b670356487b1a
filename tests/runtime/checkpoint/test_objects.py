"""Checkpoints in an object store: a folder behind the same interface, and S3 as moto plays it."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import re
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.checkpoint import store
from runtime.checkpoint.__main__ import main
from runtime.checkpoint.disk import all_there
from runtime.checkpoint.draft import write
from runtime.checkpoint.manifest import MANIFEST, sealed
from runtime.checkpoint.objects import Found, ObjectStore, step_of
from runtime.image import CHUNK_BYTES, Damaged
from runtime.snapshot import stage
from tests.runtime.checkpoint.one_rank import OneRank
from tests.runtime.checkpoint.states import SOON_S, impatient, staged_at
from tests.runtime.replicas import Fleet, until

Break = Callable[[Any, str], None]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """One that stands for a store."""
    return f"file://{tmp_path / 'objects'}"


@pytest.fixture
def server() -> Iterator[Any]:
    """It plays S3."""
    server_of = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    started = server_of.ThreadedMotoServer("127.0.0.1", port=0)
    started.start()
    yield started
    started.stop()


@pytest.fixture
def bucket(server: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{uuid.uuid4().hex}"  # the server's memory is that of the process
    pytest.importorskip("boto3").client("s3").create_bucket(Bucket=name)
    return f"s3://{name}/of/ours"


@pytest.fixture(params=["folder", "bucket"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def trainer(url: str, tmp_path: Path) -> Iterator[OneRank]:
    one = OneRank(tmp_path, object_store=url)
    yield one
    one.saver.finish()


def put(objects: ObjectStore, step: int, *, rank: int = 0, save: str = "") -> int:
    """How many bytes went there."""
    staged = staged_at(step)
    image = memoryview(staged.buffer)
    return objects.write(
        rank, staged.table, image, step=step, save=save or f"save{step}", ready=lambda _end: None
    )


def put_large(objects: ObjectStore, ready: Callable[[int], None] = all_there) -> None:
    """A state that is read in several requests, whatever they take."""
    staged = stage({"weight": torch.zeros(40 * CHUNK_BYTES, dtype=torch.uint8)}, 7)
    image = memoryview(staged.buffer)
    objects.write(0, staged.table, image, step=7, save="save7", ready=ready)


def there(objects: ObjectStore) -> list[tuple[int, str]]:
    found = [one.manifest for one in objects.found() if isinstance(one, Found)]
    return [(one.step, one.save) for one in found]


def change_manifest(objects: ObjectStore, found: Found) -> None:
    data = bytearray(objects._files.cat_file(f"{found.path}/{MANIFEST}"))
    data[-3] ^= 1  # of its seal
    objects._files.pipe_file(f"{found.path}/{MANIFEST}", bytes(data))


def test_a_copy_becomes_a_verified_checkpoint_there(trainer: OneRank, url: str) -> None:
    trainer.save_all(7)

    trainer.told.until(lambda: len(trainer.told.messages) == 2)
    (saved,) = [one for one in trainer.told.messages if one.tier == "object"]
    assert saved.path.startswith(f"{url}/j/checkpoints/step-00000007.")
    assert saved.digest == staged_at(7).digest
    sources = trainer.saver.sources
    assert sources.saves() == [(7, "save7", "shared"), (7, "save7", "object")]
    assert sources.read("save7", "object", 0).digest == saved.digest
    assert sources.ranks("save7", "object") == 1


def test_manifests_are_read_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store far away answers each request late."""
    objects = ObjectStore(url, "j")
    for step in (5, 6, 7):
        put(objects, step)
        objects.publish(step, f"save{step}", 1, {})
    meeting = threading.Barrier(3, timeout=30)
    read = objects._files.cat_file

    def late(*given: Any, **named: Any) -> Any:
        meeting.wait()
        return read(*given, **named)

    monkeypatch.setattr(objects._files, "cat_file", late)

    assert there(objects) == [(7, "save7"), (6, "save6"), (5, "save5")]


def test_frozen_weights_are_put_there_once(url: str) -> None:
    """Also by a writer that was started since: the store copies its own objects."""
    objects = ObjectStore(url, "j")
    first = put(objects, 5)
    objects.publish(5, "save5", 1, {})
    second = put(objects, 6)
    objects.publish(6, "save6", 1, {})
    later = ObjectStore(url, "j")
    third = put(later, 7)
    newest = later.publish(7, "save7", 1, {})
    assert newest is not None
    later.prune(newest, 1)

    whole, frozen = staged_at(7).table.bytes, staged_at(7).table.frozen
    assert [first, second, third] == [whole, whole - frozen, whole - frozen]
    assert there(later) == [(7, "save7")]
    assert bytes(later.read("save7", 0).buffer) == bytes(staged_at(7).buffer)


def test_frozen_weights_that_were_damaged_where_they_are_are_put_anew(url: str) -> None:
    objects = ObjectStore(url, "j")
    put(objects, 5)
    found = objects.publish(5, "save5", 1, {})
    assert found is not None
    path = f"{found.path}/rank-0-0000.bin"
    data = bytearray(objects._files.cat_file(path))
    data[1000] ^= 1
    objects._files.pipe_file(path, bytes(data))

    assert put(objects, 6) == staged_at(6).table.bytes
    objects.publish(6, "save6", 1, {})
    assert put(ObjectStore(url, "j"), 7) < staged_at(7).table.bytes
    assert bytes(objects.read("save6", 0).buffer) == bytes(staged_at(6).buffer)


def test_frozen_weights_of_a_checkpoint_that_is_gone_are_put_anew(url: str) -> None:
    objects = ObjectStore(url, "j")
    put(objects, 5)
    gone = objects.publish(5, "save5", 1, {})
    assert gone is not None
    objects._remove(gone.path)

    assert put(objects, 6) == staged_at(6).table.bytes
    objects.publish(6, "save6", 1, {})
    assert bytes(objects.read("save6", 0).buffer) == bytes(staged_at(6).buffer)


def test_it_is_a_checkpoint_once_the_parts_of_all_ranks_are_there(url: str) -> None:
    objects = ObjectStore(url, "j")
    put(objects, 7, rank=1)
    alone = objects.publish(7, "save7", 2, {})
    put(objects, 7, rank=0)

    whole = objects.publish(7, "save7", 2, {"epoch": 3})

    assert alone is None
    assert whole is not None
    assert [part.rank for part in whole.manifest.parts] == [0, 1]
    assert there(objects) == [(7, "save7")]
    assert objects.read("save7", 1).digest == staged_at(7).digest


def turn_a_bit(files: Any, path: str) -> None:
    data = bytearray(files.cat_file(path))
    data[1000] ^= 1
    files.pipe_file(path, bytes(data))


def cut(files: Any, path: str) -> None:
    files.pipe_file(path, files.cat_file(path)[:-1])


def remove(files: Any, path: str) -> None:
    files.rm_file(path)


@pytest.mark.parametrize("damage", [turn_a_bit, cut, remove])
@pytest.mark.parametrize("name", ["rank-0-0000.bin", "rank-0.json"])
def test_what_was_damaged_there_is_refused_by_name(url: str, damage: Break, name: str) -> None:
    objects = ObjectStore(url, "j")
    put(objects, 7)
    found = objects.publish(7, "save7", 1, {})
    assert found is not None
    damage(objects._files, f"{found.path}/{name}")

    with pytest.raises(Damaged, match=name):
        objects.read("save7", 0)


def of_two_ranks(url: str) -> tuple[ObjectStore, Found]:
    objects = ObjectStore(url, "j")
    for rank in (0, 1):
        put(objects, 7, rank=rank)
    found = objects.publish(7, "save7", 2, {})
    assert found is not None
    return objects, found


def test_all_that_is_wrong_there_is_named_of_every_rank(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    objects, found = of_two_ranks(url)
    remove(objects._files, f"{found.path}/rank-0-0000.bin")
    remove(objects._files, f"{found.path}/rank-0-0001.bin")
    turn_a_bit(objects._files, f"{found.path}/rank-1-0000.bin")
    cut(objects._files, f"{found.path}/rank-1-0001.bin")

    assert main(["verify", objects.url_of(found), "--json"]) == 1

    (said,) = json.loads(capsys.readouterr().out)
    words = [
        r"rank-0-0000\.bin \(rank 0\), tensors base: it is missing, 2097152 bytes expected",
        r"rank-0-0001\.bin \(rank 0\), tensors .*model\.weight.*: it is missing, \d+ bytes",
        r"rank-1-0000\.bin \(rank 1\), tensors base: 1 chunks are not what was saved",
        r"rank-1-0001\.bin \(rank 1\), tensors .*model\.weight.*: it ends after \d+ of \d+ bytes",
    ]
    pairs = zip(words, said["findings"], strict=True)
    assert [word for word, finding in pairs if not re.search(word, finding)] == []


def test_one_that_ends_with_a_chunk_is_not_taken_for_a_store_out_of_reach(url: str) -> None:
    """S3 refuses who asks for what lies behind the end."""
    objects, found = of_two_ranks(url)
    path = f"{found.path}/rank-1-0000.bin"
    objects._files.pipe_file(path, objects._files.cat_file(path)[:CHUNK_BYTES])

    (finding,) = objects.verify(found)

    assert finding.endswith("tensors base: it ends after 1048576 of 2097152 bytes")


def test_what_was_found_damaged_is_said_though_the_store_hangs_then(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, found = of_two_ranks(folder)
    remove(objects._files, f"{found.path}/rank-0-0000.bin")
    small = objects._files.cat_file

    def fail(path: str, **given: Any) -> bytes:
        if "start" not in given:
            return bytes(small(path))
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(objects._files, "cat_file", fail)

    missing, unread, of_the_other = objects.verify(found)

    assert "rank-0-0000.bin (rank 0), tensors base: it is missing" in missing
    assert "rank-0.json (rank 0): the rest could not be read: " in unread
    assert "Connection timed out" in of_the_other


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (turn_a_bit, "at least 1 chunks are not what was saved"),
        (cut, "it ends after 2097151 of 2097152 bytes"),
        (remove, "it is missing, 2097152 bytes expected"),
    ],
)
def test_who_loads_hears_whose_an_object_was(url: str, damage: Break, words: str) -> None:
    objects, found = of_two_ranks(url)
    damage(objects._files, f"{found.path}/rank-1-0000.bin")

    with pytest.raises(Damaged, match=rf"rank-1-0000\.bin \(rank 1\), tensors base: {words}"):
        objects.read("save7", 1)


def test_a_part_of_which_nothing_is_said_there_is_named_by_its_rank(url: str) -> None:
    objects, found = of_two_ranks(url)
    remove(objects._files, f"{found.path}/rank-1.json")

    assert objects.verify(found) == [
        f"{found.path}/rank-1.json is missing: the tensors of rank 1 are expected there"
    ]


def two(url: str) -> tuple[ObjectStore, Found, Found]:
    """Of steps 7 and 6."""
    objects = ObjectStore(url, "j")
    for step in (6, 7):
        put(objects, step)
        objects.publish(step, f"save{step}", 1, {})
    newer, older = (one for one in objects.found() if isinstance(one, Found))
    return objects, newer, older


def test_they_are_listed_and_verified_where_they_are(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    objects, newer, older = two(url)
    turn_a_bit(objects._files, f"{older.path}/rank-0-0000.bin")

    listed = main(["ls", f"{url}/j", "--json"])
    told = capsys.readouterr()
    there = json.loads(told.out)
    verified = main(["verify", f"{url}/j/checkpoints/"])
    said = capsys.readouterr().out.splitlines()
    one_alone = main(["verify", objects.url_of(newer), "--json"])
    (well,) = json.loads(capsys.readouterr().out)

    assert (listed, verified, one_alone) == (0, 1, 0)
    assert [(one["path"], one["step"]) for one in there] == [
        (objects.url_of(newer), 7), (objects.url_of(older), 6),
    ]  # fmt: skip
    assert told.err.startswith(f"{url}/j does not say which of them led to NaN: suspects.json ")
    assert [line.rpartition("  ")[2] for line in said[:2]] == ["well", "DAMAGED"]
    assert "rank-0-0000.bin (rank 0), tensors base: 1 chunks are not what was saved" in said[2]
    assert (well["digest"], well["findings"]) == (newer.manifest.digest, [])


@pytest.mark.parametrize(
    ("named", "words"), [("{url}/other", "has no checkpoint: give"), ("s3://j", "names no job's")]
)
def test_a_url_that_leads_to_none_is_said(
    folder: str, named: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = ObjectStore(folder, "j")
    put(objects, 7)
    objects.publish(7, "save7", 1, {})

    assert main(["verify", named.format(url=folder)]) == 2
    assert f"{words}" in (said := capsys.readouterr().err)
    assert "s3://bucket/prefix/JOB" in said


def test_what_is_damaged_is_said_though_other_parts_could_not_be_read(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = ObjectStore(folder, "j")
    for rank in (0, 1):
        put(objects, 7, rank=rank)
    objects.publish(7, "save7", 2, {})
    compare = ObjectStore._compare

    def compared(self: ObjectStore, where: str, part: Any, **also: Any) -> Any:
        by_rank: list[Any] = [partial(compare, self), out_of_reach]
        return by_rank[part.rank](where, part, **also)

    def out_of_reach(*_given: object, **_also: object) -> None:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(ObjectStore, "_compare", compared)
    (found,) = (one for one in objects.found() if isinstance(one, Found))
    unread = main(["verify", objects.url_of(found)])
    turn_a_bit(objects._files, f"{found.path}/rank-0-0000.bin")
    damaged = main(["verify", objects.url_of(found)])

    assert (unread, damaged) == (2, 1)
    assert "rank-0-0000.bin (rank 0)" in capsys.readouterr().out


def test_one_that_is_named_and_damaged_is_said_to_be(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    objects, newer, older = two(url)
    change_manifest(objects, older)

    assert main(["verify", objects.url_of(older)]) == 1
    assert "was changed after it was written" in capsys.readouterr().out
    assert main(["verify", objects.url_of(newer)]) == 0


def test_of_a_store_that_gives_nothing_more_nothing_is_said_to_be_damaged(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = ObjectStore(folder, "j")
    put(objects, 7)
    objects.publish(7, "save7", 1, {})

    def compare(*_given: object, **_named: object) -> None:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(ObjectStore, "_compare", compare)

    assert main(["verify", f"{folder}/j"]) == 2
    assert "NOT CHECKED" in capsys.readouterr().out


def test_who_loads_asks_for_no_more_once_a_chunk_is_wrong(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.checkpoint.objects.STREAMS", 1)
    monkeypatch.setattr("runtime.checkpoint.objects.BLOCK_BYTES", CHUNK_BYTES)
    objects = ObjectStore(folder, "j")
    put(objects, 7)
    found = objects.publish(7, "save7", 1, {})
    assert found is not None
    turn_a_bit(objects._files, f"{found.path}/rank-0-0000.bin")
    seen: list[int] = []

    with pytest.raises(Damaged, match=r"rank-0-0000\.bin .* at least 1 chunks are not what was"):
        objects.read("save7", 0, seen.append)

    assert seen[-1] == CHUNK_BYTES
    assert sum(seen) < staged_at(7).table.bytes


def test_a_manifest_that_was_changed_is_no_checkpoint(url: str) -> None:
    objects = ObjectStore(url, "j")
    put(objects, 7)
    found = objects.publish(7, "save7", 1, {})
    assert found is not None
    change_manifest(objects, found)

    (damaged,) = objects.found()

    assert isinstance(damaged, Damaged)


@pytest.mark.parametrize("name", ["rank-0.json", MANIFEST])
def test_json_that_is_not_there_as_it_was_put_makes_no_checkpoint(
    url: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    objects = ObjectStore(url, "j")
    put_small = objects._put_small

    def lose_the_end(path: str, data: bytes) -> None:
        put_small(path, data[:-1] if path.endswith(name) else data)

    monkeypatch.setattr(objects, "_put_small", lose_the_end)
    put(objects, 7)

    with pytest.raises(Damaged, match=name):
        objects.publish(7, "save7", 1, {})
    assert there(objects) == []


def test_the_newest_are_kept_and_what_was_never_complete_goes(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.checkpoint.objects.IDLE_S", -SOON_S)  # as if it were long ago
    objects = ObjectStore(url, "j")
    put(objects, 1, save="died")  # its writer, before it was a checkpoint
    for step in (2, 3, 4):
        put(objects, step)
        newest = objects.publish(step, f"save{step}", 1, {})
    put(objects, 5, save="under-way")
    assert newest is not None

    objects.prune(newest, 2)

    assert there(objects) == [(4, "save4"), (3, "save3")]
    steps = sorted(path.rpartition("step-")[2].partition(".")[0] for path in objects._folders())
    assert steps == ["00000003", "00000004", "00000005"]


@pytest.mark.parametrize("job", ["llama[sft]", "llama?", "llama*"])
def test_the_name_of_a_job_is_no_pattern(url: str, job: str) -> None:
    ours, other = ObjectStore(url, job), ObjectStore(url, "llama1")
    for step in (1, 2):
        put(other, step)
        other.publish(step, f"save{step}", 1, {})
        put(ours, step)
        newest = ours.publish(step, f"save{step}", 1, {})
    assert newest is not None

    ours.prune(newest, 1)

    assert ours._folders() == [newest.path]
    assert read_in(other, "save1") == staged_at(1).digest


def test_a_folder_of_which_nothing_is_known_keeps_no_other_from_being_pruned(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that failed left it empty; and of another the store does not say when."""
    objects = ObjectStore(folder, "j")
    for step in (2, 3, 4):
        put(objects, step)
        newest = objects.publish(step, f"save{step}", 1, {})
    assert newest is not None
    empty, odd = (Path(newest.path).with_name(f"step-0000000{step}.7") for step in (0, 1))
    empty.mkdir()
    put(objects, 1, save="odd")
    objects.prune(newest, 2)
    emptied, kept = empty.exists(), there(objects)

    def unknown(_path: str) -> None:
        raise NotImplementedError

    monkeypatch.setattr(objects._files, "modified", unknown)
    objects.prune(newest, 1)

    assert not emptied
    assert kept == [(4, "save4"), (3, "save3")]
    assert there(objects) == [(4, "save4")]
    assert not odd.exists()


def test_a_writer_of_before_leaves_alone_what_its_job_writes_since_it_went_back(url: str) -> None:
    """Its trainer was killed, the job went on from an earlier step, and the writer still writes."""
    before, since = ObjectStore(url, "j"), ObjectStore(url, "j")
    put(since, 960)
    put(before, 1000)
    late = before.publish(1000, "save1000", 1, {"epoch": 1})
    assert late is not None

    before.prune(late, 3)

    assert since.publish(960, "save960", 1, {"epoch": 2}) is not None
    assert read_in(since, "save960") == staged_at(960).digest


def read_in(objects: ObjectStore, save: str) -> str:
    return objects.read(save, 0).digest


def test_a_manifest_of_which_a_store_shows_half_is_put_anew(folder: str) -> None:
    objects = ObjectStore(folder, "j")
    put(objects, 1)
    found = objects.publish(1, "save1", 1, {})
    assert found is not None
    Path(found.path, MANIFEST).write_bytes(b"")

    assert objects.publish(1, "save1", 1, {}) is not None

    assert there(objects) == [(1, "save1")]


def test_what_cannot_be_read_is_kept_until_it_is_older_than_all_that_are(url: str) -> None:
    objects = ObjectStore(url, "j")
    for step in (1, 2):
        put(objects, step)
        newest = objects.publish(step, f"save{step}", 1, {})
        assert newest is not None
        change_manifest(objects, newest)
    put(objects, 3)
    alone = objects.publish(3, "save3", 1, {})
    assert alone is not None
    objects.prune(alone, 2)
    kept = len(objects.found())
    put(objects, 4)
    newest = objects.publish(4, "save4", 1, {})
    assert newest is not None

    objects.prune(newest, 2)

    assert kept == 3
    assert len(objects.found()) == 2
    assert there(objects) == [(4, "save4"), (3, "save3")]


def test_what_the_job_did_not_begin_from_is_not_counted_there_either(url: str) -> None:
    objects = ObjectStore(url, "j")
    began = {"epoch": 1, "step": 290, "first": 2}
    for step, facts in (
        (290, {"epoch": 1}),
        (300, {"epoch": 1}),
        (311, {"epoch": 2, "began": began}),
    ):
        put(objects, step)
        found = objects.publish(step, f"save{step}", 1, facts)
    assert found is not None

    objects.prune(found, 2)

    assert {step for step, _save in there(objects)} >= {311, 290}


@pytest.fixture
def three(url: str) -> tuple[ObjectStore, Found]:
    """Checkpoints of one job, and the newest of them."""
    objects = ObjectStore(url, "j")
    found = None
    for step in (1, 2, 3):
        put(objects, step)
        found = objects.publish(step, f"save{step}", 1, {})
    assert found is not None
    return objects, found


def refuse(monkeypatch: pytest.MonkeyPatch, objects: ObjectStore, part: str, times: float) -> None:
    """So many requests for what has this in its path are refused."""
    small, refused = objects._files.cat_file, 0

    def cat_file(path: str, **given: Any) -> bytes:
        nonlocal refused
        if part in path and refused < times:
            refused += 1
            raise PermissionError(errno.EACCES, "Forbidden", path)
        return bytes(small(path, **given))

    monkeypatch.setattr(objects._files, "cat_file", cat_file)


def test_a_manifest_that_is_refused_hides_no_other_and_stays(
    three: tuple[ObjectStore, Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, newest = three
    with monkeypatch.context() as meanwhile:
        refuse(meanwhile, objects, "step-00000002", math.inf)
        seen = there(objects)
        (flaw,) = [one for one in objects.found() if not isinstance(one, Found)]
        objects.prune(newest, 1)

    assert seen == [(3, "save3"), (1, "save1")]
    assert isinstance(flaw, store.Unreadable)
    assert "step-00000002" in str(flaw)
    assert "Forbidden" in str(flaw)
    assert there(objects) == [(3, "save3"), (2, "save2")]


def test_a_request_that_is_refused_once_is_made_again(
    three: tuple[ObjectStore, Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, three[0], "step-00000003", 1)

    assert there(three[0])[0] == (3, "save3")


def test_where_no_manifest_can_be_had_the_store_is_out_of_reach(
    three: tuple[ObjectStore, Found], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, three[0], MANIFEST, math.inf)

    with pytest.raises(PermissionError, match="Forbidden"):
        three[0].found()


def test_what_another_version_put_there_stays(url: str) -> None:
    """A job that was given an older Drydock goes on from what that can read."""
    objects = ObjectStore(url, "j")
    for step, version in ((1, 5), (2, 3), (3, 3)):
        put(objects, step)
        newest = objects.publish(step, f"save{step}", 1, {})
        assert newest is not None
        change_version(objects, newest, version)
    assert newest is not None

    objects.prune(newest, 1)

    assert there(objects) == [(3, "save3")]
    assert len(objects.found()) == 2


def change_version(objects: ObjectStore, found: Found, version: int) -> None:
    path = f"{found.path}/{MANIFEST}"
    said = {**json.loads(objects._files.cat_file(path)), "version": version}
    del said["self"]
    objects._files.pipe_file(path, sealed(said))


def test_a_second_to_publish_changes_nothing(url: str) -> None:
    objects = ObjectStore(url, "j")
    put(objects, 7)
    first = objects.publish(7, "save7", 1, {"at": 1})

    assert objects.publish(7, "save7", 1, {"at": 2}) == first


def test_a_part_that_was_whole_is_not_taken_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may have seen it, and have made the checkpoint."""
    objects = ObjectStore(url, "j")
    put(objects, 7, rank=1)
    put_small = objects._put_small

    def lose_the_answer(path: str, data: bytes) -> None:
        put_small(path, data)
        raise OSError("the connection is gone")

    monkeypatch.setattr(objects, "_put_small", lose_the_answer)
    with pytest.raises(OSError, match="gone"):
        put(objects, 7, rank=0)
    monkeypatch.undo()

    assert objects.publish(7, "save7", 2, {}) is not None
    assert objects.read("save7", 0).digest == staged_at(7).digest


def test_after_a_request_that_failed_no_more_are_made(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = ObjectStore(url, "j")
    put_large(objects)
    assert objects.publish(7, "save7", 1, {}) is not None
    monkeypatch.setattr("runtime.checkpoint.objects.BLOCK_BYTES", CHUNK_BYTES)
    asked: list[str] = []
    small = objects._files.cat_file

    def fail(path: str, **given: Any) -> bytes:
        if "start" not in given:
            return bytes(small(path))
        asked.append(path)
        raise OSError("the store is away")

    monkeypatch.setattr(objects._files, "cat_file", fail)
    with pytest.raises(OSError, match="away"):
        objects.read("save7", 0)

    assert len(asked) < 40 / 4


def test_what_is_only_compared_is_read_in_small_pieces(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that is under way has memory of its own, and other tiers read back meanwhile."""
    objects = ObjectStore(folder, "j")
    read: list[int] = []
    cat_file = objects._files.cat_file

    def noted(path: str, **limits: int) -> bytes:
        found = bytes(cat_file(path, **limits))
        read.append(len(found))
        return found

    monkeypatch.setattr(objects._files, "cat_file", noted)
    put_large(objects)
    compared = max(read)
    objects.publish(7, "save7", 1, {})
    objects.read("save7", 0)

    assert compared == CHUNK_BYTES
    assert max(read) > 8 * compared


def break_off(monkeypatch: pytest.MonkeyPatch, objects: ObjectStore, error: Exception) -> None:
    """The first answer with each piece of data does."""
    cat_file, asked = objects._files.cat_file, set()

    def once(path: str, **limits: int) -> bytes:
        piece = path, limits.get("start", 0)
        if limits and piece not in asked:
            asked.add(piece)
            raise error
        return bytes(cat_file(path, **limits))

    monkeypatch.setattr(objects._files, "cat_file", once)


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), RuntimeError("not all came")])
def test_what_broke_off_on_its_way_is_asked_for_again(
    folder: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    objects = ObjectStore(folder, "j")
    break_off(monkeypatch, objects, error)
    put(objects, 7)
    monkeypatch.undo()
    objects.publish(7, "save7", 1, {})
    break_off(monkeypatch, objects, error)

    assert read_in(objects, "save7") == staged_at(7).digest


@pytest.mark.parametrize("error", [PermissionError("forbidden"), FileNotFoundError("gone")])
def test_what_is_refused_or_gone_is_asked_for_once(
    folder: str, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    objects = ObjectStore(folder, "j")
    put(objects, 7)
    objects.publish(7, "save7", 1, {})
    break_off(monkeypatch, objects, error)

    with pytest.raises((PermissionError, Damaged)):
        objects.read("save7", 0)


def busy(server: Any, method: str, name: str) -> None:
    """The next three requests for an object of this name are told to come later."""
    answer, left = server._server.app, iter(range(3))

    def app(request: dict[str, Any], start: Callable[..., Any]) -> Any:
        asked = request["REQUEST_METHOD"], request["PATH_INFO"].rpartition("/")[2]
        if asked != (method, name) or next(left, None) is None:
            return answer(request, start)
        request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
        start("503 Slow Down", [("Content-Type", "application/xml")])
        return [b"<Error><Code>SlowDown</Code><Message>Reduce the rate.</Message></Error>"]

    server._server.app = app


def test_a_writer_outlasts_a_store_that_is_busy_for_a_while(
    bucket: str, server: Any, tmp_path: Path
) -> None:
    """Nobody waits for it, and what it gives up is given up by all ranks."""
    busy(server, "PUT", "rank-0-0000.bin")
    one = OneRank(tmp_path, object_store=bucket)
    one.save_all(7)
    one.told.until(lambda: len(one.told.messages) == 2)
    one.saver.finish()

    assert one.told.troubles() == []
    assert there(ObjectStore(bucket, "j")) == [(7, "save7")]


def test_who_loads_waits_less_for_a_store_that_is_busy(bucket: str, server: Any) -> None:
    """All cards of the job wait with it, and there are other tiers."""
    objects = ObjectStore(bucket, "j")
    put(objects, 7)
    objects.publish(7, "save7", 1, {})
    busy(server, "GET", "rank-0.json")

    with pytest.raises(OSError, match="Reduce the rate"):
        objects.read("save7", 0)


def test_a_bucket_that_is_not_there_is_an_error(bucket: str) -> None:
    with pytest.raises(OSError, match="there is no bucket 'misspelt'"):
        ObjectStore("s3://misspelt/of/ours", "j").found()

    assert ObjectStore(bucket, "new").found() == []


def test_a_later_epoch_comes_before_a_later_step(url: str) -> None:
    objects = ObjectStore(url, "j")
    for step, epoch in ((9, 1), (7, 2)):
        put(objects, step)
        objects.publish(step, f"save{step}", 1, {"epoch": epoch})

    assert there(objects) == [(7, "save7"), (9, "save9")]


def test_a_copy_that_never_comes_leaves_nothing_to_load(url: str) -> None:
    objects = ObjectStore(url, "j")

    def fail(_end: int) -> None:
        raise RuntimeError("the trainer is gone")

    staged = staged_at(7)
    with pytest.raises(RuntimeError, match="the trainer is gone"):
        objects.write(0, staged.table, memoryview(staged.buffer), step=7, save="save7", ready=fail)

    assert there(objects) == []
    assert objects._files.find(objects._root) == []


def test_the_first_object_that_cannot_be_removed_ends_the_clean_up(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that hangs lets each request wait, and until then nobody hears that it failed."""
    objects = ObjectStore(url, "j")
    asked: list[str] = []

    def hang(path: str) -> None:
        asked.append(path)
        raise TimeoutError("no answer")

    def fail(_end: int) -> None:
        raise RuntimeError("the trainer is gone")

    monkeypatch.setattr(objects._files, "rm_file", hang)
    staged = staged_at(7)
    with pytest.raises(RuntimeError, match="the trainer is gone"):
        objects.write(0, staged.table, memoryview(staged.buffer), step=7, save="save7", ready=fail)

    assert len(asked) == 1


def test_what_cannot_be_discarded_is_not_put_there_later(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As whoever removes an open file from memory would do."""
    monkeypatch.setattr("runtime.checkpoint.objects.STREAMS", 1)
    monkeypatch.setattr("runtime.checkpoint.objects.BLOCK_BYTES", 5 << 20)
    objects = ObjectStore(bucket, "j")

    def refuse(*_given: object) -> None:
        raise PermissionError(errno.EACCES, "Forbidden")

    def ready(end: int) -> None:
        if end > 7 * CHUNK_BYTES:
            raise RuntimeError("the trainer is gone")

    monkeypatch.setattr(objects._files, "abort_mpu", refuse)
    with pytest.raises(RuntimeError, match="the trainer is gone"):
        put_large(objects, ready)
    gc.collect()

    assert objects._files.find(objects._root) == []


def test_a_writer_that_dies_leaves_the_ones_before(trainer: OneRank) -> None:
    trainer.save_all(1)
    trainer.told.until(lambda: len(trainer.told.messages) == 2)
    os.kill(trainer.writer("object"), signal.SIGSTOP)
    trainer.save(2, last=False)
    trainer.told.until(lambda: ("object", "save2") in trainer.saver.dispatcher._asked)
    os.kill(trainer.writer("object"), signal.SIGKILL)
    trainer.told.until(lambda: "checkpoint_failed" in trainer.told.troubles())
    trainer.save_all(3)
    trainer.told.until(lambda: "checkpoint_recovered" in trainer.told.troubles())

    tiers = [(step, tier) for step, _save, tier in trainer.saver.sources.saves()]
    assert (3, "object") in tiers
    assert (1, "object") in tiers


def test_a_store_out_of_reach_costs_the_other_tiers_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "in-the-way").write_text("no folder")
    one = OneRank(tmp_path, object_store=f"file://{tmp_path}/in-the-way")
    one.save_all(1, 2)
    one.told.until(lambda: "checkpoint_failed" in one.told.troubles())
    one.saver.finish()

    assert one.told.saved() == [1, 2]
    assert one.told.troubles() == ["checkpoint_failed"]
    assert [tier for _step, _save, tier in one.saver.sources.saves()] == ["shared", "shared"]


def test_a_store_that_hangs_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, folder: str, tmp_path: Path
) -> None:
    one = OneRank(tmp_path, object_store=folder)
    one.save_all(1)
    one.saver.finish()
    back = threading.Event()
    impatient(monkeypatch, folder)
    monkeypatch.setattr(ObjectStore, "found", lambda _store, _heard: [] * back.wait())

    found = one.saver.sources.saves()
    back.set()

    assert found == [(1, "save1", "shared")]
    assert one.told.troubles() == ["checkpoints_out_of_reach"]


def test_nobody_begins_anew_because_the_store_is_out_of_reach(tmp_path: Path) -> None:
    (tmp_path / "in-the-way").write_text("no folder")
    one = OneRank(tmp_path, object_store=f"file://{tmp_path}/in-the-way")

    with pytest.raises(OSError, match="in-the-way"):
        one.saver.sources.saves()


def test_nobody_begins_with_an_import_while_the_store_is_out_of_reach(tmp_path: Path) -> None:
    """It has what the job of that name trained before, which would be taken for later."""
    (tmp_path / "in-the-way").write_text("no folder")
    one = OneRank(tmp_path, object_store=f"file://{tmp_path}/in-the-way")
    (tmp_path / "checkpoints").mkdir()
    write(tmp_path / "checkpoints", staged_at(0), facts={"imported": "theirs.pt", "epoch": 0})

    with pytest.raises(OSError, match="in-the-way"):
        one.saver.sources.saves()


def test_an_import_hides_behind_no_disk_of_a_job_that_had_its_name(tmp_path: Path) -> None:
    before = OneRank(tmp_path, own_disk=True)
    before.save_all(7)
    before.saver.finish()
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    again = OneRank(tmp_path, own_disk=True)
    (tmp_path / "checkpoints").mkdir()
    write(tmp_path / "checkpoints", staged_at(0), facts={"imported": "theirs.pt", "epoch": 0})

    assert [tier for *_, tier in again.saver.sources.saves()] == ["shared"]
    assert again.told.troubles() == ["checkpoints_out_of_reach"]


def test_who_holds_a_state_needs_none_of_a_store_that_is_out_of_reach(tmp_path: Path) -> None:
    (tmp_path / "in-the-way").write_text("no folder")
    one = OneRank(tmp_path, object_store=f"file://{tmp_path}/in-the-way")

    assert one.saver.sources.saves(after=(1, 5)) == []
    assert one.told.troubles() == ["checkpoints_out_of_reach"]


def test_nobody_begins_anew_where_nothing_in_the_store_can_be_read(
    folder: str, tmp_path: Path
) -> None:
    objects = ObjectStore(folder, "j")
    put(objects, 7)
    found = objects.publish(7, "save7", 1, {})
    assert found is not None
    change_manifest(objects, found)
    (damaged,) = objects.found()
    one = OneRank(tmp_path, object_store=folder)

    why = rf"none of the 1 checkpoints in file://.* \({re.escape(str(damaged))}\): mend that"
    with pytest.raises(ValueError, match=why):
        one.saver.sources.saves()


def test_an_old_checkpoint_of_the_store_hides_no_folder_that_is_not_mounted(
    folder: str, tmp_path: Path
) -> None:
    one = OneRank(tmp_path, own_disk=True)
    one.save_all(7)
    one.saver.finish()
    put(ObjectStore(folder, "j"), 3)
    ObjectStore(folder, "j").publish(3, "save3", 1, {})
    (tmp_path / "checkpoints").rename(tmp_path / "not-mounted")
    again = OneRank(tmp_path, own_disk=True, object_store=folder)

    with pytest.raises(ValueError, match="if it is not mounted, mount it"):
        again.saver.sources.saves()


def test_what_the_store_has_from_before_an_import_is_not_gone_on_from(
    folder: str, tmp_path: Path
) -> None:
    """It is of the job that had this name before."""
    one = OneRank(tmp_path, object_store=folder)
    (tmp_path / "checkpoints").mkdir()
    objects = ObjectStore(folder, "j")
    for step, at in ((500, 1e9), (3, 3e9)):
        put(objects, step)
        objects.publish(step, f"save{step}", 1, {"epoch": 5, "at": at})
    facts = {"imported": "theirs.pt", "epoch": 0, "at": 2e9}
    write(tmp_path / "checkpoints", staged_at(0), facts=facts)

    found = one.saver.sources.saves()

    assert [(step, tier) for step, _save, tier in found] == [(3, "object"), (0, "shared")]
    assert one.saver.sources.latest_epoch == 5  # what is saved from here on is later


def test_a_url_with_a_password_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="credentials belong in the environment") as refused:
        OneRank(tmp_path, object_store="ftp://me:secret@there/x")

    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["nothing-known://here", "s4://bucket"])
def test_a_store_of_an_unknown_kind_is_refused_at_once(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"the object store '{url}' cannot be used"):
        OneRank(tmp_path, object_store=url)


def test_a_job_goes_on_from_the_store_alone(make_fleet: Callable[..., Fleet], folder: str) -> None:
    fleet = make_fleet(2, object_store=folder, options={"object_s": 0.2})
    fleet.start()
    objects = ObjectStore(folder, "job_t")
    until(lambda: len(there(objects)) > 1, "two checkpoints are there")
    fleet.kill(0, 1)
    fleet.tell_ended()
    before = len(fleet.steps(0))
    for replica in (0, 1):
        fleet.start_rank(replica, object_s=3600)
    until(lambda: len(fleet.steps(0)) > before + 20, "it trains again")
    lost = not (fleet.folder / "state").exists()
    saved = {step for step, _save in there(objects)}
    fleet.stop()

    assert lost
    assert fleet.steps(0)[before]["step"] - 1 in saved
    assert len(fleet.digests()) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_wrong_with_one_says_of_which_step_it_is(url: str, which: int) -> None:
    """By that a job tells whether it goes on from an older one."""
    objects, *both = two(url)
    change_manifest(objects, both[which])

    (damaged,) = [one for one in objects.found() if isinstance(one, Damaged)]
    assert step_of(damaged) == both[which].manifest.step
