"""A process that has imported torch and forks replicas on order, so that a start takes no seconds.

`python -m benchmarks.rivals.nursery train_ours`: an order is a line of JSON, the answer the new
process's id. It must have one thread when it forks, and never computes itself.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def main() -> None:
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    worker = importlib.import_module(f"benchmarks.rivals.{sys.argv[1]}")
    _import_the_rest()
    if len([*Path("/proc/self/task").iterdir()]) > 1:
        raise RuntimeError("the nursery has threads, which a fork would lose; import less")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _live(worker, json.loads(line))
        print(child, flush=True)


def _import_the_rest() -> None:
    """What torch imports when an optimizer is first made takes longer than torch itself."""
    import torch

    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight], fused=True).step()


def _live(worker: Any, order: dict[str, Any]) -> None:
    """Be one replica, and end with the nursery."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.stdin.close()
    os.dup2(2, 1)  # answers are the nursery's
    os.environ.update(order["environment"])
    from benchmarks.rivals.task import Model, Task
    from benchmarks.rivals.training import Driver

    task = Task(**{**order["task"], "model": Model(**order["task"]["model"])})
    driver = Driver(task)
    status = 1
    try:
        worker.train(task, driver)
        status = 0
    except BaseException as error:
        driver.tell("failed", error=f"{type(error).__name__}: {error}")
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stderr.flush()
        threading.excepthook = lambda _arguments: None  # threads of a library that still run
        os._exit(status)


if __name__ == "__main__":
    main()
