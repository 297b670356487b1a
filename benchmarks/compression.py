"""What compressing a checkpoint saves: zstd, with and without the one before as its base.

    pip install 'drydock-fleet[zstd]'
    python benchmarks/compression.py [--steps 100] [--apart 10,100,1000] [--folder DIR]

A small transformer learns a repeated sequence with AdamW; its state is taken after so many steps,
and so many later. Each kind of tensor is compressed as it is, with its bytes sorted by
significance, and so after an exclusive or with the first state. Beside each ratio stands the speed
of one core.

Then the first two are saved in turns by the real writer: to the disk as it is, and to one that is
throttled, each with chunks packed where that is measured to pay, and never. The first save of each,
by which the writer learns how quick the disk is, does not count.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.checkpoints import throttled
from benchmarks.checkpoints.ours import AtOnce
from runtime.checkpoint import compression, store
from runtime.checkpoint.tiers import Packing
from runtime.checkpoint.writer_handle import WRITER_MODULE
from runtime.image import chunks_of
from runtime.snapshot import bytes_of

WIDTH, LAYERS, WORDS, LENGTH, BATCH = 256, 4, 512, 32, 4
RARE = 8_000  # words, most of which are never seen
SPEEDS: tuple[float | None, ...] = (None, 200, 100, 50)  # MB/s; None: as quick as the disk is
SAVES = 4  # of each, after the first

State = dict[str, list[torch.Tensor]]


class Tiny(torch.nn.Module):
    """A decoder of some 4 million weights, and those of words that it never sees."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(words, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS)
        self.out = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        mask = mask.to(self.out.weight.dtype)
        found: torch.Tensor = self.out(self.layers(self.words(words), mask=mask, is_causal=True))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="before the first state is taken")
    parser.add_argument(
        "--apart", default="10,100,1000", help="steps from it to each of the others"
    )
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    given = parser.parse_args()
    apart = [int(one) for one in given.apart.split(",")]
    columns = ["plain", "sorted", *(f"delta, {one}" for one in apart)]
    level = compression.LEVEL
    print(f"zstd level {level}, one core; a state after {given.steps} steps, and later ones")
    print(" " * 24 + "MB | " + " | ".join(f"{column:>11}" for column in columns))
    states: dict[str, list[State]] = {}
    for name, words, dtype in (
        ("float32", WORDS, torch.float32),
        ("bfloat16", WORDS, torch.bfloat16),
        ("rare words", RARE, torch.float32),
    ):
        states[name] = trained(words, dtype, given.steps, apart)
        for line in rows(name, states[name]):
            print(line, flush=True)
    print("\nsaved to a disk of   | state         MB |  durable | packed:  durable   time  ratio")
    for speed in SPEEDS:
        for name, (before, after, *_) in states.items():
            print(compared(speed, name, before, after, given.folder), flush=True)


# --- one core -------------------------------------------------------------------------------------


def rows(name: str, states: list[State]) -> Iterator[str]:
    """Ratio and MB/s, for each kind of tensor."""
    first, *later = states
    for kind in first:
        size, old, new = (
            first[kind][0].element_size(),
            as_bytes(first[kind]),
            as_bytes(later[0][kind]),
        )
        cells = [packed(new, 1), packed(new, size)]
        cells += [packed(as_bytes(one[kind]), size, old) for one in later]
        yield f"{name:<11}{kind:<9} {new.numel() / 1e6:5.0f} | " + " | ".join(cells)


def packed(new: torch.Tensor, size: int, old: torch.Tensor | None = None) -> str:
    began = time.perf_counter()
    data = bytes_of(new if old is None else new ^ old)
    stored = sum(len(compression.pack(chunk, size)) for chunk in chunks_of(data))
    return f"{stored / len(data):5.2f} {len(data) / (time.perf_counter() - began) / 1e6:5.0f}"


def as_bytes(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([one.flatten().view(torch.uint8) for one in tensors])


# --- saves ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """At the median."""

    durable_s: float
    ratio: float


def compared(
    speed: float | None, name: str, before: State, after: State, folder: Path | None
) -> str:
    plain, other = (saved(speed, before, after, pack, folder) for pack in (False, "auto"))
    size = sum(one.numel() * one.element_size() for kind in after.values() for one in kind)
    disk = "full speed" if speed is None else f"{speed:g} MB/s"
    return (
        f"{disk:<20} | {name:<10} {size / 1e6:5.0f} | {plain.durable_s:6.2f} s | "
        f"{other.durable_s:15.2f} s  {other.durable_s / plain.durable_s - 1:+5.0%} "
        f"{other.ratio:6.2f}"
    )


def saved(
    speed: float | None, before: State, after: State, pack: Packing, folder: Path | None
) -> Saved:
    if speed is not None:
        os.environ[WRITER_MODULE] = throttled.__name__
        os.environ[throttled.ENV_MB_S] = str(speed)
    place = Path(tempfile.mkdtemp(prefix="drydock-compression-", dir=folder))
    turns = [
        {f"{kind}.{number}": one for kind, some in state.items() for number, one in enumerate(some)}
        for state in (before, after)
    ]
    state = {name: one.clone() for name, one in turns[0].items()}
    saver = AtOnce(state, place, pack)
    durable, ratios = [], []
    try:
        for number in range(1 + SAVES):
            for name, tensor in turns[number % 2].items():
                state[name].copy_(tensor)
            saver.prepare()
            began = time.monotonic()
            kept = saver.save(number).done.result()
            durable.append(kept.durable - began)
            if kept.path is None:
                raise SystemExit("it is nowhere")
            manifest = store.manifest_of(kept.path)
            ratios.append(manifest.stored / manifest.size)
    finally:
        saver.close()
        shutil.rmtree(place, ignore_errors=True)
        os.environ.pop(WRITER_MODULE, None)
    return Saved(statistics.median(durable[1:]), statistics.median(ratios[1:]))


# --- states ---------------------------------------------------------------------------------------


def trained(words: int, dtype: torch.dtype, steps: int, apart: list[int]) -> list[State]:
    """The states after so many steps, and so many later."""
    torch.manual_seed(3)
    model = Tiny(words).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    found = []
    for step in range(1, steps + max(apart) + 1):
        start = torch.randint(0, WORDS, (BATCH, 1))
        text = (start + 7 * torch.arange(LENGTH + 1)) % WORDS
        logits = model(text[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step - steps in (0, *apart):
            found.append(state_of(model, optimizer))
    return found


def state_of(model: Tiny, optimizer: torch.optim.Optimizer) -> State:
    moments = [optimizer.state[one] for one in model.parameters()]
    return {
        "weights": [one.detach().clone() for one in model.parameters()],
        "moment 1": [one["exp_avg"].clone() for one in moments],
        "moment 2": [one["exp_avg_sq"].clone() for one in moments],
    }


if __name__ == "__main__":
    main()
