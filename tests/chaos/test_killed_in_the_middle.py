"""Each process killed in the middle of a hardware fault: the fault is mended all the same, once."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

from tests.product import Product

pytestmark = pytest.mark.e2e

Choose = Callable[[psutil.Process], bool]


def _argument(*words: str) -> Choose:
    return lambda process: all(word in process.cmdline() for word in words)


def _named(name: str) -> Choose:
    return lambda process: process.name() == name


#: By kind, which processes of the product belong to it.
KINDS: dict[str, Choose] = {
    "web": _argument("controlplane.wsgi:application"),
    "ingest": _argument("controlplane.ingest.app:app"),
    "keeper": _argument("manage.py", "keeper"),
    "worker": _argument("workers.celery:app"),
    "agents": _argument("-m", "node_agent"),
    "redis": _named("redis-server"),
    "postgres": _named("postgres"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_mended_once_whichever_process_is_killed_meanwhile(
    product: Product, kind: str
) -> None:
    play = product.begin("xid79")
    victims = [process for process in product.processes() if KINDS[kind](process)]
    for process in victims:
        process.kill()
    for data in product.home.glob("redis/*.rdb"):
        data.unlink()  # Redis keeps nothing that matters: it may lose all it has
    result = product.end(play)

    assert victims
    assert result["problems"] == []
    assert result["facts"]["boots"] == 1
    assert result["samples"] == {"lost": 0, "duplicated": 0}
