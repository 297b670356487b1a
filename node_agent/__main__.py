"""`python -m node_agent --config FILE`: the daemon of one node."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from node_agent.agent import Agent
from node_agent.config import ConfigError
from node_agent.identity import CannotEnrol
from node_agent.log import log

EX_CONFIG = 78


def main() -> int:
    """Run the agent until SIGTERM or SIGINT; the exit status is 0, or 78 if it cannot start."""
    parser = argparse.ArgumentParser(prog="python -m node_agent", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML file, see config.py")
    arguments = parser.parse_args()
    try:
        agent = Agent(arguments.config)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: agent.stop())
        agent.run()
    except (ConfigError, CannotEnrol) as error:
        log("cannot_start", "error", error=str(error))
        return EX_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
