"""A job small enough for tests: a linear model, a line per committed step, a digest at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import runtime

job = runtime.join()

import torch  # noqa: E402


def main() -> None:
    folder = Path(job.options["folder"])
    steps_log = (folder / f"steps.{job.replica}").open("a", buffering=1)
    torch.set_num_threads(1)
    torch.manual_seed(3)
    data = torch.randn(960, 16)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(), torch.nn.Linear(32, 1))
    batches = runtime.Batches(samples=len(data), shard_size=2, seed=5)
    saver = runtime.Checkpointer(job, every_s=job.options.get("checkpoint_s", 3600))
    optimizer = Momentum([*model.parameters()])

    def report(step: Any) -> None:
        steps_log.write(json.dumps(vars(step)) + "\n")

    with runtime.ReplicaGroup(
        job, model, optimizer, batches, saver, steps=job.options.get("steps"), on_step=report
    ) as replica:
        for shard in replica:
            rows = data[list(shard.ids)]
            replica.backward((model(rows).squeeze(1) - rows.sum(1)).square().mean())
    (folder / f"digest.{job.replica}").write_text(replica.state.copy().digest)
    replica.state.ledger.load_state_dict([])  # its epochs tell of deaths, the rest must not
    (folder / f"weights.{job.replica}").write_text(replica.state.copy().digest)


class Momentum:
    """Plain stochastic gradient descent with momentum."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.momentum = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, momentum in zip(self.parameters, self.momentum, strict=True):
            assert parameter.grad is not None
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.sub_(momentum, alpha=1e-3)

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, given in zip(self.momentum, state["momentum"], strict=True):
            mine.copy_(given)


if __name__ == "__main__":
    main()
