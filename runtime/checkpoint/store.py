"""Checkpoints on disk: a folder per step, complete and verified or invisible.

    step-00001234/tensors.bin      raw bytes, as staged
    step-00001234/manifest.json    what lies where, a hash per tensor, the digest of the whole

No pickle. A folder appears by rename after everything in it is durable; the older ones are only
removed after that. A damaged or incomplete folder is never chosen.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import xxhash

from runtime.snapshot import Buffer, Damaged, Piece, Staged

log = logging.getLogger("drydock.checkpoint")

FORMAT = 2
KEEP = 3
DRAFT_S = 3600.0  # another host's draft that nobody touched for so long was left by a dead writer
#: Pids mean something only here; a container that shares the store is a host of its own.
HOST = socket.gethostname()


def write(folder: Path, staged: Staged, keep: int = KEEP, spare: Collection[Path] = ()) -> Path:
    """Write one checkpoint durably, read it back, make it visible, then prune to `keep`.

    Keeps those of `spare` however old they are. Raises OSError (disk full, I/O) or Damaged; what
    was there before is untouched then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = place(folder, staged.step)
    mine = f"{staged.step:08d}-{HOST}-{os.getpid()}"
    draft = folder / f".writing-{mine}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        write_file(draft / "tensors.bin", staged.buffer)
        write_file(draft / "manifest.json", json.dumps(manifest_of(staged)).encode())
        sync_folder(draft)
        read(draft)
        if final.exists():
            replaced = folder / f".replaced-{mine}"
            final.rename(replaced)
            draft.rename(final)
            shutil.rmtree(replaced)
        else:
            draft.rename(final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_folder(folder)
    prune(folder, keep, {final, *spare})
    return final


def newest(folder: Path) -> tuple[Path, Staged] | None:
    """The newest checkpoint that verifies, or None. What fails is left in place and named."""
    for path in candidates(folder):
        if (staged := verified(path)) is not None:
            return path, staged
    return None


def verified(path: Path) -> Staged | None:
    """One checkpoint, or None if it fails: it is left in place, and named."""
    try:
        return read(path)
    except (Damaged, OSError, ValueError, KeyError, TypeError) as error:
        log.warning("checkpoint_refused path=%s error=%s", path, error)
        return None


def read(path: Path) -> Staged:
    """One checkpoint, every hash checked. Raises Damaged naming the tensor, or OSError."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    if manifest["format"] != FORMAT:
        raise Damaged(f"{path} has format {manifest['format']}, this version reads {FORMAT}")
    if manifest["self"] != self_hash(manifest):
        raise Damaged(f"{path}: the manifest was changed")
    buffer = bytearray((path / "tensors.bin").read_bytes())
    if len(buffer) != manifest["bytes"]:
        raise Damaged(f"{path}: {len(buffer)} bytes, {manifest['bytes']} expected")
    for piece, expected in zip(manifest["pieces"], manifest["hashes"], strict=True):
        if hash_of(buffer, Piece(**piece)) != expected:
            raise Damaged(f"{path}: tensor {piece['name']} was changed")
    return Staged.restore(manifest, buffer)


def place(folder: Path, step: int) -> Path:
    """Where the checkpoint of this step is."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def candidates(folder: Path) -> list[Path]:
    """Visible checkpoints, newest first."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, reverse=True)


def prune(folder: Path, keep: int, spared: Collection[Path]) -> None:
    """Keep those that are spared, among them the one just written, and the newest others that look
    whole, `keep` in all."""
    kept = 1
    for path in candidates(folder):
        if path in spared:
            continue
        if kept < keep and looks_whole(path):
            kept += 1
        else:
            shutil.rmtree(path, ignore_errors=True)  # another host may be removing it too
    for path in leftovers(folder):
        shutil.rmtree(path, ignore_errors=True)


def looks_whole(path: Path) -> bool:
    """A cheap check: the manifest is unchanged and the tensors have the length that it says."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        size = (path / "tensors.bin").stat().st_size
        whole: bool = manifest["self"] == self_hash(manifest) and manifest["bytes"] == size
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return whole


def leftovers(folder: Path) -> Iterator[Path]:
    """Drafts of writers that died: on this host at once, on others by age."""
    for path in folder.glob(".*-*-*-*"):
        start, _, pid = path.name.rpartition("-")
        ours = start.endswith(f"-{HOST}")
        if not Path(f"/proc/{pid}").exists() if ours else age_s(path) > DRAFT_S:
            yield path


def age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0  # its writer finished meanwhile


def manifest_of(staged: Staged) -> dict[str, Any]:
    hashes = [hash_of(staged.buffer, piece) for piece in staged.pieces]
    manifest = {"format": FORMAT, **staged.describe(), "hashes": hashes}
    return {**manifest, "self": self_hash(manifest)}


def self_hash(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "self"}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())


def hash_of(buffer: Buffer, piece: Piece) -> str:
    view = memoryview(buffer)[piece.offset : piece.offset + piece.bytes]
    return xxhash.xxh3_64_hexdigest(view)


def write_file(path: Path, data: bytes | Buffer) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
