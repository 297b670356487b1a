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


def test_what_is_there_is_the_edge_also_in_the_middle_of_a_step_that_is_given_up() -> None:
    subject = model()
    statistics = RunningStatistics(subject)
    step(subject, statistics, [0, 1, 2, 3])
    edge = [buffer.clone() for buffer in subject.buffers()]
    statistics.begin()
    subject(SHARDS[0])

    statistics.forget()
    statistics.reload()

    assert all(torch.equal(a, b) for a, b in zip(subject.buffers(), edge, strict=True))


def test_what_was_loaded_stays_where_no_step_was_begun() -> None:
    subject = model()
    statistics = RunningStatistics(subject)
    subject.get_buffer("0.running_mean").fill_(3.0)

    statistics.forget()
    statistics.reload()

    assert subject.get_buffer("0.running_mean").tolist() == [3.0] * 3


def test_a_model_without_any_costs_nothing() -> None:
    assert RunningStatistics(torch.nn.Linear(2, 2)).size == 0


class Counting(torch.nn.Module):
    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1), persistent=persistent)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen").add_(len(rows))
        return rows


def counted(subject: torch.nn.Module) -> RunningStatistics:
    """After a step that was computed."""
    statistics = RunningStatistics(subject)
    statistics.begin()
    subject(SHARDS[0])
    statistics.apply(statistics.change())
    return statistics


def test_another_buffer_that_forward_changes_is_refused_by_its_name() -> None:
    subject = Counting()
    statistics = counted(subject)
    statistics.restore()
    subject(SHARDS[0])

    with pytest.raises(RuntimeError, match="forward changes the buffer 'seen'"):
        statistics.restore()


def test_it_is_refused_with_the_second_step_that_is_computed() -> None:
    subject = Counting()
    statistics = counted(subject)
    statistics.apply(statistics.change())  # one that others computed
    statistics.begin()
    subject(SHARDS[0])

    with pytest.raises(RuntimeError, match="forward changes the buffer 'seen'"):
        statistics.apply(statistics.change())


def test_a_buffer_that_no_state_has_may_change() -> None:
    subject = torch.nn.Sequential(Counting(persistent=False))
    statistics = counted(subject)
    subject(SHARDS[0])

    statistics.restore()

    assert int(subject.get_buffer("0.seen")) == 2 * len(SHARDS[0])


def test_what_all_change_after_a_step_is_the_edge() -> None:
    subject = torch.nn.Sequential(torch.nn.BatchNorm1d(3), Counting())
    statistics = RunningStatistics(subject)
    statistics.apply(statistics.change())
    for buffer in subject.buffers():
        buffer.fill_(3)

    statistics.changed_at_edge()
    statistics.restore()

    assert {float(one) for buffer in subject.buffers() for one in buffer.flatten()} == {3.0}


def test_a_layer_that_is_used_twice_has_its_edge_under_both_names() -> None:
    norm = torch.nn.BatchNorm1d(3)
    subject = torch.nn.Sequential(norm, torch.nn.Linear(3, 3), norm)
    statistics = RunningStatistics(subject)
    step(subject, statistics, [0, 1, 2, 3])
    edge = norm.running_var.clone() if norm.running_var is not None else None
    statistics.begin()
    subject(SHARDS[0])

    found = statistics.at_edge()
    assert edge is not None
    assert torch.equal(found["0.running_var"], edge)
    assert torch.equal(found["2.running_var"], edge)
    assert found["0.num_batches_tracked"] is found["2.num_batches_tracked"]
