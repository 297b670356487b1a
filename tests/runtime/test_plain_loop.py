"""What a job trains that loses a replica and takes it back is what a plain loop trains, with all
that a loop may have: accumulated gradients, clipping, a scaler, schedules, two optimizers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import runtime
from tests.runtime.replicas import Fleet

SEED, SAMPLES, SHARDS, SHARD_SIZE, PIECE = 5, 960, 12, 4, 2  # of tiny.py, where it is rich


def plain_loop(steps: int) -> list[tuple[float, float]]:
    """The loss and the gradients' norm of each step: torch alone, but for the order of samples."""
    torch.manual_seed(3)
    data = torch.randn(SAMPLES, 16)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Dropout(0.0), torch.nn.Linear(32, 1)
    )
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(model[0].parameters(), lr=1e-3),
        torch.optim.SGD(model[2:].parameters(), lr=1e-3, momentum=0.9),
    ]
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 500),
        torch.optim.lr_scheduler.StepLR(optimizers[1], 20, 0.9),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    order = runtime.Batches(samples=SAMPLES, shards=SHARDS, shard_size=SHARD_SIZE, seed=SEED)
    made = []
    for step in range(steps):
        rows = data[order.ids(step, step + 1).flatten()]
        total = 0.0
        for piece in torch.split(rows, PIECE):
            loss = (model(piece).squeeze(1) - piece.sum(1)).square().mean()
            share = loss * PIECE / len(rows)
            scaler.scale(share).backward()
            total += share.item()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        for schedule in schedules:
            schedule.step()
        made.append((total, norm.item()))
    return made


def test_a_job_trains_what_a_plain_loop_trains(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(3, options={"rich": True, "calm": True, "dropout": 0.0})
    fleet.start()
    fleet.wait_for_step(20)
    fleet.kill(1)
    fleet.wait_for_members([0, 2])
    fleet.start_rank(1)
    fleet.wait_for_members([0, 1, 2])
    fleet.train_on()
    fleet.stop()

    found = [(step["loss"], step["grad_norm"]) for step in fleet.steps(0)]
    plain = plain_loop(len(found))
    assert [loss for loss, _norm in found] == pytest.approx([one for one, _n in plain], rel=1e-4)
    assert [norm for _loss, norm in found] == pytest.approx([one for _l, one in plain], rel=1e-3)
