"""The process that does everything after the copy: hash, write, make visible, verify, prune.

    python -m runtime.checkpoint.writer SOCKET

Started by a trainer, one for each tier, and given the buffers that states are copied into and then
one message for each copy. It outlives the trainer: what it was given it finishes, and ends. Imports
no torch.

It is told, as JSON in single packets:
    {"op": "buffers", "numbers"}  with the buffers' descriptors
    {"op": "save", "buffer", "image", "described", "step", "save", "facts", ...}  `image` bytes from
     the buffer's start will be the state, `described` from the next page on are its table. Either
     "folder", "rank", "ranks", "share" and "shares" say where which share of it is to be written
     (in a folder of the job's run, "within" that, if the folder is not "shared"), or "holders",
     "token" and "label" whose memory keeps it, the last of which is a peer's ("run" is that run as
     far as the trainer knows it, or "", for "kept" see `holder`), or "objects", "job", "rank" and
     "ranks" which object store; "keep", "keep_for_s" and "common" which others stay there (see
     `store.stays`), "pack" whether chunks may be packed
    {"op": "look", "folder", "save"}  whether one whose name begins so is there: "looked", "seen"
    {"op": "copied", "save", "bytes"}  so much of the state is there by now
    {"op": "not_copied", "save", "error"}  it never will be
and says of each save, by its name: {"op": "alarm" | "durable" | "verified" | "failed" | "given_up",
"save", ...}, and at last {"op": "done", "save"}: it needs the buffer no more. "verified" has
"whole", with "path", "bytes", "stored" and "digest" of the checkpoint, where all shares of all
ranks are by now; "failed" has "keeper", the address of a holder that failed where another may not.
"""

from __future__ import annotations

import array
import contextlib
import json
import logging
import mmap
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any

from runtime.checkpoint import disk, store
from runtime.checkpoint.draft import IDLE_S, Draft, now_at, sweep
from runtime.checkpoint.holder import Label
from runtime.checkpoint.large_pages import mapped
from runtime.checkpoint.manifest import Manifest, Part
from runtime.checkpoint.objects import WRITERS_TRIES, ObjectStore
from runtime.checkpoint.packing import Packer, packed_again
from runtime.checkpoint.peer import Keeping
from runtime.checkpoint.staleness import Staleness
from runtime.checkpoint.tiers import run_of
from runtime.checkpoint.watched_store import WatchedStore
from runtime.framing import Refused
from runtime.image import CHUNK_BYTES, Damaged, Table, aligned

log = logging.getLogger("drydock.checkpoint")

PACKET_BYTES = 1 << 16
MAX_BUFFERS = 8
#: So long the shared folder is asked for the job's run where the trainer has a name for it.
RUN_S = 5.0
#: So many saves, one after the other, without the parts of others, until an engineer is told: some
#: may have died with what they wrote.
LEFT_ALONE = 3


class NotCopied(Exception):
    """What is to be saved will never be there as a whole."""


class KeeperFailed(OSError):
    """The holder that was to keep it does not, and another may."""

    def __init__(self, keeper: str, why: str) -> None:
        super().__init__(why)
        self.keeper = keeper  # its address


class GivenUp(Exception):
    """Another rank's writer failed, and says so: this checkpoint will never be complete."""


