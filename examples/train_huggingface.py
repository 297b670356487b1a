"""A small GPT-2 under Hugging Face's Trainer, on made-up text: no hub, no files.

Started by a launcher, once per replica, with DRYDOCK_* in the environment, or tortured:

    python -m runtime.torture --script examples/train_huggingface.py
"""

from __future__ import annotations

import tempfile

import runtime

job = runtime.join()

import torch  # noqa: E402 - the control plane hears of this rank while torch is imported
from torch.utils.data import Dataset  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments  # noqa: E402

from runtime.adapters.huggingface import ReplicaTrainer  # noqa: E402

WORDS, LENGTH, SAMPLES = 64, 32, 2400


class Text(Dataset[dict[str, torch.Tensor]]):
    """Rows in which each word follows from the one before, mostly."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        steps = torch.randint(1, 4, (SAMPLES, 1), generator=draw).expand(-1, LENGTH).cumsum(1)
        noise = torch.rand(SAMPLES, LENGTH, generator=draw) < 0.1
        self.rows = (steps + noise) % WORDS

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, sample: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[sample], "labels": self.rows[sample]}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    words = {"vocab_size": WORDS, "n_positions": LENGTH, "bos_token_id": 0, "eos_token_id": 0}
    arguments = TrainingArguments(
        tempfile.mkdtemp(prefix="train-"),
        per_device_train_batch_size=2,
        num_train_epochs=1000,
        learning_rate=3e-3,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    trainer = ReplicaTrainer(
        GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, **words)),
        arguments,
        train_dataset=Text(),
        job=job,
        tokens_per_sample=LENGTH,
    )
    trainer.train()


if __name__ == "__main__":
    main()
