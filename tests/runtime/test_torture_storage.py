"""The torture of what a job saves and loads: each way to damage, each claim, short real runs."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from runtime.checkpoint import disk, store
from runtime.checkpoint.draft import write
from runtime.checkpoint.holder import Holder, Label
from runtime.checkpoint.manifest import MANIFEST
from runtime.checkpoint.objects import ObjectStore
from runtime.checkpoint.peer import HOLDER_MODULE, Keeping, running
from runtime.client import ENV_PLACEMENT, ENV_REPLICA, ENV_TOKEN
from runtime.image import pages
from runtime.serving import RequestServer
from runtime.snapshot import state_of
from runtime.torture import holder
from runtime.torture.damage import DAMAGES, flip, poison
from runtime.torture.holder import ENV_RUNNER
from runtime.torture.injector import (
    ENV_FOLDER,
    ENV_OF_RANK,
    Injector,
    around,
    events_file,
    order_file,
)
from runtime.torture.kinds import (
    ANY,
    KINDS,
    LOADING,
    LOCAL,
    SAVING,
    SHARED,
)
from runtime.torture.launch import Fleet
from runtime.torture.ledger import audit, counted
from runtime.torture.report import Seen, judge
from runtime.torture.run import Run
from runtime.torture.run_record import Restart
from runtime.torture.storage import (
    broken_claims,
    broken_promises,
    memory_of,
    unsound_in_memory,
    unsound_objects,
    whole_objects,
)
from runtime.torture.watch import Event, Watch
from runtime.torture.writer import (
    BEGINNINGS,
    MODULE,
    DiskFault,
    all_ended,
    break_disk,
    end_fault,
    set_fault,
)
from tests.runtime.checkpoint.states import staged_at
from tests.runtime.replicas import PATIENCE_S, ROOT, until
from tests.runtime.test_soak import assert_every_claim_held
from tests.runtime.test_torture import FIGURES, STEPS, commit, ended, judged

# --- damage ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints of one part."""
    for step in (1, 2, 3):
        write(tmp_path / "checkpoints", staged_at(step))
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_damaged_verifies_no_more_and_nothing_else_is(
    folder: Path, kind: str, seed: int
) -> None:
    newest, older, oldest = store.candidates(folder)

    damaged = DAMAGES[kind](newest, older, random.Random(seed))  # noqa: S311 - not secret

    assert newest in damaged
    assert [path for path in (newest, older, oldest) if store.verify(path)] == damaged
    assert store.verified(newest) is None


def test_what_is_poisoned_verifies_and_has_nan_for_weights(folder: Path) -> None:
    newest, older, oldest = store.candidates(folder)
    before = store.manifest_of(newest)

    poisoned = poison(newest)

    assert store.candidates(folder) == [poisoned, older, oldest]
    assert store.verify(poisoned) == []
    assert (store.manifest_of(poisoned).facts, store.manifest_of(poisoned).step) == (
        before.facts,
        3,
    )
    state: dict[str, Any] = state_of(store.read(poisoned))
    assert state["model"]["weight"].isnan().all()
    assert state["base"].isfinite().all()


def test_a_file_that_others_share_is_whole_in_those(folder: Path) -> None:
    newest, older, _oldest = store.candidates(folder)
    for path in newest.glob("*.bin"):
        path.unlink()
        os.link(older / path.name, path)
    before = {path: path.read_bytes() for path in older.iterdir()}

    DAMAGES["flip"](newest, older, random.Random(1))  # noqa: S311 - not secret

    assert {path: path.read_bytes() for path in older.iterdir()} == before


# --- the writer -----------------------------------------------------------------------------------


