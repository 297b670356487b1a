"""The node's own examination, asked for by a command before the node is trusted with work.

Each test runs in a child of its own, behind a deadline: one that hangs has failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

#: Test name -> seconds it may take at level 1; level 2 may take three times that.
DEADLINES_S = {
    "cards": 30.0,
    "ecc": 30.0,
    "remapping": 30.0,
    "memory": 10.0,
    "disk": 10.0,
    "compute": 10.0,
    "kernel_log": 10.0,
}


def diagnose(config_path: Path, level: int) -> dict[str, Any]:
    """Run all tests. `passed` only if every one passed: a skipped test is not a passed one."""
    tests = [_run(config_path, name, level) for name in DEADLINES_S]
    return {"passed": all(test["outcome"] == "passed" for test in tests), "tests": tests}


def _run(config_path: Path, name: str, level: int) -> dict[str, Any]:
    deadline = DEADLINES_S[name] * (1 if level == 1 else 3)
    arguments = ["--config", str(config_path), "--test", name, "--level", str(level)]
    started = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "node_agent.diagnostics", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        output, errors = child.communicate(timeout=deadline)
        verdict = json.loads(output)
    except subprocess.TimeoutExpired:
        # Not waited for: a child in uninterruptible sleep does not die, and must not hold us.
        child.kill()
        verdict = {"outcome": "failed", "detail": f"no answer in {deadline:g} s"}
    except ValueError:
        detail = errors.decode(errors="replace").strip()[-500:]
        verdict = {"outcome": "failed", "detail": f"the test itself broke: {detail}"}
    seconds = round(time.monotonic() - started, 3)
    return {
        "name": name,
        "outcome": verdict["outcome"],
        "detail": verdict["detail"],
        "seconds": seconds,
    }
