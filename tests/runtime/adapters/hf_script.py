"""A tiny GPT-2 under ReplicaTrainer, on made-up text; its options: `OPTIONS`.

It runs to the end of its schedule, or `steps_made` steps of it.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import runtime

job = runtime.join()

import torch  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from runtime.adapters.huggingface import ReplicaTrainer  # noqa: E402
from tests.runtime.adapters.hf_models import LOSSES, Text, arguments, tiny_model  # noqa: E402

OPTIONS: dict[str, Any] = {
    "folder": "",
    "mode": "cover",
    "checkpoint_s": 3600.0,
    "pace_s": 0.005,
    "steps_made": None,
    "stop_at": None,
    "samples": 130,
    "workers": 0,
    "even": True,
    "dropout": 0.1,
    "clamp": math.inf,
    "loss": "of the model",
    "arguments": {},
    **job.options,
}
FOLDER = Path(OPTIONS["folder"])


class Heard(TrainerCallback):  # type: ignore[misc]
    """Notes what it is told, and paces the shards."""

    def __init__(self) -> None:
        self.file = (FOLDER / f"heard.{job.replica}").open("a", buffering=1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("begin", state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(4 * OPTIONS["pace_s"])
        self.began = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert state.global_step == self.began + 1
        del self.began  # each end has a beginning
        control.should_training_stop |= state.global_step == OPTIONS["stop_at"]

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self._note("log", state, **logs)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("evaluate", state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("epoch", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("end", state)

    def _note(self, what: str, state: Any, **more: Any) -> None:
        note = {"what": what, "step": state.global_step, "first": state.is_world_process_zero}
        self.file.write(json.dumps({**note, **more}) + "\n")


class Dashboard(TrainerCallback):  # type: ignore[misc]
    """As those of wandb and others are: whoever is first as it is set up begins a run."""

    def __init__(self) -> None:
        self._initialized = False
        self._run: list[Any] | None = None

    def _setup(self, state: Any) -> None:
        if not self._initialized:
            self._initialized = True
            self._run = [] if state.is_world_process_zero else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._setup(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self._setup(state)
        if state.is_world_process_zero:
            self._run.append(logs)  # type: ignore[union-attr]  # who has none is at fault


def main() -> None:
    torch.set_num_threads(1)
    steps_log = (FOLDER / f"steps.{job.replica}").open("a", buffering=1)

    def report(step: Any) -> None:
        steps_log.write(json.dumps(vars(step)) + "\n")
        if OPTIONS["steps_made"] is not None and step.step >= OPTIONS["steps_made"] - 2:
            job.stop.set()  # travels with the next step, after which all stop

    model = tiny_model(OPTIONS["dropout"])

    def clamp() -> None:
        for weight in model.parameters():
            weight.clamp_(-OPTIONS["clamp"], OPTIONS["clamp"])

    trainer = ReplicaTrainer(
        model,
        arguments(FOLDER, dataloader_num_workers=OPTIONS["workers"], **OPTIONS["arguments"]),
        train_dataset=Text(OPTIONS["samples"], even=OPTIONS["even"]),
        eval_dataset=Text(8, even=True),
        callbacks=[Heard(), Dashboard()],
        compute_loss_func=LOSSES[OPTIONS["loss"]],
        job=job,
        mode=OPTIONS["mode"],
        saver=runtime.Checkpointer(job, every_s=OPTIONS["checkpoint_s"]),
        on_step=report,
        after_step=clamp,
    )
    trainer.train()
    trainer.save_model()
    assert trainer.replica is not None
    (FOLDER / f"digest.{job.replica}").write_text(trainer.replica.state.copy().digest)
    (FOLDER / f"weights.{job.replica}").write_text(trainer.replica.state.digest())


if __name__ == "__main__":
    main()
