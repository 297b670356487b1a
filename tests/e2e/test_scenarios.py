"""Failures against the running product: nobody touches anything, and all comes true."""

from __future__ import annotations

import pytest

from tests.product import Product

pytestmark = pytest.mark.e2e

MOMENTS = {"seen", "recorded", "incident", "survivors_commit", "replica_commit", "resolved"}
OUT = {"quarantined", "validated", "returned"}


@pytest.mark.parametrize(
    ("name", "moments"),
    [
        ("kill-process", MOMENTS),
        ("kill-node", MOMENTS | OUT),
        ("warm-spare", MOMENTS | OUT),
        ("xid94", MOMENTS | OUT),
        ("ecc-drift", MOMENTS | OUT | {"checkpoint"}),
        ("nvlink-slow", MOMENTS | OUT | {"checkpoint"}),
        ("sram-errors", MOMENTS | OUT | {"checkpoint"}),
        ("app-error", MOMENTS),
        ("node-silent", MOMENTS | OUT),
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


def test_a_card_that_fails_again_goes_to_the_vendor_and_its_record_with_it(
    product: Product,
) -> None:
    result = product.scenario("second-failure")
    assert result["problems"] == []
    assert result["facts"]["repairs"] == ["reboot", "rma"]


def test_a_site_that_goes_quiet_is_one_incident_and_left_alone(product: Product) -> None:
    assert product.scenario("site-silent")["problems"] == []


@pytest.mark.parametrize("name", ["kill-all", "corrupt-checkpoint"])
def test_a_job_that_is_killed_whole_goes_on_by_itself(product: Product, name: str) -> None:
    result = product.scenario(name)
    assert result["problems"] == [], product.membership()
    assert result["samples"] == {"lost": 0, "duplicated": 0}


def test_a_scenario_that_nobody_knows_is_refused(product: Product) -> None:
    done = product.manage("scenario", "make-coffee")
    assert done.returncode != 0
    assert "kill-process" in done.stderr
