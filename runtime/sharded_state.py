"""A state with sharded tensors, taken apart to be saved and put together again.

Each rank saves its own part, and beside it how the whole is divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch

from runtime.checkpoint.resharding import replaced
from runtime.replica.fsdp import as_shard, is_sharded, shard_of
from runtime.replica.state import Stateful

OURS = "rank_s_part"  # the key under which a rank's part of a divided tensor is saved


def taken_apart(value: Any) -> Any:
    """Our part of a divided tensor, and what of; anything else as it is."""
    return {OURS: shard_of(value), "of": _described(value)} if is_sharded(value) else value


def _described(tensor: Any) -> dict[str, Any]:
    """How a tensor is divided: its whole shape, over which ranks, and what becomes of it along each
    dimension of these."""
    return {
        "shape": [*tensor.shape],
        "placements": [_placed(one) for one in tensor.placements],
        "mesh": tensor.device_mesh.mesh.tolist(),
    }


def _placed(placement: Any) -> dict[str, int] | str:
    """A placement of DTensor; of kinds that only torch knows, its word for it."""
    if type(placement).__name__ == "Shard":
        return {"shard": placement.dim}
    return "replicate" if placement.is_replicate() else str(placement)


def _in_words(divided: Mapping[str, Any]) -> str:
    """For a person, and all that earlier versions saved."""
    words = [
        f"S({one['shard']})" if isinstance(one, dict) else one for one in divided["placements"]
    ]
    placements = ", ".join("R" if word == "replicate" else word for word in words)
    return f"{tuple(divided['shape'])} as {placements} over {divided['mesh']}"


def as_told(ours: Any, theirs: Any) -> Any:
    """Our state, to be compared with a saved one: where an earlier version put into words how
    tensors are divided, so is it in ours."""
    return replaced(ours, _worded) if _has_words(theirs) else ours


def _worded(value: Any) -> Any:
    is_part = isinstance(value, dict) and OURS in value
    return {**value, "of": _in_words(value["of"])} if is_part else value


def _has_words(saved: Any) -> bool:
    if isinstance(saved, dict):
        return (
            isinstance(saved.get("of"), str)
            if OURS in saved
            else any(map(_has_words, saved.values()))
        )
    return isinstance(saved, list | tuple) and any(map(_has_words, saved))


def put_together(saved: Any, one: Stateful, where: str, model: Any = None) -> Any:
    """What `one` is to be given of what was saved of it; see `_rejoined`. `model`: of an optimizer.
    Raises ValueError."""
    if not _has_parts(saved):
        return saved  # and asks nobody for a state: a loader may start its workers to give it
    return _rejoined(saved, one.state_dict(), where, _weights_of(one, model))


def _has_parts(saved: Any) -> bool:
    """Whether there is a part of a divided tensor in it."""
    if isinstance(saved, dict):
        return OURS in saved or any(map(_has_parts, saved.values()))
    return isinstance(saved, list | tuple) and any(map(_has_parts, saved))


def _rejoined(
    saved: Any, now: Any, where: str, weights: Mapping[Any, Any], weight: Any = None
) -> Any:
    """What was saved, in which our parts of divided tensors are such tensors again, divided as
    those at their places in `now`, the state as this process has it before. An optimizer has none
    before its first step: what it will have is divided as its `weights`, by the keys that its state
    has for them, of which `weight` is the one that this is about.

    Raises ValueError, which names the first that cannot be.
    """
    if isinstance(saved, dict) and OURS in saved:
        return _joined(saved, now, where, [weight, *weights.values()])
    if isinstance(saved, dict):
        here = now if isinstance(now, dict) else {}
        return {
            key: _rejoined(item, here.get(key), f"{where}.{key}", weights, weights.get(key, weight))
            for key, item in saved.items()
        }
    if isinstance(saved, list | tuple):
        known = now if isinstance(now, list | tuple) else ()
        beside = zip(saved, chain(known, repeat(None)), strict=False)
        return type(saved)(
            _rejoined(item, like, f"{where}.{place}", weights, weight)
            for place, (item, like) in enumerate(beside)
        )
    return saved


def _joined(saved: dict[str, Any], now: Any, where: str, weights: Sequence[Any]) -> Any:
    """The divided tensor of which a state has our part. Raises ValueError if neither `now` nor any
    of the weights is divided as it was."""
    for like in (now, *weights):
        here = _described(like) if is_sharded(like) else None
        if here is not None and saved["of"] in (here, _in_words(here)):
            return as_shard(saved[OURS], like)
    there = saved["of"] if isinstance(saved["of"], str) else _in_words(saved["of"])
    shown = next((one for one in (now, *weights[:1]) if isinstance(one, torch.Tensor)), None)
    if shown is None:
        raise ValueError(
            f"{where} is in the checkpoint a tensor of {there}, and here there is none yet: "
            "have it made before the WholeJob is entered, so that its state_dict shows how it is "
            "divided, or start the job with the script that saved it"
        )
    ours = _in_words(_described(shown)) if is_sharded(shown) else "not divided"
    raise ValueError(
        f"{where} is in the checkpoint a tensor of {there}, which is here {ours}: start the "
        "job with the script and the number of ranks that saved it"
    )


def _weights_of(optimizer: Any, model: Any) -> dict[Any, Any]:
    """By the keys that optimizers have for them: torch's their numbers, others their names in
    the model. None of what is no optimizer."""
    groups = getattr(optimizer, "param_groups", [])
    numbered = enumerate(weight for group in groups for weight in group["params"])
    named = model.named_parameters() if isinstance(model, torch.nn.Module) else ()
    return {**dict(numbered), **dict(named)}
