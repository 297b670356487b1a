"""Faults of what a job saves to and loads from.

The whole job is killed, its checkpoints are damaged, their writers and holders are killed, and
their disks are full or slow. What is seen is noted in `Restart` and the run's events;
`broken_claims` judges it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.checkpoint import peer, store
from runtime.checkpoint.holder import MEMORY
from runtime.checkpoint.manifest import MANIFEST, Manifest
from runtime.checkpoint.objects import Found, ObjectStore
from runtime.checkpoint.sources import OF_ALL_NODES
from runtime.framing import PeerFailed
from runtime.image import Damaged
from runtime.torture.damage import DAMAGES, poison
from runtime.torture.holder import name_of
from runtime.torture.kinds import (
    BAD_MEMORY,
    CRASH,
    KINDS,
    LOADING,
    LOCAL,
    NAN,
    RECALL,
    RECEIVE,
    SHARED,
    TO_OBJECTS,
)
from runtime.torture.run_record import Restart, RunRecord, State
from runtime.torture.writer import DiskFault, all_ended, end_fault, set_fault

if TYPE_CHECKING:
    from runtime.torture.faults import Fault
    from runtime.torture.launch import Fleet, Rank
    from runtime.torture.run import Run
    from runtime.torture.watch import Event

SAVES_S = 1.0  # between two saves of a job whose checkpoints are to be broken
NEEDED = {LOCAL: 2, SHARED: 3}  # checkpoints that are there before any is damaged
RECOVERED = "checkpoint_recovered"
NOTHING: State = (0, -1)
STEPS_MEANWHILE = 5  # that all make while a disk fails


def of_rank(rank: Rank) -> str:
    """By which name it is ordered, and heard."""
    return rank.placement


def of_holder(rank: Rank) -> str:
    """The same of the holder on its node."""
    return name_of(rank.replica)


def broken_claims(restart: Restart) -> list[str]:
    """What a restart should not have done, in words."""
    before = f"the restart at fault {restart.fault}: "
    found = [f"{before}though nothing damaged it, {one}" for one in restart.unsound]
    newest = max(restart.sound, default=NOTHING)
    states = [state for state in restart.sound if state[1] == restart.began]
    if not states:
        steps = sorted({step for _epoch, step in restart.sound})
        found.append(f"{before}the job went on from step {restart.began}, whole are {steps}")
    elif not restart.refused and max(states) < newest:
        found.append(
            f"{before}the job went on from step {restart.began} though step {newest[1]} was whole, "
            "and nobody was told why"
        )
    elif not restart.refused and restart.spoiled >= newest:  # of two as new memory is read first
        found.append(
            f"{before}nobody was told that step {restart.spoiled[1]} was damaged in memory"
        )
    elif max(states) < restart.least:
        found.append(
            f"{before}the job went on from step {restart.began} though all could have gone on from "
            f"step {restart.least[1]}"
        )
    return found


# --- the whole job ------------------------------------------------------------------------------


def restart(run: Run, made: RunRecord) -> None:
    """Kill all, damage what the fault says, start all again, and wait until they train."""
    fault, fleet = made.fault, run.fleet
    await_checkpoints(run, fault)
    ranks = list(fleet.ranks.values())
    holds = fault.kind in (CRASH, BAD_MEMORY) or fault.phase == RECALL
    if holds:
        run.until(
            lambda: all("peer" in tiers_of(run, rank) for rank in ranks),
            f"each rank has saved to a node's memory, fault {fault.number}",
        )
    if fault.phase in TO_OBJECTS:
        await_object(run, made)
    run.doom(made, ranks)
    if fault.first is not None:
        reader = fleet.ranks[fault.first]
        who = of_holder if fault.phase == RECEIVE else of_rank
        run.order(made, reader, who)
        run.await_blows(made, [reader], who)
    elif fault.phase not in LOADING:
        time.sleep(fault.delay_s)
    made.struck.append(time.monotonic())
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        run.reap(rank)
        fleet.tell_exit(rank)  # else it waits a lease, for all may train on out of its reach
    if not holds:
        fleet.end_holders()  # else their memory has it all
    run.until(lambda: all_ended(fleet.folder), "the writers have finished what they were given")
    run.watch.poll()
    ended, reached = frozenset(run.watch.events), run.watch.newest()
    unsound = what_is_unsound(run)
    if fault.kind in DAMAGES:
        damage(run, fault)
    spoiled = NOTHING
    if fault.kind == BAD_MEMORY or fault.phase == RECALL:
        newest = max(what_is_held(fleet))
        remove_newer(fleet, newest)  # else nobody looks at what is held
        if fault.kind == BAD_MEMORY:
            spoiled = newest
            flip_what_is_held(run, random.Random(f"{fault.number}"))  # noqa: S311 - bytes
    poisoned = poison_newest(run) if fault.kind == NAN else None
    sound, least = what_is_left(fleet, poisoned)
    gives = giver(fleet, fault.targets[0]) if fault.kind == "holder" else None
    if holds and fault.kind != BAD_MEMORY:
        sound = tuple(sorted({*sound, *what_is_held(fleet)}))
        least = max(least, *what_is_held(fleet, but=gives), NOTHING)
    run.watch.restart()
    if not holds:
        run.start_holders()
    begin_anew(run, made, gives)
    if poisoned is not None:
        await_giving_up(run, made, poisoned)
        ended = frozenset(run.watch.events)
        run.watch.restart()
        begin_anew(run, made, gives)
    run.until(lambda: bool(run.watch.commits), f"the job goes on after fault {fault.number}")
    run.await_holders()
    made.restart = Restart(
        fault=fault.number,
        ended=ended,
        reached=reached,
        sound=sound,
        least=least,
        spoiled=spoiled,
        began=min(first_step(run, one) for one in run.watch.commits) - 1,
        refused=tuple(str(one.data["text"]) for one in troubles(run, made, "checkpoint_refused")),
        unsound=tuple(unsound),
    )


def begin_anew(run: Run, made: RunRecord, gives: int | None) -> None:
    """Start all replicas, and strike those that read if the fault says so; or the holder on the
    node of the replica that `gives`."""
    fault, fleet = made.fault, run.fleet
    struck = fault.targets if fault.phase in LOADING and gives is None else ()
    if gives is not None:
        run.order(made, fleet.ranks[gives], of_holder)
    for replica in range(fleet.replicas):
        struck_anew = made if replica in struck else None
        made.returning.add(run.start_replica(replica, struck_anew).placement)
    if gives is not None:
        run.await_blows(made, [fleet.ranks[gives]], of_holder)
    for rank in [fleet.ranks[replica] for replica in struck]:
        run.await_blows(made, [rank])
        run.reap(rank)
        made.returning.discard(rank.placement)
        made.returning.add(run.start_replica(rank.replica).placement)


def await_giving_up(run: Run, made: RunRecord, poisoned: State) -> None:
    """Until the job has ended by itself, for what it loaded does not train. Who came so late that
    it knows of that, and loads something older, is killed."""
    ranks = list(run.fleet.ranks.values())
    run.doom(made, ranks)

    def trains_on(rank: Rank) -> bool:
        return (
            rank.placement in run.watch.commits and first_step(run, rank.placement) <= poisoned[1]
        )

    run.until(
        lambda: (
            any(rank.ended for rank in ranks)
            and all(rank.ended or trains_on(rank) for rank in ranks)
        ),
        f"the job gives step {poisoned[1]} up, fault {made.fault.number}",
    )
    codes = {code for rank in ranks for code in rank.codes}
    if codes != {1}:
        run.problems.append(f"what led to NaN was given up with {codes}, fault {made.fault.number}")
    for rank in ranks:
        rank.end()
        run.fleet.tell_exit(rank)
    run.until(lambda: all_ended(run.fleet.folder), "the writers have ended")
    run.watch.poll()
    made.returning.clear()


def giver(fleet: Fleet, rather: int) -> int:
    """The replica on whose node the newest is held that any node holds, so that it is read there;
    this one, if it can be."""
    newest = max(what_is_held(fleet))
    able = [one for one in range(fleet.replicas) if newest in held_on(fleet, one)]
    return rather if rather in able else able[0]


def first_step(run: Run, placement: str) -> int:
    """Return the first step that this placement committed.

    Raises IndexError if it has committed none.
    """
    return int(run.watch.find("commit", placement)[0].data["step"])


def await_checkpoints(run: Run, fault: Fault) -> None:
    """As many whole ones on each disk as a damage needs and leaves: the newest, for older ones may
    be pruned at any time."""
    fleet = run.fleet

    def enough(folder: Path, needed: int) -> bool:
        newest = store.candidates(folder)[:needed]
        return len(newest) == needed and set(newest) <= {*intact(run, folder)}

    def there() -> bool:
        own = [fleet.own_folders(replica) for replica in range(fleet.replicas)]
        return (
            all(len(folders) == fleet.divided for folders in own)
            and enough(fleet.shared_folder(), NEEDED[SHARED])
            and all(enough(one, NEEDED[LOCAL]) for folders in own for one in folders)
        )

    run.until(there, f"{NEEDED} checkpoints are saved before fault {fault.number}")


def damage(run: Run, fault: Fault) -> None:
    """The newest checkpoint in each folder that the fault is for."""
    chance = random.Random(f"{fault.number} {fault.delay_s}")  # noqa: S311 - bytes, not secrets
    for folder in folders(run.fleet, fault.phase):
        newest, older = intact(run, folder)[:2]
        for path in DAMAGES[fault.kind](newest, older, chance):
            run.damaged.add(mark(path))


def poison_newest(run: Run) -> State:
    """Each copy of the newest state on disks, which no memory or object store has then."""
    fleet = run.fleet
    own = [whole(fleet.own_folders(replica)) for replica in range(fleet.replicas)]
    newest = max(whole([fleet.shared_folder()]).union(*own))
    remove_newer(fleet, newest)
    for objects, one in in_objects(fleet):
        if one.age[:2] == newest:
            objects.give_up(one.manifest.step, one.manifest.save)
    for folder in folders(fleet):
        for path, found in store.listed(folder):
            if isinstance(found, Manifest) and (store.epoch_of(found), found.step) == newest:
                run.damaged.add(mark(poison(path)))
    return newest


# --- a writer, a disk ---------------------------------------------------------------------------


def writer(run: Run, made: RunRecord) -> None:
    """Kill one that writes, and wait until the rank has saved again wherever it did before."""
    fault = made.fault
    rank = run.fleet.ranks[fault.targets[0]]
    run.until(
        lambda: {"local", "peer"} <= tiers_of(run, rank),
        f"replica {rank.replica} saves, fault {fault.number}",
    )
    if fault.phase in TO_OBJECTS:
        await_object(run, made)
    tiers = tiers_of(run, rank)
    run.order(made, rank)
    made.struck += run.await_blows(made, [rank])
    step = run.watch.newest()

    def saved_again() -> bool:
        later = [one for one in saves(run) if one.data["step"] > step]
        ours = {one.data["tier"] for one in later if one.placement == rank.placement}
        # To what all share one replica saves, and that may be another by now.
        return tiers <= ours | {one.data["tier"] for one in later}.intersection(OF_ALL_NODES)

    run.until(saved_again, f"replica {rank.replica} saves again, fault {fault.number}")
    run.problems += [f"after fault {fault.number}, {one}" for one in what_is_unsound(run)]


def holder(run: Run, made: RunRecord) -> None:
    """Kill one that is given a state, and wait until it is there again, all have saved to peers'
    memory since, and nobody's alarm is left."""
    fault, ranks = made.fault, list(run.fleet.ranks.values())
    run.until(
        lambda: all("peer" in tiers_of(run, rank) for rank in ranks),
        f"each rank has saved to a node's memory, fault {fault.number}",
    )
    struck = run.fleet.ranks[fault.targets[0]]
    run.order(made, struck, of_holder)
    made.struck += run.await_blows(made, [struck], of_holder)
    step = run.watch.newest()

    def saved_again(rank: Rank) -> bool:
        held = of_tier(saves(run, rank.placement), "peer")
        return any(one.data["step"] > step for one in held)

    run.until(
        lambda: all(map(saved_again, ranks)) and no_alarm_left(run, made) and run.fleet.hold(),
        f"all save to nodes' memory again, and nobody's alarm left, fault {fault.number}",
    )
    made.over_at = time.monotonic()
    run.problems += [f"after fault {fault.number}, {one}" for one in what_is_unsound(run)]


