"""What a node's memory keeps, for the command line: its holder is asked, as by a rank that loads.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from runtime import client
from runtime.checkpoint import peer
from runtime.checkpoint.facts import saved_when
from runtime.checkpoint.holder import LOCK
from runtime.checkpoint.progress import Bar
from runtime.image import Damaged

SCHEME = "holder://"
_ADDRESS = re.compile(r"[^/\s]+:\d{1,5}")


def address_of(path: Path | str) -> str | None:
    """Of the holder that this means, by its URL, holder://HOST:PORT, or by its folder on this node;
    None if it means none. Raises ValueError if that is no address, or none runs there; OSError."""
    if isinstance(path, str):
        if not path.startswith(SCHEME):
            return None
        if _ADDRESS.fullmatch(address := path.removeprefix(SCHEME)) is None:
            raise ValueError(f"{path} is no address of a holder: give {SCHEME}HOST:PORT")
        return address
    if not (path / LOCK).is_file():
        return None
    os.close(os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC))  # else it cannot be told who runs
    if not (found := peer.running(path)):
        raise ValueError(f"no holder runs in {path}: what one kept there is gone with it")
    return found


def listed(
    address: str, bar: Callable[[str, int], AbstractContextManager[Bar]] | None = None
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Of each rank's state there what it is, for a program and for a person; with a `bar` also
    whether it is what was given to be kept: every byte is read. Raises OSError, ValueError."""
    token = os.environ.get(client.ENV_TOKEN, "")
    if not token:
        raise ValueError(
            f"{client.ENV_TOKEN} is not set: give the job's token, as its ranks have it; a holder "
            "answers nobody else"
        )
    for one in sorted(peer.held(address, token), key=_newest_first):
        answer = {"path": f"{SCHEME}{address}", **one, "findings": [], "not_checked": ""}
        word = ""
        if bar is not None:
            with bar(f"{one['save']} of rank {one['rank']}", int(one["bytes"])) as shown:
                word = _verified(address, token, one, answer, shown)
        line = (
            f"step {one['step']:<11} {saved_when(one['facts'])}  {one['bytes']:>15,} bytes  "
            f"rank {one['rank']} of {one['ranks']}  {one['digest']}{word}"
        )
        why = answer["findings"] or [answer["not_checked"]]
        yield answer, [line, *(f"  {flaw}" for flaw in why if flaw)]


def _verified(
    address: str, token: str, one: dict[str, Any], answer: dict[str, Any], shown: Bar
) -> str:
    """What is to be said of it; the `answer` has the details."""
    try:
        peer.read(address, token, one["rank"], one["save"], one["digest"], shown)
    except Damaged as error:
        answer["findings"] = [str(error)]
        return "  DAMAGED"
    except OSError as error:
        with contextlib.suppress(OSError):
            if one not in peer.held(address, token):
                answer["removed"] = True
                return "  replaced meanwhile"
        answer["not_checked"] = str(error)
        return "  NOT CHECKED"
    return "  well"


def _newest_first(one: dict[str, Any]) -> tuple[int, int, str, int]:
    return -one["epoch"], -one["step"], one["run"], one["rank"]
