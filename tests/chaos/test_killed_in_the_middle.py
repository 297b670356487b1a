"""Each process killed in the middle of a hardware fault: the fault is mended all the same, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from tests.product import Product

pytestmark = pytest.mark.e2e

#: What runs of the control plane, by the names that `up` gives; and the agents of all nodes.
KINDS = ("web", "ingest", "keeper", "worker", "agents", "redis", "postgres")


def processes_of(product: Product, kind: str) -> list[psutil.Process]:
    """None while one that ended is being started again."""
    if kind == "agents":
        return [p for p in product.processes() if "node_agent" in words_of(p)]
    with suppress(psutil.NoSuchProcess, FileNotFoundError):
        record = json.loads((product.home / "pids" / f"{kind}.json").read_text())
        main = psutil.Process(record["pid"])
        return [main, *main.children(recursive=True)]
    return []


def words_of(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess):
        words: list[str] = process.cmdline()
        return words
    return []  # it ended since it was found


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_mended_once_whichever_process_is_killed_meanwhile(
    product: Product, kind: str, eventually: Callable[..., list[psutil.Process]]
) -> None:
    play = product.begin("xid79")
    victims = eventually(lambda: processes_of(product, kind), 120, f"a process of {kind} runs")
    for process in victims:
        with suppress(psutil.NoSuchProcess):  # its parent took it along
            process.kill()
    for data in product.home.glob("redis/*.rdb"):
        data.unlink()  # Redis keeps nothing that matters: it may lose all it has
    result = product.end(play)

    assert result["problems"] == []
    assert result["facts"]["boots"] == 1
    assert result["samples"] == {"lost": 0, "duplicated": 0}
