"""Checkpoints in a folder: found, verified, chosen, and removed last.

One that was damaged is never chosen. How they are written is in `draft`, the format in `manifest`.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from runtime.checkpoint import compression, disk
from runtime.checkpoint.compression import NotInstalled
from runtime.checkpoint.manifest import (
    MANIFEST,
    DataFile,
    Manifest,
    OtherVersion,
    Part,
    PartHash,
    Run,
    chunks_in,
)
from runtime.image import CHUNK_BYTES, Damaged, Staged, chunks_of, hash_of, pages

log = logging.getLogger("drydock.checkpoint")

KEEP = 3
#: So far ahead may be a clock by which a checkpoint was dated that is taken for a recent one.
CLOCKS_APART_S = 300.0
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?", re.ASCII)
_ASIDE = ".damaged-"
GONE = ".gone-"  # given up or to be removed
#: The folder of a rank on a node's own disk, in which it is the only one, and so the first.
OWN = re.compile(r"replica-\d+-rank-(?P<rank>\d+)")


#: Commands that help, before a path.
_ALL_THAT_IS_WRONG = "to see all that is wrong: python -m runtime.checkpoint verify"
WHICH_ARE_WHOLE = "to see which ones are whole: python -m runtime.checkpoint verify"
_WHO_MADE_IT = "to see who made it: python -m runtime.checkpoint inspect"
_WHAT_IS_THERE = "to see what a job has: python -m runtime.checkpoint ls STATE_DIR"

#: Is told of so many bytes more; what it raises ends the reading, and is raised.
Progress = Callable[[int], object]


def unseen(_bytes: int) -> None:
    """Nobody looks on."""


class _Enough(Exception):
    """A chunk is wrong, and whoever wants to use the file needs to know no more."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with a checkpoint, and where."""

    file: str
    rank: int | None
    tensors: tuple[str, ...]
    what: str
    #: it could not be read, or is of another version: nothing is known to be wrong with it
    not_judged: bool = False

    def __str__(self) -> str:
        whose = "" if self.rank is None else f" (rank {self.rank})"
        tensors = f", tensors {shortened(self.tensors)}" if self.tensors else ""
        return f"{self.file}{whose}{tensors}: {self.what}"


def in_job(finding: Finding, folder: Path) -> Finding:
    """With the rank that the job knows: of a checkpoint in this folder, which may be its own."""
    return replace(finding, rank=rank_in(folder, finding.rank))


def rank_in(folder: Path, rank: int | None) -> int | None:
    """Return the rank of the job whose part lies in this folder.

    A rank's own folder on a node's disk, `replica-R-rank-K`, holds the part of rank K. In any other
    folder it is `rank`, which the checkpoint itself tells.
    """
    own = OWN.fullmatch(folder.absolute().name)
    return rank if own is None else int(own["rank"])


class Unreadable(Damaged):
    """A checkpoint could not be read; nothing is known to be wrong with it.

    Its store may be well again in a moment.
    """


#: Of these nobody can tell here whether they are needed: they stay.
NOT_JUDGED = (OtherVersion, Unreadable)
#: There is no such file, which no disk or server that is well again will bring.
_NO_FILE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ESPIPE, errno.ELOOP, errno.EINVAL),
    *(errno.ENXIO, errno.ENAMETOOLONG, errno.EFBIG),
}


def candidates(folder: Path) -> list[Path]:
    """Visible checkpoints, newest first. Raises OSError if the folder cannot be read."""
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    found = [(number_of(path), path) for path in paths if is_named(path)]
    return [path for _, path in sorted(found, reverse=True)]


def is_named(path: Path) -> bool:
    """Whether it has a checkpoint's name."""
    return is_name(path.name)


def is_name(name: str) -> bool:
    """Whether a checkpoint's folder may have this name, as step-00000012 or step-00000012.1."""
    return _NAME.fullmatch(name) is not None


def found_in(path: Path) -> list[Path]:
    """The checkpoints that a path means, the latest training first, as a job takes them: itself, or
    those in it, or those in the state folder of a job. Raises Damaged if there are none, saying
    what it is instead."""
    if (path / MANIFEST).exists() or (is_named(path) and os.path.lexists(path)):
        return [path]
    for folder in (path, path / "checkpoints"):
        if folder.is_dir() and (found := candidates(folder)):
            return _by_training(found)
    raise Damaged(_no_checkpoint(path))


