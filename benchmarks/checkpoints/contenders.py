"""Who is compared, and which interpreter runs whom. Imports no torch."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from benchmarks.rivals import environments

#: All but torchsnapshot run in the first; DCP's process and safetensors need NumPy.
SAFETENSORS, TORCHSNAPSHOT, NUMPY = "safetensors==0.7.0", "torchsnapshot==0.1.0", "numpy==2.3.5"


@dataclass(frozen=True)
class Contender:
    name: str
    worker: str  # how `worker.py` calls it
    requirement: str = SAFETENSORS
    limit: bool = False  # no rival, but what bounds all of them


MEMCPY = Contender("warm memcpy", "memcpy", limit=True)
DISK = Contender("disk, O_DIRECT", "disk", limit=True)
DISK_OF_STATE = Contender("disk, all of a state", "disk-of-state", limit=True)
OVERLAPPED = Contender("ours, beside the next step", "overlapped")
AT_ONCE = Contender("ours, copied at once", "at-once")
OURS = (OVERLAPPED, AT_ONCE)
ALL = (
    MEMCPY,
    DISK,
    DISK_OF_STATE,
    *OURS,
    Contender("torch.save + fsync", "torch.save"),
    Contender("safetensors + fsync", "safetensors"),
    Contender("DCP save", "dcp"),
    Contender("DCP async, thread", "dcp-thread"),
    Contender("DCP async, process", "dcp-process"),
    Contender("DCP async, thread, staged", "dcp-thread-staged"),
    Contender("DCP async, process, staged", "dcp-process-staged"),
    Contender("torchsnapshot async + fsync", "torchsnapshot", TORCHSNAPSHOT),
)


def python_of(contender: Contender) -> str:
    """The interpreter with what it needs. Raises RuntimeError if that cannot be installed."""
    python = environments.python_of(contender.requirement)
    if subprocess.run([python, "-c", "import numpy"], capture_output=True).returncode:
        command = [python, "-m", "pip", "install", "--quiet", NUMPY]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{NUMPY} cannot be installed: {done.stderr.strip()[-500:]}")
    return python
