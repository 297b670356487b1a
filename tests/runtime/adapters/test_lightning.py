"""A Lightning module under a replica group: deaths change nothing, and it trains the same."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, Subset

import runtime
from runtime.ledger.__main__ import main as check_ledger
from tests.runtime.adapters.fleets import (
    ScriptFleet,
    alone,
    cut_off_and_back,
    finished,
    killed_and_back,
    once_each,
    one_is_lost,
    trained_as,
)
from tests.runtime.adapters.lightning_models import Rows, Sums
from tests.runtime.replicas import PATIENCE_S

MakeFleet = Callable[..., ScriptFleet]
Capture = pytest.CaptureFixture[str]
SCRIPT = "lightning_script.py"
SAVED = ["last.ckpt", "model.ckpt"]


def heard(fleet: ScriptFleet, replica: int, what: str) -> list[dict[str, Any]]:
    notes = [json.loads(line) for line in fleet.notes(replica)]
    return [note for note in notes if note["what"] == what]


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_deaths_of_any_replica_leave_weights_losses_and_samples_as_if_there_were_none(
    make_fleet: MakeFleet, tmp_path: Path, capsys: Capture, interval: str
) -> None:
    fleet = make_fleet(SCRIPT, 3, mode="reproducible", clamp=0.05, interval=interval)
    killed_and_back(fleet)

    trained_as(fleet, alone(tmp_path / "alone", fleet))
    assert check_ledger([str(fleet.folder / "state")]) == 0
    assert "whole" in capsys.readouterr().out


def test_who_comes_back_is_at_the_step_and_epoch_of_the_others(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(SCRIPT, 2, mode="reproducible")
    one_is_lost(fleet, 0)
    fleet.start_rank(0)
    fleet.wait_for_members([0, 1])
    fleet.train_on(10)
    fleet.stop()

    told = [{(n["step"], n["epoch"], n["loss"]) for n in heard(fleet, r, "step")} for r in (0, 1)]
    assert told[0] <= told[1]
    assert {note["samples"] for note in heard(fleet, 0, "step")} == {2}
    assert {note["first"] for note in heard(fleet, 1, "step")} == {False, True}
    assert (fleet.folder / "csv" / "version_1" / "metrics.csv").read_text().count("\n") > 10


def test_who_comes_back_goes_on_with_the_files_that_others_wrote(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(SCRIPT, 2)
    one_is_lost(fleet, 0)
    fleet.start_rank(0)
    fleet.wait_for_members([0, 1])
    fleet.train_on(10)  # over the end of an epoch
    fleet.stop()

    saved = sorted((fleet.folder / "saved").iterdir())
    assert [path.name for path in saved] == SAVED
    steps = [torch.load(path, weights_only=False)["global_step"] for path in saved]
    assert steps == [heard(fleet, 0, "epoch")[-1]["step"]] * 2


def test_who_speaks_next_has_the_settings_and_writes_over_nothing(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(SCRIPT, 2, numbered=False)
    one_is_lost(fleet, 0)
    fleet.stop()

    first, then = sorted((fleet.folder / "csv").iterdir())
    rows = [(one / "metrics.csv").read_text().count("\n") for one in (first, then)]
    assert min(rows) > 5
    for one in (first, then):
        assert "dropout: 0.3" in (one / "hparams.yaml").read_text()


def test_who_was_cut_off_is_at_the_step_and_epoch_of_the_others(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(SCRIPT, 2, mode="reproducible")
    cut_off_and_back(fleet)

    told = [{(n["step"], n["epoch"], n["loss"]) for n in heard(fleet, r, "step")} for r in (0, 1)]
    assert told[1] < told[0]
    assert max(told[0]) == max(told[1])


def test_a_job_resumes_from_the_groups_checkpoint(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet(SCRIPT, 2, mode="reproducible")
    fleet.start()
    fleet.wait_for_members([0, 1])
    fleet.train_on(5)
    fleet.stop()
    stopped = fleet.newest()
    for replica in (0, 1):
        fleet.start_rank(replica)
    fleet.wait_for_step(stopped + 5)
    fleet.stop()

    assert once_each(fleet.steps(0))
    assert heard(fleet, 0, "begin")[1]["step"] == stopped + 1
    assert sorted(path.name for path in (fleet.folder / "saved").iterdir()) == SAVED
    assert fleet.weights() == alone(tmp_path / "alone", fleet).weights()


def test_epochs_validation_and_checkpoints_are_the_trainers(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(SCRIPT, 2, mode="reproducible", arguments={"max_epochs": 3})
    finished(fleet)

    for replica in (0, 1):
        # 130 samples, 24 a step: epochs end in the steps 6, 11 and 17
        assert [note["steps"] for note in heard(fleet, replica, "begin")] == [17]
        assert [note["step"] for note in heard(fleet, replica, "validate")] == [6, 11, 17]
        epochs = heard(fleet, replica, "epoch")
        assert [(note["step"], note["epoch"]) for note in epochs] == [(6, 0), (11, 1), (17, 2)]
        assert {"train_loss_epoch", "val_loss"} <= set(epochs[0]["logged"])
    losses = [[note["loss"] for note in heard(fleet, r, "validate")] for r in (0, 1)]
    assert losses[0] == losses[1]
    saved = torch.load(fleet.folder / "saved" / "last.ckpt", weights_only=False)
    assert (saved["global_step"], saved["epoch"]) == (17, 2)
    assert [path.name for path in (fleet.folder / "csv").iterdir()] == ["version_0"]


def test_a_stop_of_one_is_a_stop_of_all_one_step_later(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(SCRIPT, 2, stop_at=8)
    finished(fleet)

    assert [len(fleet.steps(replica)) for replica in (0, 1)] == [9, 9]
    for replica in (0, 1):
        assert [note["step"] for note in heard(fleet, replica, "epoch")] == [6, 9]
    assert len(fleet.digests()) == 1


def test_who_only_has_to_leave_ends_no_epoch(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(SCRIPT, 2, samples=130_000)
    fleet.start()
    fleet.wait_for_members([0, 1])
    (leaving,) = fleet.part_with(1)
    leaving.send_signal(signal.SIGTERM)
    assert leaving.wait(PATIENCE_S) == 0
    fleet.stop()

    assert [len(heard(fleet, replica, "end")) for replica in (0, 1)] == [1, 1]
    assert [heard(fleet, replica, "epoch") for replica in (0, 1)] == [[], []]


def test_a_stop_from_outside_ends_no_epoch(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(SCRIPT, 1, steps_made=4)
    finished(fleet)

    assert [note["step"] for note in heard(fleet, 0, "end")] == [4]
    assert heard(fleet, 0, "epoch") == []


def test_a_job_that_ended_within_an_epoch_ends_at_once_if_started_again(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(SCRIPT, 1, arguments={"max_steps": 10})
    finished(fleet)
    fleet.start_rank(0)
    assert fleet.ranks[0].wait(PATIENCE_S) == 0

    assert [note["step"] for note in heard(fleet, 0, "end")] == [10, 10]
    assert [note["step"] for note in heard(fleet, 0, "epoch")] == [6, 10]


def test_it_trains_what_lightning_trains(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet(SCRIPT, 2, dropout=0.0, arguments={"max_steps": 10})
    finished(fleet)
    order = runtime.Batches(samples=130, shard_size=2).ids(0, 10).flatten().tolist()
    plain = Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=12, gradient_clip_val=1.0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    module = Sums(dropout=0.0)
    plain.fit(module, DataLoader(Subset(Rows(130), order), batch_size=2))

    told = heard(fleet, 0, "step")
    assert {tuple(note["returned"]) for note in told} == {("loss", "sums")}
    trained = torch.load(fleet.folder / "module.0.pt")
    for name, expected in module.state_dict().items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-4, atol=1e-5)
