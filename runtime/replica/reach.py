"""Who reaches whom: looked at by connecting, and whom to do without if not all reach all.

Standard library only.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

log = logging.getLogger("drydock.reach")

TRIES = 2  # one packet may be lost
#: A kernel answers within milliseconds, however busy its machine is; members wait for it.
TRY_S = 0.2
NEWCOMER_TRY_S = 1.0  # nobody waits for a newcomer
#: The end of a connection, or of the attempt to open one, that tells that nobody answered.
NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class Doubt:
    """Whether the members of an epoch reach each other, once one of them found another silent.

    All are asked; until all have answered nothing is decided.
    """

    def __init__(self) -> None:
        self.open = False
        self._unreached: dict[int, Collection[int]] = {}

    def answer(self, replica: int, unreached: Collection[int]) -> None:
        self._unreached[replica] = unreached

    def unasked(self, members: Collection[int]) -> list[int]:
        """Who has not answered."""
        return [replica for replica in members if replica not in self._unreached]

    def settle(self, steps: Mapping[int, int]) -> list[int]:
        """All have answered: whom of the members to do without. `steps`: how far each is."""
        return apart(self._unreached, steps)


def apart(unreached: Mapping[int, Collection[int]], steps: Mapping[int, int]) -> list[int]:
    """Whom to do without so that all others reach each other: those first who are out of most
    others' reach; of equals who is behind, then the later number."""
    pairs = {
        frozenset((one, other))
        for one, others in unreached.items()
        for other in others
        if one in steps and other in steps
    }
    found = []
    while pairs:
        lonely = {replica: sum(replica in pair for pair in pairs) for replica in steps}
        worst = max(steps, key=lambda replica: (lonely[replica], -steps[replica], replica))
        found.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return found


def waited_s(try_s: float) -> float:
    """For how long after the first try an answer to it counts."""
    return TRIES * try_s


def unreached(addresses: Sequence[str], try_s: float = TRY_S) -> list[int]:
    """The places of those whose machine does not answer; one that refuses answers, and of whom we
    could not ask, as without a free file descriptor, we say nothing.

    The first try is waited for beside the next: what was lost is sent again soon, and an answer
    that comes from far away still counts.
    """
    try:
        return _unreached(dict(enumerate(addresses)), try_s)
    except OSError as error:
        log.warning("peers_not_asked error=%s", error)
        return []


def _unreached(silent: dict[int, str], try_s: float) -> list[int]:
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for _ in range(TRIES):
            until = time.monotonic() + try_s
            for place, address in [*silent.items()]:
                connection = stack.enter_context(socket.socket())
                connection.setblocking(False)
                host, _, port = address.rpartition(":")
                code = connection.connect_ex((host, int(port)))
                if code == errno.EINPROGRESS:
                    selector.register(connection, selectors.EVENT_WRITE, place)
                elif code not in NO_ANSWER:  # it answered at once, or the fault is here
                    del silent[place]
            while silent and selector.get_map():
                left = until - time.monotonic()
                for place in _answers(selector, max(left, 0.0)):
                    silent.pop(place, None)
                if left <= 0:  # also where we stood still what came by then was looked at
                    break
    return sorted(silent)


def _answers(selector: selectors.BaseSelector, limit_s: float) -> list[int]:
    """Who answered, once anybody has or no answer will come to one of the tries."""
    found = []
    for key, _events in selector.select(limit_s):
        selector.unregister(key.fileobj)
        connection: socket.socket = key.fileobj  # type: ignore[assignment]
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in NO_ANSWER:
            found.append(key.data)
        connection.close()  # of a large job each takes as many as there are members
    return found