@pytest.fixture
def wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A folder, on the disk that a writer has under torture."""
    monkeypatch.setattr(disk, "write", disk.write)  # put back at the end
    break_disk(Injector(tmp_path, "plc_0", 0))
    (tmp_path / "shared").mkdir()
    handle = os.open(tmp_path / "shared", os.O_RDONLY | os.O_DIRECTORY)
    yield handle
    os.close(handle)


def test_a_full_disk_takes_half_a_file_until_there_is_room(tmp_path: Path, wrapped: int) -> None:
    data = pages(8192)
    set_fault(tmp_path, DiskFault("full", str(tmp_path / "shared"), 0.0))

    with pytest.raises(OSError, match="No space left"):
        disk.write("a", data, wrapped)
    half = (tmp_path / "shared" / "a").stat().st_size
    end_fault(tmp_path)
    disk.write("a", data, wrapped)

    assert half == 4096
    assert (tmp_path / "shared" / "a").stat().st_size == 8192
    told = [json.loads(line) for line in events_file(tmp_path, "plc_0").read_text().splitlines()]
    assert [(one["what"], one["data"]) for one in told] == [("met", {"kind": "full"})]


def test_another_disk_is_not_full(tmp_path: Path, wrapped: int) -> None:
    set_fault(tmp_path, DiskFault("full", str(tmp_path / "disk0"), 0.0))

    disk.write("a", pages(8192), wrapped)

    assert (tmp_path / "shared" / "a").stat().st_size == 8192
    assert events_file(tmp_path, "plc_0").read_text() == ""


def test_every_phase_of_a_save_begins_at_a_function_that_there_is() -> None:
    for owner, name in BEGINNINGS.values():
        assert callable(getattr(owner, name))


def test_who_comes_to_a_phase_strikes_once_and_says_so_before(tmp_path: Path) -> None:
    strike = (
        "from pathlib import Path; from runtime.torture.injector import Injector;"
        f"injector = Injector(Path({str(tmp_path)!r}), 'plc_0', 0);"
        "[injector.at(phase) for phase in ('write', 'verify', 'publish')]; print('lives')"
    )
    order = {"fault": 3, "kind": "writer", "phase": "verify", "delay_s": 0.0, "seconds": 0.0}
    order_file(tmp_path, "plc_0").write_text(json.dumps(order))

    done = subprocess.run([sys.executable, "-c", strike], cwd=ROOT, check=False)
    again = subprocess.run([sys.executable, "-c", strike], cwd=ROOT, check=False)

    assert (done.returncode, again.returncode) == (-signal.SIGKILL, 0)
    told = [json.loads(line) for line in events_file(tmp_path, "plc_0").read_text().splitlines()]
    assert [(one["what"], one["data"]["fault"]) for one in told] == [("struck", 3)]


def test_an_order_is_for_one_of_a_replica_s_ranks(tmp_path: Path) -> None:
    order = {"fault": 3, "kind": "slow", "phase": "copy", "delay_s": 0.0, "seconds": 0.0, "rank": 1}
    order_file(tmp_path, "plc_0").write_text(json.dumps(order))

    Injector(tmp_path, "plc_0", 0).at("copy")
    meanwhile = order_file(tmp_path, "plc_0").exists()
    Injector(tmp_path, "plc_0", 1).at("copy")

    assert meanwhile
    assert not order_file(tmp_path, "plc_0").exists()


@pytest.mark.parametrize(("phase", "taken"), [("write", False), ("copy", False), ("apply", True)])
def test_at_any_moment_is_at_any_of_the_training(tmp_path: Path, phase: str, taken: bool) -> None:
    """A writer that came to a phase of its save would strike itself, and not its replica."""
    order = {"fault": 3, "kind": "slow", "phase": ANY, "delay_s": 0.0, "seconds": 0.0}
    order_file(tmp_path, "plc_0").write_text(json.dumps(order))

    Injector(tmp_path, "plc_0", 0).at(phase)

    assert order_file(tmp_path, "plc_0").exists() == (not taken)


def test_what_is_put_around_a_function_is_given_it() -> None:
    class Owner:
        def double(self, number: int) -> int:
            return 2 * number

    around(Owner, "double", lambda inner, *given: inner(*given) + 1)

    assert Owner().double(4) == 9


def test_a_writer_counts_as_alive_from_its_start_until_it_ends(tmp_path: Path) -> None:
    """It does what it was given though its trainer dies before it has come to itself."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    named = {ENV_FOLDER: str(tmp_path), ENV_PLACEMENT: "plc_0", ENV_OF_RANK: "0"}
    with (
        ours,
        subprocess.Popen(
            [sys.executable, "-m", MODULE, str(theirs.fileno())],
            cwd=ROOT,
            env=os.environ | named,
            pass_fds=[theirs.fileno()],
        ) as process,
    ):
        process.send_signal(signal.SIGSTOP)  # before it can have done anything
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, "it stands")
        theirs.close()
        at_once = all_ended(tmp_path)
        another_run = all_ended(tmp_path / "other")
        process.send_signal(signal.SIGCONT)
        ours.close()
        ended = process.wait(PATIENCE_S)

    assert (at_once, another_run, ended) == (False, True, 0)
    assert all_ended(tmp_path)


# --- a holder ------------------------------------------------------------------------------------


