"""What a step costs while nothing fails: our replicas beside plain DistributedDataParallel.

    python benchmarks/healthy_step.py [--mode cover|reproducible] [--rounds 30] [--replicas 4]

The same four processes train the same model on the same samples both ways, in turns of 20 steps, so
that both meet the same machine. DDP beside itself (A/A) says what the machine's noise makes of it.
The target: the 95% interval of ours over DDP within 1%, seen beside the interval of DDP over DDP.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

STEPS = 20  # in each turn
WARM_UP = 2  # turns that are not counted
SHARDS, SHARD_SIZE, SAMPLES, CONTEXT = 12, 2, 2400, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", default="cover", choices=["cover", "reproducible"])
    parser.add_argument("--rounds", type=int, default=30, help="pairs of turns")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    if "DRYDOCK_REPLICA" in os.environ:
        train(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        report(options, run(options, Path(folder)))


# --- the processes --------------------------------------------------------------------------------


def run(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Start a coordinator and the replicas; the turns' times as the first replica saw them."""
    token = os.urandom(8).hex()
    common = {
        **os.environ,
        "DRYDOCK_TOKEN": token,
        "DRYDOCK_WORLD_REPLICAS": str(options.replicas),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    port_file = folder / "port"
    words = ["--job", "bench", "--state-dir", str(folder), "--port-file", str(port_file)]
    coordinator = subprocess.Popen(
        [sys.executable, "-m", "runtime.replica.coordinator", *words], env=common
    )
    started: list[subprocess.Popen[bytes]] = []
    try:
        while not port_file.exists():
            threading.Event().wait(0.05)
        for replica in range(options.replicas):
            own = {
                "DRYDOCK_JOB": "bench",
                "DRYDOCK_REPLICA": str(replica),
                "DRYDOCK_COORDINATOR": f"127.0.0.1:{port_file.read_text().strip()}",
                "DRYDOCK_STATE_DIR": str(folder / "state"),
                "BENCH_FOLDER": str(folder),
            }
            started.append(subprocess.Popen([sys.executable, *sys.argv], env={**common, **own}))
        if any(process.wait() for process in started):
            raise SystemExit("a replica failed; see above")
        times: dict[str, list[float]] = json.loads((folder / "times.json").read_text())
        return times
    finally:
        for process in [*started, coordinator]:
            process.kill()


def train(options: argparse.Namespace) -> None:
    """One replica: turns of DDP and of ours, in the same order everywhere."""
    os.environ["DRYDOCK_OPTIONS"] = json.dumps({"dropout": 0.0})
    import torch
    from torch import distributed

    import runtime
    from runtime.torture import script

    torch.set_num_threads(1)
    folder, rank = Path(os.environ["BENCH_FOLDER"]), int(os.environ["DRYDOCK_REPLICA"])
    torch.manual_seed(0)
    text = script.made_up(SAMPLES, CONTEXT)
    ours, theirs = (script.Transformer(options.width, 2, CONTEXT) for _ in range(2))
    batches = runtime.Batches(samples=SAMPLES, shards=SHARDS, shard_size=SHARD_SIZE)
    replica = runtime.ReplicaGroup(
        script.job, ours, script.AdamW([*ours.parameters()], 1e-3), batches,
        runtime.Checkpointer(script.job, every_s=3600), mode=options.mode,
    )  # fmt: skip
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/ddp", rank=rank, world_size=options.replicas
    )
    wrapped = torch.nn.parallel.DistributedDataParallel(theirs)
    optimizer = script.AdamW([*theirs.parameters()], 1e-3)

    def step_of_ddp(step: int) -> None:
        shards = range(rank * SHARDS // options.replicas, (rank + 1) * SHARDS // options.replicas)
        for index in shards:
            rows = text[list(batches.shard(step, index).ids)]
            wrapped.require_backward_grad_sync = index == shards[-1]
            (wrapped(rows[:, :-1], rows[:, 1:]) / len(shards)).backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        theirs.zero_grad()

    with replica:
        turn_of_ours = turns(replica, ours, text)
        times: dict[str, list[float]] = {"ddp": [], "ours": []}
        for turn in range(2 * (options.rounds + WARM_UP)):
            distributed.barrier()
            began = time.perf_counter()
            if turn % 2:
                next(turn_of_ours)
            else:
                for step in range(STEPS):
                    step_of_ddp(turn * STEPS + step)
            times["ours" if turn % 2 else "ddp"].append((time.perf_counter() - began) / STEPS)
        distributed.barrier()
    if rank == 0:
        counted = {kind: values[WARM_UP:] for kind, values in times.items()}
        (folder / "times.json").write_text(json.dumps(counted))


def turns(replica: Any, model: Any, text: Any) -> Iterator[None]:
    """Each `next` trains STEPS steps."""
    reached = STEPS
    for shard in replica:
        if shard.step >= reached:
            reached += STEPS
            yield
        rows = text[list(shard.ids)]
        replica.backward(model(rows[:, :-1], rows[:, 1:]))


# --- what came of it ------------------------------------------------------------------------------


def report(options: argparse.Namespace, times: dict[str, list[float]]) -> None:
    ddp, ours = times["ddp"], times["ours"]
    # Each turn is compared with the mean of the two that it lies between.
    against_ddp = [b / ((a + c) / 2) for (a, c), b in zip(pairwise(ddp), ours, strict=False)]
    against_itself = [b / ((a + c) / 2) for a, b, c in zip(ddp, ddp[1:], ddp[2:], strict=False)]
    print(f"step of plain DDP   {statistics.median(ddp) * 1e3:7.2f} ms")
    print(f"step of ours        {statistics.median(ours) * 1e3:7.2f} ms   ({options.mode})")
    for name, ratios in (("ours over DDP", against_ddp), ("DDP over DDP", against_itself)):
        low, high = interval(ratios)
        middle = statistics.median(ratios)
        print(f"{name:<19} {middle - 1:+7.2%}     95% interval {low - 1:+.2%} to {high - 1:+.2%}")


def interval(ratios: list[float], draws: int = 2000) -> tuple[float, float]:
    """The 95% interval of the median, by drawing again from what was seen."""
    chance = random.Random(0)  # noqa: S311 - a figure, not a secret
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(draws * 0.025)], medians[int(draws * 0.975)]


if __name__ == "__main__":
    main()
