"""The script that is tortured if no other is given: a small transformer on made-up text.

Needs no files. DRYDOCK_OPTIONS may change what OPTIONS names. It does not know that it is watched.
With `"device": "cuda"` all replicas train on the one card of this machine.
"""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import runtime

job = runtime.join()

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812 - its usual name
from torch.utils.data import Dataset  # noqa: E402

OPTIONS: dict[str, Any] = {
    "width": 32,
    "layers": 2,
    "context": 32,
    "shards": 12,
    "shard_size": 2,
    "samples": 2400,
    "seed": 11,
    "device": "cpu",
    "learning_rate": 3e-3,
    "dropout": 0.1,
    "checkpoint_s": 3600.0,
    "workers": 0,
    **job.options,
}
WORDS = 64


def main() -> None:
    """Train the transformer as one rank of the job, until the job ends."""
    torch.set_num_threads(1)
    device = torch.device(OPTIONS["device"])
    if device.type == "cuda":
        share_card()
    torch.manual_seed(OPTIONS["seed"])
    text = made_up(OPTIONS["samples"], OPTIONS["context"])
    model = Transformer(OPTIONS["width"], OPTIONS["layers"], OPTIONS["context"]).to(device)
    if job.ranks > 1:
        divide(model, device)
    optimizer = AdamW([*model.parameters()], OPTIONS["learning_rate"])
    batches = runtime.Batches(
        Rows(text),
        shards=OPTIONS["shards"],
        shard_size=OPTIONS["shard_size"],
        seed=OPTIONS["seed"],
        tokens_per_sample=OPTIONS["context"],
        workers=OPTIONS["workers"],
    )
    saver = runtime.Checkpointer(job, every_s=OPTIONS["checkpoint_s"])
    with runtime.ReplicaGroup(
        job, model, optimizer, batches, saver,
        schedule=Cosine(optimizer, 400), steps=OPTIONS.get("steps"),
    ) as replica:  # fmt: skip
        for shard in replica:
            rows = shard.data.to(device)
            replica.backward(model(rows[:, :-1], rows[:, 1:]))


def share_card() -> None:
    """Have all ranks of this machine use its one card, and compute the same there every time.

    NCCL refuses a card to two ranks of one host: each passes for a host of its own, and they speak
    through sockets, as nodes do that no faster network joins.
    """
    os.environ["NCCL_HOSTID"] = f"{job.placement}.{job.rank}"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else cuBLAS may add in another order
    torch.use_deterministic_algorithms(True)
    for enable in (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_cudnn_sdp,
    ):
        enable(False)  # their backward passes add in any order


def divide(model: Transformer, device: torch.device) -> None:
    """Among the ranks of this replica."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        rank=job.rank,
        world_size=job.ranks,
    )
    mesh = init_device_mesh(device.type, (job.ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def mine(tensor: torch.Tensor) -> torch.Tensor:
    """Of a divided tensor this rank's part, in place."""
    return tensor.to_local() if job.ranks > 1 else tensor  # type: ignore[attr-defined]


def made_up(samples: int, context: int) -> torch.Tensor:
    """Rows in which each word mostly follows from the one before."""
    follows = torch.randperm(WORDS)
    rows = torch.randint(WORDS, (samples, context + 1))
    faithful = torch.rand(samples, context + 1) < 0.8
    for place in range(1, context + 1):
        rows[:, place] = torch.where(
            faithful[:, place], follows[rows[:, place - 1]], rows[:, place]
        )
    return rows


class Rows(Dataset[torch.Tensor]):
    """The text, as a dataset."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, sample: int) -> torch.Tensor:
        return self.text[sample]


class Transformer(nn.Module):
    """A decoder with dropout, so that random numbers matter."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(context, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, OPTIONS["dropout"], batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, given: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        x = self.words(given) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        loss: torch.Tensor = F.cross_entropy(self.head(x).flatten(0, 1), expected.flatten())
        return loss


class AdamW:
    """AdamW in a dozen lines: torch.optim would import the whole compiler at its first step."""

    def __init__(self, parameters: list[torch.Tensor], rate: float) -> None:
        self.parameters = parameters
        self.rate = rate
        self.count = 0
        self.mean = [torch.zeros_like(mine(p)) for p in parameters]
        self.square = [torch.zeros_like(mine(p)) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters in place, once, by their gradients.

        Every parameter needs a gradient. The rule is that of Loshchilov and Hutter, "Decoupled
        Weight Decay Regularization" (arXiv:1711.05101), with betas 0.9 and 0.99, epsilon 1e-8 and
        decay 0.01.
        """
        self.count += 1
        gradients = [mine(p.grad) for p in self.parameters if p.grad is not None]
        parameters = [mine(p) for p in self.parameters]
        torch._foreach_lerp_(self.mean, gradients, 1 - 0.9)
        torch._foreach_mul_(self.square, 0.99)
        torch._foreach_addcmul_(self.square, gradients, gradients, 1 - 0.99)
        scale = torch._foreach_sqrt(self.square)
        torch._foreach_div_(scale, math.sqrt(1 - 0.99**self.count))
        torch._foreach_add_(scale, 1e-8)
        torch._foreach_mul_(parameters, 1 - self.rate * 0.01)
        pace = -self.rate / (1 - 0.9**self.count)
        torch._foreach_addcdiv_(parameters, self.mean, scale, pace)

    def state_dict(self) -> dict[str, Any]:
        return {
            "rate": self.rate, "count": self.count, "mean": self.mean, "square": self.square,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate, self.count = state["rate"], state["count"]
        torch._foreach_copy_(self.mean, state["mean"])
        torch._foreach_copy_(self.square, state["square"])


class Cosine:
    """The rate swings between its peak and a tenth of it, once in so many steps."""

    def __init__(self, optimizer: AdamW, period: int) -> None:
        self.optimizer = optimizer
        self.peak = optimizer.rate
        self.period = period
        self.count = 0

    def step(self) -> None:
        self.count += 1
        swing = 0.5 + 0.5 * math.cos(2 * math.pi * self.count / self.period)
        self.optimizer.rate = self.peak * (0.1 + 0.9 * swing)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


if __name__ == "__main__":
    main()
