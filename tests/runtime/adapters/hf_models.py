"""A tiny GPT-2, made-up text, and arguments for both a plain Trainer and a ReplicaTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments


class Text(Dataset[dict[str, torch.Tensor]]):
    """Rows that count on from where they begin; if not `even`, some have fewer labels."""

    def __init__(self, samples: int, *, even: bool) -> None:
        self.samples = samples
        self.unlabelled = 0 if even else 4

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        words = (torch.arange(12) * (1 + sample % 3) + sample) % 64
        labels = words.clone()
        labels[: self.unlabelled * (sample % 2)] = -100
        return {"input_ids": words, "labels": labels, "unused": words}


def tiny_model(dropout: float = 0.1) -> GPT2LMHeadModel:
    """The same at each call."""
    torch.manual_seed(3)
    dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    words = {"vocab_size": 64, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, **words, **dropouts)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else a plain Trainer counts one label too many in each row
    return model


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """The mean, by the count that a Trainer gives to a compute_loss_func."""
    guessed = outputs.logits[:, :-1].flatten(0, 1)
    summed = torch.nn.functional.cross_entropy(guessed, labels[:, 1:].flatten(), reduction="sum")
    mean: torch.Tensor = summed / num_items_in_batch
    return mean


LOSSES: dict[str, Any] = {"of the model": None, "summed": summed_loss}


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    usual: dict[str, Any] = {
        "use_cpu": True,
        "report_to": "none",
        "per_device_train_batch_size": 2,
        "learning_rate": 3e-3,
        "warmup_steps": 5,
        "num_train_epochs": 100,
        "logging_steps": 5,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder / "output"), **{**usual, **settings})