def await_object(run: Run, made: RunRecord) -> None:
    """The replica that the fault is for saves to the object store."""
    replica = made.fault.targets[0] if made.fault.first is None else made.fault.first
    rank = run.fleet.ranks[replica]
    run.until(
        lambda: "object" in tiers_of(run, rank),
        f"replica {replica} saves to the object store, fault {made.fault.number}",
    )


def disk(run: Run, made: RunRecord) -> None:
    """Fill a disk or slow it, until it was noticed; then wait until it keeps checkpoints again."""
    fault = made.fault
    only = fault.phase == LOCAL
    tellers = [run.fleet.ranks[fault.targets[0]].placement] if only else []
    run.until(
        lambda: bool(of_tier(saves(run, *tellers), fault.phase)),
        f"a checkpoint on the disk, fault {fault.number}",
    )
    made.struck.append(time.monotonic())
    mend = break_disk(run.fleet, fault)
    try:
        if fault.kind == "full":
            run.until(
                lambda: bool(troubles(run, made, "checkpoint_failed")),
                f"it is told that the disk is full, fault {fault.number}",
            )
        else:
            run.until(
                lambda: bool(run.watch.find("met", *tellers, since=made.struck[0])),
                f"a file that the disk is slow to take, fault {fault.number}",
            )
        run.await_steps(STEPS_MEANWHILE, f"all train on meanwhile, fault {fault.number}")
        over = made.struck[0] + fault.seconds
        run.until(lambda: time.monotonic() > over, "the fault's time is over")
    finally:
        mend()
    made.over_at = time.monotonic()
    step = run.watch.newest()
    run.until(
        lambda: (
            any(one.data["step"] > step for one in of_tier(saves(run, *tellers), fault.phase))
            and no_alarm_left(run, made)
        ),
        f"a checkpoint on the disk again, and nobody's alarm left, fault {fault.number}",
    )
    run.problems += [f"after fault {fault.number}, {one}" for one in what_is_unsound(run)]