def test_a_holder_that_nobody_of_ours_started_ends_with_the_runner(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as runner:
        named = {
            ENV_FOLDER: str(tmp_path), ENV_RUNNER: str(runner.pid), ENV_REPLICA: "0",
            ENV_TOKEN: "right", HOLDER_MODULE: holder.MODULE,
        }  # fmt: skip
        start = "import sys; from pathlib import Path; from runtime.checkpoint.peer import ensured;"
        start += "print(ensured(Path(sys.argv[1]), 'j', 'right', '127.0.0.1'))"
        words = [sys.executable, "-c", start, str(tmp_path)]
        subprocess.run(words, cwd=ROOT, env=os.environ | named, check=True)
        meanwhile = running(tmp_path / "j")

        runner.kill()

    assert meanwhile
    until(lambda: not running(tmp_path / "j"), "it has ended")


@pytest.mark.parametrize(("flipped", "flaws"), [(False, 0), (True, 1)])
def test_what_nodes_hold_is_verified(flipped: bool, flaws: int) -> None:
    here, staged = Holder(), staged_at(7)
    server = RequestServer("127.0.0.1", "right", here.serve, idle_s=None)
    keeping = Keeping(server.address, "right")
    label = Label(run="r", rank=0, ranks=1, step=7, save="1-7", epoch=1, bytes=staged.table.bytes)
    digest, _sent = keeping.hold(label, staged.table, {}, memoryview(staged.buffer))
    here.memory.listed()[0].buffer.memory[5] ^= flipped
    fleet = SimpleNamespace(holding=lambda: ["", server.address], token="right")

    found = [*unsound_in_memory(cast(Run, SimpleNamespace(fleet=fleet, flipped=set())))]
    known = [*unsound_in_memory(cast(Run, SimpleNamespace(fleet=fleet, flipped={digest})))]
    keeping.close()
    server.close()

    assert (len(found), known) == (flaws, [])
    assert all("step 7, held in memory: " in one for one in found)


def test_what_is_in_an_object_store_is_verified(tmp_path: Path) -> None:
    objects, staged = ObjectStore(f"file://{tmp_path}", "j"), staged_at(7)
    image = memoryview(staged.buffer)
    objects.write(0, staged.table, image, step=7, save="s", ready=lambda _end: None)
    made = objects.publish(7, "s", 1, {"epoch": 2})
    assert made is not None
    fleet = cast(
        Fleet, SimpleNamespace(object_store=lambda: ObjectStore(f"file://{tmp_path}", "j"))
    )
    before = (whole_objects(fleet), [*unsound_objects(fleet)])

    flip(Path(made.path), Path(), random.Random(1))  # noqa: S311 - not secret
    damaged = (whole_objects(fleet), [*unsound_objects(fleet)])
    Path(made.path, MANIFEST).write_bytes(b"{")
    unreadable = (whole_objects(fleet), [*unsound_objects(fleet)])

    assert before == ({(2, 7)}, [])
    assert damaged[0] == set()
    assert "in the object store, " in damaged[1][0]
    assert unreadable == (set(), [])


# --- the judgement --------------------------------------------------------------------------------

RESTART = Restart(
    fault=1, ended=frozenset({"plc_0", "plc_1"}), reached=5, sound=((1, 1), (1, 3)), least=(1, 3),
    spoiled=(0, -1), began=3, refused=("it is damaged",), unsound=(),
)  # fmt: skip


def test_a_restart_from_the_newest_whole_state_breaks_no_claim() -> None:
    assert broken_claims(RESTART) == []
    assert broken_claims(replace(RESTART, refused=())) == []


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"began": 4}, "went on from step 4, whole are [1, 3]"),
        ({"spoiled": (1, 4), "refused": ()}, "nobody was told that step 4 was damaged in memory"),
        ({"spoiled": (1, 3), "refused": ()}, "nobody was told that step 3 was damaged in memory"),
        ({"sound": (), "least": (0, -1)}, "whole are []"),
        ({"began": 1}, "could have gone on from step 3"),
        ({"began": 1, "refused": ()}, "nobody was told why"),
        ({"unsound": ("step-00000003: rank-0.json is missing",)}, "rank-0.json is missing"),
    ],
)
def test_one_broken_claim_of_a_restart_is_enough(changed: dict[str, Any], told: str) -> None:
    (found,) = broken_claims(replace(RESTART, **changed))

    assert told in found


def test_what_another_disk_still_has_may_be_older_than_what_was_damaged() -> None:
    restart = replace(RESTART, sound=((1, 1), (1, 3), (1, 4)), least=(1, 3), began=3)

    assert broken_claims(restart) == []


