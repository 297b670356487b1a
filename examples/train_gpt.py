"""A small byte-level GPT, trained on the Python files of this machine's standard library.

Started by a launcher, once per replica, with DRYDOCK_* in the environment. DRYDOCK_OPTIONS may
change what OPTIONS names; `nice` is taken on only once the rank takes part, so that a replacement
starts at full speed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import runtime

job = runtime.join()

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch  # noqa: E402 - the control plane hears of this rank while torch is imported
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812 - its usual name

AUTOGROUP = Path("/proc/self/autogroup")
OPTIONS: dict[str, Any] = {
    "steps": None,
    "width": 64,
    "layers": 2,
    "context": 64,
    "shard_size": 2,
    "seed": 7,
    "learning_rate": 3e-3,
    "checkpoint_s": {"peer": 2.0, "local": 5.0, "shared": 20.0},
    "megabytes": 8,
    "log": "",
    "nice": 0,
    "mode": "cover",
    **job.options,
}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(OPTIONS["seed"])
    context = OPTIONS["context"]
    data = corpus(OPTIONS["megabytes"] << 20)
    model = Gpt(OPTIONS["width"], OPTIONS["layers"], context)
    optimizer = AdamW([*model.parameters()], OPTIONS["learning_rate"])

    batches = runtime.Batches(
        samples=(len(data) - 1) // context,
        shard_size=OPTIONS["shard_size"],
        seed=OPTIONS["seed"],
        tokens_per_sample=context,
    )
    saver = runtime.Checkpointer(job, every_s=OPTIONS["checkpoint_s"])
    with runtime.ReplicaGroup(
        job, model, optimizer, batches, saver, mode=OPTIONS["mode"],
        schedule=Warmup(optimizer), steps=OPTIONS["steps"], on_step=report,
    ) as replica:  # fmt: skip
        for shard in replica:
            rows = torch.stack([data[i * context : (i + 1) * context + 1] for i in shard.ids])
            rows = rows.long()
            replica.backward(model(rows[:, :-1], rows[:, 1:]))


def corpus(limit: int) -> torch.Tensor:
    """Bytes of the standard library's modules, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py")):
        if "site-packages" not in path.parts and len(text) < limit:
            text += path.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8)[:limit]


def report(step: Any) -> None:
    """After each commit: give way to others, and a line where somebody asked for one."""
    if OPTIONS["nice"]:
        give_way(OPTIONS["nice"])
    if OPTIONS["log"]:
        with Path(OPTIONS["log"]).open("a") as file:
            file.write(json.dumps(vars(step)) + "\n")
    if step.step % 20 == 0 and job.sender.speaks:
        print(f"step {step.step} loss {step.loss:.3f} members {step.members}", flush=True)


def give_way(nice: int) -> None:
    """To other processes. Where Linux shares the processor out among sessions only a session's
    niceness counts, and it lets who is not root change one in each tenth of a second, of all that
    there are: who is refused asks again after the next step."""
    os.nice(max(0, nice - os.nice(0)))
    with contextlib.suppress(OSError):
        if not AUTOGROUP.read_text().endswith(f" nice {nice}\n"):
            AUTOGROUP.write_text(str(nice))


class Gpt(nn.Module):
    """Pre-norm decoder over bytes."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, given: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        x = self.bytes(given) + self.places.weight[: given.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss: torch.Tensor = F.cross_entropy(logits.flatten(0, 1), expected.flatten())
        return loss


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what came in."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        added: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + added


class AdamW:
    """AdamW in a dozen lines: torch.optim would import the whole compiler at its first step."""

    def __init__(self, parameters: list[torch.Tensor], rate: float, decay: float = 0.01) -> None:
        self.parameters = parameters
        self.peak = self.rate = rate
        self.decay = decay
        self.count = 0
        self.mean = [torch.zeros_like(p) for p in parameters]
        self.square = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._foreach_lerp_(self.mean, gradients, 1 - 0.9)
        torch._foreach_mul_(self.square, 0.99)
        torch._foreach_addcmul_(self.square, gradients, gradients, 1 - 0.99)
        scale = torch._foreach_sqrt(self.square)
        torch._foreach_div_(scale, math.sqrt(1 - 0.99**self.count))
        torch._foreach_add_(scale, 1e-8)
        torch._foreach_mul_(self.parameters, 1 - self.rate * self.decay)
        pace = -self.rate / (1 - 0.9**self.count)
        torch._foreach_addcdiv_(self.parameters, self.mean, scale, pace)

    def state_dict(self) -> dict[str, Any]:
        return {
            "rate": self.rate, "count": self.count, "mean": self.mean, "square": self.square,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rate, self.count = state["rate"], state["count"]
        torch._foreach_copy_(self.mean, state["mean"])
        torch._foreach_copy_(self.square, state["square"])


class Warmup:
    """The rate rises over the first steps, then falls with the root of the step."""

    def __init__(self, optimizer: AdamW, steps: int = 50) -> None:
        self.optimizer = optimizer
        self.steps = steps
        self.count = 0
        self._apply()

    def step(self) -> None:
        self.count += 1
        self._apply()

    def _apply(self) -> None:
        now = self.count + 1
        factor = min(now / self.steps, math.sqrt(self.steps * 20 / max(now, self.steps * 20)))
        self.optimizer.rate = self.optimizer.peak * factor

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]
        self._apply()


if __name__ == "__main__":
    main()
