"""A small LightningModule under ReplicaTrainer, on made-up rows; its options: `OPTIONS`.

It runs to the end of its epochs, or `steps_made` steps of them.
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
from lightning.pytorch import Callback  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from runtime.adapters.lightning import ReplicaTrainer  # noqa: E402
from tests.runtime.adapters.lightning_models import Sums, loader  # noqa: E402

OPTIONS: dict[str, Any] = {
    "folder": "",
    "mode": "cover",
    "checkpoint_s": 3600.0,
    "pace_s": 0.02,
    "steps_made": None,
    "stop_at": None,
    "samples": 130,
    "dropout": 0.3,
    "clamp": math.inf,
    "interval": "step",
    "numbered": True,  # its logger's folders, by us
    "arguments": {},
    **job.options,
}
FOLDER = Path(OPTIONS["folder"])


class Heard(Callback):  # type: ignore[misc]
    """Notes what it is told, and paces the steps."""

    def __init__(self) -> None:
        self.file = (FOLDER / f"heard.{job.replica}").open("a", buffering=1)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._note("begin", trainer, steps=pl_module.steps)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        time.sleep(OPTIONS["pace_s"])
        torch.rand(1)
        self.began = batch_idx

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert batch_idx == self.began
        del self.began  # each end has a beginning
        loss = float(outputs["loss"])
        self._note("step", trainer, loss=loss, returned=sorted(outputs), samples=len(batch))
        trainer.should_stop = trainer.global_step == OPTIONS["stop_at"]

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._note("epoch", trainer, logged=sorted(trainer.callback_metrics))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._note("validate", trainer, loss=float(trainer.callback_metrics.get("val_loss", 0)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._note("end", trainer)

    def _note(self, what: str, trainer: Any, **more: Any) -> None:
        known = {"step": trainer.global_step, "first": trainer.is_global_zero}
        told = {"what": what, **known, "epoch": trainer.current_epoch, **more}
        self.file.write(json.dumps(told) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    steps_log = (FOLDER / f"steps.{job.replica}").open("a", buffering=1)

    def report(step: Any) -> None:
        steps_log.write(json.dumps(vars(step)) + "\n")
        if OPTIONS["steps_made"] is not None and step.step >= OPTIONS["steps_made"] - 2:
            job.stop.set()  # travels with the next step, after which all stop

    module = Sums(OPTIONS["dropout"], OPTIONS["interval"])

    def clamp() -> None:
        for weight in module.parameters():
            weight.clamp_(-OPTIONS["clamp"], OPTIONS["clamp"])

    usual = {
        "max_epochs": 1000,
        "gradient_clip_val": 1.0,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    trainer = ReplicaTrainer(
        job=job,
        mode=OPTIONS["mode"],
        saver=runtime.Checkpointer(job, every_s=OPTIONS["checkpoint_s"]),
        on_step=report,
        after_step=clamp,
        logger=CSVLogger(
            str(FOLDER),
            name="csv",
            version=job.replica if OPTIONS["numbered"] else None,
            flush_logs_every_n_steps=1,
        ),
        callbacks=[
            Heard(),
            EarlyStopping("val_loss", patience=1000),
            ModelCheckpoint(FOLDER / "saved", "model", save_last=True),
        ],
        **{**usual, **OPTIONS["arguments"]},
    )
    trainer.fit(module, loader(OPTIONS["samples"]), loader(8, shuffle=False))
    torch.save(module.state_dict(), FOLDER / f"module.{job.replica}.pt")
    assert trainer.replica is not None
    (FOLDER / f"digest.{job.replica}").write_text(trainer.replica.state.copy().digest)
    (FOLDER / f"weights.{job.replica}").write_text(trainer.replica.state.digest())


if __name__ == "__main__":
    main()
