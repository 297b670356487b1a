"""What a job trains that loses a replica and takes it back is what a plain loop trains, with all
that a loop may have: accumulated gradients, clipping, a scaler, schedules, two optimizers, averaged
weights."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

import runtime
from tests.runtime.replicas import Fleet

SEED, SAMPLES, SHARDS, SHARD_SIZE, PIECE = 5, 960, 12, 4, 2  # of tiny.py, where it is rich


def plain_loop(
    coverage: list[list[int]], freezes_at: int
) -> tuple[list[tuple[float, float]], list[float]]:
    """The loss and the gradients' norm of each step, and the average of the weights in the end:
    torch alone, but for the order of samples. `coverage`: of each step, 0 for each shard that is
    left out."""
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
    average = torch.optim.swa_utils.AveragedModel(model)
    order = runtime.Batches(samples=SAMPLES, shards=SHARDS, shard_size=SHARD_SIZE, seed=SEED)
    made = []
    for step, there in enumerate(coverage):
        shards = order.ids(step, step + 1).view(SHARDS, SHARD_SIZE)
        rows = data[shards[torch.tensor(there).bool()].flatten()]
        total = 0.0
        model[0].requires_grad_(step < freezes_at)
        trained = optimizers if step < freezes_at else optimizers[1:]  # a scaler refuses the other
        for piece in torch.split(rows, PIECE):
            loss = (model(piece).squeeze(1) - piece.sum(1)).square().mean()
            share = loss * PIECE / len(rows)
            scaler.scale(share).backward()
            total += share.item()
        for optimizer in trained:
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in trained:
            scaler.step(optimizer)
        model.zero_grad()
        scaler.update()
        for schedule in schedules:
            schedule.step()
        average.update_parameters(model)
        made.append((total, norm.item()))
    return made, torch.nn.utils.parameters_to_vector(average.parameters()).tolist()


@pytest.mark.parametrize(
    ("mode", "freezes_at"), [("cover", 1 << 60), ("drop", 1 << 60), ("cover", 10), ("cover", 0)]
)
def test_a_job_trains_what_a_plain_loop_trains(
    make_fleet: Callable[..., Fleet], mode: str, freezes_at: int
) -> None:
    """In the mode `drop` without the shards of who was away, and with the mean of what was left.
    What the loop freezes is trained no more, neither by decay nor by momentum."""
    same = {"rich": True, "calm": True, "dropout": 0.0}
    fleet = make_fleet(3, options={"mode": mode, "freezes_at": freezes_at, **same})
    fleet.start()
    fleet.wait_for_step(20)
    fleet.kill(1)
    fleet.wait_for_members([0, 2])
    fleet.start_rank(1)
    fleet.wait_for_members([0, 1, 2])
    fleet.train_on()
    fleet.stop()

    coverage = [step["coverage"] for step in fleet.steps(0)]
    found = [(step["loss"], step["grad_norm"]) for step in fleet.steps(0)]
    plain, average = plain_loop(coverage, freezes_at)
    assert ([0] in [sorted({*there})[:1] for there in coverage]) == (mode == "drop")
    averaged = json.loads((fleet.folder / "average.0").read_text())
    assert [loss for loss, _norm in found] == pytest.approx([one for one, _n in plain], rel=1e-4)
    assert averaged == pytest.approx(average, rel=1e-3, abs=1e-5)
    assert [norm for _loss, norm in found] == pytest.approx([one for _l, one in plain], rel=1e-3)
