"""Running statistics do not depend on who computes which shard, nor on how often."""

from __future__ import annotations

import pytest
import torch

from runtime.replica.statistics import RunningStatistics

SHARDS = [torch.randn(8, 3, generator=torch.Generator().manual_seed(k)) + k for k in range(4)]


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.LayerNorm(3))


def step(subject: torch.nn.Module, statistics: RunningStatistics, order: list[int]) -> None:
    changes = {}
    for shard in order:
        statistics.begin()
        subject(SHARDS[shard])
        changes[shard] = statistics.change() / len(SHARDS)
    statistics.apply(torch.stack([changes[k] for k in range(len(SHARDS))]).sum(0))


def test_neither_order_nor_repetition_changes_them() -> None:
    first, second = model(), model()
    for subject, order in ((first, [0, 1, 2, 3]), (second, [3, 1, 1, 0, 2, 3])):
        statistics = RunningStatistics(subject)
        for _ in range(5):
            step(subject, statistics, order)

    assert all(torch.equal(a, b) for a, b in zip(first.buffers(), second.buffers(), strict=True))
    assert int(first.get_buffer("0.num_batches_tracked")) == 5
    assert first.get_buffer("0.running_mean").abs().sum() > 0


def test_the_edge_is_what_a_copy_sees() -> None:
    subject = model()
    statistics = RunningStatistics(subject)
    step(subject, statistics, [0, 1, 2, 3])
    edge = subject.get_buffer("0.running_var").clone()

    statistics.begin()
    subject(SHARDS[0])
    assert not torch.equal(subject.get_buffer("0.running_var"), edge)
    statistics.restore()

    assert torch.equal(subject.get_buffer("0.running_var"), edge)


def test_a_model_without_any_costs_nothing() -> None:
    assert RunningStatistics(torch.nn.Linear(2, 2)).size == 0


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen").add_(len(rows))
        return rows


def test_another_buffer_that_forward_changes_is_refused_by_its_name() -> None:
    subject = Counting()
    statistics = RunningStatistics(subject)
    statistics.begin()
    subject(SHARDS[0])
    statistics.apply(statistics.change())
    statistics.restore()
    subject(SHARDS[0])

    with pytest.raises(RuntimeError, match="forward changes the buffer 'seen'"):
        statistics.restore()
