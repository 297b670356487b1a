"""`python -m node_agent.diagnostics`: one test, its verdict as one JSON line. The agent runs it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from node_agent.collectors import HardwareUnknown
from node_agent.config import load_config
from node_agent.diagnostics.checks import CHECKS


def main() -> None:
    """Run the named test and print {"outcome", "detail"} as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m node_agent.diagnostics")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--test", choices=sorted(CHECKS), required=True)
    parser.add_argument("--level", type=int, default=1)
    arguments = parser.parse_args()
    try:
        outcome, detail = CHECKS[arguments.test](load_config(arguments.config), arguments.level)
    except HardwareUnknown as error:
        outcome, detail = "failed", str(error)
    sys.stdout.write(json.dumps({"outcome": outcome, "detail": detail}) + "\n")


if __name__ == "__main__":
    main()
