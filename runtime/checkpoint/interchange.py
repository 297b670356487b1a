"""Checkpoints to and from what others read: torch files, safetensors folders, torch's own
distributed checkpoints (DCP), Hugging Face folders.

What was divided among ranks is put together on the way out. Nothing is ever unpickled but what
torch's `weights_only` lets through.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint import disk, draft, memory_left, store
from runtime.checkpoint.manifest import refuse_odd_name, shown
from runtime.checkpoint.progress import bytes_in, bytes_read, watched
from runtime.checkpoint.records import Odd, in_a_line, record_sizes, refuse_damaged
from runtime.checkpoint.resharding import AS_SAVED, resharded
from runtime.checkpoint.tiers import epochs_taken, known_run
from runtime.image import Damaged, Staged
from runtime.snapshot import Copying, Layout, state_of

#: Bytes of one safetensors file at most, as Hugging Face cuts them.
SHARD_BYTES = 5_000_000_000
#: Of what there can be no tensors there.
UNKNOWN = (torch.complex128, torch.complex32)
INDEX = "model.safetensors.index.json"
_NEWER = "pip install 'safetensors>=0.8'"
_OF_TWO = "the folder has files of two saves, get it anew"
#: Under which key other tools keep a model's weights beside other things.
MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
#: How the names end under which modules give what else they keep (`get_extra_state`), of any kind.
EXTRA = "_extra_state"
#: Also in what torch makes of it.
_NO_MEMORY = os.strerror(errno.ENOMEM)
#: How the names of weights in several files end, as Hugging Face counts them.
_PART = re.compile(r"-\d{5}-of-(?P<files>\d{5})\.(?:safetensors|bin)$")

State = dict[str, Any]


def whole_state(path: Path, progress: store.Progress = store.unseen) -> State:
    """All of a checkpoint as one nested state, in plain tensors. Raises Damaged, MemoryError."""
    manifest = store.manifest_of(path)
    if store.is_of_one_rank(manifest):
        raise Damaged(
            f"{path} has the part of one rank of {manifest.facts['ranks']} alone: give that step "
            "in the shared folder, which has those of all"
        )

    def read(rank: int) -> Staged:
        memory_left.demand(manifest.part(rank).bytes)  # the whole grows meanwhile
        return store.read(path, rank, progress)

    first, *others = (part.bytes for part in manifest.parts)
    try:
        with _memory_for(path, first + max(others, default=0)):
            state: State = resharded(read, len(manifest.parts), 0, 1)
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, Damaged):
            if str(path) in str(error):
                raise
            raise Damaged(f"{path}: {error}") from error
        raise Damaged(f"{path}: its tensors do not make a state: {shown(error)}") from error
    return state


def comparable_state(path: Path, progress: store.Progress = store.unseen) -> State:
    """The same; of what only its script can put together each rank's, as "rank 0" and so on."""
    manifest = store.manifest_of(path)
    skeleton = store.part_of(path, manifest, 0).table.skeleton
    keys = [pair[0] for pair in skeleton["$dict"]] if "$dict" in skeleton else []
    if AS_SAVED not in keys:
        return whole_state(path, progress)
    ranks = (part.rank for part in manifest.parts)
    with _memory_for(path, manifest.size):
        return {f"rank {rank}": state_of(store.read(path, rank, progress)) for rank in ranks}


# --- out ------------------------------------------------------------------------------------------
# What `progress` is told of are the bytes that were written.


