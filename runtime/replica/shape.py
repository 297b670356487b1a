"""What must be alike on all replicas of a job, told in words that name the difference.

Compared before a replica may join, so that a wrong script is refused with a sentence and not found
out by sums that do not fit. Standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from runtime.data import Batches

_SAME_SCRIPT = "start all replicas with the same script and options"
#: Kinds of module, and packages, that spread one model over all processes of a job.
_WHOLE_JOB = ("FullyShardedDataParallel", "PipelineStage", "deepspeed")
#: By its key in the shape: what it is called, and what to do if it differs.
_WORDS = {
    "mode": ("mode", "start all replicas with the same mode"),
    "shards": ("number of shards", "start all replicas with the same Batches"),
    "order": ("data order's rule", "run all replicas with one version of Drydock"),
    "shard_size": ("shard size", "start all replicas with the same Batches"),
    "samples": ("dataset's length", "give all replicas the same data"),
    "drop_last": ("drop_last", "start all replicas with the same Batches"),
    "seed": ("data order's seed", "give all replicas the same seed"),
    "model": ("model", _SAME_SCRIPT),
    "optimizer": ("optimizer", _SAME_SCRIPT),
    "clipping": ("largest gradient norm", _SAME_SCRIPT),
    "numerics": ("arithmetic", "run all replicas with one version of torch on one kind of machine"),
}


def describe(
    model: torch.nn.Module,
    optimizers: Sequence[Any],
    batches: Batches,
    mode: str,
    max_grad_norm: float | None,
    numerics: str,
) -> dict[str, str]:
    """This replica's side of the comparison, each part in a few words.

    `numerics`: what else decides on the last bit of a sum.
    """
    tensors = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    count = sum(parameter.numel() for parameter in model.parameters())
    digest = hashlib.sha256("\n".join(tensors).encode()).hexdigest()[:8]
    return {
        "mode": mode,
        **{key: str(value) for key, value in batches.state_dict().items()},
        "model": f"{type(model).__name__} of {len(tensors)} tensors and {count:,} parameters "
        f"({digest})",
        "optimizer": ", ".join(_settings(optimizer) for optimizer in optimizers),
        "clipping": "none" if max_grad_norm is None else f"{max_grad_norm:g}",
        "numerics": numerics,
    }


def cannot_drop(model: torch.nn.Module, rank: int) -> str:
    """Why a model is of a shape whose replicas cannot be dropped, with what to do; "" if it can.

    `rank`: of this process within its replica.
    """
    otherwise = "such a job is recovered by a restart from its checkpoint, without a ReplicaGroup"
    if rank:
        return (
            f"this is rank {rank} of its replica: a replica of several processes cannot be "
            f"dropped yet; {otherwise}"
        )
    for name, module in model.named_modules():
        where = f"the module {name}" if name else "the model"
        kind = type(module)
        if kind.__name__ == "DistributedDataParallel":
            return (
                f"{where} is wrapped in DistributedDataParallel: give ReplicaGroup the bare model, "
                "it sums the gradients itself"
            )
        if kind.__name__ in _WHOLE_JOB or kind.__module__.partition(".")[0] in _WHOLE_JOB:
            return f"{where} is a {kind.__name__}, which spans all processes; {otherwise}"
    for name, parameter in model.named_parameters():
        if placements := getattr(parameter, "placements", ()):
            told = ", ".join(str(placement) for placement in placements)
            return (
                f"the parameter {name} is divided among processes, {told}, so none of them can be "
                f"dropped alone; {otherwise}"
            )
        if parameter.device.type != "cpu":
            return (
                f"the parameter {name} is on {parameter.device}: only parameters in the "
                "processor's memory are exchanged yet"
            )
    return ""


def misfit(
    join: Mapping[str, Any], world: int, others: Sequence[tuple[dict[str, str], bool]]
) -> str:
    """Why a replica that wants to join does not fit the job, with the remedy; "" if it does.

    `others`: the shapes of those that are there, and whether each is a member. Members are
    measured by no newcomer: one that comes back to a new coordinator is let in.
    """
    shards = int(join["shards"])
    replicas = max(world, int(join["world"]), int(join["replica"]) + 1)
    if shards < replicas and not int(join["epoch"]):
        return (
            f"{shards} shards cannot be divided among {replicas} replicas: give Batches at least "
            "as many shards"
        )
    measure = sorted(others, key=lambda other: not other[1])
    if not measure or (int(join["epoch"]) and not measure[0][1]):
        return ""
    return difference(join.get("shape", {}), measure[0][0])


def difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """In which way a newcomer's shape is not the job's, with the remedy; "" if in none."""
    for key in dict.fromkeys([*_WORDS, *ours, *theirs]):
        what, remedy = _WORDS.get(key, (key, _SAME_SCRIPT))
        if theirs.get(key) != ours.get(key):
            return (
                f"this replica's {what} is {theirs.get(key, 'not told')}, "
                f"the job's is {ours.get(key, 'not told')}: {remedy}"
            )
    return ""


def _settings(optimizer: Any) -> str:
    """An optimizer's kind and the settings that it was made with."""
    name = type(optimizer).__name__
    defaults = getattr(optimizer, "defaults", None)
    if not isinstance(defaults, dict):
        return name
    plain = {k: v for k, v in defaults.items() if isinstance(v, bool | int | float | tuple)}
    told = " ".join(f"{key}={value}" for key, value in sorted(plain.items()))
    return f"{name}({told})"