def _by_training(paths: list[Path]) -> list[Path]:
    """The latest first. One that cannot be read has its place by its number: before the one with
    the next lower."""
    ages: list[tuple[int, tuple[int, int], Path]] = []
    for path in sorted(paths, key=number_of):
        try:
            epoch = epoch_of(manifest_of(path))
        except Damaged:
            epoch = ages[-1][0] if ages else 0
        ages.append((epoch, number_of(path), path))
    return [path for _epoch, _number, path in sorted(ages, reverse=True)]


def number_of(path: Path) -> tuple[int, int]:
    """Its step, and which of the saves of that step it is."""
    return numbers_in(path.name)


def numbers_in(name: str) -> tuple[int, int]:
    """Return the step in a checkpoint's name, and which save of that step it is, from 0.

    Raises ValueError if it is not the name of a checkpoint.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} is not named as a checkpoint is: step-00000012")
    return int(match[1]), int(match[2] or 0)


def manifest_of(path: Path) -> Manifest:
    """What this checkpoint consists of. Raises Damaged, saying what it is instead of one, and which
    command helps; as Unreadable if that cannot be told."""
    try:
        data = disk.read_small(path / MANIFEST)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise Damaged(_no_checkpoint(path, error.strerror)) from error
        raise _unreadable(path / MANIFEST, error) from error
    with _pointing_to(f"{WHICH_ARE_WHOLE} {path.parent}"):
        manifest = Manifest.from_json(data, str(path / MANIFEST))
        if is_named(path) and number_of(path)[0] != manifest.step:
            raise Damaged(f"{path} holds step {manifest.step}: it was renamed")
    return manifest


def _unreadable(path: Path, error: OSError) -> Unreadable:
    return Unreadable(
        f"{path} could not be read ({error.strerror}): it may be whole; see to its disk or server; "
        f"{WHICH_ARE_WHOLE} {path.parent.parent}"
    )


def part_of(path: Path, manifest: Manifest, rank: int) -> Part:
    """The description of one rank's image. Raises Damaged, saying which command helps."""
    with _pointing_to(f"{_WHO_MADE_IT} {path}"):
        expected = manifest.part(rank)
    with _pointing_to(f"{_ALL_THAT_IS_WRONG} {path}"):
        return _part(path, manifest, expected)


def _part(path: Path, manifest: Manifest, expected: PartHash) -> Part:
    try:
        data = disk.read_small(path / expected.name)
    except OSError as error:
        kind = Damaged if error.errno in _NO_FILE else Unreadable
        raise kind(
            f"{path / expected.name} cannot be read: the tensors of rank "
            f"{rank_in(path.parent, expected.rank)} are expected there, found: {error.strerror}"
        ) from error
    return checked_part(data, manifest, expected, str(path / expected.name))


@contextlib.contextmanager
def _pointing_to(command: str) -> Iterator[None]:
    """What is raised ends with the command that helps. Raises Damaged."""
    try:
        yield
    except OtherVersion:  # which says what to do itself
        raise
    except Unreadable as error:
        raise Unreadable(f"{error}; {command}") from error
    except Damaged as error:
        raise Damaged(f"{error}; {command}") from error


def checked_part(data: bytes, manifest: Manifest, expected: PartHash, what: str) -> Part:
    """The description of a part, if it is the one that the manifest names. Raises Damaged, which
    begins with `what`."""
    part = Part.from_json(data, what)
    whose = (part.rank, part.save, part.step)
    if whose != (expected.rank, manifest.save, manifest.step):
        raise Damaged(
            f"{what} is rank {part.rank} of save {part.save} at step {part.step}, "
            f"not of this checkpoint: save {manifest.save} at step {manifest.step}"
        )
    if (found := xxhash.xxh3_128_hexdigest(data)) != expected.hash:
        raise Damaged(
            f"{what} was changed after its {MANIFEST} was written: hash {expected.hash} expected, "
            f"found {found}"
        )
    if (part.table.bytes, part.digest) != (expected.bytes, expected.digest):
        raise Damaged(
            f"{what} is an image of {part.table.bytes} bytes, digest {part.digest}; its "
            f"{MANIFEST} has {expected.bytes}, {expected.digest}"
        )
    return part


def read(path: Path, rank: int = 0, progress: Progress = unseen) -> Staged:
    """One rank's image, each chunk compared. `progress` is told of each block, on any thread.
    Raises Damaged, naming tensors and file; NotInstalled if it is packed, and nothing here unpacks
    it."""
    part = part_of(path, manifest_of(path), rank)
    if any(part.packed):
        compression.demand(str(path))
    buffer = pages(part.table.bytes)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for file in part.files:
            start = file.first * CHUNK_BYTES
            into = buffer[start : start + file.bytes]
            for finding in check(part, file, handle, into, progress):
                what = in_job(finding, path.parent)
                kind = Unreadable if finding.not_judged else Damaged
                raise kind(f"{path}: {what}; {_ALL_THAT_IS_WRONG} {path}")
    finally:
        os.close(handle)
    return Staged(part.step, part.table, buffer, part.hashes)