def no_alarm_left(run: Run, made: RunRecord) -> bool:
    """Whether each failure to save that was told since the fault was told as recovered."""
    return len(troubles(run, made, "checkpoint_failed")) == len(troubles(run, made, RECOVERED))


def break_disk(fleet: Fleet, fault: Fault) -> Callable[[], None]:
    """Returns what mends it. A file system of its own is filled for real."""
    if fault.kind == "full" and fault.phase == SHARED and fleet.state.parent.is_mount():
        return fill(fleet.state.parent)
    under = fleet.disk(fault.targets[0]) if fault.phase == LOCAL else fleet.state
    set_fault(fleet.folder, DiskFault(fault.kind, str(under), fault.seconds))
    return lambda: end_fault(fleet.folder)


def fill(folder: Path) -> Callable[[], None]:
    """Take all room of its file system, in a file without a name: however we end, the room is given
    back. Returns what does so."""
    filler = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by whoever mends
    room = os.statvfs(folder)
    taken, more = 0, room.f_bavail * room.f_frsize
    while more >= room.f_frsize:
        try:
            os.posix_fallocate(filler.fileno(), taken, more)
            taken += more
        except OSError:  # others take of it too
            more //= 2
    return filler.close


def broken_promises(kind: str, disk: str, alarms: Mapping[str, int]) -> Iterator[str]:
    """What was not told of a disk that failed, or not once, in words."""
    told = {one: often for one, often in alarms.items() if one.startswith("checkpoint_failed")}
    failed, well = (alarms.get(f"{one} {disk}", 0) for one in ("checkpoint_failed", RECOVERED))
    if set(told) != ({f"checkpoint_failed {disk}"} if kind == "full" else set()) or failed > 1:
        yield f"it was told {told or 'to nobody'}"
    if failed != well:
        yield f"of {failed} alarms {well} were taken back"