@pytest.mark.parametrize(
    ("kind", "disk", "alarms", "broken"),
    [
        ("full", LOCAL, {"checkpoint_failed local": 1, "checkpoint_recovered local": 1}, 0),
        ("full", SHARED, {"checkpoint_failed shared": 1, "checkpoint_recovered shared": 1}, 0),
        ("full", SHARED, {"checkpoint_failed shared": 2, "checkpoint_recovered shared": 2}, 1),
        ("full", LOCAL, {}, 1),
        ("full", LOCAL, {"checkpoint_failed local": 1}, 1),
        ("full", LOCAL, {"checkpoint_failed local": 2, "checkpoint_recovered local": 2}, 1),
        ("full", SHARED, {"checkpoint_failed local": 1, "checkpoint_recovered local": 1}, 1),
        ("slowdisk", LOCAL, {"checkpoint_late": 1}, 0),
        ("slowdisk", LOCAL, {"checkpoint_failed local": 1, "checkpoint_recovered local": 1}, 1),
    ],
)
def test_a_full_disk_is_told_once_and_taken_back(
    kind: str, disk: str, alarms: dict[str, int], broken: int
) -> None:
    assert len(list(broken_promises(kind, disk, alarms))) == broken


def test_a_training_that_waits_for_the_disk_is_a_problem() -> None:
    waited = replace(FIGURES, kind="slowdisk", phase="shared", gap_s=3.1)
    seen = resumed(began=3)

    report = judge(seen, seen, [waited], mode="cover", seed=1, replicas=2)

    assert "the training waited for the disk, 3100 ms" in "\n".join(report.problems)


def test_a_training_that_waits_for_a_holder_is_a_problem() -> None:
    waited = replace(FIGURES, kind="holder", phase="receive", gap_s=3.1)
    seen = resumed(began=3)

    report = judge(seen, seen, [waited], mode="cover", seed=1, replicas=2)

    assert "the training waited for the holder, 3100 ms" in "\n".join(report.problems)


def test_a_long_step_is_no_wait_for_the_disk() -> None:
    long = replace(FIGURES, kind="slowdisk", phase="shared", gap_s=3.1)
    seen = replace(resumed(began=3), step_s=2.5)

    assert judge(seen, seen, [long], mode="cover", seed=1, replicas=2).ok


def resumed(began: int, *, again_from: int | None = None) -> Seen:
    """Two replicas came to step 4, were killed, and went on from a checkpoint of step `began`."""
    first = began + 1 if again_from is None else again_from
    events: dict[str, list[Event]] = {}
    for old, new in (("plc_0", "plc_2"), ("plc_1", "plc_3")):
        events[old] = [commit(step, placement=old) for step in range(5)]
        again = [commit(step, placement=new) for step in range(first, STEPS)]
        events[new] = [*again, ended(new)]
    restart = replace(RESTART, reached=4, began=began, sound=((1, began),), least=(1, began))
    left = counted(events, [restart])
    return Seen(events=left, present=["plc_2", "plc_3"], steps=STEPS, restarts=[restart])


def test_steps_that_are_made_again_are_counted_once() -> None:
    report = judged(resumed(began=2))

    assert report.problems == []
    assert report.ledger == {"lost": 0, "duplicated": 0, "dropped": 0}
    assert report.digest_equal


def test_a_step_that_is_not_made_again_is_lost() -> None:
    report = judged(resumed(began=2, again_from=4))

    assert not report.ok
    assert report.ledger["lost"] == 8


def test_what_was_rolled_back_may_have_had_other_losses() -> None:
    events = {
        "plc_0": [commit(step, placement="plc_0", loss=9.0) for step in range(5)],
        "plc_1": [commit(step, placement="plc_1") for step in range(STEPS)],
    }
    restart = replace(RESTART, ended=frozenset({"plc_0"}), began=-1)

    found = audit(counted(events, [restart]), STEPS)

    assert found.problems == []