def verified(path: Path, rank: int = 0) -> Staged | None:
    """One rank's image, or None if it fails: it is left in place, and named. Raises
    NotInstalled."""
    try:
        return read(path, rank)
    except NotInstalled:
        raise  # nothing is wrong with it, and what is older must not take its place
    except Damaged as error:
        log.warning("checkpoint_refused path=%s error=%s", path, error)
        return None


def newest(folder: Path, rank: int = 0) -> tuple[Path, Staged] | None:
    """The newest checkpoint of which this rank's image verifies, or None. Raises NotInstalled."""
    for path in candidates(folder):
        if (staged := verified(path, rank)) is not None:
            return path, staged
    return None


def verify(path: Path, progress: Progress = unseen) -> list[Finding]:
    """All that is wrong with a checkpoint, reading every byte of it. `progress`: see `read`. Raises
    NotInstalled if some of it is packed, nothing here unpacks it, and nothing else is wrong."""
    try:
        manifest = manifest_of(path)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except Damaged as error:
        return [_finding(MANIFEST, None, error)]
    except OSError as error:
        return [_finding(MANIFEST, None, _unreadable(path / MANIFEST, error))]
    findings, packed = [], False
    try:
        for expected in manifest.parts:
            try:
                part = _part(path, manifest, expected)
            except Damaged as error:
                findings.append(_finding(expected.name, expected.rank, error))
                continue
            for file in part.files:
                try:
                    findings += check(part, file, handle, progress=progress)
                except NotInstalled:
                    packed = True
    finally:
        os.close(handle)
    if packed and not findings:
        compression.demand(str(path))
    return [in_job(finding, path.parent) for finding in findings]


def _finding(file: str, rank: int | None, error: Damaged) -> Finding:
    return Finding(file, rank, (), str(error), not_judged=isinstance(error, NOT_JUDGED))


def _no_checkpoint(path: Path, why: str | None = None) -> str:
    if not path.exists():
        return (
            f"{path} does not exist; a checkpoint is a folder, named as step-00000012; "
            f"{_WHAT_IS_THERE}"
        )
    if not path.is_dir():
        return f"{path} is no folder; a checkpoint is one, named as step-00000012; {_WHAT_IS_THERE}"
    try:
        inside = candidates(path)
    except OSError as error:
        return f"{path} cannot be looked into ({error.strerror}); {_WHAT_IS_THERE}"
    if inside:
        return f"{path} holds {len(inside)} checkpoints and is none; give one of them: {inside[0]}"
    if why is not None:
        return f"{path} is no checkpoint: its {MANIFEST} cannot be read ({why}); {_WHAT_IS_THERE}"
    return (
        f"{path} holds no checkpoint: none of its folders is named as step-00000012; "
        f"{_WHAT_IS_THERE}"
    )


