"""Replicas of two ranks each, among which fully_shard divided the model: what drops is the replica,
whichever of its ranks dies, and one that comes back takes each part from those who have it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from runtime.checkpoint import store
from runtime.checkpoint.copy_buffers import COPY_BUFFERS
from runtime.checkpoint.difference import differences
from runtime.checkpoint.interchange import whole_state
from tests.runtime.replicas import PATIENCE_S, until
from tests.runtime.test_client import Door
from tests.runtime.test_modes import alone, covered
from tests.runtime.test_replicas import MakeFleet, assert_every_sample_once

KILLED = -signal.SIGKILL


def test_two_by_two_go_through_a_rank_s_death_and_a_rank_s_silence(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2, divided=2)
    fleet.start()
    fleet.wait_for_step(20)

    ended = fleet.kill_rank(1, 1)
    fleet.wait_for_members([0])
    fleet.start_rank(1)
    fleet.wait_for_members([0, 1])
    fleet.others[1, 1].send_signal(signal.SIGSTOP)
    fleet.wait_for_members([0])
    fleet.others[1, 1].send_signal(signal.SIGCONT)  # it comes back by itself
    fleet.wait_for_members([0, 1])
    assert fleet.coordinator is not None
    fleet.coordinator.kill()
    fleet.start_coordinator()
    fleet.train_on()
    for told in (fleet.others[0, 1], fleet.ranks[1]):  # any rank of a replica is told for all of it
        told.send_signal(signal.SIGTERM)
    status = [one.wait(PATIENCE_S) for one in [*fleet.ranks.values(), *fleet.others.values()]]

    assert ended[1] == KILLED
    assert ended[0] != 0
    assert status == [0, 0, 0, 0]
    assert_every_sample_once(fleet.steps(0), 0)
    assert len(fleet.digests()) == len(fleet.digests_of_rank(1)) == 1


def test_three_by_two_that_lose_a_first_rank_end_as_one_replica_left_alone(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(3, divided=2, options={"mode": "reproducible", "rich": True})
    fleet.start()
    fleet.wait_for_step(20)

    ended = fleet.kill_rank(2, 0)
    fleet.wait_for_members([0, 1])
    fleet.start_rank(2)
    fleet.wait_for_members([0, 1, 2])
    fleet.train_on(5)
    fleet.stop()

    assert ended[0] == KILLED
    assert ended[1] != 0
    assert covered(fleet.steps(0)) == {(1,) * 12}
    assert fleet.weights() == alone(make_fleet, fleet)


def test_a_divided_replica_moves_to_other_processes(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(2, divided=2)
    fleet.start()
    fleet.wait_for_step(20)

    leavers = fleet.part_with(1)
    fleet.ranks[1] = fleet.start_rank(1, standby="migrate")
    ended = [process.wait(PATIENCE_S) for process in leavers]
    fleet.wait_for_members([0, 1])
    fleet.train_on()
    fleet.stop()

    assert ended == [0, 0]
    assert_every_sample_once(fleet.steps(0), 0)
    assert len(fleet.digests()) == len(fleet.digests_of_rank(1)) == 1


def test_a_divided_replica_trains_as_a_whole_one(make_fleet: MakeFleet) -> None:
    options = {"steps": 40, "pace_s": 0, "dropout": 0.0}
    whole, divided = make_fleet(1, options=options), make_fleet(1, divided=2, options=options)
    for fleet in (whole, divided):
        fleet.start()
        assert fleet.ranks[0].wait(PATIENCE_S) == 0

    for key in ("loss", "grad_norm", "samples"):
        expected = [step[key] for step in whole.steps(0)]
        assert [step[key] for step in divided.steps(0)] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("shapes", "kind"),
    [
        ([2, 4, 2], {"rich": True}),
        pytest.param([2, 1, 2], {}, marks=pytest.mark.soak),
        # Without running statistics, of which each rank has its own.
        pytest.param([4, 2, 1, 4], {"rich": True, "calm": True}, marks=pytest.mark.soak),
    ],
)
def test_a_job_resumes_with_other_ranks(
    make_fleet: MakeFleet, shapes: list[int], kind: dict[str, bool]
) -> None:
    """Of other numbers of ranks without a step, and all save what was saved at first. Then on, as
    one that was left alone."""
    options = {"steps": 30, "averages": False, "pace_s": 0, "dropout": 0.0, **kind}
    fleet = make_fleet(1, divided=shapes[0], options=options)
    fleet.start_coordinator()
    images, states = [], []
    for ranks in shapes:
        fleet.divided = ranks
        fleet.start_rank(0)
        assert [process.wait(PATIENCE_S) for process in fleet.part_with(0)] == [0] * ranks
        newest, *older = store.candidates(fleet.folder / "state" / "checkpoints")
        for path in older:
            store.remove(path)
        assert len(store.manifest_of(newest).parts) == ranks
        images.append([store.read(newest, rank).digest for rank in range(ranks)])
        states.append(whole_state(newest))
    fleet.options["steps"] = 40
    fleet.start_rank(0)
    assert [process.wait(PATIENCE_S) for process in fleet.part_with(0)] == [0] * shapes[-1]

    left_alone = make_fleet(1, divided=shapes[0], options={**options, "steps": 40})
    left_alone.start()
    assert left_alone.ranks[0].wait(PATIENCE_S) == 0

    assert images[0] == images[-1]
    assert [[*differences(states[0], other)] for other in states[1:]] == [[]] * len(states[1:])
    assert [step["step"] for step in fleet.steps(0)] == [*range(40)]
    losses = [step["loss"] for step in left_alone.steps(0)]
    assert [step["loss"] for step in fleet.steps(0)] == losses


@pytest.mark.soak
def test_a_job_that_trains_on_with_other_ranks_stays_close(make_fleet: MakeFleet) -> None:
    """Not more: four ranks add up the parts of a sum in another order than two."""
    rich = {"rich": True, "calm": True, "averages": False}
    options = {**rich, "pace_s": 0, "dropout": 0.0, "steps": 60}
    left_alone = make_fleet(1, divided=2, options=options)
    left_alone.start()
    assert left_alone.ranks[0].wait(PATIENCE_S) == 0
    fleet = make_fleet(1, options=options)
    fleet.start_coordinator()
    for ranks, steps in ((2, 20), (4, 40), (2, 60)):
        fleet.divided, fleet.options["steps"] = ranks, steps
        fleet.start_rank(0)
        assert [process.wait(PATIENCE_S) for process in fleet.part_with(0)] == [0] * ranks

    for key in ("loss", "grad_norm"):
        expected = [step[key] for step in left_alone.steps(0)]
        assert [step[key] for step in fleet.steps(0)] == pytest.approx(expected, rel=1e-3)


def test_a_job_resumes_from_the_newest_checkpoint_of_which_every_part_is_there(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(1, divided=2, options={"checkpoint_s": 0.2})
    fleet.start()
    folder = fleet.folder / "state" / "checkpoints"
    until(lambda: len(list(folder.glob("step-*"))) > 1, "two checkpoints")
    fleet.stop()
    newest, *older = sorted(folder.glob("step-*"), reverse=True)
    (newest / "rank-1.json").unlink()
    (older[0] / "rank-1-0000.bin").write_bytes(b"rubbish")
    before = fleet.last(0)["step"]
    fleet.start_rank(0)
    until(lambda: fleet.last(0)["step"] != before, "it trains again")
    fleet.stop()

    again = [step["step"] for step in fleet.steps(0)]
    assert again[before + 1] == int(older[1].name.removeprefix("step-")) + 1


def test_each_rank_s_part_is_shared_out_by_the_replicas(make_fleet: MakeFleet) -> None:
    options = {"checkpoint_s": 0.5, "width": 1 << 16, "pace_s": 0}
    fleet = make_fleet(2, divided=2, options=options)
    fleet.start()
    folder = fleet.folder / "state" / "checkpoints"

    def shared_out() -> list[Path]:
        return [path for path in store.candidates(folder) if len([*path.glob("rank-1-*.bin")]) > 1]

    until(shared_out, "both replicas have written their shares of one")
    fleet.stop()

    findings = [store.verify(path) for path in store.candidates(folder)]
    assert findings == [[]] * len(findings)
    assert len(fleet.digests()) == 1


def test_a_disk_that_hangs_on_one_rank_holds_up_no_other_tier(make_fleet: MakeFleet) -> None:
    door = Door()
    fleet = make_fleet(
        1, divided=2, own_disks=True, url=door.url, writer="tests.runtime.hanging_writer",
        options={"local_s": 0.2, "checkpoint_s": 0.5},
    )  # fmt: skip
    fleet.start()
    folder = fleet.folder / "state" / "checkpoints"

    def told() -> list[str]:
        """By the rank whose disk hangs: which tiers are late."""
        batches = [batch for batch in list(door.batches) if batch["rank"] == 1]
        messages = [message for batch in batches for message in batch["messages"]]
        return [one["text"] for one in messages if one.get("kind") == "checkpoint_late"]

    def newest() -> int:
        return max(map(store.number_of, store.candidates(folder)), default=(-1, 0))[0]

    until(lambda: "local" in "".join(told()), "it tells so")
    for _ in range(COPY_BUFFERS + 1):
        before = newest()
        until(lambda before=before: newest() > before, "the shared folder is saved to")  # type: ignore[misc]
    door.close()

    assert not [*(fleet.folder / "disk0").rglob("replica-0-rank-1/step-*")]


def test_what_all_ranks_have_stays_while_one_rank_s_disk_fails(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(1, divided=2, own_disks=True, options={"local_s": 0.2})
    fleet.start()
    disk = fleet.folder / "disk0"

    def newest_first(of: str) -> list[int]:
        return sorted(
            (store.number_of(path)[0] for path in disk.glob(f"*/*/{of}/step-*")), reverse=True
        )

    until(lambda: len(newest_first("replica-0-rank-1")) > 1, "it saves")
    (folder,) = disk.glob("*/*/replica-0-rank-1")
    folder.rename(folder.with_name("away"))
    folder.write_text("no folder")
    lost = newest_first("away")[0]
    until(
        lambda: sum(number > lost for number in newest_first("replica-0-rank-0")) > 1,
        "the other rank has two that are newer",
    )
    fleet.stop()

    assert {*newest_first("replica-0-rank-0")} & {*newest_first("away")}


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1], ids=["first", "other"])
def test_a_rank_may_die_in_any_phase(make_fleet: MakeFleet, rank: int) -> None:
    fleet = make_fleet(2, divided=2, options={"mode": "reproducible"})
    fleet.start()
    fleet.wait_for_step(20)

    for phase in ("forward", "backward", "reduce", "apply", "optimizer", "sync"):
        fleet.kill_rank(1, 1)
        fleet.wait_for_members([0])
        fleet.start_rank(1, kill_at=f"{phase}:{fleet.newest() + 5}", kill_rank=rank)
        dying = fleet.part_with(1)
        ended = [process.wait(PATIENCE_S) for process in dying]
        assert ended[rank] == KILLED
        assert ended[1 - rank] != 0
        fleet.wait_for_members([0])  # else who died just after it entered counts as who comes now
        fleet.start_rank(1)
        fleet.wait_for_members([0, 1])
    fleet.train_on()
    fleet.stop()

    assert_every_sample_once(fleet.steps(0), 0)
    assert len(fleet.digests()) == len(fleet.digests_of_rank(1)) == 1
    assert fleet.weights() == alone(make_fleet, fleet)
