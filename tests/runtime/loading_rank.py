"""A rank with a socket and workers, to be killed: prints what to look for, then works on."""

from __future__ import annotations

import os
import socket
import sys
import threading

import torch

from runtime.data import Batches
from tests.runtime.datasets import Noisy


def main() -> None:
    torch.set_num_threads(1)
    listening = socket.create_server(("127.0.0.1", 0))
    batches = Batches(Noisy(), shards=4, workers=2)
    batches.open(lambda kind, text: sys.exit(f"{kind}: {text}"))
    batches.expect(0, [0, 1])
    pause, told, step = threading.Event(), False, 0
    while True:
        pids = {pid for k in (0, 1) for pid in batches.shard(step, k).data[1].tolist()}
        if not told and len(pids - {os.getpid()}) == 2:
            told_of = [*pids, os.fstat(listening.fileno()).st_ino]
            sys.stdout.write(" ".join(map(str, told_of)) + "\n")
            sys.stdout.flush()
            told = True
        pause.wait(0.02)
        step += 1


if __name__ == "__main__":
    main()
