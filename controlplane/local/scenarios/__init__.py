"""Scripted failures against the running product, and what they measure.

A scenario breaks one thing from outside and then only watches: everything that mends it is the
product. It reads rows; it never writes one.
"""

from __future__ import annotations

from controlplane.local.scenarios import hardware, replicas, site
from controlplane.local.scenarios.base import Result, Say, ScenarioError

NAMES = (*replicas.FAULTS, "second-failure", "site-silent")


def play(name: str, say: Say) -> Result:
    """Break one thing, wait until it is mended, and measure. Raises ScenarioError."""
    if name == "second-failure":
        return hardware.second_failure(say)
    if name == "site-silent":
        return site.silence(say)
    return replicas.play(name, say)


__all__ = ["NAMES", "Result", "Say", "ScenarioError", "play"]
