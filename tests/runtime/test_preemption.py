"""Whoever is told that it will be killed has saved by then, whatever it is doing."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from runtime.checkpoint import store
from runtime.data import Batches
from runtime.image import Staged
from runtime.job import Job, join, options_of, seconds_of
from runtime.replica.preemption import Preemption, durable_in, hangs, in_time, longest_s
from runtime.replica.state import TrainingState
from runtime.snapshot import Changed, Copying
from tests.runtime.replicas import PATIENCE_S, Fleet, until
from tests.runtime.test_client import Door
from tests.runtime.test_replicas import MakeFleet, assert_every_sample_once


@pytest.mark.parametrize(
    ("usual_s", "left_s", "tiers"),
    [
        ({"peer": 0.1, "local": 0.5, "shared": 40.0}, 30.0, {"peer", "local"}),
        ({"peer": 0.1, "local": 0.5, "shared": 20.0}, 30.0, {"peer", "local", "shared"}),
        # As usual it would be in time, but not beside the others on one disk.
        ({"local": 14.0, "shared": 17.0}, 30.0, {"local"}),
        ({"peer": 0.1, "local": 0.5, "shared": 10.0}, 30.0, {"peer", "local", "shared"}),
        ({"peer": 0.1, "local": 0.5, "shared": 20.0}, 0.1, {"peer"}),  # the least bad
        ({"local": 3.0, "shared": 2.0}, 1.0, {"shared"}),
        ({"local": None, "shared": None}, 30.0, {"local", "shared"}),
        ({"local": None, "shared": None}, 2.0, {"local"}),
    ],
)
def test_the_tiers_that_will_be_durable_in_time_are_chosen(
    usual_s: dict[str, float | None], left_s: float, tiers: set[str]
) -> None:
    assert durable_in(usual_s, left_s) == tiers


@pytest.mark.parametrize(
    ("usual_s", "left_s", "tiers"),
    [
        # Both would be durable alone, and neither beside the other on one disk.
        ({"local": 14.0, "shared": 17.0}, 30.0, {"local", "peer"}),
        ({"local": 14.0, "shared": 15.0}, 30.0, {"local", "shared", "peer"}),
        ({"local": 14.0, "shared": 17.0}, math.inf, {"local", "shared", "peer"}),
    ],
)
def test_a_last_save_leaves_out_what_would_hold_up_the_others(
    usual_s: dict[str, float | None], left_s: float, tiers: set[str]
) -> None:
    """And goes to one that fails all the same: it may be well again."""
    assert in_time(["local", "shared", "peer"], usual_s, left_s) == tiers


def test_how_long_is_left_counts_from_the_signal(tmp_path: Path) -> None:
    (tmp_path / "notice").write_text("100")
    told: Any = job(DRYDOCK_NOTICE_FILE=str(tmp_path / "notice"))
    before = told.left_s()
    told.told.set()
    told.told.at -= 70.0
    told.told.set()

    assert (before, 29.0 < told.left_s() <= 30.0) == (math.inf, True)


def noticed(grace_s: float, needs_s: float) -> tuple[Preemption, threading.Event]:
    saved = threading.Event()
    return Preemption(grace_s, lambda: needs_s, saved.set), saved


def test_no_edge_in_time_saves_without_one() -> None:
    preemption, saved = noticed(0.5, 0.4)
    preemption.notice()
    assert saved.wait(PATIENCE_S)


#: A script that forks a helper, and tells it to end.
FORKS = """
import os, signal, threading
from runtime.forking import take_signal
from runtime.replica.preemption import Preemption

saved = threading.Event()
preemption = Preemption(0.5, lambda: 0.4, saved.set)
take_signal(signal.SIGTERM, lambda _number, _frame: preemption.notice())
there, begun = os.pipe()
child = os.fork()
if not child:
    os.write(begun, b"!")
    signal.pause()
    os._exit(0)
os.read(there, 1)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), saved.wait(1.0))
preemption.notice()
print(saved.wait(30.0))
"""


#: A script whose main thread is in a library's call that only the save ends.
IN_A_CALL = """
import ctypes, os, signal, threading
from runtime.forking import take_signal
from runtime.replica.preemption import Preemption

libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)

def save():
    print("saved", flush=True)
    libc.pthread_mutex_unlock(mutex)

