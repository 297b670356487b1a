"""What must be alike on all replicas of a job, told in words that name the difference.

Compared before a replica may join, so that a wrong script is refused with a sentence and not found
out by sums that do not fit. Standard library only.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from runtime.data import Batches

_OTHERWISE = (
    "such a job is recovered by a restart from its checkpoint, in a runtime.WholeJob instead of a "
    "ReplicaGroup"
)
_BY_DEEPSPEED = (
    f"{_OTHERWISE}, which is given runtime.adapters.deepspeed.EngineState(engine), and [] for the "
    "optimizers"
)
_SAME_SCRIPT = "start all {who}s with the same script and options"
_ONE_VERSION = "run all {who}s with one version of Drydock"
#: Kinds of module and optimizer that spread one model over all processes of a job, and where
#: DeepSpeed has its own of that kind (its kernels' optimizers are as anybody's).
_WHOLE_JOB = ("FullyShardedDataParallel", "PipelineStage", "ZeroRedundancyOptimizer")
_DEEPSPEED = "deepspeed.runtime."
#: Of these helpers the settings are compared too; of others only what they are.
_COMPARED = ("schedule", "scaler")
_COUNTED = ("_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step", "lr_lambdas")
_LONG = 300  # characters of settings; of more a hash is told
#: Where something lies, in memory or on which card.
_PLACE = re.compile(r" at 0x[0-9a-f]+|\bcuda(:\d+)?|\bGPU \d+")
#: So many groups of an optimizer's parameters are told apart in words.
_GROUPS_IN_WORDS = 4
#: By its key in the shape: what it is called, and what to do if it differs, `who` being replicas or
#: the ranks of one.
_WORDS = {
    "mode": ("mode", "start all {who}s with the same mode"),
    "ranks": ("number of ranks", "start all {who}s with as many ranks"),
    "shards": ("number of shards", "start all {who}s with the same Batches"),
    "order": ("data order's rule", _ONE_VERSION),
    "shard_size": ("shard size", "start all {who}s with the same Batches"),
    "samples": ("dataset's length", "give all {who}s the same data"),
    "data": ("dataset", "give all {who}s the same data"),
    "content": (
        "dataset's content",
        "give all {who}s the same data, or, if it is the same but for what no sample hangs on, "
        "say which it is by a text in the dataset's attribute fingerprint",
    ),
    "drop_last": ("drop_last", "start all {who}s with the same Batches"),
    "seed": ("data order's seed", "give all {who}s the same seed"),
    "model": ("model", _SAME_SCRIPT),
    "trained": ("set of trained weights", _SAME_SCRIPT),
    "modules": ("set of modules", _SAME_SCRIPT),
    "optimizer": ("optimizer", _SAME_SCRIPT),
    "clipping": ("largest gradient norm", _SAME_SCRIPT),
    "helpers": ("set of schedules, scaler, average and extras", _SAME_SCRIPT),
    "steps": ("number of steps", _SAME_SCRIPT),
    "compare_every": ("compare_every", _SAME_SCRIPT),
    "after_step": ("after_step", _SAME_SCRIPT),
    "numerics": ("arithmetic", "run all {who}s with one version of torch on one kind of machine"),
}


def describe(
    model: torch.nn.Module,
    optimizers: Sequence[Any],
    batches: Batches,
    mode: str,
    max_grad_norm: float | None,
    numerics: str,
    ranks: int = 1,
    helpers: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> dict[str, str]:
    """This replica's side of the comparison, each part in a few words.

    `numerics`: what else decides on the last bit of a sum. `ranks`: of one replica. `helpers`: what
    else a step changes, by what it is.
    """
    tensors = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    count = sum(parameter.numel() for parameter in model.parameters())
    trained = {n: one.numel() for n, one in model.named_parameters() if one.requires_grad}
    digest = _hash_of("\n".join(tensors))
    return {
        "mode": mode,
        "ranks": str(ranks),
        **{key: str(value) for key, value in batches.state_dict().items()},
        "data": batches.data,
        "content": batches.content,
        "model": f"{type(model).__name__} of {len(tensors)} tensors and {count:,} parameters "
        f"({digest})",
        "trained": f"{sum(trained.values()):,} parameters ({_hash_of(chr(10).join(trained))})",
        "modules": _modules(model),
        "optimizer": ", ".join(_settings(optimizer) for optimizer in optimizers),
        "clipping": "none" if max_grad_norm is None else f"{max_grad_norm:g}",
        "helpers": _helpers(helpers),
        "numerics": numerics,
    }


def of_loop(steps: int | None, compare_every: int, after_step: object) -> dict[str, str]:
    """The same of how the loop goes: where one is over before the others it ends the job."""
    return {
        "steps": "without end" if steps is None else str(steps),
        "compare_every": str(compare_every),
        "after_step": "none" if after_step is None else "one",
    }


#: What must be alike on all ranks of one replica too. Not how the loop ends and compares, which the
#: first rank decides for all, nor the arithmetic: a rank's part is summed with the same rank's of
#: other replicas, not with other ranks' parts.
_OF_RANKS = (
    "mode", "ranks", "order", "samples", "shards", "shard_size", "seed", "drop_last", "data",
    "content", "model", "trained", "optimizer", "clipping", "after_step",
)  # fmt: skip


def of_ranks(shape: Mapping[str, str], helpers: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """What of a shape must be alike on all ranks of one replica. `helpers`: those of `describe` but
    for the extras, which each rank saves for itself."""
    told = {key: shape[key] for key in _OF_RANKS if key in shape}
    # What a module says of itself, whose hash is behind its kind, may be of its rank or its card.
    kinds = shape["modules"].rpartition(" (")[0]
    return {**told, "modules": kinds, "helpers": _helpers(helpers)}


def cannot_drop(
    model: torch.nn.Module, rank: int = 0, ranks: int = 1, optimizers: Sequence[Any] = ()
) -> str:
    """Why a model is of a shape whose replicas cannot be dropped, with what to do; "" if it can.

    `rank`: of this process, of so many `ranks` of its replica.
    """
    modules = model.named_modules() if hasattr(model, "named_modules") else [("", model)]
    parts: list[tuple[str, Any]] = [
        *((f"the module {name}" if name else "the model", module) for name, module in modules),
        *(("the optimizer", optimizer) for optimizer in optimizers),
    ]
    for where, part in parts:
        kind = type(part)
        if kind.__name__ == "DistributedDataParallel":
            return (
                f"{where} is wrapped in DistributedDataParallel: give ReplicaGroup the bare model, "
                "it sums the gradients itself"
            )
        if error := of_deepspeed(where, part):
            return error
        if kind.__name__ in _WHOLE_JOB:
            return f"{where} is a {kind.__name__}, which spans all processes; {_OTHERWISE}"
    if not hasattr(model, "named_modules"):
        return f"the model is a {type(model).__name__}: give ReplicaGroup a torch.nn.Module"
    for name, parameter in model.named_parameters():
        if error := _cannot_exchange(f"the parameter {name}", parameter, rank, ranks):
            return error
    places = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(places) > 1:
        return f"the parameters are on {' and '.join(places)}: put them in one place; {_OTHERWISE}"
    whole = [name for name, one in model.named_parameters() if not _placements(one)]
    divided = [name for name, one in model.named_parameters() if _placements(one)]
    if ranks > 1 and not divided:
        return (
            f"this is rank {rank} of {ranks} of its replica, and its model is not divided: let "
            "fully_shard divide it among them, or start each as a replica of its own; a stage of a "
            f"pipeline is not the whole model: {_OTHERWISE}"
        )
    if divided and not any(kind.__name__ == "FSDPModule" for kind in type(model).__mro__):
        return (
            f"the parameter {divided[0]} is divided among processes, but not by fully_shard called "
            f"on the model that ReplicaGroup is given: call it, or, if the model is tensor "
            f"parallel, know that {_OTHERWISE}"
        )
    if divided and any("Adafactor" in type(one).__name__ for one in optimizers):
        return (
            "the model is divided by fully_shard and its optimizer is Adafactor, whose state is "
            "then divided otherwise than the weights and could not be saved: use another, as AdamW"
        )
    if divided and whole:
        return (
            f"the parameter {whole[0]} is whole on each rank and {divided[0]} is divided: let "
            "fully_shard divide all"
        )
    return ""


def of_deepspeed(where: str, part: Any) -> str:
    """Why only a DeepSpeed engine's state can save this module, parameter or optimizer; "" if it is
    none of those. `where`: what it is, in words."""
    if hasattr(part, "ds_id") or getattr(part, "_hp_mapping", None) is not None:
        return f"{where} is divided among all processes by DeepSpeed's ZeRO; {_BY_DEEPSPEED}"
    if type(part).__module__.startswith(_DEEPSPEED):
        return f"{where} is a {type(part).__name__}, which spans all processes; {_BY_DEEPSPEED}"
    return ""


def _cannot_exchange(what: str, parameter: torch.nn.Parameter, rank: int, ranks: int) -> str:
    if error := of_deepspeed(what, parameter):
        return error
    placements = _placements(parameter)
    told = ", ".join(str(placement) for placement in placements)
    if len(placements) > 1 or not all(one.is_shard() for one in placements):
        return (
            f"{what} is divided among processes in more than one way, {told}: divide it by "
            f"fully_shard over a mesh of one dimension, the replica's ranks, alone; {_OTHERWISE}"
        )
    mesh = getattr(parameter, "device_mesh", None) if placements else None
    size = ranks if mesh is None else mesh.size()
    if size != ranks:
        return (
            f"{what} is divided among {size} processes, {told}, and the launcher says that a "
            f"replica has {ranks} (DRYDOCK_RANKS, or one torchrun for each replica): the ranks of "
            "one replica, and no others, must divide its model"
        )
    if mesh is not None and mesh.get_local_rank() != rank:
        return (
            f"{what} is divided by a mesh in which this process is {mesh.get_local_rank()}, and "
            f"the launcher says that it is rank {rank} of its replica: let the mesh have the ranks "
            "in their order"
        )
    if parameter.device.type not in ("cpu", "cuda"):
        return (
            f"{what} is on {parameter.device}: only parameters in the processor's memory or on a "
            "CUDA card are exchanged"
        )
    if parameter.is_cuda and (lacking := _missing()):
        return f"{what} is on {parameter.device}, and {lacking}"
    return ""


def _missing() -> str:
    from runtime.replica.nccl import missing  # the coordinator reads this module without torch

    return missing()


def _placements(parameter: torch.nn.Parameter) -> tuple[Any, ...]:
    """How a divided parameter is divided."""
    found: tuple[Any, ...] = tuple(getattr(parameter, "placements", ()))
    return found


def misfit(
    join: Mapping[str, Any], world: int, others: Sequence[tuple[int, dict[str, str], bool]]
) -> str:
    """Why a replica that wants to join does not fit the job, with the remedy; "" if it does.

    `others`: the numbers (below 0 of standbys) and shapes of those that are there, and whether each
    is a member. Members are measured by no newcomer: one that comes back to a new coordinator is
    let in. Before there is a member nobody knows which of two is the wrong one: both are named.
    """
    if int(join["replica"]) < 0:
        return f"replica {join['replica']}: replicas count from 0; give it another DRYDOCK_REPLICA"
    shards = int(join["shards"])
    replicas = max(world, int(join["world"]), int(join["replica"]) + 1)
    if shards < replicas and not int(join["epoch"]):
        return (
            f"{shards} shards cannot be divided among {replicas} replicas: give Batches at least "
            "as many shards"
        )
    measure = sorted(others, key=lambda other: not other[2])
    if not measure or (int(join["epoch"]) and not measure[0][2]):
        return ""
    number, ours, member = measure[0]
    who = f"replica {number}" if number >= 0 else "a standby"
    whose = "the job's" if member else f"that of {who}, which came first,"
    return difference(join.get("shape", {}), ours, whose)


def difference(
    theirs: Mapping[str, str],
    ours: Mapping[str, str],
    whose: str = "the job's",
    who: str = "replica",
) -> str:
    """In which way a newcomer's shape is not ours, with the remedy; "" if in none. `whose`: what
    ours is called. `who`: what the newcomer is, and all that are to be alike."""
    for key in dict.fromkeys([*_WORDS, *ours, *theirs]):
        what, remedy = _WORDS.get(key, (key, _SAME_SCRIPT))
        if (key in theirs) != (key in ours):
            remedy = _ONE_VERSION
        if theirs.get(key) != ours.get(key):
            return (
                f"this {who}'s {what} is {theirs.get(key, 'not told')}, "
                f"{whose} is {ours.get(key, 'not told')}: {remedy.format(who=who)}"
            )
    return ""


def _modules(model: torch.nn.Module) -> str:
    """How many of each kind, and a hash of what they say of themselves: a dropout's probability."""
    kinds = Counter(type(module).__name__ for module in model.modules())
    digest = _hash_of(_PLACE.sub("", repr(model)))
    return f"{', '.join(f'{kinds[kind]} {kind}' for kind in sorted(kinds))} ({digest})"


