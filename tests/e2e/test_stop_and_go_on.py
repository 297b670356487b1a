"""`up` stops without a trace and goes on with the job, whether it was asked to or killed."""

from __future__ import annotations

import pytest

from tests.product import Product

pytestmark = pytest.mark.e2e


def test_ctrl_c_leaves_no_process_and_the_next_up_goes_on(product: Product) -> None:
    before = product.job()
    assert product.stop() == 0
    assert product.processes() == []

    product.start()

    after = product.job()
    assert after["step"] > before["step"]
    assert after["recomputed_steps"] == before["recomputed_steps"]


def test_the_remains_of_a_killed_up_are_cleared_and_the_job_goes_on(product: Product) -> None:
    before = product.job()
    product.kill()
    assert product.processes() != []

    product.start()

    after = product.job()
    assert after["state"] == "running"
    assert after["epoch"] > before["epoch"]
    assert after["ledger_step"] >= 0


def test_a_second_up_says_that_one_runs(product: Product) -> None:
    done = product.manage("up", "--port", str(product.port))
    assert done.returncode != 0
    assert product.url in done.stderr