handled = []
preemption = Preemption(60.0, lambda: 60.0, save)
take_signal(signal.SIGTERM, lambda number, _frame: handled.append(number))
preemption.listen(signal.SIGTERM, preemption.notice)

def send():
    while mutex.raw[0] != 2:  # somebody waits for it
        pass
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=send).start()
libc.pthread_mutex_lock(mutex)
print("out", handled)
preemption.close()
print(signal.set_wakeup_fd(-1))
"""


def test_a_signal_is_heard_while_the_main_thread_is_in_a_library_s_call() -> None:
    told = subprocess.run(
        [sys.executable, "-c", IN_A_CALL], capture_output=True, text=True, check=True, timeout=60
    )

    assert told.stdout.split() == ["saved", "out", f"[{int(signal.SIGTERM)}]", "-1"]


def test_a_deadline_in_a_year_is_followed_by_one_that_is_near() -> None:
    preemption, saved = noticed(600.0, 0.2)
    preemption.notice(4e7)
    assert not saved.wait(0.3)
    preemption.notice(0.4)

    assert saved.wait(PATIENCE_S)


def test_a_later_notice_that_leaves_less_time_counts() -> None:
    preemption, saved = noticed(600.0, 0.2)
    preemption.notice()
    preemption.notice(900.0)
    later_s = preemption.left_s()
    preemption.notice(0.4)

    assert saved.wait(PATIENCE_S)
    assert later_s <= 600.0


def test_a_child_that_is_told_to_end_ends_and_saves_nothing() -> None:
    told = subprocess.run(
        [sys.executable, "-c", FORKS], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.split() == ["-15", "False", "True"]


def test_a_word_from_elsewhere_is_no_notice() -> None:
    preemption, saved = noticed(0.5, 0.4)
    os.write(preemption._tell, b"!")  # as a child would that has the same pipe
    assert not saved.wait(0.3)
    preemption.notice()
    assert saved.wait(PATIENCE_S)


def test_an_edge_in_time_is_what_is_saved() -> None:
    asked, saved = threading.Event(), threading.Event()

    def needs_s() -> float:  # is asked once the notice is heard
        preemption.edge()
        asked.set()
        return 600.0  # so that without an edge it saves at once

    preemption = Preemption(600.0, needs_s, saved.set)
    preemption.notice()
    assert asked.wait(PATIENCE_S)
    assert not saved.wait(1.0)


@pytest.mark.parametrize(
    ("usual_s", "needs_s"),
    [
        ({"peer": 0.05, "local": 0.5, "shared": 5.0}, 11.0),  # so that all are durable in time
        ({"peer": 0.05, "local": 0.5, "shared": 50.0}, 2.0),  # which shared cannot be
        ({"local": 0.5, "shared": 20.0}, 21.5),  # and here may be
        ({"shared": 50.0}, 101.0),
        ({"shared": 16.0}, 33.0),  # at once: it is not sure to be in time
    ],
)
def test_it_begins_early_enough_for_all_that_can_be_durable(
    usual_s: dict[str, float], needs_s: float
) -> None:
    assert longest_s(usual_s, grace_s=30.0) == needs_s


@pytest.mark.parametrize(
    ("under_way_s", "usual_s", "far_too_long"),
    [
        (0.0, 0.0, False),
        (60.0, 16.0, False),
        (70.0, 16.0, True),
        (10.0, None, False),
        (30.0, None, True),
    ],
)
def test_a_save_that_is_written_and_read_back_does_not_hang(
    under_way_s: float, usual_s: float | None, far_too_long: bool
) -> None:
    assert hangs(under_way_s, usual_s) is far_too_long


def test_whoever_leaves_saves_nothing_more() -> None:
    preemption, saved = noticed(0.2, 0.0)
    preemption.close()
    preemption.notice()
    assert not saved.wait(0.5)


@pytest.mark.parametrize("value", ["steps=3", "[3]", "3"])
def test_options_that_are_no_object_are_refused(value: str) -> None:
    with pytest.raises(RuntimeError, match=r"DRYDOCK_OPTIONS is .* give an object in JSON"):
        options_of(value)


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", "1e12"])
def test_a_grace_that_is_no_time_is_refused(value: str) -> None:
    with pytest.raises(RuntimeError, match="DRYDOCK_GRACE_S is"):
        seconds_of(value)


def test_a_notice_may_leave_less_time_than_usual() -> None:
    preemption, saved = noticed(600.0, 0.2)
    preemption.notice(0.4)

    assert saved.wait(PATIENCE_S)
    assert preemption.left_s() < 1.0


@pytest.mark.parametrize(
    ("written", "left_s"),
    [
        ("4\n", 4.0),
        ("0.5", 0.5),
        ("", 60.0),
        ("soon", 60.0),
        ("-1", 60.0),
        ("nan", 60.0),
        ("inf", 60.0),
    ],
)
def test_the_deadline_of_a_notice_is_read_and_rubbish_is_none(
    tmp_path: Path, written: str, left_s: float
) -> None:
    notice = tmp_path / "notice"
    notice.write_text(written)

    assert job(DRYDOCK_GRACE_S="60", DRYDOCK_NOTICE_FILE=str(notice)).kill_in_s() == left_s


def test_without_a_notice_the_usual_time_is_left(tmp_path: Path) -> None:
    missing = str(tmp_path / "notice")

    assert job(DRYDOCK_GRACE_S="60", DRYDOCK_NOTICE_FILE=missing).kill_in_s() == 60.0


def test_a_copy_aside_is_the_edge_s_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainingState(model, [optimizer], Batches(samples=24, shards=2))
    at_edge = state.copy().digest
    state.statistics.begin()
    model(torch.randn(8, 4)).sum().backward()  # the middle of a shard
    during = [buffer.clone() for buffer in model.buffers()]
    drawn = torch.get_rng_state()

    aside = state.begin_copy_aside(None).finish()

    assert aside.digest == at_edge
    assert all(map(torch.equal, during, model.buffers()))
    assert torch.equal(drawn, torch.get_rng_state())


def swaps(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.add_(1)


def lays_elsewhere(weight: torch.Tensor) -> None:
    weight.data = weight.data + 1


def swaps_unseen(weight: torch.Tensor) -> None:
    """As libraries of averages do: torch counts no write."""
    weight.data.copy_(weight.data + 1)


@pytest.mark.parametrize("writes", [swaps, lays_elsewhere, swaps_unseen])
@pytest.mark.parametrize("frozen", [False, True])
def test_no_copy_aside_is_of_weights_that_the_script_has_put_there(
    writes: Callable[[torch.Tensor], None], frozen: bool
) -> None:
    model = nn.Linear(4, 3)
    model.weight.requires_grad_(not frozen)
    state = TrainingState(model, [], Batches(samples=24))
    at_edge = state.begin_copy_aside(None).finish().digest

    writes(model.weight)

    with pytest.raises(Changed, match="has other weights in the model than the last edge left"):
        state.begin_copy_aside(None)
    state.note_weights()
    assert state.begin_copy_aside(None).finish().digest != at_edge


@pytest.mark.parametrize("kind", range(9))
def test_each_kind_of_weight_of_layers_that_repeat_is_looked_at(kind: int) -> None:
    layers = [[nn.Linear(2, 2, bias=False) for _ in range(9)] for _ in range(32)]
    state = TrainingState(nn.ModuleList(map(nn.ModuleList, layers)), [], Batches(samples=24))

    for layer in layers:
        swaps(layer[kind].weight)

    with pytest.raises(Changed):
        state.begin_copy_aside(None)


def test_a_frozen_weight_that_is_no_number_keeps_no_copy_aside() -> None:
    model = nn.Linear(4, 3)
    model.weight.requires_grad_(False).fill_(math.nan)
    state = TrainingState(model, [], Batches(samples=24))

    assert state.begin_copy_aside(None).finish().digest == state.copy().digest


def test_weights_that_were_put_back_are_copied_aside() -> None:
    model = nn.Linear(4, 3)
    state = TrainingState(model, [], Batches(samples=24))
    trained = model.weight.detach().clone()

    swaps(model.weight)
    model.weight.data.copy_(trained)

    assert state.begin_copy_aside(None).finish().digest == state.copy().digest


def test_weights_that_are_written_while_they_are_copied_aside_make_no_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(4, 3)
    state = TrainingState(model, [], Batches(samples=24))

    class Meanwhile(Copying):
        def finish(self, *given: Any, **how: Any) -> Staged:
            swaps(model.weight)
            return super().finish(*given, **how)

    monkeypatch.setattr("runtime.replica.state.Copying", Meanwhile)

    with pytest.raises(Changed):
        state.begin_copy_aside(None)


#: A save that was never measured is thought to take eleven seconds at most, and begins then.
NOTICE_S = 11.5


def preempt(fleet: Fleet, grace_s: float | None = None) -> list[int]:
    """SIGTERM to all ranks, and SIGKILL once their time is over, to their writers too, as when the
    machine is taken away; how the ranks ended. `grace_s`: a notice says that it is over then."""
    ranks = fleet.part_with(0)
    left_s = fleet.grace_s if grace_s is None else grace_s
    fleet.notice(0).write_text(f"{left_s:g}\n")
    started = children_of(ranks)
    end = time.monotonic() + left_s
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, end - time.monotonic()))
    started |= children_of(ranks)
    for process in [*ranks, *started]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    codes = [rank.wait() for rank in ranks]
    fleet.tell_ended()
    return codes


def children_of(ranks: list[subprocess.Popen[bytes]]) -> set[psutil.Process]:
    """What they have started, their writers among it; of a rank that is dead none can be told."""
    found: set[psutil.Process] = set()
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.update(psutil.Process(rank.pid).children(recursive=True))
    return found


def job(**environment: str) -> Job:
    """Of a process that is told nothing but these and what it must know."""
    needed = {
        "DRYDOCK_JOB": "j",
        "DRYDOCK_REPLICA": "0",
        "DRYDOCK_WORLD_REPLICAS": "1",
        "DRYDOCK_COORDINATOR": "none",
        "DRYDOCK_TOKEN": "t",
        "DRYDOCK_STATE_DIR": "/nowhere",
    }
    return join({**needed, **environment})


def newest(fleet: Fleet, disk: str = "state") -> int:
    """The newest step that is whole on this disk."""
    folders = [path.parent for path in (fleet.folder / disk).rglob("step-*") if path.is_dir()]
    found = [store.newest(folder) for folder in {*folders}]
    return max(staged.step for _path, staged in filter(None, found))


@pytest.mark.parametrize(
    ("ranks", "usual_s"),
    [(1, 4.0), (1, 600.0), pytest.param(2, 4.0, marks=pytest.mark.soak)],
)
def test_a_job_that_evaluates_when_it_is_to_be_killed_loses_no_step(
    make_fleet: MakeFleet, ranks: int, usual_s: float
) -> None:
    options = {"evaluate_at": 30, "rich": True, "averages": False}
    fleet = make_fleet(1, divided=ranks, grace_s=usual_s, options=options)
    fleet.start()
    until((fleet.folder / "evaluating.0").exists, "it evaluates")

    codes = preempt(fleet, grace_s=NOTICE_S)
    saved = newest(fleet)
    fleet.start_rank(0)
    fleet.train_on()
    fleet.stop()

    assert codes == [-signal.SIGKILL] * ranks
    assert saved == 29
    assert [step["step"] for step in fleet.steps(0)] == [*range(fleet.newest() + 1)]


def test_a_preemption_before_the_first_step_ends_cleanly_and_leaves_nothing(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(2, own_disks=True, holders=True)
    fleet.start_coordinator()
    codes = []
    for _ in range(2):
        fleet.start_rank(0)
        until(lambda: fleet.ask(op="status")["peers"], "it waits for the other replica")
        codes += preempt(fleet)

    left = [*fleet.folder.glob("disk0/**/*"), *fleet.folder.glob("state/**/*")]
    assert codes == [0, 0]
    assert left == []
    assert "checkpoint_failed" not in (fleet.folder / "rank0.log").read_text()


def test_a_job_that_is_told_to_end_twice_at_one_step_saves_it_under_two_names(
    make_fleet: MakeFleet,
) -> None:
    """One that fails must not take the other with it."""
    fleet = make_fleet(1, grace_s=NOTICE_S, options={"evaluate_at": 30})
    fleet.start_coordinator()
    for _ in range(2):
        (fleet.folder / "evaluating.0").unlink(missing_ok=True)
        fleet.start_rank(0)
        until((fleet.folder / "evaluating.0").exists, "it evaluates")
        preempt(fleet)

    found = store.candidates(fleet.folder / "state" / "checkpoints")
    assert {store.number_of(path)[0] for path in found} == {29}
    assert len({store.manifest_of(path).save for path in found}) == 2


def test_a_job_that_is_told_to_end_while_it_makes_memory_for_checkpoints_loses_no_step(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(1, grace_s=120.0, options={"width": 1_000_000, "pace_s": 0.3})  # 136 MB
    fleet.start()
    fleet.wait_for_step(0)

    codes = preempt(fleet)

    assert codes == [0]
    assert newest(fleet) == fleet.steps(0)[-1]["step"] < 5  # the memory is made after the first


def test_who_alone_is_told_to_end_leaves_at_an_edge_and_the_others_train_on(
    make_fleet: MakeFleet,
) -> None:
    door = Door()
    fleet = make_fleet(3, own_disks=True, url=door.url, options={"mode": "reproducible"})
    fleet.start()
    fleet.wait_for_step(20)

    (left,) = fleet.part_with(1)
    left.send_signal(signal.SIGTERM)
    status = left.wait(PATIENCE_S)
    fleet.wait_for_members([0, 2])
    saved = newest(fleet, "disk1")
    fleet.train_on()
    until(lambda: door.messages("regrouped"), "the others tell that they went on")
    fleet.start_rank(1)
    fleet.wait_for_members([0, 1, 2])
    fleet.stop()
    door.close()

    assert status == 0
    assert [one["because"] for one in door.messages("stopped")] == ["told"] * 4
    assert [one["lost"] for one in door.messages("regrouped")] == [[1], []]
    assert saved >= 20  # at once: the others may be about to die untold
    told = (fleet.folder / "coordinator.log").read_text()
    assert ("left replica=1" in told, "lost replica=" in told) == (True, False)
    assert "severed" not in "".join(path.read_text() for path in fleet.folder.glob("rank*.log"))
    assert_every_sample_once(fleet.steps(0), 0)
    assert len(fleet.digests()) == 1


def test_two_of_three_that_are_told_leave_together_and_the_third_waits_for_others(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(3, min_replicas=2)
    fleet.start()
    fleet.wait_for_step(10)

    gone = [*fleet.part_with(0), *fleet.part_with(2)]
    for process in gone:
        process.send_signal(signal.SIGTERM)
    status = [process.wait(PATIENCE_S) for process in gone]
    fleet.start_rank(0)
    fleet.wait_for_members([0, 1])
    fleet.train_on()
    fleet.stop()

    assert status == [0, 0]
    assert_every_sample_once(fleet.steps(1), 0)
    assert len(fleet.digests()) == 1


def come_to_a_step(fleet: Fleet, moments: random.Random) -> None:
    """Start the job, and let it train for a while."""
    last = fleet.last(0)["step"]
    fleet.start_rank(0)
    fleet.wait_for_step(last + 10 + moments.randrange(20))


def come_to_an_evaluation(fleet: Fleet, moments: random.Random) -> None:
    """The same, until it evaluates: no edge comes in time."""
    marker = fleet.folder / "evaluating.0"
    marker.unlink(missing_ok=True)
    fleet.start_rank(0, evaluate_at=fleet.last(0)["step"] + 10 + moments.randrange(20))
    until(marker.exists, "it evaluates")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("disk", "settings"),
    [
        ("state", {}),
        # The shared folder is never in time: what counts is on the node's own disk by then, and at
        # an edge nobody waits for the other.
        ("disk0", {"own_disks": True, "writer": "tests.runtime.slow_writer"}),
    ],
)
def test_twenty_preemptions_at_any_moment_lose_no_step(
    make_fleet: MakeFleet, disk: str, settings: dict[str, Any]
) -> None:
    moments = random.Random(20)  # noqa: S311 - the same each time
    fleet = make_fleet(1, grace_s=3.0, **settings)
    fleet.start_coordinator()
    ended, lost = [], []
    for come_to in [come_to_a_step, come_to_an_evaluation] * 10:
        come_to(fleet, moments)
        ended += preempt(fleet)
        lost.append(fleet.steps(0)[-1]["step"] - newest(fleet, disk))
    fleet.start_rank(0)
    fleet.train_on()
    fleet.stop()

    assert lost == [0] * 20
    assert ended == [0, -signal.SIGKILL] * 10
    assert_every_sample_once(fleet.steps(0), 0)
