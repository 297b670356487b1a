"""Both failures against the running product: nobody touches anything, and all comes true."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Product

pytestmark = pytest.mark.e2e

MOMENTS = {"seen", "recorded", "incident", "survivors_commit", "replica_commit", "resolved"}


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("kill-process", MOMENTS),
        ("kill-node", MOMENTS | {"quarantined", "validated"}),
    ],
)
def test_a_scenario_comes_true(product: Product, name: str, moments: set[str]) -> None:
    result = product.scenario(name)
    assert result["problems"] == []
    assert result["ok"]
    assert result["scenario"] == name
    assert set(result["seconds"]) == moments
    assert result["samples"] == {"lost": 0, "duplicated": 0}
    assert result["incident"].startswith(product.url)


def test_a_scenario_that_nobody_knows_is_refused(product: Product) -> None:
    done = product.manage("scenario", "make-coffee")
    assert done.returncode != 0
    assert "kill-process" in done.stderr
