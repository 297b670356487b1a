"""A small module with dropout and a schedule, and rows to train it on."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset[torch.Tensor]):
    """Made up, the same at each start."""

    def __init__(self, samples: int) -> None:
        self.rows = torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, sample: int) -> torch.Tensor:
        return self.rows[sample]


def loader(samples: int, **settings: Any) -> DataLoader[torch.Tensor]:
    """Two samples a shard."""
    return DataLoader(Rows(samples), batch_size=2, **{"shuffle": True, **settings})


class Sums(LightningModule):  # type: ignore[misc]
    """Learns the sum of a row. `interval`: of its schedule."""

    def __init__(self, dropout: float = 0.3, interval: str = "step") -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.interval = interval
        self.net = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.Dropout(dropout), torch.nn.Linear(32, 1)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "sums": batch.sum(1)}

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> dict[str, Any]:
        self.steps = self.trainer.estimated_stepping_batches  # as OneCycleLR asks for them
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        paced = {"scheduler": schedule, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": paced}

    def _loss(self, batch: torch.Tensor) -> torch.Tensor:
        guessed: torch.Tensor = self.net(batch).squeeze(1)
        return (guessed - batch.sum(1)).square().mean()