def shortened(names: tuple[str, ...], most: int = 4) -> str:
    """Return the first `most` names as text for a person, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name.removeprefix(".") for name in names[:most]) + more


def listed(folder: Path) -> Iterator[tuple[Path, Manifest | Damaged]]:
    """Every visible one, newest first, with what it consists of or why that cannot be told."""
    for path in candidates(folder):
        try:
            yield path, manifest_of(path)
        except Damaged as error:
            yield path, error


def verify_part(part: Part, handle: int, progress: Progress = unseen) -> list[Finding]:
    """Read the files of a part again, from the disk; what is wrong with them."""
    findings = []
    for file in part.files:
        findings += check(part, file, handle, progress=progress)
    return findings


def check(
    part: Part,
    file: DataFile,
    handle: int,
    into: memoryview | None = None,
    progress: Progress = unseen,
) -> list[Finding]:
    """Read one file and compare its chunks; what is wrong with it. `into`: see `disk.read`; if it
    is given the file is to be used, and nothing more is begun once a chunk is wrong. `progress`:
    see `read`. Raises NotInstalled if it is packed, and nothing here unpacks it."""
    wrong: list[int] = []

    def judge(seen: int) -> None:
        progress(seen)
        if wrong and into is not None:
            raise _Enough

    def compare(offset: int, block: memoryview) -> None:
        first = file.first + offset // CHUNK_BYTES
        for chunk, data in enumerate(chunks_of(block), first):
            if hash_of(data) != part.hashes[chunk]:
                wrong.append(chunk)
        judge(len(block))

    def unpack(run: Run, block: memoryview) -> None:
        for chunk, stored in part.cut(run, block):
            length = part.length_of(chunk)
            data = compression.chunk_in(part, chunk, stored)
            if data is None:
                wrong.append(chunk)
            elif into is not None:
                start = (chunk - file.first) * CHUNK_BYTES
                into[start : start + length] = data
            judge(length)

    try:
        if part.packs(file):
            # That it is missing or cut short shows all the same.
            runs = part.runs_of(file, disk.PACKED_BYTES) if compression.is_installed() else ()
            disk.read_runs(file.name, part.stored_of(file), handle, runs, unpack)
            compression.demand(f"{file.name} (rank {part.rank})")
        else:
            disk.read(file.name, file.bytes, handle, compare, into)
    except (OSError, EOFError) as error:
        what = str(error)
        if isinstance(error, FileNotFoundError):
            what = f"it is missing, {part.stored_of(file)} bytes expected"
        unread = isinstance(error, OSError) and error.errno not in _NO_FILE
        tensors = names_in(part, *chunks_in(file))
        return [Finding(file.name, part.rank, tensors, what, not_judged=unread)]
    except _Enough:
        pass
    if not wrong:
        return []
    least = "" if into is None else "at least "
    what = f"{least}{len(wrong)} of {file.chunks} chunks are not what was saved"
    return [Finding(file.name, part.rank, names_in(part, *sorted(wrong)), what)]


def names_in(part: Part, *chunks: int) -> tuple[str, ...]:
    """The tensors of which something lies in these chunks."""
    return tuple(dict.fromkeys(name for chunk in chunks for name in part.table.names_in(chunk)))


def epoch_of(manifest: Manifest) -> int:
    """In which epoch of the job's membership it was trained; 0 if it does not say."""
    epoch = manifest.facts.get("epoch", 0)
    return epoch if isinstance(epoch, int) else 0


def is_of_one_rank(manifest: Manifest) -> bool:
    """Whether it has the part of one rank of several alone, as on a node's own disk."""
    ranks = manifest.facts.get("ranks")
    return type(ranks) is int and ranks != len(manifest.parts)


def saved_at(manifest: Manifest) -> float:
    """Unix time; 0 if it does not say."""
    at = manifest.facts.get("at")
    return at if isinstance(at, int | float) else 0.0


def stays(
    place: int,
    found: Manifest,
    newest: Manifest,
    keep: int,
    keep_for_s: float,
    common: int | None = None,
    now: float = math.inf,
) -> bool:
    """Whether a complete checkpoint is not to be removed now that `newest` was verified: it is
    that one or of later training, of which its own writer decides; or one of the `keep` of the
    latest training (`place`: how many are later), or was saved within `keep_for_s` seconds before
    that one, or is of the step `common`, which every rank has. Age only ever adds to what the
    number keeps. `now`: by the clock of whatever they lie on, for those that they were dated by
    may be ahead.
    """
    later = (epoch_of(found), found.step) > (epoch_of(newest), newest.step)
    at = saved_at(found)
    first, last = sorted((saved_at(newest), now))
    recent = keep_for_s > 0 and first - keep_for_s <= at <= last + CLOCKS_APART_S
    known = found.step == common or found.save == newest.save
    return place < keep or recent or later or known


def is_passed_over(found: Manifest, newest: Manifest) -> bool:
    """Whether the job that saved `newest` began from an earlier state than this one, which was
    there: it was damaged, or did not train. Never of an import: with weights alone a job begins
    before its first step."""
    if "imported" in found.facts:
        return False
    began: Any = newest.facts.get("began")
    try:
        state, first = (began["epoch"], began["step"]), began["first"]
        return epoch_of(found) < first and (epoch_of(found), found.step) > state
    except (KeyError, TypeError):  # it does not say
        return False


def set_aside(path: Path) -> None:
    """Never choose this checkpoint, but leave it for a person to look at, in the place of the one
    that was set aside before: on a disk that gives nothing back there is one with each save."""
    aside = path.with_name(f"{_ASIDE}{path.name}-{time.time_ns()}")
    with contextlib.suppress(OSError):
        path.rename(aside)
        for one in path.parent.glob(f"{_ASIDE}*"):
            if one.name != aside.name:
                remove(one)


