"""The command says what is there, and what is wrong with it, to people and to programs."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoint import disk, store
from runtime.checkpoint.__main__ import main
from runtime.checkpoint.draft import write
from runtime.checkpoint.manifest import Manifest, sealed
from tests.runtime.checkpoint.states import flip_a_bit, staged_at, unreadable

Capture = pytest.CaptureFixture[str]
URL = "s3://bucket/prefix/JOB"


def test_checkpoints_are_listed_newest_first(tmp_path: Path, capsys: Capture) -> None:
    for step in (1, 2):
        write(tmp_path / "checkpoints", staged_at(step))

    assert main(["ls", str(tmp_path)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step-00000002", "step-00000001"]
    assert staged_at(2).digest in lines[0]


def test_every_tensor_is_listed(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path, staged_at(2))

    assert main(["inspect", str(path), "--json"]) == 0

    (found,) = json.loads(capsys.readouterr().out)
    tensors = {one["name"]: (one["dtype"], one["shape"]) for one in found["tensors"]}
    assert tensors[".model.weight"] == ("float32", [300, 7])
    assert tensors[".scalar"] == ("int64", [])
    assert main(["inspect", str(path)]) == 0
    assert "float32   300x7          model.weight" in capsys.readouterr().out


def test_damage_is_named_and_is_the_exit_status(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, staged_at(1))
    flip_a_bit(write(tmp_path, staged_at(2)) / "rank-0-0001.bin", 80)

    assert main(["verify", str(tmp_path)]) == 1

    newer, finding, older = capsys.readouterr().out.splitlines()
    assert newer.split() == ["step-00000002", "DAMAGED"]
    assert "rank-0-0001.bin (rank 0), tensors model.weight" in finding
    assert older.split() == ["step-00000001", "well"]
    for verb in ("ls", "verify"):
        (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
        assert main([verb, str(tmp_path), "--json"]) == 1


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_nor_is_what_it_removes_while_it_is_looked_into(
    tmp_path: Path, verb: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, staged_at(1))
    manifest_of = store.manifest_of

    def just_in_time(path: Path) -> Manifest:
        found = manifest_of(path)
        store.remove(path)
        return found

    monkeypatch.setattr(store, "manifest_of", just_in_time)

    assert main([verb, str(path)]) == 0
    assert capsys.readouterr().out == "step-00000001    removed meanwhile\n"


@pytest.mark.parametrize("verb", ["ls", "verify"])
def test_what_its_job_removes_meanwhile_is_not_damaged(
    tmp_path: Path, verb: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(tmp_path, staged_at(step), keep=9)
    manifest_of = store.manifest_of

    def too_late(path: Path) -> Manifest:
        store.remove(tmp_path / "step-00000001")
        return manifest_of(path)

    monkeypatch.setattr(store, "manifest_of", too_late)

    assert main([verb, str(tmp_path)]) == 0

    newer, older = capsys.readouterr().out.splitlines()
    assert newer.startswith("step-00000002")
    assert older == "step-00000001    removed meanwhile"


@pytest.mark.parametrize("found_by", ["manifest_of", "part_of"])
@pytest.mark.parametrize("verb", ["diff", "export"])
def test_what_its_job_removes_while_it_is_read_is_not_damaged(
    tmp_path: Path, verb: str, found_by: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "job", staged_at(1))
    there = getattr(store, found_by)

    def just_in_time(*given: Any) -> Any:
        found = there(*given)
        store.remove(path)
        return found

    monkeypatch.setattr(store, found_by, just_in_time)
    words = {
        "diff": [str(path), str(path)],
        "export": [str(path), str(tmp_path / "out"), "--to", "torch"],
    }

    assert main([verb, *words[verb]]) == 2
    assert capsys.readouterr().err == (
        f"{path} was removed while it was read, as a job that trains removes its older ones: "
        "run it again, or copy it first\n"
    )


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.json", "rank-0-0001.bin"])
def test_nobody_waits_for_what_is_no_file(tmp_path: Path, name: str, capsys: Capture) -> None:
    write(tmp_path, staged_at(1))
    in_place = write(tmp_path, staged_at(2)) / name
    in_place.unlink()
    os.mkfifo(in_place)  # who opens one waits until somebody writes

    assert main(["verify", str(tmp_path)]) == 1

    told = capsys.readouterr().out
    assert "DAMAGED" in told.splitlines()[0]
    assert "step-00000001" in told.splitlines()[-1]
    assert "well" in told.splitlines()[-1]


def test_a_folder_that_cannot_be_looked_into_hides_no_other(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, staged_at(1))
    shut = write(tmp_path, staged_at(2))
    listing = Path.iterdir

    def forbidden(path: Path) -> Iterator[Path]:
        if path == shut:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return listing(path)

    monkeypatch.setattr(Path, "iterdir", forbidden)
    (shut / "manifest.json").unlink()

    assert main(["verify", str(tmp_path)]) == 1

    told = capsys.readouterr().out
    assert "cannot be looked into (Permission denied)" in told
    assert "well" in told.splitlines()[-1]


def test_a_checkpoint_is_not_exported_into_itself(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path, staged_at(1))

    assert main(["export", str(path), str(path / "out"), "--to", "torch"]) == 2

    assert "is in the checkpoint itself: give a place outside" in capsys.readouterr().err
    assert store.verify(path) == []


@pytest.mark.parametrize("verb", ["export", "inspect", "verify", "diff"])
def test_a_link_to_itself_is_no_checkpoint(tmp_path: Path, capsys: Capture, verb: str) -> None:
    path = tmp_path / "step-00000001"
    path.symlink_to(path)
    more = {"export": [str(tmp_path / "out"), "--to", "torch"], "diff": [str(path)]}

    assert main([verb, str(path), *more.get(verb, [])]) != 0

    said = capsys.readouterr()
    assert "step-00000001 does not exist; a checkpoint is a folder" in said.err + said.out


def test_a_part_that_is_missing_is_said_in_one_line_with_the_command_that_helps(
    tmp_path: Path, capsys: Capture
) -> None:
    path = write(tmp_path / "job", staged_at(1))
    (path / "rank-0.json").unlink()

    exported = main(["export", str(path), str(tmp_path / "out"), "--to", "torch"])
    inspected = main(["inspect", str(path)])

    told = capsys.readouterr()
    assert (exported, inspected) == (2, 1)
    assert told.err == told.out
    assert told.err.endswith(
        "the tensors of rank 0 are expected there, found: No such file or directory; to see all "
        f"that is wrong: python -m runtime.checkpoint verify {path}\n"
    )


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify"])
def test_where_nothing_is_that_is_said(tmp_path: Path, verb: str, capsys: Capture) -> None:
    (tmp_path / "file").write_text("")

    names = ("file", "absent", "step-00000001", "")
    assert [main([verb, str(tmp_path / name)]) for name in names] == [2] * 4

    said = capsys.readouterr().err
    assert "step-00000001 does not exist" in said
    assert "file is no folder; a checkpoint is one" in said
    assert "absent does not exist" in said
    assert "holds no checkpoint: none of its folders is named as" in said


def test_what_cannot_be_done_is_an_object_too(tmp_path: Path, capsys: Capture) -> None:
    assert main(["verify", str(tmp_path / "absent"), "--json"]) == 2

    told = capsys.readouterr()
    ((name, error),) = json.loads(told.out)[0].items()
    assert name == "error"
    assert "absent does not exist" in error
    assert told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls"], "required: path"),
        (["prune", "there", "--keep", "0"], "at least 1 is kept"),
        (["export", "there", "out", "--to", "onnx"], "invalid choice: 'onnx'"),
        (["look", "there"], "invalid choice: 'look'"),
        *(
            (asked, f"only ls and verify look into an object store: copy {URL} to a folder first")
            for asked in (
                ["inspect", URL],
                ["diff", "there", URL],
                ["diff", URL, "there"],
                ["export", URL, "out", "--to", "torch"],
                ["prune", URL],
            )
        ),
        (["inspect", "holder://here:1"], "only ls and verify look into a node's memory"),
        *(
            (asked, f"a place on this machine is expected, found {URL}: copy from there first")
            for asked in (
                ["export", "there", URL, "--to", "torch"],
                ["import", URL, "there"],
                ["import", "there", URL],
            )
        ),
    ],
)
def test_what_is_wrong_with_the_arguments_is_an_object_too(
    arguments: list[str], words: str, capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])

    told = capsys.readouterr()
    assert ended.value.code == 2
    assert words in json.loads(told.out)[0]["error"]
    assert words in told.err


def test_facts_that_anybody_wrote_move_no_cursor_and_are_json(
    tmp_path: Path, capsys: Capture
) -> None:
    facts = {"at": "soon", "job": "\x1b[2Jgone\nstep-00000009 well", "loss": float("nan")}
    path = write(tmp_path, staged_at(1), facts=facts)

    assert main(["inspect", str(path)]) == 0
    assert "job: \\x1b[2Jgone\\x0astep-00000009 well\n" in capsys.readouterr().out
    assert main(["ls", str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["facts"]["loss"] == "nan"


def test_a_locale_without_the_letters_of_a_fact_hides_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, staged_at(1), facts={"job": "größer …"})

    ended = subprocess.run(
        [sys.executable, "-m", "runtime.checkpoint", "inspect", str(path)],
        check=False, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip

    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"job: gr\\xf6\\xdfer \\u2026" in ended.stdout


def test_what_is_nested_too_deep_is_said_in_a_line(tmp_path: Path, capsys: Capture) -> None:
    deep: Any = 1
    for _ in range(700):
        deep = [deep]
    write(tmp_path, staged_at(1), facts={"odd": deep})
    write(tmp_path, staged_at(2))

    assert main(["ls", str(tmp_path), "--json"]) == 1
    whole, odd = json.loads(capsys.readouterr().out)
    assert whole["step"] == 2
    assert "its facts are nested in each other more than 32 times" in odd["findings"][0]


def test_it_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path, staged_at(1))
    program = (
        "import sys; sys.modules['torch'] = None; from runtime.checkpoint.__main__ import main; "
        f"sys.exit(main(['verify', {str(tmp_path)!r}]))"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_what_needs_torch_says_so_where_it_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path, staged_at(1))
    program = (
        "import sys; sys.modules['torch'] = None; from runtime.checkpoint.__main__ import main; "
        f"sys.exit(main(['diff', {str(path)!r}, {str(path)!r}, '--json']))"
    )

    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)

    assert ended.returncode == 2
    assert "diff needs a package that is missing" in json.loads(ended.stdout)[0]["error"]
    assert ended.stderr.count(b"\n") == 1


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))


def test_what_trained_on_later_is_kept_whatever_its_step(tmp_path: Path) -> None:
    """The job went back to an older step, and on from there."""
    for step, epoch in ((100, 1), (60, 5)):
        write(tmp_path, staged_at(step), facts={"epoch": epoch})

    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0

    assert names(tmp_path) == ["step-00000060"]


def test_what_does_not_train_is_not_the_one_that_is_kept(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, staged_at(step), facts={"epoch": 1})
    (tmp_path / "suspects.json").write_text(json.dumps([{"epoch": 1, "step": 2}]))

    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0

    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize(
    "asked", [["ls"], ["inspect"], ["prune", "--keep=1"], ["prune", "--keep=1", "--json"]]
)
def test_where_the_list_of_what_does_not_train_is_not_kept_that_is_said(
    tmp_path: Path, capsys: Capture, asked: list[str]
) -> None:
    own = tmp_path / "replica-0-rank-0"
    for step in (1, 2):
        write(own, staged_at(step), facts={"epoch": 1})

    assert main([*asked, str(own)]) == 0
    without = capsys.readouterr().err
    (own / "suspects.json").write_text(json.dumps([{"epoch": 1, "step": 1}]))
    assert main([*asked, str(own)]) == 0

    assert without == (
        f"{own} does not say which of them led to NaN: suspects.json beside the checkpoints in the "
        "job's shared folder does; a copy of it here counts\n"
    )
    assert capsys.readouterr().err == ""


def test_nobody_waits_for_what_is_no_list_of_what_does_not_train(
    tmp_path: Path, capsys: Capture
) -> None:
    write(tmp_path, staged_at(1))
    os.mkfifo(tmp_path / "suspects.json")

    assert main(["ls", str(tmp_path)]) == 2
    assert f"{tmp_path}/suspects.json is no regular file: remove it" in capsys.readouterr().err


def test_what_does_not_train_is_not_the_one_that_is_exported(
    tmp_path: Path, capsys: Capture
) -> None:
    for step in (1, 2):
        write(tmp_path / "job", staged_at(step), facts={"epoch": 1})
    known = [{"epoch": 1, "step": 2}]
    (tmp_path / "job" / "suspects.json").write_text(json.dumps(known))

    assert main(["ls", str(tmp_path / "job")]) == 0
    newer, older = capsys.readouterr().out.splitlines()
    assert main(["ls", str(tmp_path / "job"), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert main(["export", str(tmp_path / "job"), str(tmp_path / "out"), "--to", "torch"]) == 0
    exported = capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "job")]) == 0
    inspected = capsys.readouterr().out

    assert (newer.endswith("  led to NaN"), "NaN" in older) == (True, False)
    assert [one["leads_to_nan"] for one in listed] == [True, False]
    assert exported.startswith("step-00000001 is in ")
    assert inspected.startswith("step 1, saved ")


def test_where_nothing_trains_it_is_exported_only_by_its_name(
    tmp_path: Path, capsys: Capture
) -> None:
    path = write(tmp_path / "job", staged_at(2), facts={"epoch": 1})
    (tmp_path / "job" / "suspects.json").write_text(json.dumps([{"epoch": 1, "step": 2}]))

    exported = [
        main(["export", str(one), str(tmp_path / "out"), "--to", "torch"])
        for one in (path.parent, path)
    ]

    assert exported == [2, 0]
    assert "led to NaN soon after it was loaded; to take one all" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["ls", "inspect", "verify"])
def test_what_only_cannot_be_judged_here_is_not_said_to_be_damaged(
    tmp_path: Path, capsys: Capture, verb: str
) -> None:
    path = write(tmp_path, staged_at(1))
    manifest = path / "manifest.json"
    with unreadable(path):
        ill = main([verb, str(tmp_path), "--json"])
    (unread,) = json.loads(capsys.readouterr().out)
    manifest.write_bytes(sealed({**json.loads(manifest.read_bytes()), "version": 5}))
    newer = main([verb, str(tmp_path), "--json"])
    (unknown,) = json.loads(capsys.readouterr().out)

    assert (ill, unread["findings"], newer, unknown["findings"]) == (2, [], 2, [])
    assert "Input/output error" in unread["not_checked"]
    assert "is of format version 5" in unknown["not_checked"]
    assert main(["verify", str(tmp_path)]) == 2
    assert capsys.readouterr().out.split()[:3] == ["step-00000001", "NOT", "CHECKED"]


def test_what_another_version_wrote_stays_and_what_is_damaged_is_not_counted(
    tmp_path: Path,
) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, staged_at(step), keep=4)
    newer = tmp_path / "step-00000004" / "manifest.json"
    newer.write_bytes(sealed({**json.loads(newer.read_bytes()), "version": 5}))
    for step in (1, 3):
        (tmp_path / f"step-0000000{step}" / "manifest.json").write_text("{}")

    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0

    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_what_could_not_be_read_is_not_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, staged_at(step), keep=3)

    with unreadable(tmp_path / "step-00000001"):
        assert main(["prune", str(tmp_path), "--keep", "1"]) == 0

    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_tensors_that_could_not_be_read_are_not_said_to_be_damaged(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(name: str, *_where: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    path = write(tmp_path, staged_at(1))
    monkeypatch.setattr(disk, "read", read)

    assert main(["verify", str(path), "--json"]) == 2

    (found,) = json.loads(capsys.readouterr().out)
    assert found["findings"] == []
    assert "rank-0-0001.bin (rank 0), tensors model.weight" in found["not_checked"]
    assert "Input/output error" in found["not_checked"]


def test_what_one_disk_does_not_give_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, staged_at(step), keep=3)
    verify = store.verify

    def verified(path: Path, progress: store.Progress) -> list[store.Finding]:
        ill = [store.Finding("rank-0-0000.bin", 0, (), "Input/output error", not_judged=True)]
        return ill if path.name == "step-00000003" else verify(path, progress)

    monkeypatch.setattr(store, "verify", verified)

    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_where_nothing_trains_nothing_is_removed_and_that_is_why(
    tmp_path: Path, capsys: Capture
) -> None:
    write(tmp_path, staged_at(1))
    (tmp_path / "suspects.json").write_text(json.dumps([{"epoch": 0, "step": 1}]))

    assert main(["prune", str(tmp_path)]) == 2

    said = capsys.readouterr().err
    assert "none of the 1 checkpoints" in said
    assert "is not known to lead to NaN: all stay" in said
    assert f"python -m runtime.checkpoint verify {tmp_path}" in said


def test_where_too_few_verify_all_stay_for_the_disk_may_be_ill(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, staged_at(step), keep=3)
    for step in (1, 2):
        (tmp_path / f"step-0000000{step}" / "manifest.json").write_text("{}")

    assert main(["prune", str(tmp_path), "--keep", "2"]) == 0

    assert len(names(tmp_path)) == 3


def test_the_newest_that_can_be_told_is_looked_into(tmp_path: Path, capsys: Capture) -> None:
    for step in (1, 2):
        write(tmp_path, staged_at(step))
    (tmp_path / "step-00000001" / "manifest.json").write_text("{}")

    assert main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("step 2, saved")


def test_of_a_link_the_link_alone_is_removed(tmp_path: Path) -> None:
    archived = write(tmp_path / "archive", staged_at(1))
    write(tmp_path / "checkpoints", staged_at(2))
    (tmp_path / "checkpoints" / archived.name).symlink_to(archived)

    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0

    assert names(tmp_path / "checkpoints") == ["step-00000002"]
    assert store.verify(archived) == []


def test_of_a_rank_s_own_those_stay_of_which_one_is_of_a_step_that_all_have(
    tmp_path: Path, capsys: Capture
) -> None:
    for step in (1, 2, 3):
        write(tmp_path / "replica-0-rank-1", staged_at(step), facts={"ranks": 2})
    asked = ["prune", str(tmp_path / "replica-0-rank-1"), "--keep", "1"]

    assert main([*asked, "--dry-run"]) == 0
    words = capsys.readouterr().out.splitlines()
    assert main([*asked, "--json"]) == 0
    removed, told = json.loads(capsys.readouterr().out)

    assert names(tmp_path / "replica-0-rank-1") == ["step-00000002", "step-00000003"]
    assert words == ["would remove step-00000001", told["why"]]
    assert told["why"].startswith("2 are kept, not 1: these are the parts of one rank of several")
    assert (removed["removed"], told["removed"], told["kept"]) == (True, False, 2)


@pytest.mark.parametrize(("ranks", "keep"), [(1, 1), (2, 2)])
def test_else_as_many_stay_as_are_asked_for(
    tmp_path: Path, capsys: Capture, ranks: int, keep: int
) -> None:
    for step in (1, 2, 3):
        write(tmp_path, staged_at(step), facts={"ranks": ranks})

    assert main(["prune", str(tmp_path), "--keep", str(keep), "--json"]) == 0

    assert len(names(tmp_path)) == keep
    assert [one["removed"] for one in json.loads(capsys.readouterr().out)] == [True] * (3 - keep)


def test_what_could_not_be_removed_is_said(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(tmp_path, staged_at(step))
    monkeypatch.setattr("shutil.rmtree", lambda _path, **_options: None)

    assert main(["prune", str(tmp_path), "--keep", "1"]) == 1

    assert "step-00000001 could not be removed: " in capsys.readouterr().out


@pytest.mark.parametrize("days", ["nan", "inf", "-5"])
def test_an_age_that_is_none_is_refused(tmp_path: Path, days: str) -> None:
    with pytest.raises(SystemExit):
        main(["prune", str(tmp_path), f"--older-than={days}"])


def test_what_a_kept_link_leads_to_is_not_removed(tmp_path: Path, capsys: Capture) -> None:
    for step in (1, 2):
        write(tmp_path, staged_at(step))
    (tmp_path / "step-00000002.1").symlink_to("step-00000002")

    assert main(["prune", str(tmp_path), "--keep", "1"]) == 0

    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000002",
        "step-00000002.1",
    ]
    assert "removed step-00000001" in capsys.readouterr().out
