"""A node's disk that fails every write, and one that answers none: the training goes on, an
engineer is told once, and checkpoints are durable again once the disk is well.

With a real disk under a real file system, which only root may make: ext4 on a loop device. It fails
writes while its image is immutable (each is then an I/O error), and hangs while it is frozen.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from runtime.checkpoint import store
from tests.runtime.replicas import Fleet, until
from tests.runtime.test_client import Door

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/loop-control").exists(),
    reason="only root may mount, and there must be loop devices",
)
IMAGE_BYTES = 64 << 20
Command = tuple[str | Path, ...]


def run(*words: str | Path) -> str:
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return done.stdout.strip()


class Disk:
    """A file system on a device of its own, and what may befall it."""

    def __init__(self, image: Path, folder: Path) -> None:
        self.image, self.folder = image, folder
        self.undo: list[Command] = []  # the last first

    def make(self) -> None:
        """Raises CalledProcessError or OSError where that cannot be."""
        self.undo.insert(0, ("rm", "-f", self.image))
        with self.image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        run("mkfs.ext4", "-q", "-F", self.image)
        device = run("losetup", "--find", "--show", self.image)
        self.undo.insert(0, ("losetup", "--detach", device))
        with self.failing():
            zeros = ("dd", "if=/dev/zero", f"of={device}", "bs=4096", "count=1", "oflag=direct")
            done = subprocess.run(zeros, check=False, capture_output=True)
        if not done.returncode:
            raise OSError(f"{self.image} was written while it was immutable")
        self.folder.mkdir()
        # What is not data is kept back, so that the file system does not give itself up first.
        run("mount", "-o", "commit=600", device, self.folder)
        self.undo.insert(0, ("umount", "--lazy", self.folder))

    def failing(self) -> contextlib.AbstractContextManager[None]:
        """Every write is an I/O error."""
        return self._struck(("chattr", "+i", self.image), ("chattr", "-i", self.image))

    def hanging(self) -> contextlib.AbstractContextManager[None]:
        """No write comes back."""
        freeze = ("fsfreeze", "--freeze", self.folder)
        return self._struck(freeze, ("fsfreeze", "--unfreeze", self.folder))

    @contextlib.contextmanager
    def _struck(self, strike: Command, mend: Command) -> Iterator[None]:
        run(*strike)
        self.undo.insert(0, mend)
        yield
        run(*self.undo.pop(0))

    def close(self) -> None:
        """Everything, the last first, whatever of it fails."""
        for words in self.undo:
            subprocess.run(words, check=False)


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.close()


@pytest.fixture
def fleet(make_fleet: Callable[..., Fleet], door: Door) -> Fleet:
    """Of one replica, which saves to its own disk and to a shared folder that is well."""
    options = {"checkpoint_s": 0.5, "local_s": 2.0}
    return make_fleet(1, own_disks=True, url=door.url, options=options)


@pytest.fixture
def disk(fleet: Fleet) -> Iterator[Disk]:
    made = Disk(fleet.folder / "image", fleet.folder / "disk0")
    try:
        made.make()
        yield made
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"no such disk can be made here: {error}")
    finally:
        made.close()


def saved(door: Door, tier: str) -> int:
    """The last step that is durable there."""
    return max((m["step"] for m in door.messages("checkpoint") if m["tier"] == tier), default=-1)


def troubles(door: Door) -> list[str]:
    return [m["kind"] for m in door.messages("trouble") if "local" in (m["subject"], *words_of(m))]


def words_of(trouble: dict[str, str]) -> list[str]:
    return trouble["text"].replace(",", " ").split()


def goes_on(fleet: Fleet, door: Door) -> None:
    """Steps are made, and saved to the shared folder."""
    step = fleet.newest()
    until(lambda: saved(door, "shared") > step, "a checkpoint in the shared folder")
    fleet.train_on()


def on_disk(fleet: Fleet) -> list[Path]:
    """The checkpoints on the replica's own disk, the newest first."""
    (folder,) = (fleet.folder / "disk0" / "job_t").glob("*/replica-0-rank-0")
    return store.candidates(folder)


def is_recovered(fleet: Fleet, door: Door) -> None:
    """A checkpoint that began after now is durable on the disk."""
    step = fleet.newest()
    until(lambda: saved(door, "local") > step, "a checkpoint on the disk")


def test_a_disk_that_fails_every_write_is_told_once_and_costs_no_step(
    fleet: Fleet, disk: Disk, door: Door
) -> None:
    log = fleet.folder / "rank0.log"
    fleet.start()
    until(lambda: saved(door, "local") >= 0, "a checkpoint on the disk")

    with disk.failing():
        until(lambda: log.read_text().count("checkpoint_failed tier=local") > 2, "saves fail")
        goes_on(fleet, door)
    is_recovered(fleet, door)
    fleet.stop()

    # That a save takes longer than its interval may be told besides, where others use the machine.
    told = [kind for kind in troubles(door) if kind != "checkpoint_late"]
    assert told == ["checkpoint_failed", "checkpoint_recovered"]
    failed = [m["text"] for m in door.messages("trouble") if m["kind"] == "checkpoint_failed"]
    assert "Input/output error" in failed[0]
    assert store.number_of(on_disk(fleet)[0])[0] == fleet.newest()
    assert [store.verify(path) for path in on_disk(fleet)] == [[], []]
    assert [step["step"] for step in fleet.steps(0)] == [*range(fleet.newest() + 1)]


def test_a_disk_that_hangs_is_told_once_and_costs_no_step(
    fleet: Fleet, disk: Disk, door: Door
) -> None:
    fleet.start()
    until(lambda: saved(door, "local") >= 0, "a checkpoint on the disk")

    with disk.hanging():
        until(lambda: hung(fleet), "a writer hangs")
        until(lambda: "checkpoint_late" in troubles(door), "an engineer is told")
        goes_on(fleet, door)
        goes_on(fleet, door)
        # The shared folder's writer may wait for its own disk in that moment, but not for ever.
        until(lambda: hung(fleet) == 1, "no more than one writer hangs")
        told = troubles(door)
    is_recovered(fleet, door)
    fleet.stop()

    assert told == ["checkpoint_late"]
    assert store.number_of(on_disk(fleet)[0])[0] == fleet.newest()
    assert [store.verify(path) for path in on_disk(fleet)] == [[], []]
    assert [step["step"] for step in fleet.steps(0)] == [*range(fleet.newest() + 1)]


def hung(fleet: Fleet) -> int:
    """How many of a rank's writers wait for a disk."""
    writers = psutil.Process(fleet.ranks[0].pid).children()
    return [one.status() for one in writers].count(psutil.STATUS_DISK_SLEEP)