class Writer:
    """Works off what the trainer asks, one after the other."""

    def __init__(self, trainer: socket.socket) -> None:
        self._trainer = trainer
        self._copy_buffers: dict[int, memoryview] = {}
        self._buffer: int | None = None  # that of the save under way
        self._keeping: dict[str, Keeping] = {}  # address -> the holder that keeps what we save
        self._objects: ObjectStore | None = None
        self._before: dict[str, Part] = {}  # folder -> the last part that was written there
        #: folders in which what was written could not be read back: what an earlier checkpoint has
        #: there may be why, and is not shared once more
        self._doubted: set[str] = set()
        #: folder -> our last draft there to which parts of others lacked, and how many before it
        #: had stayed drafts
        self._unfinished: dict[str, tuple[Path, int]] = {}
        #: steps and names of the last saves to the object store to which parts of others lack
        self._unpublished: list[tuple[int, str]] = []
        self._left: set[Path] = set()  # what was to be removed after the last save, and is there
        self._staleness = Staleness()
        self._packer = Packer()
        self._name = ""  # of the save under way
        self._known_run = ""
        self._mounts: dict[str, Path] = {}  # folder -> see `mount_of`, as of our first save there
        self._watched: WatchedStore | None = None  # the shared folder for it
        self._copied = 0  # bytes of its state that are there
        self._flaw = ""  # why there will be no more
        self._hearing = threading.Lock()  # both who writes and who hashes may wait for more of it
        #: what the trainer said before it ended, and nobody has worked off
        self._last_words: deque[dict[str, Any]] = deque()

    def run(self) -> None:
        """Until the trainer is gone and all that it asked is done."""
        with contextlib.suppress(RuntimeError):  # no more threads: it keeps all its memory
            threading.Thread(target=self._outlive, name="drydock-end", daemon=True).start()
        while (asked := self._next()) is not None:
            if asked["op"] == "save":
                self._save(asked)
            elif asked["op"] == "look":
                self._look(Path(asked["folder"]), str(asked["save"]))
            # else it is more about a save that failed before it was copied

    def _next(self) -> dict[str, Any] | None:
        """What is to be done next; None if nothing will be."""
        with self._hearing:
            asked = self._hear()
            self._buffer = None if asked is None else asked.get("buffer")
            return asked

    def _outlive(self) -> None:
        """Once the trainer has ended, keep of the memory only what is still to be written: its next
        start takes as much again, and a slow store may hold us for minutes."""
        end = select.poll()
        end.register(self._trainer, select.POLLRDHUP)
        end.poll()
        with self._hearing:
            left = []
            while (asked := self._hear()) is not None:
                left.append(asked)
            self._last_words.extend(left)
            needed = {self._buffer, *(asked.get("buffer") for asked in left)}
            for number in self._copy_buffers.keys() - needed:
                del self._copy_buffers[number]

    def _hear(self) -> dict[str, Any] | None:
        """What the trainer says next about saves; None once it is gone."""
        if self._last_words:
            return self._last_words.popleft()
        while True:
            try:
                data, ancillary, _flags, _from = self._trainer.recvmsg(
                    PACKET_BYTES, socket.CMSG_SPACE(MAX_BUFFERS * array.array("i").itemsize)
                )
            except ConnectionResetError:  # it died before it read all we said; what it asked stays
                continue
            if not data:
                return None
            asked: dict[str, Any] = json.loads(data)
            if asked["op"] != "buffers":
                return asked
            self._take_buffers(asked["numbers"], ancillary)

    def _look(self, folder: Path, save: str) -> None:
        try:
            found = (one for _path, one in store.listed(folder) if isinstance(one, Manifest))
            seen = any(one.save.startswith(save) for one in found)
        except OSError:
            seen = False
        self._say("looked", seen=seen)

    def _await_copy(self, end: int) -> None:
        """Until the state that is saved is copied up to there. Raises NotCopied."""
        if end <= self._copied and not self._flaw:
            return  # past whoever waits for more of it
        with self._hearing:
            while self._copied < end and not self._flaw:
                heard = self._hear()
                if heard is None:
                    self._flaw = "the trainer ended before the copy was whole"
                elif heard["op"] == "not_copied":
                    self._flaw = str(heard["error"])
                elif heard["op"] == "copied":
                    self._copied = int(heard["bytes"])
            if self._flaw:
                raise NotCopied(self._flaw)

    def _take_buffers(self, numbers: list[int], ancillary: list[Any]) -> None:
        self._copy_buffers.clear()
        for _level, _type, data in ancillary:
            descriptors = array.array("i")
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
            for number, fd in zip(numbers, descriptors, strict=True):
                size = os.fstat(fd).st_size
                self._copy_buffers[number] = mapped(fd, size, writable=False)
                os.close(fd)

    def _save(self, asked: dict[str, Any]) -> None:
        self._name, self._copied, self._flaw = str(asked["save"]), 0, ""
        try:
            if "holders" in asked:
                self._replicate(asked)
            elif "objects" in asked:
                self._put(asked)
            else:
                self._write(asked)
        except GivenUp:
            self._say("given_up")
        except KeeperFailed as error:
            self._say("failed", error=str(error), keeper=error.keeper)
        except (OSError, Damaged, NotCopied) as error:
            self._say("failed", error=str(error))
        except Exception as error:  # the next save may succeed
            log.exception("save_failed save=%s", self._name)
            self._say("failed", error=repr(error))
        self._say("done")

    def _write(self, asked: dict[str, Any]) -> None:
        image, table = self._copy(asked)
        place = Path(asked["folder"])
        mount = self._demand_mounted(place)
        folder, rank, step = self._folder(asked), int(asked["rank"]), int(asked["step"])
        moved = mount != self._mounts[str(place)]
        if "within" in asked or self._demand_run(place, mounted_since=moved):
            self._mounts[str(place)] = mount
        before = self._before.get(str(folder)) or last_part(folder, rank)
        share, shares = int(asked["share"]), int(asked["shares"])
        shared = None if str(folder) in self._doubted else before
        alone = self._left_alone(folder)
        if (not rank and not share) or alone >= LEFT_ALONE:  # one for all that write to this folder
            with contextlib.suppress(OSError):  # what dead writers left may be what fills the disk
                for one in [folder, *neighbours(folder)]:
                    sweep(one, sparing=self._name)
        try:
            draft = Draft(folder, step, self._name, int(asked["ranks"]), asked["facts"], shares)
        except OSError as error:  # a folder takes room, too
            self._make_way_if_full(error, folder, asked)
            raise
        begun, verified = draft.path, False
        try:
            written = draft.write(
                rank, table, image, shared,
                share=share, ready=self._await_copy, packer=self._packer_for(asked),
            )  # fmt: skip
            part = written.part
            draft.publish()
            self._say("durable", written=written.bytes)
            if written.whole and (stale := self._staleness.news(written.whole, before)):
                self._say("alarm", kind="checkpoint_stale", text=str(store.in_job(stale, folder)))
            self._doubted.add(str(folder))
            self._verify(draft, part, image)
            self._doubted.discard(str(folder))
            verified = True
            whole = draft.note_verified(rank, share)
            path = draft.path if whole is None else draft.where() or draft.path
        except BaseException as error:
            if verified:
                pass  # it is whole: that a note could not be made is no flaw of it
            elif (visible := _visible(draft)) is not None:
                store.set_aside(visible)
            elif draft.is_given_up() and isinstance(error, OSError | Damaged):
                if draft.is_overdue():  # perhaps nobody else says so
                    raise TimeoutError(
                        f"it took more than {IDLE_S:g} s and is gone from {folder}, where others "
                        f"remove what was left alone for so long ({error}): see why that is slow"
                    ) from error
                if draft.ranks * shares == 1:
                    raise OSError(
                        f"it was removed from {folder} while it was written ({error}): see what "
                        "else removes things there"
                    ) from error
                raise GivenUp from error
            else:
                draft.give_up()
            self._make_way_if_full(error, folder, asked)
            raise
        finally:
            draft.close()
        if shares == 1:
            self._before[str(folder)] = part
        else:  # what others wrote of it is to be read
            self._before.pop(str(folder), None)
        if whole is None:
            self._say("verified", whole=None)
            self._unfinished[str(folder)] = (begun, alone)
            return
        self._say("verified", whole=as_told(whole, str(path)))
        self._clean(folder, path, asked)

    def _demand_mounted(self, folder: Path) -> Path:
        """That the file system on which we saved first is still there: what is written beneath its
        mount point nobody finds again once it is back. Where it is mounted by now: it may have been
        since, or a link leads elsewhere. Raises OSError, also for one that is ill."""
        with contextlib.suppress(FileNotFoundError):
            folder.stat()  # has mounted what is mounted when somebody asks for it
        now = mount_of(folder)
        mount = self._mounts.setdefault(str(folder), now)
        beneath = mount != now and mount.is_relative_to(now)
        if beneath and folder.resolve().is_relative_to(mount):
            raise OSError(f"nothing is mounted at {mount} any more, where {folder} was: mount it")
        return now

    def _demand_run(self, folder: Path, *, mounted_since: bool) -> bool:
        """That this folder of all has the name of the run that we are of; whether it has, for none
        can be given to one that is full. Raises OSError if it has another's: it was mounted after
        the job began."""
        if self._known_run and not mounted_since:
            return True
        found = ""
        with contextlib.suppress(OSError):  # else who saves elsewhere could not if it is full
            found = run_of(folder, self._known_run)
        if found and self._known_run and found != self._known_run:
            raise OSError(
                f"{folder} was mounted after this job began, which is run {self._known_run}, and "
                f"has its run {found}: end the job, then it goes on from there"
            )
        self._known_run = found or self._known_run
        return bool(found)

    def _left_alone(self, folder: Path) -> int:
        """How many of our saves there, up to the last, never had the parts of all: others save
        somewhere else. From the third on it is told, for nothing else here shows it."""
        path, before = self._unfinished.pop(str(folder), (None, 0))
        if path is None or not path.exists():  # it is whole, or was given up, which another tells
            return 0
        alone = before + 1
        if alone >= LEFT_ALONE:
            self._say(
                "alarm", kind="checkpoint_not_whole",
                text=f"the last {alone} saves to {folder} lack the parts of other ranks: if it is "
                "not one folder on all nodes, mount it; none of them can be loaded",
            )  # fmt: skip
        return alone

    def _folder(self, asked: dict[str, Any]) -> Path:
        """Where to write. Raises OSError if that needs the job's run, and it cannot be told."""
        folder = Path(asked["folder"])
        return folder / self._run(asked) / asked["within"] if "within" in asked else folder

    def _run(self, asked: dict[str, Any]) -> str:
        """Which run of the job this is, as the shared folder says, once; as long as that cannot,
        as the trainer says. Raises OSError."""
        if self._known_run:
            return self._known_run
        shared, believed = Path(asked["shared"]), str(asked["run"])
        self._watched = self._watched or WatchedStore(str(shared))

        def look() -> None:  # it may come back after it was given up
            self._known_run = run_of(shared)

        try:
            self._watched.call(look, RUN_S if believed else None)
        except OSError:
            if not believed:
                raise
        return self._known_run or believed

    def _replicate(self, asked: dict[str, Any]) -> None:
        """Have a peer's holder keep it, our own node's before that if it is to have it too: durable
        and verified once all have it whole."""
        image, table = self._copy(asked)
        addresses = [str(address) for address in asked["holders"]]
        for address in self._keeping.keys() - addresses:
            self._keeping.pop(address).close()
        self._await_copy(len(image))
        label = Label(**asked["label"], run=self._run(asked))
        written, failed = 0, None
        for address in addresses:
            if address not in self._keeping:
                self._keeping[address] = Keeping(address, str(asked["token"]))
            keeping = self._keeping[address]
            try:
                digest, sent = keeping.hold(label, table, asked["facts"], image, asked["kept"])
            except Refused:
                raise
            except (OSError, Damaged) as error:  # one of two is better than none
                failed = KeeperFailed(address, str(error))
            else:
                written += sent
        if failed is not None:
            raise failed
        self._say("durable", written=written)
        size = len(image)
        whole = {"path": addresses[-1], "bytes": size, "stored": size, "digest": digest}
        self._say("verified", whole=whole)

    def _put(self, asked: dict[str, Any]) -> None:
        """Into an object store: durable once it is there, and was read back."""
        image, table = self._copy(asked)
        if self._objects is None:
            url, job = str(asked["objects"]), str(asked["job"])
            self._objects = ObjectStore(url, job, WRITERS_TRIES)
        objects, step = self._objects, int(asked["step"])
        with contextlib.suppress(OSError):  # what became of those before is no reason to save none
            self._tell_unpublished(objects)
        written = objects.write(
            int(asked["rank"]), table, image,
            step=step, save=self._name, ready=self._await_copy, packer=self._packer_for(asked),
        )  # fmt: skip
        found = objects.publish(step, self._name, int(asked["ranks"]), asked["facts"])
        self._say("durable", written=written)
        if found is None:
            self._say("verified", whole=None)
            self._unpublished.append((step, self._name))
            return
        self._unpublished.clear()
        self._say("verified", whole=as_told(found.manifest, objects.url_of(found)))
        try:
            objects.prune(found, int(asked["keep"]), float(asked["keep_for_s"]))
        except OSError as error:
            self._say("alarm", kind="checkpoint_not_pruned", text=str(error))

    def _tell_unpublished(self, objects: ObjectStore) -> None:
        """See `_left_alone`; of what will not be whole there the last few stay. Raises OSError."""
        if any(objects.is_whole(*one) for one in self._unpublished):
            self._unpublished.clear()
        if (alone := len(self._unpublished)) < LEFT_ALONE:
            return
        self._say(
            "alarm", kind="checkpoint_not_whole",
            text=f"the last saves to {objects.url} lack the parts of other ranks: if it is not one "
            "store for all nodes, mend that; none of them can be loaded",
        )  # fmt: skip
        for _ in range(alone - LEFT_ALONE):
            objects.give_up(*self._unpublished.pop(0))

    def _packer_for(self, asked: dict[str, Any]) -> Packer | None:
        return self._packer if asked["pack"] else None

    def _copy(self, asked: dict[str, Any]) -> tuple[memoryview, Table]:
        """What is asked to be written. Raises Damaged if something else is in that room."""
        buffer, size = self._copy_buffers[asked["buffer"]], int(asked["image"])
        start = aligned(size, mmap.PAGESIZE)
        described = json.loads(bytes(buffer[start : start + int(asked["described"])]))
        if (described["step"], described["save"]) != (asked["step"], asked["save"]):
            raise Damaged(f"its buffer holds step {described['step']}, save {described['save']}")
        return buffer[:size], Table.restore(described)

    def _clean(self, folder: Path, newest: Path, asked: dict[str, Any]) -> None:
        """Remove what is not needed any more. The checkpoint is safe, whatever fails here."""
        try:
            keep = int(asked["keep"])
            left = [*self._prune(folder, newest, asked), *sweep(folder)]
            if others := neighbours(folder):
                store.prune_others(folder, others, keep)
            for other in others:
                left += sweep(other)
            if stays := self._left.intersection(left):  # not what another removes just now
                names = store.shortened(tuple(sorted(map(str, stays))))
                text = f"what is left of old ones cannot be removed, and fills the disk: {names}"
                self._say("alarm", kind="checkpoint_not_pruned", text=text)
            self._left = {*left}
            if asked["common"] is not None and asked["common"] < asked["step"]:
                for other in siblings(folder):
                    store.prune_left(other, asked["common"])
        except (OSError, Damaged) as error:
            self._say("alarm", kind="checkpoint_not_pruned", text=str(error))

    def _make_way_if_full(self, error: BaseException, folder: Path, asked: dict[str, Any]) -> None:
        """What makes room on a disk comes after a save that succeeds: writers that died before that
        may have left more than is to be kept."""
        if not isinstance(error, OSError) or error.errno not in disk.FULL:
            return
        keep = int(asked["keep"])
        with contextlib.suppress(OSError, Damaged):
            store.drop_aside(folder)
            whole = [path for path, found in store.listed(folder) if isinstance(found, Manifest)]
            if len(whole) > keep and not store.verify(whole[0]):
                self._prune(folder, whole[0], asked)

    def _prune(self, folder: Path, newest: Path, asked: dict[str, Any]) -> list[Path]:
        keep, keep_for_s = int(asked["keep"]), float(asked["keep_for_s"])
        return store.prune(folder, newest, keep, keep_for_s, asked["common"], now_at(folder))

    def _verify(self, draft: Draft, part: Part, image: memoryview) -> None:
        """Read all of it back; write anew what is not what was saved. Raises Damaged if that is no
        use."""
        findings = draft.verify(part)
        if not findings:
            return
        if draft.is_given_up():
            raise Damaged("another rank gave it up")
        self._say(
            "alarm", kind="checkpoint_damaged",
            text=f"written again, for it was not what was saved: {in_short(findings, draft)}",
        )  # fmt: skip
        wrong = {finding.file for finding in findings}
        draft.describe_again(wrong)
        for file in part.files:
            if file.name in wrong:
                start = file.first * CHUNK_BYTES
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.name, dir_fd=draft.handle)  # it may be shared with earlier ones
                if part.packs(file):
                    pieces = packed_again(part, file, image)
                    disk.write_pieces(file.name, pieces, part.stored_of(file), draft.handle)
                else:
                    disk.write(file.name, image[start : start + file.bytes], draft.handle)
        os.fsync(draft.handle)
        if findings := draft.verify(part):
            raise Damaged(in_short(findings, draft))

    def _say(self, op: str, **message: Any) -> None:
        with contextlib.suppress(
            OSError
        ):  # the trainer is gone; what it asked is done all the same
            said = {"op": op, "save": self._name, **message}
            self._trainer.send(json.dumps(said).encode())