def drop_aside(folder: Path) -> None:
    """Remove what was set aside there: no room is left for what is only to be looked at."""
    for one in folder.glob(f"{_ASIDE}*"):
        remove(one)


def prune(
    folder: Path,
    newest: Path,
    keep: int = KEEP,
    keep_for_s: float = 0.0,
    common: int | None = None,
    now: float = math.inf,
) -> list[Path]:
    """Remove all complete checkpoints but those that stay (see `stays`); what of the others could
    not be removed. What is damaged is not counted, and goes once it is older than all that are
    kept. What could not be read, or is of another version, is not counted and stays.

    What has a later step than `newest` and an earlier epoch is set aside, and whatever is later
    than the state that the job began from and was there then: the job did not go on from there, or
    could not. What has a later one of both was saved while `newest` took long.

    What a link that stays leads to stays with it.
    """
    ours = manifest_of(newest)
    newest = folder / newest.name  # it may have been found by another way
    whole = {newest: ours}
    not_judged: list[Path] = []
    damaged: list[Path] = []
    astray: list[Path] = []
    for path, found in listed(folder):
        if path == newest:
            continue
        if isinstance(found, NOT_JUDGED):
            not_judged.append(path)
            continue
        later = number_of(path) > number_of(newest)
        if isinstance(found, Damaged):
            (astray if later else damaged).append(path)
        elif is_passed_over(found, ours) or (later and epoch_of(found) < epoch_of(ours)):
            astray.append(path)
        else:
            whole[path] = found
    for path in reversed(astray):  # the latest is the last, and stays
        set_aside(path)
    latest = sorted(whole, key=lambda path: (epoch_of(whole[path]), number_of(path)), reverse=True)
    kept = [
        path
        for place, path in enumerate(latest)
        if stays(place, whole[path], ours, keep, keep_for_s, common, now)
    ]
    oldest = min(map(number_of, kept))
    useless = [path for path in damaged if len(kept) >= keep and number_of(path) < oldest]
    needed = led_to([*kept, *not_judged])
    old = [path for path in latest if path not in kept and not is_needed(path, needed)]
    left = map(remove, [*old, *useless])
    return [path for path in left if path is not None]


def led_to(paths: Iterable[Path]) -> set[str]:
    """Where these lie: a link may lead to another one."""
    return {os.path.realpath(path) for path in paths}


def is_needed(path: Path, places: Collection[str]) -> bool:
    """Whether it lies in one of these places (see `led_to`), and is no link to there."""
    return not path.is_symlink() and os.path.realpath(path) in places


def prune_others(folder: Path, others: Iterable[Path], keep: int) -> None:
    """Once `keep` are in this folder, remove from other folders on its disk what is of earlier
    training than they, or, if it is damaged, of an earlier step: a process that had another
    replica's number left it there."""
    kept = [found for _path, found in listed(folder) if isinstance(found, Manifest)]
    if len(kept) < keep:
        return
    oldest = min((epoch_of(found), found.step) for found in kept)
    first = min(found.step for found in kept)
    for other in others:
        for path, found in listed(other):
            if isinstance(found, NOT_JUDGED):
                continue
            if isinstance(found, Manifest):
                earlier = (epoch_of(found), found.step) < oldest
            else:
                earlier = number_of(path)[0] < first
            if earlier:
                remove(path)


def prune_left(folder: Path, common: int) -> None:
    """Remove what a rank left on this disk that is on another node by now: all that is there is of
    earlier steps than `common`, of which every rank has its part where it is."""
    there = candidates(folder)
    if all(number_of(path)[0] < common for path in there):
        for path in there:
            remove(path)


def remove(path: Path) -> Path | None:
    """Out of sight first, so that what is left of it when we die is no checkpoint: one that cannot
    be renamed stays whole. Of a link the link alone. What could not be removed, and where it is."""
    gone = path
    if not path.name.startswith(GONE):
        gone = path.with_name(f"{GONE}{path.name}-{uuid.uuid4().hex}")
        try:
            path.rename(gone)
        except FileNotFoundError:  # another host was faster
            return None
        except OSError as error:  # this folder cannot be written, or its disk is ill
            if is_named(path) and error.errno not in disk.FULL:
                return path
            gone = path  # a full disk may have no room for the longer name
    with contextlib.suppress(OSError):
        if gone.is_symlink() or gone.is_file():
            gone.unlink()
        else:
            (gone / MANIFEST).unlink()
    shutil.rmtree(gone, ignore_errors=True)
    return gone if os.path.lexists(gone) else None
