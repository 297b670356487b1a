"""What all tests of the control plane share."""

from __future__ import annotations

import pytest
from pytest_django import Settings


@pytest.fixture(autouse=True)
def no_lease_runs_out(settings: Settings) -> None:
    """Nothing beats here, however long a test takes."""
    settings.LEASE_S = 600
