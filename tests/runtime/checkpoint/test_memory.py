"""Saves take the memory that they take at first, and no more of it after two hundred."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import psutil
import pytest

from tests.runtime.replicas import Fleet, until
from tests.runtime.test_client import Door

MB = 1e6
WIDTH = 230_000  # of the model: weights and momentum are 33 MB
LARGE_WIDTH = 1_000_000  # and 144 MB
FEW = slice(10, 30)  # around the 20th save
MANY = slice(190, 210)
SOME = 5
#: A step's temporary tensors go back to the system at once: what stays is what is kept.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
GROWTH_BYTES = 4 * MB
OWN_BYTES = 64 * MB  # beside the copies of the state
OBJECTS_BYTES = 20 * MB  # and what writes to an object store is one process more
HELD = 2  # states that a holder needs memory for, of replicas of one rank
ROOM = "/memfd:drydock-copy"
HOLDER_BYTES = 32 * MB  # beside those: it is a process


@dataclass(frozen=True)
class Memory:
    """Of a trainer, its writers and its node's holder, in bytes."""

    trainer: int  # what no file has, after a step: in the middle of one there is more
    copy_buffers: int
    writers: int  # without buffers
    holder: int

    @property
    def own(self) -> int:
        """What is there for the checkpoints alone."""
        return self.copy_buffers + self.writers

    @property
    def all(self) -> int:
        return self.trainer + self.own

    @staticmethod
    def of(fleet: Fleet) -> Memory:
        trainer = psutil.Process(fleet.ranks[0].pid)
        writers = [one for one in trainer.children() if "writer" in " ".join(one.cmdline())]
        _address, holder = fleet.holder(0)
        return Memory(
            trainer=fleet.last(0)["anonymous"],
            copy_buffers=buffers_of(trainer.pid),
            writers=sum(beside_buffers(one.pid) for one in writers),
            holder=beside_buffers(holder),
        )


def buffers_of(pid: int) -> int:
    """Bytes that this process's buffers take, whoever maps them by now."""
    found = [path.stat() for path in Path(f"/proc/{pid}/fd").iterdir() if ROOM in name_of(path)]
    return 512 * sum({one.st_ino: one.st_blocks for one in found}.values())


def name_of(descriptor: Path) -> str:
    """Empty for one that is closed meanwhile, as that by which the folder is listed is."""
    with contextlib.suppress(FileNotFoundError):
        return str(descriptor.readlink())
    return ""


def beside_buffers(pid: int) -> int:
    """Bytes of this process: a page that several processes map counts in equal parts for each."""
    mapped = Path(f"/proc/{pid}/smaps").read_text().split("VmFlags:")
    return sum(pss(one) for one in mapped if ROOM not in one)


def pss(smaps: str) -> int:
    return sum(int(line.split()[1]) << 10 for line in smaps.splitlines() if line.startswith("Pss:"))


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.close()


Train = Callable[[int, int, set[str]], list[Memory]]
NEAR = {"peer", "local", "shared"}


@pytest.fixture
def trained(
    make_fleet: Callable[..., Fleet], door: Door, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Train:
    """What a rank with a model of this width takes, after each of so many saves to each of these
    tiers, of which only the object store may be left out."""

    def train(width: int, saves: int, tiers: set[str]) -> list[Memory]:
        for name, value in MALLOC.items():
            monkeypatch.setenv(name, value)
        options = {
            "width": width, "pace_s": 0, "checkpoint_s": 0.05, "local_s": 0.05, "peer_s": 0.05,
            "object_s": 0.05, "measures": True,
        }  # fmt: skip
        fleet = make_fleet(
            1,
            own_disks=True,
            holders=True,
            object_store="".join(f"file://{tmp_path / one}" for one in tiers - NEAR),
            url=door.url,
            options=options,
        )
        fleet.start()
        found = [after(n, fleet, door, tiers) for n in range(1, saves + 1)]
        fleet.stop()
        return found

    return train


@pytest.mark.soak
@pytest.mark.parametrize(
    ("tiers", "copies", "beside"),
    [(NEAR, 2, OWN_BYTES), ({*NEAR, "object"}, 3, OWN_BYTES + OBJECTS_BYTES)],
)
def test_two_hundred_saves_take_no_more_memory_than_twenty(
    tiers: set[str], copies: int, beside: float, trained: Train, door: Door
) -> None:
    """And what is there for them alone are two copies of the state and 64 MB; a third where one
    may be on its way to an object store for long, and 20 MB. A holder keeps two of its peers."""
    found = trained(WIDTH, MANY.stop, tiers)

    few, many = found[FEW], found[MANY]
    show("after save 20", few, door)
    show("after save 200", many, door)
    assert kept(many, "all") - kept(few, "all") <= GROWTH_BYTES
    assert kept(many, "holder") - kept(few, "holder") <= GROWTH_BYTES
    assert max(one.own for one in found) <= copies * state_bytes(door) + beside
    assert max(one.holder for one in found) <= HELD * state_bytes(door) + HOLDER_BYTES


@pytest.mark.soak
def test_of_a_large_state_too_there_are_no_more_than_two_copies(trained: Train, door: Door) -> None:
    """Nor half of a third, which of a small one would hardly show beside what the writers are."""
    found = trained(LARGE_WIDTH, SOME, NEAR)

    show(f"after save {SOME}", found, door)
    assert max(one.own for one in found) <= 2.5 * state_bytes(door)
    assert max(one.holder for one in found) <= 2.5 * state_bytes(door)


def after(saves: int, fleet: Fleet, door: Door, tiers: set[str]) -> Memory:
    """Once so many are durable in each tier."""

    def durable() -> bool:
        told = [message["tier"] for message in door.messages("checkpoint")]
        return min(told.count(tier) for tier in tiers) >= saves

    until(durable, f"{saves} saves")
    return Memory.of(fleet)


def kept(some: list[Memory], what: str) -> float:
    """What was there most of the time: a step's own memory comes and goes, by tens of megabytes."""
    return float(median_low(getattr(one, what) for one in some))


def state_bytes(door: Door) -> int:
    size: int = door.messages("checkpoint")[-1]["bytes"]
    return size


def show(when: str, some: list[Memory], door: Door) -> None:
    print(  # noqa: T201
        f"{when}: trainer {kept(some, 'trainer') / MB:.1f} MB, buffers "
        f"{kept(some, 'buffers') / MB:.1f}, writers {kept(some, 'writers') / MB:.1f}, "
        f"all {kept(some, 'all') / MB:.1f}, holder {kept(some, 'holder') / MB:.1f}; own "
        f"{max(one.own for one in some) / MB:.1f} at most, holder "
        f"{max(one.holder for one in some) / MB:.1f}, of a state of {state_bytes(door) / MB:.1f}"
    )