# --- what there is ------------------------------------------------------------------------------


def what_is_left(fleet: Fleet, but: State | None = None) -> tuple[tuple[State, ...], State]:
    """The states of which a checkpoint verifies, `but` this; and which of them any replica comes
    to, that takes the newest of one disk if the other failed."""
    shared = whole([fleet.shared_folder()]) - {but}
    own = [whole(fleet.own_folders(replica)) - {but} for replica in range(fleet.replicas)]
    worst = [min(max(each) for each in (shared, one) if each) for one in own if shared or one]
    there = shared.union(*own, whole_objects(fleet))
    return tuple(sorted(there)), max(worst, default=NOTHING)


def what_is_held(fleet: Fleet, but: int | None = None) -> set[State]:
    """The states of which the nodes, `but` this replica's, hold every rank's part in memory."""
    parts: dict[State, set[int]] = {}
    for replica in range(fleet.replicas):
        for state, rank in held_on(fleet, replica).items() if replica != but else ():
            parts.setdefault(state, set()).update(rank)
    return {state for state, ranks in parts.items() if len(ranks) == fleet.divided}


def held_on(fleet: Fleet, replica: int) -> dict[State, set[int]]:
    """The states that this replica's node holds, and of which ranks the parts."""
    found: dict[State, set[int]] = {}
    if address := fleet.holding()[replica]:
        for one in peer.held(address, fleet.token):
            found.setdefault((int(one["epoch"]), int(one["step"])), set()).add(int(one["rank"]))
    return found


