"""A Trainer under a replica group: deaths change nothing, and it trains what a Trainer trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file
from transformers import GPT2LMHeadModel, Trainer

import runtime
from runtime.adapters.huggingface import best_in
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
from tests.runtime.adapters.hf_models import LOSSES, Text, arguments, tiny_model
from tests.runtime.replicas import PATIENCE_S

MakeFleet = Callable[..., ScriptFleet]
Capture = pytest.CaptureFixture[str]
SCRIPT = "hf_script.py"


def heard(fleet: ScriptFleet, replica: int, what: str) -> list[dict[str, Any]]:
    notes = [json.loads(line) for line in fleet.notes(replica)]
    return [note for note in notes if note["what"] == what]


def test_deaths_of_any_replica_leave_weights_losses_and_samples_as_if_there_were_none(
    make_fleet: MakeFleet, tmp_path: Path, capsys: Capture
) -> None:
    fleet = make_fleet(SCRIPT, 3, mode="reproducible", clamp=0.05)
    killed_and_back(fleet)

    trained_as(fleet, alone(tmp_path / "alone", fleet))
    assert check_ledger([str(fleet.folder / "state")]) == 0
    assert "whole" in capsys.readouterr().out


def test_who_speaks_logs_and_the_next_takes_over(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(SCRIPT, 2)
    one_is_lost(fleet, 0)
    fleet.stop()

    logs = heard(fleet, 1, "log")
    assert {note["first"] for note in logs} == {False, True}
    assert [note["step"] for note in logs[:-1]] == list(
        range(logs[0]["step"], logs[-2]["step"] + 1, 5)
    )
    assert load_file(fleet.folder / "output" / "model.safetensors")


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
    undisturbed = alone(tmp_path / "alone", fleet)

    assert once_each(fleet.steps(0))
    assert heard(fleet, 0, "begin")[1]["step"] == stopped + 1
    assert fleet.weights() == undisturbed.weights()
    assert heard(fleet, 0, "epoch") == heard(undisturbed, 0, "epoch")


def test_all_evaluate_at_the_steps_that_were_asked_for(make_fleet: MakeFleet) -> None:
    asked = {"eval_strategy": "steps", "eval_steps": 4, "max_steps": 14, "bf16": True}
    fleet = make_fleet(SCRIPT, 2, mode="reproducible", arguments=asked)
    finished(fleet)

    for replica in (0, 1):
        assert [note["step"] for note in heard(fleet, replica, "evaluate")] == [4, 8, 12, 14]
        assert [note["step"] for note in heard(fleet, replica, "epoch")] == [6, 11, 14]
    losses = [[n["eval_loss"] for n in heard(fleet, r, "log") if "eval_loss" in n] for r in (0, 1)]
    assert losses[0] == losses[1]
    assert len(fleet.digests()) == 1


def test_what_is_due_at_the_end_of_epochs_is_done_at_the_end_of_training_too(
    make_fleet: MakeFleet,
) -> None:
    asked = {"eval_strategy": "epoch", "save_strategy": "epoch", "max_steps": 8}
    fleet = make_fleet(SCRIPT, 2, arguments=asked)
    finished(fleet)

    for replica in (0, 1):
        assert [note["step"] for note in heard(fleet, replica, "evaluate")] == [6, 8]
    folders = sorted(path.name for path in (fleet.folder / "output").glob("checkpoint-*"))
    assert folders == ["checkpoint-6", "checkpoint-8"]


def test_checkpoints_of_the_trainer_are_written_once_and_can_be_loaded(
    make_fleet: MakeFleet,
) -> None:
    asked = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 2, "max_steps": 12}
    fleet = make_fleet(SCRIPT, 2, arguments=asked)
    finished(fleet)

    folders = sorted(path.name for path in (fleet.folder / "output").glob("checkpoint-*"))
    assert folders == ["checkpoint-12", "checkpoint-8"]
    last = load_file(fleet.folder / "output" / "checkpoint-12" / "model.safetensors")
    end = load_file(fleet.folder / "output" / "model.safetensors")
    assert all(torch.equal(last[name], end[name]) for name in end)


def test_who_spoke_before_leaves_the_trainers_folder_to_who_speaks(make_fleet: MakeFleet) -> None:
    best = {"save_strategy": "best", "metric_for_best_model": "loss", "save_total_limit": 1}
    asked = {**best, "eval_strategy": "steps", "eval_steps": 2}
    fleet = make_fleet(SCRIPT, 2, arguments=asked)
    one_is_lost(fleet, 0)
    fleet.start_rank(0)
    fleet.wait_for_members([0, 1])
    fleet.train_on(10)
    fleet.stop()

    assert [note["first"] for note in heard(fleet, 1, "end")] == [False]
    assert len(list((fleet.folder / "output").glob("checkpoint-*"))) == 1


def test_a_job_that_is_started_again_removes_no_folder_that_is_better(
    make_fleet: MakeFleet,
) -> None:
    best = {"save_strategy": "best", "metric_for_best_model": "loss", "save_total_limit": 1}
    asked = {**best, "eval_strategy": "steps", "eval_steps": 2}
    fleet = make_fleet(SCRIPT, 1, arguments=asked)
    fleet.start()
    fleet.wait_for_step(5)
    fleet.stop()
    (folder,) = (fleet.folder / "output").glob("checkpoint-*")
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(json.dumps({**state, "best_metric": 0.0}))
    stopped = fleet.newest()
    fleet.start_rank(0)
    fleet.wait_for_step(stopped + 5)
    fleet.stop()

    assert [*(fleet.folder / "output").glob("checkpoint-*")] == [folder]


def write_folder(output: Path, step: int, best: int, metric: float) -> None:
    """As the Trainer does."""
    folder = output / f"checkpoint-{step}"
    folder.mkdir()
    state = {"best_global_step": best, "best_metric": metric}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def test_what_was_best_is_known_from_the_newest_folder_that_can_be_read(tmp_path: Path) -> None:
    for step, best, metric in ((8, 8, 2.0), (12, 8, 1.0), (20, 20, 0.5)):
        write_folder(tmp_path, step, best, metric)
    (tmp_path / "checkpoint-14").mkdir()  # whoever wrote it died
    (tmp_path / "checkpoint-15").mkdir()
    (tmp_path / "checkpoint-15" / "trainer_state.json").write_text('{"best_')
    (tmp_path / "checkpoint-of-mine").mkdir()

    assert best_in(tmp_path, step=19) == (1.0, 8)
    assert best_in(tmp_path, step=20) == (0.5, 20)
    assert best_in(tmp_path, step=7) is None
    assert best_in(tmp_path / "elsewhere", step=7) is None


def test_of_a_best_one_that_is_gone_nothing_is_known(tmp_path: Path) -> None:
    write_folder(tmp_path, 12, 8, 1.0)

    assert best_in(tmp_path, step=12) is None


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_it_trains_what_a_trainer_trains(make_fleet: MakeFleet, tmp_path: Path, loss: str) -> None:
    fleet = make_fleet(SCRIPT, 2, dropout=0.0, loss=loss, arguments={"max_steps": 10})
    finished(fleet)
    order = runtime.Batches(samples=130, shard_size=2, seed=42).ids(0, 10).flatten().tolist()
    rows = torch.utils.data.Subset(Text(130, even=True), order)
    plain = Trainer(
        tiny_model(dropout=0.0),
        arguments(
            tmp_path, max_steps=10, gradient_accumulation_steps=12,
            train_sampling_strategy="sequential",
        ),
        train_dataset=rows,
        compute_loss_func=LOSSES[loss],
    )  # fmt: skip
    plain.train()

    logged = [note["loss"] for note in heard(fleet, 0, "log") if "loss" in note]
    assert logged == pytest.approx(
        [entry["loss"] for entry in plain.state.log_history if "loss" in entry], rel=1e-5
    )
    ours = GPT2LMHeadModel.from_pretrained(fleet.folder / "output").state_dict()
    for name, expected in plain.model.state_dict().items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-5)


def test_who_comes_back_is_at_the_step_of_the_others(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(SCRIPT, 2)
    one_is_lost(fleet, 1)
    fleet.start_rank(1)
    fleet.wait_for_members([0, 1])
    fleet.train_on(10)
    fleet.stop()

    logs = {note["step"]: note for note in heard(fleet, 0, "log") if "loss" in note}
    entered = heard(fleet, 1, "begin")[1]["step"]
    later = [note for note in heard(fleet, 1, "log") if note["step"] > entered + 5]
    assert [note["learning_rate"] for note in later[:-1]] == [
        logs[note["step"]]["learning_rate"] for note in later[:-1]
    ]
    assert [note["loss"] for note in later[:-1]] == [logs[n["step"]]["loss"] for n in later[:-1]]


def test_who_was_cut_off_is_at_the_step_of_the_others(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(SCRIPT, 2)
    cut_off_and_back(fleet)

    told = [
        {(n["step"], n["loss"], n["learning_rate"]) for n in heard(fleet, r, "log") if "loss" in n}
        for r in (0, 1)
    ]
    assert len(told[1] - told[0]) <= 1  # of a part of the steps, when it came back
    assert max(told[0]) == max(told[1])


def test_a_stop_of_one_is_a_stop_of_all_one_step_later(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(SCRIPT, 2, stop_at=8)
    finished(fleet)

    assert [len(fleet.steps(replica)) for replica in (0, 1)] == [9, 9]
    assert [note["step"] for note in heard(fleet, 1, "epoch")] == [6, 9]
    assert len(fleet.digests()) == 1


def test_shards_of_unequal_labels_are_refused_unless_each_may_weigh_alike(
    make_fleet: MakeFleet,
) -> None:
    refused = make_fleet(SCRIPT, 1, even=False)
    refused.start()
    assert refused.ranks[0].wait(PATIENCE_S) == 1
    assert "average_tokens_across_devices=False" in refused.log(0)

    arguments = {"average_tokens_across_devices": False, "max_steps": 6}
    accepted = make_fleet(SCRIPT, 1, even=False, arguments=arguments)
    finished(accepted)
    assert len(accepted.steps(0)) == 6
