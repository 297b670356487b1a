"""A job that restarts as a whole, of several ranks under torchrun, on one node and on two."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from node_agent import wire
from node_agent.launch import together
from runtime.checkpoint import store
from runtime.checkpoint.__main__ import main
from runtime.checkpoint.manifest import digest_of_all
from tests.runtime.test_client import Door
from tests.runtime.whole.runs import STEPS, Whole, all_of, imported_into, local_saves

#: See `samples_of`: 30 steps of 8 samples each, of 100.
AS_PLANNED = [(100, 0, 0), (100, 0, 0), (40, 0, 60)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    whole = Whole(tmp_path_factory.mktemp("undisturbed"))
    status, said = whole.run()
    assert status == 0, said
    return whole


@pytest.fixture
def copied(undisturbed: Whole, tmp_path: Path) -> Whole:
    """The job that has ended, as its shared folder has it on a node of another disk."""
    shutil.copytree(undisturbed.folder / "state", tmp_path / "state")
    return Whole(tmp_path)


def test_a_replica_group_refuses_it_and_says_what_to_do(tmp_path: Path) -> None:
    status, said = Whole(tmp_path).run(as_replica=True)

    assert status != 0
    assert "ValueError: the parameter 2.bias is divided among processes" in said
    assert "such a job is recovered by a restart from its checkpoint, in a runtime.WholeJob" in said


def test_torchrun_starts_it_anew_and_it_ends_as_if_nothing_had_happened(
    undisturbed: Whole, tmp_path: Path
) -> None:
    whole = Whole(tmp_path)
    status, said = whole.run(dies=True, restarts=1)

    assert status == 0, said
    assert (tmp_path / "died").exists()
    assert 0 < whole.begins(epoch=2) <= whole.steps(1)[-1][1]
    assert whole.digests() == undisturbed.digests()
    assert samples_of(whole) == samples_of(undisturbed) == AS_PLANNED


@pytest.mark.parametrize(("divided", "states"), [("layers", 2), ("samples", 1)])
def test_so_does_one_that_divides_other_things(tmp_path: Path, divided: str, states: int) -> None:
    calm, whole = (Whole(tmp_path / name) for name in ("calm", "killed"))
    for one in (calm, whole):
        one.folder.mkdir()
    ended, words = calm.run(divided=divided)
    status, said = whole.run(divided=divided, dies=True, restarts=1)

    assert (ended, status) == (0, 0), words + said
    assert (whole.folder / "died").exists()
    assert whole.begins(epoch=2) > 0
    assert whole.digests() == calm.digests()
    assert len({*calm.digests()}) == states
    assert samples_of(whole) == samples_of(calm) == AS_PLANNED


def samples_of(whole: Whole) -> list[tuple[int, int, int]]:
    """Of each pass over the data how many were trained once, more often, and not yet."""
    report = whole.ledger()
    assert report.whole, report.problems
    return [(one.trained_once, one.duplicated, one.to_come) for one in report.epochs]


def test_what_each_rank_keeps_for_itself_is_told_once_and_as_a_whole(tmp_path: Path) -> None:
    door, whole = Door(), Whole(tmp_path)
    status, said = whole.run(url=door.url)
    door.close()
    told = local_saves(door)
    parts = [store.manifest_of(path) for path in whole.parts(STEPS - 1)]

    assert status == 0, said
    assert len({one["step"] for one in told}) == len(told)
    assert (told[-1]["step"], len(parts)) == (STEPS - 1, 2)
    assert told[-1]["bytes"] == sum(part.size for part in parts)
    assert told[-1]["digest"] == digest_of_all([part.digest for part in parts])


def test_of_what_one_rank_could_not_keep_no_other_tells_as_of_a_checkpoint(tmp_path: Path) -> None:
    door, whole = Door(), Whole(tmp_path)
    (tmp_path / "no-folder").touch()
    ended, said = whole.run_on_two_nodes("disk-of-0", "no-folder", url=door.url)
    door.close()

    assert ended == [0, 0], said
    assert len(whole.parts(STEPS - 1, disk="disk-of-0")) == 1
    assert door.messages("checkpoint")
    assert local_saves(door) == []


def test_a_tier_that_one_node_lacks_is_told_of_with_the_setting_that_is_missing(
    tmp_path: Path,
) -> None:
    door = Door()
    ended, said = Whole(tmp_path).run_on_two_nodes("disk-of-0", "", url=door.url)
    door.close()

    assert ended == [0, 0], said
    assert local_saves(door) == []
    (told,) = [one for one in door.messages("trouble") if one["kind"] == "tier_left_out"]
    assert told["subject"] == "local"
    assert "1 of 2 ranks, the first of them rank 1, have no DRYDOCK_LOCAL_DIR" in told["text"]


def test_each_rank_tells_of_its_own_stores_that_are_late(tmp_path: Path) -> None:
    door = Door()
    # It is to save at each edge: at some of so many a rank has not finished the save before.
    status, said = Whole(tmp_path).run(url=door.url, steps=10 * STEPS)
    door.close()

    assert status == 0, said
    late = [one for one in door.batches if '"checkpoint_late"' in json.dumps(one["messages"])]
    assert {one["rank"] for one in late} == {0, 1}


def test_a_stage_of_a_pipeline_is_no_replica(tmp_path: Path) -> None:
    status, said = Whole(tmp_path).run(divided="layers", as_replica=True)

    assert status != 0
    assert "a stage of a pipeline is not the whole model: such a job is recovered by" in said


def test_moved_to_another_node_it_goes_on_from_the_shared_folder(
    undisturbed: Whole, tmp_path: Path
) -> None:
    whole = Whole(tmp_path)
    died, _ = whole.run(dies=True, disk="disk-of-one")
    ended, said = whole.run(dies=True, disk="disk-of-another")

    assert died != 0
    assert ended == 0, said
    assert whole.begins(epoch=2) > 0
    assert whole.digests() == undisturbed.digests()


def test_over_two_nodes_all_go_on_from_what_all_have(undisturbed: Whole, tmp_path: Path) -> None:
    whole = Whole(tmp_path)
    died, _ = whole.run_on_two_nodes("disk-of-0", "disk-of-1", dies=True)
    ended, said = whole.run_on_two_nodes("disk-of-0", "disk-of-another", dies=True)

    assert 0 not in died
    assert ended == [0, 0], said
    assert whole.begins(epoch=2) > 0
    assert "is gone" not in said
    assert whole.digests() == undisturbed.digests()


MEMORIES = ("memory-of-0", "memory-of-1")


@pytest.fixture
def with_memories(tmp_path: Path) -> Iterator[Whole]:
    """Of its nodes each has a holder."""
    whole = Whole(tmp_path)
    yield whole
    for memory in MEMORIES:
        with contextlib.suppress(FileNotFoundError):  # it was never started
            whole.lose(memory)


@pytest.mark.parametrize("lost", MEMORIES)
def test_what_one_node_takes_with_it_the_other_s_memory_has_of_both(
    undisturbed: Whole, with_memories: Whole, lost: str
) -> None:
    whole = with_memories
    died, _ = whole.run_on_two_nodes("disk-of-0", "disk-of-1", memories=MEMORIES, dies=True)
    whole.lose(lost)
    for step in whole.checkpoints.glob("step-*"):
        shutil.rmtree(step)
    ended, said = whole.run_on_two_nodes("another-disk", "and-another", memories=MEMORIES)

    assert 0 not in died
    assert ended == [0, 0], said
    assert whole.begins(epoch=2) > 0
    assert whole.digests() == undisturbed.digests()


def test_what_is_in_memory_is_told_of_as_of_one_checkpoint(with_memories: Whole) -> None:
    door = Door()
    ended, said = with_memories.run_on_two_nodes("0", "1", memories=MEMORIES, url=door.url)
    door.close()
    told = [one for one in door.messages("checkpoint") if one["tier"] == "peer"]
    parts = [store.manifest_of(with_memories.parts(STEPS - 1, disk=disk)[0]) for disk in "01"]

    assert ended == [0, 0], said
    assert told[-1]["step"] == STEPS - 1
    assert told[-1]["digest"] == digest_of_all([part.digest for part in parts])
    assert "checkpoint_not_apart" not in said


def test_if_one_node_has_no_holder_none_keeps_anything_and_that_is_told(
    with_memories: Whole,
) -> None:
    """Else each start would look for what was kept before, which one of them cannot."""
    door = Door()
    with_memories.run_on_two_nodes("0", "1", memories=MEMORIES)
    ended, said = with_memories.run_on_two_nodes(
        "0", "1", memories=(MEMORIES[0], ""), url=door.url, steps=STEPS + 1
    )
    door.close()

    assert ended == [0, 0], said
    assert with_memories.begins(epoch=2) == STEPS
    assert {one["tier"] for one in door.messages("checkpoint")} == {"local", "shared"}
    (told,) = [one["text"] for one in door.messages("trouble") if one["kind"] == "no_holder"]
    assert told.endswith("the node of rank 1 has no holder")


@pytest.mark.parametrize(
    "disks", [("disk-of-another", "disk-of-1"), ("disk-of-0", "disk-of-another")]
)
def test_what_the_disks_of_some_nodes_have_alone_is_no_start_for_all(
    disks: tuple[str, str], tmp_path: Path
) -> None:
    whole = Whole(tmp_path)
    whole.run_on_two_nodes("disk-of-0", "disk-of-1")
    for step in whole.checkpoints.glob("step-*"):
        shutil.rmtree(step)
    ended, said = whole.run_on_two_nodes(*disks)

    assert ended == [0, 0], said
    assert whole.begins(epoch=2) == 0


def test_where_the_first_rank_alone_lacks_the_folder_of_all_nobody_begins_anew(
    copied: Whole,
) -> None:
    status, said = copied.run_on_two_nodes(
        "disk-of-0", "disk-of-1", states=("state-of-another", "state")
    )

    assert 0 not in status
    assert "the first rank sees no checkpoint of this job in" in said
    assert not [*copied.folder.glob("digest.*")]


def test_torchruns_that_do_not_find_each_other_are_told_why(tmp_path: Path) -> None:
    start = wire.Together(nodes=2, node_rank=1, address="127.0.0.1", port=1, start="plc_1")
    alone = ["--standalone", "--nnodes=1"]
    process = Whole(tmp_path).start(alone, "disk", together(start))
    said = all_of(process)

    assert process.returncode != 0
    assert "leave out --standalone, --nnodes and --rdzv-endpoint" in said


def test_of_a_checkpoint_that_is_damaged_on_one_rank_all_take_the_one_before(
    undisturbed: Whole, copied: Whole
) -> None:
    newest, before, *_ = store.candidates(copied.checkpoints)
    (data,) = newest.glob("rank-1-*.bin")
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    status, said = copied.run()

    assert status == 0, said
    assert copied.begins(epoch=2) == store.number_of(before)[0] + 1
    assert copied.digests() == undisturbed.digests()


def test_where_none_can_be_loaded_nobody_begins_anew_unasked(copied: Whole) -> None:
    for data in copied.checkpoints.glob("step-*/rank-0-*.bin"):
        data.write_bytes(b"?")
    status, said = copied.run()

    assert status != 0
    assert re.search(r"checkpoints of this job can be loaded \(rank 0: shared: .*rank-0-", said)
    assert f"python -m runtime.checkpoint verify {copied.checkpoints}" in said
    assert not [*copied.folder.glob("digest.*")]


def test_another_number_of_ranks_is_refused_with_the_remedy(copied: Whole) -> None:
    status, said = copied.run(ranks=1)

    assert status != 0
    assert "the checkpoint is of 2 ranks, and this job has 1" in said


def test_weights_that_another_tool_made_are_refused_with_the_remedy(tmp_path: Path) -> None:
    whole = Whole(tmp_path)
    imported_into(whole.checkpoints)
    status, said = whole.run()

    assert status != 0
    assert "was imported from another tool and has weights alone" in said
    assert "is of 1 ranks" not in said


def test_two_of_its_checkpoints_are_compared_rank_by_rank(
    copied: Whole, capsys: pytest.CaptureFixture[str]
) -> None:
    newer, older, *_ = store.candidates(copied.checkpoints)
    same = main(["diff", str(newer), str(newer)])
    capsys.readouterr()
    differ = main(["diff", str(older), str(newer), "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    names = {one["name"] for one in found["findings"]}

    assert (same, differ) == (0, 1)
    assert {"rank 0.step", "rank 1.step"} <= names
    assert any(name.startswith("rank 1.model.") for name in names)


def test_its_checkpoints_are_verified_and_not_exported_in_part(
    copied: Whole, capsys: pytest.CaptureFixture[str]
) -> None:
    verified = main(["verify", str(copied.checkpoints)])
    exported = main(["export", "--to", "dcp", str(copied.checkpoints), str(copied.folder / "out")])

    assert (verified, exported == 0) == (0, False)
    assert "nothing but a runtime.WholeJob of 2 ranks can read it" in capsys.readouterr().err
    assert not (copied.folder / "out").exists()
