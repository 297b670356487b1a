"""Resetting real cards with the vendor's own tool, behind a deadline.

NVML has no such call. The tool is a child that is killed when its time is up or its agent has died;
no shell is involved.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from node_agent import procfs
from node_agent.collectors import ResetFailed
from node_agent.log import log

DEADLINE_S = 60.0
#: Marks the child, so that the next agent finds one that this one left behind.
ENV_RESET = "DRYDOCK_RESET"


def reset(tool: Path, uuids: list[str], deadline_s: float = DEADLINE_S) -> None:
    """Reset these cards in one go: cards joined by NVLink can only be reset together.

    Raises ResetFailed.
    """
    argv = [str(tool), "--gpu-reset", "-i", ",".join(uuids)]
    try:
        child = subprocess.Popen(
            argv,
            env={**os.environ, ENV_RESET: str(tool)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise ResetFailed(
            f"{tool}: {error.strerror}: install it, or name it as `nvidia_smi`"
        ) from error
    try:
        output, _ = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired as error:
        # Not waited for: a child in uninterruptible sleep does not die, and must not hold us.
        child.kill()
        raise ResetFailed(f"{tool} did not end in {deadline_s:g} s: reboot the node") from error
    if child.returncode != 0:
        said = output.decode(errors="replace").strip()[-500:]
        raise ResetFailed(
            f"{tool} ended with status {child.returncode}: {said or 'it said nothing'}"
            " (if a process uses the card, stop it; otherwise reboot the node)"
        )


def end_left_over(tool: Path) -> None:
    """Kill a reset that an agent before this one had under way when it died."""
    for process in procfs.with_environment(ENV_RESET, str(tool)):
        log("reset_left_over", "warning", pid=process.pid)
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