def mount_of(folder: Path) -> Path:
    """Where the file system begins on which this folder is, or will be."""
    path = folder.resolve()
    while not os.path.ismount(path):
        path = path.parent
    return path


def neighbours(folder: Path) -> list[Path]:
    """On a node's disk the folders of our rank that processes of other replicas' numbers left, or
    write to. The shared folder has none."""
    own = store.OWN.fullmatch(folder.name)
    if own is None:
        return []
    return sorted({*folder.parent.glob(f"replica-*-rank-{own['rank']}")} - {folder})


def siblings(folder: Path) -> list[Path]:
    """On a node's disk the folders of our replica's other ranks, which are here or once were."""
    own = store.OWN.fullmatch(folder.name)
    if own is None:
        return []
    replica = folder.name.removesuffix(f"-rank-{own['rank']}")
    return sorted({*folder.parent.glob(f"{replica}-rank-*")} - {folder})


def as_told(whole: Manifest, path: str) -> dict[str, Any]:
    """A checkpoint, as the trainer is told."""
    return {"path": path, "bytes": whole.size, "stored": whole.stored, "digest": whole.digest}


def in_short(findings: list[store.Finding], draft: Draft) -> str:
    """A few of them: a message is one packet."""
    told = [store.in_job(finding, draft.path.parent) for finding in findings]
    return store.shortened(tuple(map(str, told)))


def last_part(folder: Path, rank: int) -> Part | None:
    """What the newest checkpoint holds of this rank."""
    for path, manifest in store.listed(folder):
        if not isinstance(manifest, Damaged):
            with contextlib.suppress(Damaged):
                return store.part_of(path, manifest, rank)
    return None


def _visible(draft: Draft) -> Path | None:
    """See `Draft.where`; None also if that cannot be told."""
    try:
        return draft.where()
    except OSError:
        return None


def main() -> None:
    """Read messages from the socket whose descriptor is given."""
    logging.basicConfig(format="%(asctime)s writer %(message)s", level=logging.INFO)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the trainer's end is seen on the socket
    Writer(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
