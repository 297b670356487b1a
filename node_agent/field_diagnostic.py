"""The vendor's field diagnostic on one card: hours of tests that say whether it goes back.

The tool is whatever the agent's configuration names. Its exit status is the one of NVIDIA's own
(docs.nvidia.com/deploy/hw-field-diag, return codes): 0 passed, 1 failed, 2 to be run again once its
set-up is right. It is killed, with all that it started, when its time is up or its agent has died.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from node_agent import procfs
from node_agent.config import Config
from node_agent.launch import DIAGNOSTIC_LOG, launch
from node_agent.log import log
from node_agent.wire import GpuInfo

PASSED, FAILED = 0, 1
#: So much of what the tool wrote goes with the verdict, in bytes.
TAIL = 4000
#: Marks the tool and all that it starts, so that none of it is left behind.
ENV_MARK = "DRYDOCK_FIELD_DIAGNOSTIC"


class NoVerdict(Exception):
    """The diagnostic did not come to a verdict on the card; the message says why."""


def examine(config: Config, card: GpuInfo, limit_s: float) -> dict[str, Any]:
    """Run the diagnostic and wait for it: the result of `wire.FieldDiagnose`.

    No process may use the card. Raises NoVerdict.
    """
    argv = config.field_diagnostic_argv(card)
    path = config.state_dir / "logs" / DIAGNOSTIC_LOG.format(card.uuid)
    log("field_diagnostic_began", uuid=card.uuid, argv=argv)
    started = time.monotonic()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as output:
            environment = {**os.environ, ENV_MARK: _mark(config)}
            tool = launch(argv, config.workdir, environment, output)
    except OSError as error:
        raise NoVerdict(
            f"{error.filename or argv[0]}: {error.strerror}: set `field_diagnostic` right in the"
            " agent's configuration"
        ) from error
    try:
        status = tool.wait(limit_s)
    except subprocess.TimeoutExpired as error:
        tool.kill()
        raise NoVerdict(f"{argv[0]} did not end in {limit_s:g} s; see {path}") from error
    finally:
        end_left_over(config)
    said = _tail(path)
    if status not in (PASSED, FAILED):
        raise NoVerdict(
            f"{argv[0]} ended with status {status}, no verdict on the card: {said or 'no word'}"
        )
    return {
        "uuid": card.uuid,
        "outcome": "passed" if status == PASSED else "failed",
        "status": status,
        "seconds": round(time.monotonic() - started, 3),
        "log": str(path),
        "said": said,
    }


def end_left_over(config: Config) -> None:
    """Kill what a diagnostic has left behind, or an agent before this one with it."""
    killed: set[int] = set()
    while True:  # one that was just forked is seen the next time
        left = procfs.with_environment(ENV_MARK, _mark(config))
        if {process.pid for process in left} <= killed:
            return
        for process in left:
            log("field_diagnostic_left_over", "warning", pid=process.pid)
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        killed |= {process.pid for process in left}


def _mark(config: Config) -> str:
    return str(config.state_dir.resolve())


def _tail(path: Path) -> str:
    """The last words, without what no text holds: a progress bar draws with control characters."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        text = file.read().decode(errors="replace")
    kept = "".join(c if c.isprintable() or c == "\n" else " " for c in text.replace("\r", "\n"))
    return "\n".join(line.strip() for line in kept.splitlines() if line.strip())