def test_after_a_restart_nobody_has_made_a_step_yet(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    watch.follow(0, "plc_0")
    line = {"what": "commit", "at": 1.0, "data": {"step": 7}}
    events_file(tmp_path, "plc_0").write_text(json.dumps(line) + "\n")

    watch.restart()

    assert watch.newest() == -1
    assert [event.data["step"] for event in watch.find("commit")] == [7]


# --- for real -------------------------------------------------------------------------------------


def torture(folder: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "runtime.torture", "--json", "--replicas", "2", *words],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        check=False,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def struck(report: dict[str, Any]) -> set[tuple[str, str]]:
    """What was struck, and in which phase."""
    return {(one["kind"], one["phase"]) for one in report["failures"]}


def alarms(failure: dict[str, Any], kind: str) -> int:
    """How often it was told, of whichever tier."""
    told: dict[str, int] = failure["alarms"]
    return sum(often for one, often in told.items() if one.split()[0] == kind)


def test_a_job_that_was_killed_goes_on_from_what_was_not_damaged(tmp_path: Path) -> None:
    report = torture(tmp_path, "--seed", "1", "--each", "--kinds", "flip", "--phases", "both")

    assert_every_claim_held(report)
    (failure,) = report["failures"]
    assert failure["again"] > 0
    assert failure["load_s"] < failure["back_s"]
    assert alarms(failure, "checkpoint_refused") > 0
    assert [*tmp_path.iterdir()] == []


def test_a_job_goes_on_from_what_nodes_hold_and_notices_what_was_lost(tmp_path: Path) -> None:
    """Of memory that is bad, and of a holder that dies while it gives."""
    objects = tmp_path / "objects"
    report = torture(
        tmp_path, "--seed", "6", "--each", "--kinds", "crash,badmemory,holder",
        "--phases", "any,recall", "--objects", f"file://{objects}",
    )  # fmt: skip

    assert_every_claim_held(report)
    crash, bad, gives = report["failures"]
    assert [(one["kind"], one["phase"]) for one in report["failures"]] == [
        ("crash", "any"), ("badmemory", "any"), ("holder", "recall"),
    ]  # fmt: skip
    assert alarms(crash, "checkpoint_refused") == 0
    assert alarms(bad, "checkpoint_refused") > 0
    assert alarms(gives, "checkpoint_refused") > 0
    assert [*objects.iterdir()] == []


#: A holder's memory, and connections that come and go.
BUSY = """
import os, socket
from runtime.checkpoint.holder import MEMORY
memory = os.memfd_create(MEMORY)
print(memory, flush=True)
while True:
    socket.socket().close()
"""


def test_memory_is_found_in_a_holder_whose_connections_come_and_go() -> None:
    words = [sys.executable, "-c", BUSY]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as busy:
        assert busy.stdout is not None
        memory = Path(f"/proc/{busy.pid}/fd/{busy.stdout.readline().strip()}")
        try:
            found = [path for _ in range(300) for path in memory_of(busy.pid)]
        finally:
            busy.kill()

    assert found == [memory] * 300


@pytest.mark.soak
def test_every_damage_on_every_disk(tmp_path: Path) -> None:
    kinds = ",".join((*DAMAGES, "nan"))

    report = torture(tmp_path, "--seed", "2", "--each", "--kinds", kinds)

    assert_every_claim_held(report)
    assert len(report["failures"]) == len(struck(report)) == 3 * len(DAMAGES) + 1


@pytest.mark.soak
def test_whoever_is_killed_in_any_phase_of_a_save_or_a_load(tmp_path: Path) -> None:
    kinds = ("kill", "writer", "holder", "crash", "outage")
    phases = ("copy", *SAVING, *LOADING, "any")

    report = torture(
        tmp_path, "--seed", "3", "--each", "--objects", f"file://{tmp_path / 'objects'}",
        "--kinds", ",".join(kinds), "--phases", ",".join(phases),
    )  # fmt: skip

    assert_every_claim_held(report)
    pairs = {(kind, phase) for kind in kinds for phase in phases if phase in KINDS[kind].phases}
    assert len(pairs) == 38
    assert struck(report) == pairs
    assert len(report["failures"]) == len(pairs)


@pytest.mark.soak
def test_disks_that_are_full_or_slow(tmp_path: Path) -> None:
    report = torture(tmp_path, "--seed", "4", "--each", "--kinds", "full,slowdisk")

    assert_every_claim_held(report)
    assert len(report["failures"]) == 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_file_system_that_is_really_full(tmp_path: Path, small_disk: Path) -> None:
    report = torture(
        tmp_path, "--seed", "5", "--each", "--kinds", "full", "--phases", "shared",
        "--disk", str(small_disk),
    )  # fmt: skip

    assert_every_claim_held(report)
    assert report["failures"][0]["alarms"]["checkpoint_failed shared"] > 0
    assert [*small_disk.iterdir()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_disk_is_filled_for_as_long_as_whoever_filled_it_lives(small_disk: Path) -> None:
    fill_it = (
        "import sys; from pathlib import Path; from runtime.torture.storage import fill;"
        "mend = fill(Path(sys.argv[1])); print('full', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", fill_it, str(small_disk)]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as filler:
        assert filler.stdout is not None
        filler.stdout.readline()
        meanwhile = os.statvfs(small_disk).f_bavail
        filler.kill()

    assert meanwhile == 0
    assert os.statvfs(small_disk).f_bavail > 0
    assert [*small_disk.iterdir()] == []
