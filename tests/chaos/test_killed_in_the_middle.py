"""Each process killed in the middle of a hardware fault: the fault is mended all the same, once."""

from __future__ import annotations

import json
from contextlib import suppress

import psutil
import pytest

from tests.product import Product

pytestmark = pytest.mark.e2e

#: What runs of the control plane, by the names that `up` gives; and the agents of all nodes.
KINDS = ("web", "ingest", "keeper", "worker", "agents", "redis", "postgres")


def processes_of(product: Product, kind: str) -> list[psutil.Process]:
    if kind == "agents":
        return [p for p in product.processes() if "node_agent" in p.cmdline()]
    record = json.loads((product.home / "pids" / f"{kind}.json").read_text())
    main = psutil.Process(record["pid"])
    return [main, *main.children(recursive=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_mended_once_whichever_process_is_killed_meanwhile(
    product: Product, kind: str
) -> None:
    play = product.begin("xid79")
    victims = processes_of(product, kind)
    for process in victims:
        with suppress(psutil.NoSuchProcess):  # its parent took it along
            process.kill()
    for data in product.home.glob("redis/*.rdb"):
        data.unlink()  # Redis keeps nothing that matters: it may lose all it has
    result = product.end(play)

    assert victims
    assert result["problems"] == []
    assert result["facts"]["boots"] == 1
    assert result["samples"] == {"lost": 0, "duplicated": 0}
