"""The checkpoint holder of a node, with the injector of the runner in it.

It may be struck while it is given a state or gives one. It ends with the runner, whoever started
it. Ranks learn of it through DRYDOCK_CHECKPOINT_HOLDER. Imports no torch.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.checkpoint import holder
from runtime.client import ENV_REPLICA
from runtime.torture.injector import ENV_FOLDER, Injector, around
from runtime.torture.kinds import RECALL, RECEIVE

MODULE = "runtime.torture.holder"  # under whatever name it was imported
#: The process id of the runner. Ranks start a holder anew that died, so it may be nobody's child.
ENV_RUNNER = "DRYDOCK_TORTURE_RUNNER"
#: Where each phase begins: by then it has made room for a state, or found the one that it gives.
BEGINNINGS = {RECEIVE: "receive_chunk", RECALL: "send_chunk"}


def main() -> None:
    """Run the checkpoint holder with the injector in it, until the runner ends."""
    threading.Thread(target=end_with, args=(int(os.environ[ENV_RUNNER]),), daemon=True).start()
    ours = Injector(Path(os.environ[ENV_FOLDER]), name_of(int(os.environ[ENV_REPLICA])), 0)
    for phase, name in BEGINNINGS.items():
        come_to(ours, phase, name)
    holder.main()


def come_to(injector: Injector, phase: str, name: str) -> None:
    """Have the injector come to `phase` whenever the holder's function `name` begins."""

    def begin(inner: Callable[..., Any], *given: Any) -> Any:
        injector.at(phase)
        return inner(*given)

    around(holder, name, begin)


def name_of(replica: int) -> str:
    """Of the holder on this replica's node: in its orders and events, and of its log."""
    return f"holder{replica}"


def end_with(runner: int) -> None:
    """Wait for its end, and go too."""
    try:
        gone = os.pidfd_open(runner)
    except ProcessLookupError:
        os._exit(1)
    select.select([gone], [], [])
    os._exit(1)


if __name__ == "__main__":
    main()