def to_torch(state: State, out: Path, progress: store.Progress = store.unseen) -> None:
    """One file, with all that the checkpoint has; `torch.load(…, weights_only=True)` reads it."""
    with _made_whole(out, size_of(state), progress) as new, new.open("xb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # what a disk that is full comes to in torch
            raise Odd(f"{out} cannot be written: {shown(error)}") from error


def to_dcp(state: State, out: Path, progress: store.Progress = store.unseen) -> None:
    """A folder, with all that the checkpoint has, as `torch.distributed.checkpoint` writes it."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    with _made_whole(out, size_of(state), progress) as new, warnings.catch_warnings():
        # That nobody else saves is meant.
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            save(state, checkpoint_id=new, no_dist=True)
        except CheckpointException as error:  # no Exception, and of many lines
            raise Odd(f"{out} cannot be written: {_causes(error)}") from error


def to_safetensors(
    state: State,
    out: Path,
    progress: store.Progress = store.unseen,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """A folder with the model's weights in files of so many bytes at most, and their index; tied
    weights are in it under each of their names. Raises Odd without a recent safetensors."""
    library = _recent_safetensors()
    if "model" not in state:
        raise Odd(f"the checkpoint has no model, only {store.shortened(tuple(map(str, state)))}")
    model = state["model"]  # of tensors, and of values that hold none
    if odd := [name for name, one in model.items() if one is not next(tensors_in(one), one)]:
        raise Odd(
            f"{odd[0]} of the model holds tensors that have no name of their own, and safetensors "
            "keeps none of those: export --to torch or dcp"
        )
    if wide := [name for name, one in model.items() if getattr(one, "dtype", None) in UNKNOWN]:
        raise Odd(
            f"{wide[0]} of the model is of {model[wide[0]].dtype}, which safetensors does not "
            "have: export --to torch or dcp"
        )
    shards = _shards(model, shard_bytes)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    with _made_whole(out, size_of(model), progress) as new:
        new.mkdir()
        for name, shard in zip(names, shards, strict=True):
            try:
                described = {  # not by its function for torch, which needs NumPy
                    key: library.TensorSpec(
                        dtype=str(one.dtype).removeprefix("torch."), shape=[*one.shape],
                        data_ptr=one.data_ptr(), data_len=one.nbytes,
                    )
                    for key, one in shard.items()
                }  # fmt: skip
                library.serialize_file(described, new / name, {"format": "pt"})
            except library.SafetensorError as error:
                raise Odd(f"{out} cannot be written: {error}") from error
        where = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        size = sum(one.nbytes for shard in shards for one in shard.values())
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (new / INDEX).write_text(json.dumps(index, indent=2))


EXPORTS: dict[str, Callable[..., None]] = {
    "dcp": to_dcp, "safetensors": to_safetensors, "torch": to_torch,
}  # fmt: skip


def demand(kind: str, out: Path) -> None:
    """Before a checkpoint is read for it: raises Odd if an export of this kind cannot be written
    there."""
    if os.path.lexists(out):
        raise _exists(out)
    if kind == "safetensors":
        _recent_safetensors()


def left_out(kind: str, state: State) -> tuple[str, ...]:
    """What the model has that an export of this kind does not take with it: what modules give that
    is no tensor (`get_extra_state`)."""
    model = state["model"] if kind == "safetensors" else {}
    return tuple(name for name, one in model.items() if not isinstance(one, torch.Tensor))


def size_as(kind: str, state: State) -> int:
    """Bytes of the tensors that an export of this kind writes."""
    return size_of(state.get("model") if kind == "safetensors" else state)


# --- in -------------------------------------------------------------------------------------------


def demand_new(folder: Path) -> None:
    """Before anything is read for it: raises Odd if nothing can be imported into this state folder,
    for there are checkpoints already, or a job has begun there; OSError."""
    checkpoints = folder / "checkpoints"
    if there := store.candidates(checkpoints):
        raise Odd(f"{checkpoints} has checkpoints ({there[0].name}, …): begin in another folder")
    run, epochs = known_run(checkpoints), epochs_taken(checkpoints)
    if run or epochs:
        begun = f"run {run}" if run else f"epoch {max(epochs)}"
        raise Odd(
            f"{checkpoints} is of a job that has begun ({begun}), of which disks and memory of "
            "nodes may have checkpoints, and it would go on from these: begin in another folder"
        )


def foreign_state(source: Path, progress: store.Progress = store.unseen) -> State:
    """What others wrote, as it is: `model`, and what else there is beside it. `progress` is told of
    the bytes that are read. Raises Odd."""
    with watched(bytes_read, progress):
        found = _found_in(source)
    for key in MODEL_KEYS:
        model = found.get(key)
        if isinstance(model, Mapping) and any(map(torch.is_tensor, model.values())):
            return {**{k: v for k, v in found.items() if k != key}, "model": dict(model)}
    weights = [one for name, one in found.items() if not str(name).endswith(EXTRA)]
    if weights and all(isinstance(one, torch.Tensor) for one in weights):
        return {"model": found}
    raise Odd(
        f"{source} has no model's weights: expected tensors by name, there or under one of "
        f"{', '.join(MODEL_KEYS)}; found {store.shortened(tuple(map(str, found)))}"
    )


def size_to_read(source: Path) -> int:
    """Bytes that `foreign_state` reads, those of DCP once for their checksums too. safetensors are
    mapped, and read as they are copied."""
    if (source / ".metadata").exists():
        return 2 * bytes_in(source)
    if source.is_dir():
        mapped = any(source.glob("model.safetensors*"))
        return 0 if mapped else sum(map(bytes_in, source.glob("*.bin")))
    return 0 if source.suffix == ".safetensors" else bytes_in(source)


def import_into(
    folder: Path,
    state: State,
    source: Path,
    strip: str = "",
    progress: store.Progress = store.unseen,
) -> Path:
    """A checkpoint from which a new job of this state folder begins at step 0; where it is.

    It has the weights, by their names without the prefix `strip`, and nothing else. `progress`: see
    `draft.write`; it is told of the bytes before that when they are copied. Raises Odd if there are
    checkpoints already, or a job has begun there, or no name has that prefix; OSError, Damaged,
    MemoryError.
    """
    demand_new(folder)
    if odd := [name for name in state["model"] if not isinstance(name, str)]:
        raise Odd(f"a tensor of {source} is named {shown(odd[0])}; names are expected to be text")
    model = {name.removeprefix(strip): one for name, one in state["model"].items()}
    if len(model) < len(state["model"]):
        whole = [name for name in state["model"] if not name.startswith(strip)]
        twice = next(name for name in whole if strip + name in state["model"])
        raise Odd(
            f"{twice} and {strip}{twice} of {source} would have one name without {strip!r}: rename "
            "one of them first"
        )
    if strip and model.keys() == state["model"].keys():
        names = store.shortened(tuple(state["model"]))
        raise Odd(f"no tensor's name begins with {strip!r}; the names are {names}")
    facts = {"imported": str(source), "epoch": 0, "ranks": 1, "at": round(time.time(), 3)}
    try:
        with _memory_for(source, Layout({"model": model}).table.bytes):
            staged = _staged({"model": model}, progress)
    except (TypeError, RuntimeError) as error:
        raise Odd(f"{source} cannot be kept: {in_a_line(error)}") from error
    checkpoints = folder / "checkpoints"
    with _room_in(checkpoints, staged.table.bytes):
        return draft.write(checkpoints, staged, facts=facts, progress=progress)


def _staged(state: State, progress: store.Progress) -> Staged:
    """As `snapshot.stage` makes it; `progress` is told of the bytes that were copied."""
    seen = 0

    def copied(end: int) -> None:
        nonlocal seen
        progress(end - seen)
        seen = end

    # Of what is due at once nothing is told.
    copy = Copying(state, 0, due=lambda _name, _tensor: "soon").finish(copied)
    table = Layout(state).table  # which has all in the same places
    return Staged(0, table, copy.buffer[: table.bytes])


def _found_in(source: Path) -> State:
    if source.is_file():
        _refuse_one_of_several(source)
        return _unpickled(source) if source.suffix != ".safetensors" else _from_safetensors(source)
    if (source / ".metadata").exists():
        return _from_dcp(source)
    if source.is_dir():
        return _from_hugging_face(source)
    raise Odd(f"{source} does not exist")


def _refuse_one_of_several(source: Path) -> None:
    """Raises Odd. Its folder says what belongs together."""
    part = _PART.search(source.name)
    if part is not None and int(part["files"]) > 1:
        what = f"one of the {int(part['files'])} files of a model"
        if not any(source.parent.glob("*.index.json")):
            raise Odd(
                f"{source} is {what}, and beside it is no index of them: get all of them with the "
                f"index, or if it is a model of its own rename it, as to model{source.suffix}"
            )
    elif source.name.endswith(".index.json"):
        what = "the index of a model's files"
    elif source.suffix == ".distcp" or source.name == ".metadata":
        what = "a file of a DCP folder"
    else:
        return
    raise Odd(
        f"{source} is {what}: give its folder: python -m runtime.checkpoint import "
        f"{source.absolute().parent} STATE_DIR"
    )


def _unpickled(path: Path) -> State:
    _demand_file(path)
    with path.open("rb") as file:
        refuse_damaged(file, str(path))
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise Odd(
            f"{path} is no torch file that can be read safely ({in_a_line(error)}): expected what "
            "torch.save(model.state_dict(), …) of torch 1.6 or later writes"
        ) from error
    if not isinstance(found, dict):
        raise Odd(f"{path} holds a {type(found).__name__}; expected a dict of tensors by name")
    _refuse_overlong(path, found)
    return found


def _refuse_overlong(path: Path, found: State) -> None:
    """Raises Odd if it has more bytes of a tensor than a record of it: the file is mapped, and what
    is lacking would be those of its neighbour."""
    with path.open("rb") as file:
        there = record_sizes(file)
    plain = (one for one in tensors_in(found) if one.layout == torch.strided)
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in plain}
    if lacking := Counter(one.nbytes() for one in storages.values()) - there:
        raise Odd(
            f"{path} is damaged: {min(lacking)} bytes of a tensor are expected in a record of its "
            "own, and none has as many: get it anew"
        )


def _demand_file(path: Path) -> None:
    """Raises Odd: of what lies in its place nobody waits for a word that may never come."""
    if path.exists() and not path.is_file():
        raise Odd(f"{path} is no regular file: expected one that was saved")


def _from_safetensors(path: Path) -> State:
    _demand_file(path)
    try:
        with _safetensors().safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except Odd:
        raise
    except Exception as error:
        raise Odd(f"{path} cannot be read: {in_a_line(error)}") from error


def _from_dcp(source: Path) -> State:
    from torch.distributed.checkpoint.api import CheckpointException

    from runtime.checkpoint import distributed

    _demand_file(source / ".metadata")
    try:
        with _memory_for(source, sum(map(bytes_in, source.glob("*.distcp")))):
            return distributed.read(source)
    except MemoryError:
        raise
    except CheckpointException as error:
        why = _causes(error)
        raise Odd(f"{source} cannot be read safely as a DCP folder: {why}") from error
    except Exception as error:
        why = in_a_line(error)
        raise Odd(f"{source} cannot be read safely as a DCP folder: {why}") from error


def _from_hugging_face(source: Path) -> State:
    """Weights in one file, or in several with an index."""
    kinds: dict[str, Callable[[Path], State]] = {
        "model.safetensors": _from_safetensors,
        "pytorch_model.bin": _unpickled,
    }
    for name, read in kinds.items():
        there = [one for one in (name, f"{name}.index.json") if os.path.lexists(source / one)]
        for one in there:
            if not (source / one).exists():
                raise Odd(f"{source / one} is a link that leads nowhere: the folder is not whole")
        if len(there) > 1 and {*map(str, _weight_map(source / there[1]).values())} != {name}:
            raise Odd(f"{source} has {' and '.join(there)}: {_OF_TWO}; move one of them away")
        if there:
            last = source / there[-1]
            return read(last) if last.name == name else _indexed(last, read)
    _refuse_ours(source)
    expected = ", ".join([*kinds, *(f"{name}.index.json" for name in kinds), ".metadata (DCP)"])
    found = store.shortened(tuple(sorted(path.name for path in source.iterdir()))) or "nothing"
    raise Odd(f"{source} has none of {expected}; found {found}")


def _refuse_ours(source: Path) -> None:
    """Raises Odd."""
    try:
        store.found_in(source)
    except Damaged:  # there is none
        return
    raise Odd(
        f"{source} is of Drydock itself: write it for other tools first, and import that: python "
        f"-m runtime.checkpoint export {source} OUT --to torch"
    )


def _weight_map(index: Path) -> dict[Any, Any]:
    """In which file each tensor is. Raises Odd."""
    _demand_file(index)
    try:
        return dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Odd(f"{index} is no index of weights: {in_a_line(error)}") from error


def _indexed(index: Path, read: Callable[[Path], State]) -> State:
    where = _weight_map(index)
    try:
        for name in where.values():
            refuse_odd_name(name, str(index))
    except Damaged as error:
        raise Odd(str(error)) from error
    state: State = {}
    for name in sorted(set(where.values())):
        if not (index.parent / name).is_file():
            raise Odd(f"{index} names {name}, which is not there: the folder is not whole")
        found = read(index.parent / name)
        named = {key for key, file in where.items() if file == name}
        if missing := sorted(named - found.keys()):
            raise Odd(f"{index} says that {name} has {store.shortened(tuple(missing))}: {_OF_TWO}")
        if beside := sorted(found.keys() - where.keys()):
            raise Odd(
                f"{name} has {store.shortened(tuple(beside))}, of which {index} does not know: "
                f"{_OF_TWO}"
            )
        if astray := sorted(found.keys() & where.keys() - named):
            raise Odd(
                f"{name} has {store.shortened(tuple(astray))}, which is in {where[astray[0]]} as "
                f"{index} says: {_OF_TWO}"
            )
        state |= found
    return state


# --- helpers --------------------------------------------------------------------------------------


def _causes(error: Any) -> str:
    """What came of a torch.distributed.checkpoint.api.CheckpointException. Raises
    KeyboardInterrupt, if that is what it came of."""
    causes = [cause for cause, _trace in error.failures.values()]
    for cause in causes:
        if isinstance(cause, KeyboardInterrupt):
            raise cause
    return "; ".join(map(in_a_line, causes))


def size_of(value: Any) -> int:
    """Bytes of the tensors in a nested value."""
    return sum(one.numel() * one.element_size() for one in tensors_in(value))


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Those of a dict or list that is there several times once. `seen`: which were."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one, seen)


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise Odd(f"the package safetensors is missing: {_NEWER}") from error
    return safetensors


def _recent_safetensors() -> Any:
    library = _safetensors()
    if not hasattr(library, "TensorSpec"):
        raise Odd(f"the package safetensors is too old to write with: {_NEWER}")
    return library


def _shards(model: Mapping[str, torch.Tensor], most: int) -> list[dict[str, torch.Tensor]]:
    """In their order; each at most so many bytes, or one tensor."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in model.items():
        if not isinstance(tensor, torch.Tensor):
            continue  # what a module gave of its own
        if shards[-1] and size + tensor.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    return shards


@contextlib.contextmanager
def _made_whole(out: Path, size: int, progress: store.Progress) -> Iterator[Path]:
    """A name to write so many bytes of tensors to; the real one once all is there. Raises Odd if
    there is something."""
    if os.path.lexists(out):
        raise _exists(out)
    with _room_in(out.parent, size):
        draft.make_folder(out.parent)
        with _beside(out) as new:
            with watched(partial(bytes_in, new), progress):
                yield new
                for one in [*new.rglob("*"), new]:
                    draft.sync(one)
            _give_name(new, out)
            draft.sync(out.parent)


@contextlib.contextmanager
def _room_in(folder: Path, size: int) -> Iterator[None]:
    """So many bytes are written there, and nothing is left of what fails. Raises Odd that says how
    much is free, if it is too little: what other libraries make of a full disk does not."""
    try:
        yield
    except (OSError, Odd) as error:
        there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        free = shutil.disk_usage(there).free
        if free < size or getattr(error, "errno", None) in disk.FULL:
            raise Odd(
                f"{folder} has {free:,} bytes free, and {size:,} are to be written there: make "
                f"room, or give another place ({error})"
            ) from error
        raise


@contextlib.contextmanager
def _memory_for(what: Path, size: int) -> Iterator[None]:
    """So many bytes of it at least are taken into memory. Raises MemoryError that says so, if there
    are too few, also where only who takes them finds that."""
    try:
        memory_left.demand(size)
        yield
    except BaseException as error:  # of which torch's for DCP is none other
        if not isinstance(error, MemoryError) and _NO_MEMORY not in str(error):
            raise
        left = memory_left.left_bytes()
        known = f", and at most {left:,.0f} are left" if left < math.inf else ""
        raise MemoryError(
            f"{what} does not fit in memory: at least {size:,} bytes are needed{known}: take a "
            f"machine with more, or end what else runs here ({in_a_line(error)})"
        ) from error


def _give_name(new: Path, out: Path) -> None:
    """Raises Odd if there is something of that name by now."""
    try:
        if new.is_dir():
            new.rename(out)
            return
        os.link(new, out)  # a rename would take a file's place without a word
    except FileExistsError as error:
        raise _exists(out) from error
    except OSError:  # a file system without links
        if os.path.lexists(out):
            raise _exists(out) from None
        new.rename(out)


def _exists(out: Path) -> Odd:
    return Odd(f"{out} exists: give another name, or remove it")


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A name to write to that nobody has; what is there at the end is removed, and so is what those
    left who were killed."""
    begin = f".{out.name}.exporting-"
    for one in out.parent.iterdir():
        # It may be another user's, or go just now.
        with contextlib.suppress(OSError):
            if one.name.startswith(begin) and draft.is_abandoned(one):
                shutil.rmtree(one, ignore_errors=True)
    folder = out.parent / f"{begin}{uuid.uuid4().hex[:12]}"
    folder.mkdir()
    try:
        with (folder / "new.lock").open("xb", buffering=0) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                pass  # a file system without locks: its age will tell
            else:
                lock.write(draft.HOST.encode())
            yield folder / "new"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
