"""The simulated BMC of a simulated node, which speaks Redfish: `python -m node_agent.chassis`.

It is out of band: it works whatever the node's agent does. It uses the standard library only, and
is small, for eight of these run beside a training job. `machine` has what it switches; `bmc` has
its HTTP server.
"""

from __future__ import annotations

import argparse
import ctypes
import signal
import sys
import threading
from pathlib import Path

from node_agent.log import log
from node_agent.machine import Machine, sweep

PR_SET_CHILD_SUBREAPER = 36
EX_CONFIG = 78


def main() -> int:
    """Run the simulated BMC until SIGTERM or SIGINT; with --sweep only kill what was left behind.

    The exit status is 0, 78 (EX_CONFIG of sysexits.h) if the BMC password cannot be read, and 2 for
    missing options. Raises OSError if the process cannot become a subreaper or cannot listen.
    """
    parser = argparse.ArgumentParser(prog="python -m node_agent.chassis", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="the node's folder")
    parser.add_argument("--sweep", action="store_true", help="only kill what was left behind")
    parser.add_argument("--listen", metavar="ADDRESS:PORT")
    parser.add_argument("--name")
    parser.add_argument("--agent-config", type=Path)
    parser.add_argument("--shutdown-grace", type=float, default=15.0, metavar="SECONDS")
    arguments = parser.parse_args()
    folder = arguments.dir.resolve()
    sweep(folder)
    if arguments.sweep:
        return 0
    if not (arguments.listen and arguments.name and arguments.agent_config):
        parser.error("--listen, --name and --agent-config are needed")
    return _run(folder, arguments)


def _run(folder: Path, arguments: argparse.Namespace) -> int:
    # The BMC speaks plain HTTP on loopback: without OpenSSL the process is a third smaller.
    for module in ("ssl", "_hashlib"):
        sys.modules[module] = None  # type: ignore[assignment]
    from node_agent import bmc

    try:
        password = bmc.read_password(folder / "bmc-password")
    except bmc.PasswordError as error:
        log("cannot_start", "error", error=str(error))
        return EX_CONFIG
    # Taken by `sigwait` below; blocked before any thread starts, unblocked again in children.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    machine = Machine(folder, arguments.name, arguments.agent_config.resolve())
    machine.power_on()
    threading.Thread(target=machine.reap, daemon=True).start()
    host, _, port = arguments.listen.rpartition(":")
    server = bmc.server(machine, (host, int(port)), password)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    log("chassis_started", name=arguments.name, listen=arguments.listen)
    signal.sigwait(ends)
    server.shutdown()
    machine.shut_down(arguments.shutdown_grace)
    log("chassis_stopped", name=arguments.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
