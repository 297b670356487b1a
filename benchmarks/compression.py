"""What compressing a checkpoint would save: zstd, with and without the one before as its base.

    pip install zstandard
    python benchmarks/compression.py [--steps 300] [--apart 10]

A small transformer learns a repeated sequence with AdamW; its state is taken twice, so many steps
apart. Each kind of tensor is compressed as it is, with its bytes sorted by significance, and so
after an exclusive or with the earlier state. Beside each ratio stands the speed of one core, and
below what the whole state would come to: a tier gains only if it writes slower than that core
compresses what is saved.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import zstandard

from runtime.snapshot import bytes_of

LEVEL = 1  # the quickest that is no mere copy
WIDTH, LAYERS, WORDS, LENGTH, BATCH = 256, 4, 512, 64, 8

State = dict[str, list[torch.Tensor]]


class Tiny(torch.nn.Module):
    """A decoder of some 4 million weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS)
        self.out = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        found: torch.Tensor = self.out(self.layers(self.words(words), mask=mask, is_causal=True))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="before the first state is taken")
    parser.add_argument("--apart", type=int, default=10, help="steps between the two")
    given = parser.parse_args()
    before, after = trained(given.steps, given.apart)
    ways: dict[str, Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
        "plain": lambda new, _old, _size: new,
        "sorted": lambda new, _old, size: by_significance(new, size),
        "delta": lambda new, old, size: by_significance(new ^ old, size),
    }
    print(f"zstd level {LEVEL}, one core; states after {given.steps} steps and {given.apart} more")
    print("kind              MB | " + " | ".join(f"{way:>6}: ratio  MB/s" for way in ways))
    whole = dict.fromkeys(ways, 0.0)
    seconds = dict.fromkeys(ways, 0.0)
    size = 0
    for kind in after:
        new, old = as_bytes(after[kind]), as_bytes(before[kind])
        cells = []
        for way, prepared in ways.items():
            began = time.perf_counter()
            data = bytes_of(prepared(new, old, after[kind][0].element_size()))
            packed = len(zstandard.ZstdCompressor(LEVEL).compress(data))
            took = time.perf_counter() - began
            cells.append(f"{new.numel() / packed:12.2f} {new.numel() / took / 1e6:6.0f}")
            if kind != "weights, bfloat16":  # which a state has instead of float32, not beside it
                whole[way] += packed
                seconds[way] += took
        size += new.numel() * (kind != "weights, bfloat16")
        print(f"{kind:17} {new.numel() / 1e6:3.0f} | " + " | ".join(cells))
    for way in ways:
        ratio, speed = size / whole[way], size / seconds[way] / 1e6
        pays = speed * (1 - 1 / ratio)
        print(
            f"whole state, {way}: 1 to {1 / ratio:.2f} at {speed:.0f} MB/s; "
            f"one core pays for a tier that takes less than {pays:.0f} MB/s"
        )


def trained(steps: int, apart: int) -> tuple[State, State]:
    """The states after so many steps and so many more."""
    torch.manual_seed(3)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    found = []
    for step in range(steps + apart):
        start = torch.randint(0, WORDS, (BATCH, 1))
        words = (start + 7 * torch.arange(LENGTH + 1)) % WORDS
        logits = model(words[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step + 1 in (steps, steps + apart):
            found.append(state_of(model, optimizer))
    return found[0], found[1]


def state_of(model: Tiny, optimizer: torch.optim.Optimizer) -> State:
    weights = [one.detach().clone() for one in model.parameters()]
    moments = [optimizer.state[one] for one in model.parameters()]
    return {
        "weights, float32": weights,
        "weights, bfloat16": [one.bfloat16() for one in weights],
        "first moment": [one["exp_avg"].clone() for one in moments],
        "second moment": [one["exp_avg_sq"].clone() for one in moments],
    }


def as_bytes(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([one.flatten().view(torch.uint8) for one in tensors])


def by_significance(data: torch.Tensor, size: int) -> torch.Tensor:
    """All first bytes of the numbers, then all second ones: exponents lie together."""
    return data.reshape(-1, size).T.contiguous().flatten()


if __name__ == "__main__":
    main()
