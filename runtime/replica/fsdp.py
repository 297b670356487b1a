"""A model sharded among the ranks of its replica by FSDP2's `fully_shard`: each rank's own part.

Everything else in the runtime sees the parts, as plain tensors. A model that is whole on each rank
is one part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist

from runtime.checkpoint.resharding import MARK, is_part, replaced, span

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

_ADDRESS_BYTES = 64


class ShardGroup:
    """Over which ranks one replica's model is divided, and what they tell each other."""

    def __init__(self, model: torch.nn.Module, rank: int) -> None:
        self.rank = rank
        meshes = [p.device_mesh for p in model.parameters() if is_sharded(p)]
        self._mesh: DeviceMesh | None = meshes[0] if meshes else None
        #: those that put their weights together for forward
        self._modules = [*_putting_together(model)] if meshes else []

    @property
    def divided(self) -> bool:
        """Whether any of it is."""
        return self._mesh is not None

    def gather(self, mine: list[float]) -> list[list[float]]:
        """What each rank of the replica gives, in their order; the same on all of them."""
        if self._mesh is None:
            return [mine]
        given = torch.tensor(mine, dtype=torch.float64)
        found = [torch.empty_like(given) for _ in range(self._mesh.size())]
        dist.all_gather(found, given, group=self._mesh.get_group())
        return [one.tolist() for one in found]

    def agree(self, address: str) -> str:
        """The first rank's address, on all ranks."""
        if self._mesh is None:
            return address
        told = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
        words = torch.frombuffer(bytearray(address.encode() or b" "), dtype=torch.uint8)
        told[: len(words)] = words
        dist.broadcast(told, group=self._mesh.get_group(), group_src=0)
        return bytes(told.tolist()).decode().strip(" \0")

    def take_apart(self) -> None:
        """Let the model be of our parts again: forward alone, as of an evaluation, leaves some of
        it together, and whoever looks at it then sees other weights than those that are trained,
        as they were before the step."""
        for module in self._modules:
            module.reshard()

    def taken_apart(self, state: Any) -> Any:
        """A nested state with our part in place of each divided tensor, and what of."""
        return state if self._mesh is None else replaced(state, _described)

    def put_together(self, state: Any) -> Any:
        """The reverse. Raises ValueError if this model is not divided, and the state is."""
        return replaced(state, self._whole)

    def cut_as(self, given: Any, mine: Any) -> Any:
        """A nested state in which what is whole there and divided in `mine` is divided too."""
        if isinstance(given, torch.Tensor):
            return self._cut(given, mine)
        if isinstance(given, dict) and isinstance(mine, dict):
            return {key: self.cut_as(item, mine.get(key)) for key, item in given.items()}
        if isinstance(given, list) and isinstance(mine, list) and len(given) == len(mine):
            return [self.cut_as(one, other) for one, other in zip(given, mine, strict=True)]
        return given

    def _cut(self, whole: torch.Tensor, like: object) -> torch.Tensor:
        if self._mesh is None or is_sharded(whole) or not is_sharded(like):
            return whole
        if whole.shape != like.shape:
            return whole
        dim: int = like.placements[0].dim  # type: ignore[attr-defined]
        low, high = span(whole.shape[dim], self.rank, self._mesh.size())
        return as_shard(whole.narrow(dim, low, high - low).contiguous(), like)

    def _whole(self, value: Any) -> Any:
        if not is_part(value):
            return value
        from torch.distributed.tensor import DTensor, Shard

        of = value[MARK]
        if self._mesh is None:
            raise ValueError(
                "the state is a part of a divided model, this script's model is whole; resume with "
                "the same, or start a new job"
            )
        return DTensor.from_local(
            value["part"],
            self._mesh,
            [Shard(of["dim"])],
            run_check=False,
            shape=torch.Size(of["shape"]),
            stride=tuple(of["stride"]),
        )


def _putting_together(model: torch.nn.Module) -> Iterator[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule  # slow to import, and few need it

    return (one for one in model.modules() if isinstance(one, FSDPModule))


def _described(value: Any) -> Any:
    if not is_sharded(value):
        return value
    (placement,) = value.placements
    dim: int = placement.dim  # type: ignore[attr-defined]  # any other kind was refused at first
    of = {"shape": [*value.shape], "stride": [*value.stride()], "dim": dim}
    return {MARK: of, "part": shard_of(value)}


#: What is surely not divided. Asked for first, for this is asked of each parameter in each step.
_WHOLE = (torch.Tensor, torch.nn.Parameter)


def is_sharded(tensor: object) -> TypeGuard[DTensor]:
    """Whether this is a tensor of which each rank holds a part."""
    if type(tensor) in _WHOLE:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # who never imported it has none
    return module is not None and isinstance(tensor, module.DTensor)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, in place."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def as_shard(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor divided as `like` is, of which this rank holds `part`, in place."""
    if not is_sharded(like):
        return part
    return type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape,
        stride=like.stride(),
    )  # fmt: skip