def _helpers(helpers: Mapping[str, Sequence[Any]]) -> str:
    told = [
        f"{what} {type(one).__name__}{_told(one) if what in _COMPARED else ''}"
        for what, ones in helpers.items()
        for one in ones
    ]
    return ", ".join(told) or "none"


def _told(helper: Any) -> str:
    """What one of torch's own is set to: all plain values of its state. Others may keep in theirs
    what is not the same everywhere."""
    own = type(helper).__module__.startswith("torch.")
    words = _in_words(dict(_values(helper.state_dict()))) if own else ""
    return f"({words if len(words) <= _LONG else _hash_of(words)})" if words else ""


def _values(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What is no container, by the way to it; without what a schedule counts for itself."""
    if not isinstance(state, Mapping | list | tuple):
        yield name, state
        return
    inner = state.items() if isinstance(state, Mapping) else enumerate(state)
    for key, value in inner:
        if key not in _COUNTED:
            yield from _values(value, f"{name}.{key}" if name else str(key))


def _hash_of(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:8]


def _settings(optimizer: Any) -> str:
    """An optimizer's kind, the settings that it was made with, and in which groups of parameters
    they are others."""
    name = type(optimizer).__name__
    defaults = getattr(optimizer, "defaults", None)
    if not isinstance(defaults, dict):
        return name
    told = _in_words(defaults)
    groups = [
        f"; of {len(group['params'])} tensors {others}"
        for group in getattr(optimizer, "param_groups", [])
        if (others := _in_words({k: v for k, v in group.items() if k in defaults}, defaults))
    ]
    if len(groups) > _GROUPS_IN_WORDS:
        groups = [f"; others in {len(groups)} groups ({_hash_of(''.join(groups))})"]
    return f"{name}({told}{''.join(groups)})"


def _in_words(settings: Mapping[str, Any], usual: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Those that are not as usual."""
    told = {k: v.item() if getattr(v, "ndim", None) == 0 else v for k, v in settings.items()}
    plain = {k: v for k, v in told.items() if isinstance(v, bool | int | float | str | tuple)}
    plain = {k: v for k, v in plain.items() if k not in usual or repr(v) != repr(usual[k])}
    return " ".join(f"{key}={value}" for key, value in sorted(plain.items()))