def remove_newer(fleet: Fleet, than: State) -> None:
    """From all disks, and the object store, as if they had been slower than the memory of nodes."""
    for folder in folders(fleet):
        for path, found in store.listed(folder):
            if isinstance(found, Manifest) and (store.epoch_of(found), found.step) > than:
                shutil.rmtree(path)
    for objects, one in in_objects(fleet):
        if one.age[:2] > than:
            objects.give_up(one.manifest.step, one.manifest.save)


def flip_what_is_held(run: Run, chance: random.Random) -> None:
    """A bit in each, as bad memory would."""
    for address in filter(None, run.fleet.holding()):
        run.flipped.update(str(one["digest"]) for one in peer.held(address, run.fleet.token))
    for process in run.fleet.holders():
        for link in memory_of(process):
            with link.open("r+b") as memory:
                where = chance.randrange(os.fstat(memory.fileno()).st_size)
                (byte,) = os.pread(memory.fileno(), 1, where)
                os.pwrite(memory.fileno(), bytes([byte ^ 1 << chance.randrange(8)]), where)


def memory_of(holder: int) -> Iterator[Path]:
    """The memory that this process has for states, by its descriptors."""
    for link in Path(f"/proc/{holder}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a connection that it closed meanwhile
            if MEMORY in str(link.readlink()):
                yield link


def whole(parts: list[Path]) -> set[State]:
    """The states of which each of these folders has a checkpoint that verifies."""
    found = [
        {
            (store.epoch_of(one), one.step)
            for path, one in store.listed(folder)
            if isinstance(one, Manifest) and not store.verify(path)
        }
        for folder in parts
    ]
    return set.intersection(*found) if found else set()


def what_is_unsound(run: Run) -> list[str]:
    """The flaws of all checkpoints that we have not damaged. Also while they are written."""
    found = []
    for folder in folders(run.fleet):
        for path in store.candidates(folder):
            try:
                findings = [] if mark(path) in run.damaged else store.verify(path)
            except FileNotFoundError:
                continue
            if (path / MANIFEST).exists():  # else it was removed just now, or never was one
                found += [f"{path.name} in {folder.name}: {one}" for one in findings]
    return [*found, *unsound_in_memory(run), *unsound_objects(run.fleet)]


def unsound_in_memory(run: Run) -> Iterator[str]:
    """The flaws of what nodes hold."""
    for address in filter(None, run.fleet.holding()):
        for one in peer.held(address, run.fleet.token):
            rank, save, digest = one["rank"], one["save"], one["digest"]
            try:
                if digest not in run.flipped:
                    peer.read(address, run.fleet.token, rank, save, digest)
            except Damaged as error:
                yield f"step {one['step']}, held in memory: {error}"
            except PeerFailed:
                continue  # a newer one took its place just now


def unsound_objects(fleet: Fleet) -> Iterator[str]:
    """The flaws of what is in the object store."""
    for objects, one in in_objects(fleet):
        for flaw in flaws_of(objects, one):
            if any(one.path == other.path for _objects, other in in_objects(fleet)):
                yield f"in the object store, {flaw}"  # else it was removed just now


def whole_objects(fleet: Fleet) -> set[State]:
    """The states of which the object store has a checkpoint that verifies."""
    return {one.age[:2] for objects, one in in_objects(fleet) if not [*flaws_of(objects, one)]}


def in_objects(fleet: Fleet) -> Iterator[tuple[ObjectStore, Found]]:
    """What is complete there. A manifest that cannot be read is not counted: a store shows what is
    put whole or not at all, but the folder that stands in for one here may have half of it."""
    if (objects := fleet.object_store()) is not None:
        yield from ((objects, one) for one in objects.found() if isinstance(one, Found))


def flaws_of(objects: ObjectStore, found: Found) -> Iterator[Damaged]:
    """Yield what is wrong with each rank's part of a checkpoint in the object store."""
    for part in found.manifest.parts:
        try:
            objects.read(found.manifest.save, part.rank)
        except Damaged as error:
            yield error


def intact(run: Run, folder: Path) -> list[Path]:
    """The checkpoints that we have not damaged, the latest training first."""
    found = [
        (store.epoch_of(one), one.step, path)
        for path, one in store.listed(folder)
        if isinstance(one, Manifest) and mark(path) not in run.damaged
    ]
    return [path for _epoch, _step, path in sorted(found, reverse=True)]


def folders(fleet: Fleet, where: str = "") -> Iterator[Path]:
    """Of checkpoints; those on one sort of disk, or all."""
    if where != LOCAL:
        yield fleet.shared_folder()
    if where != SHARED:
        for replica in range(fleet.replicas):
            yield from fleet.own_folders(replica)


def mark(path: Path) -> tuple[Path, int]:
    """Of this checkpoint, and of none that has its name later."""
    try:
        return path, path.stat().st_ino
    except FileNotFoundError:
        return path, 0


def saves(run: Run, *placements: str) -> list[Event]:
    """Return the events of finished saves, of these placements or of all if none is named."""
    return run.watch.find("saved", *placements)


def tiers_of(run: Run, rank: Rank) -> set[str]:
    """To which its process has saved."""
    return {event.data["tier"] for event in saves(run, rank.placement)}


def of_tier(events: list[Event], tier: str) -> list[Event]:
    """Return those of the saves that went to this tier."""
    return [event for event in events if event.data["tier"] == tier]


def troubles(run: Run, made: RunRecord, kind: str) -> list[Event]:
    """Told since the fault began."""
    found = run.watch.find("trouble", since=min(made.struck))
    return [event for event in found if event.data["kind"] == kind]


BY_TARGET: dict[str, Callable[[Run, RunRecord], None]] = {
    "writer": writer,
    "holder": holder,
    "disk": disk,
    "job": restart,
}


def stored(run: Run, made: RunRecord) -> bool:
    """Whether the fault is one of these; then it was made."""
    target = "job" if made.fault.restarts else KINDS[made.fault.kind].target
    if target in BY_TARGET:
        BY_TARGET[target](run, made)
    return target in BY_TARGET
