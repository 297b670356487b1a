"""Scripted failures against the running product, and what they measure.

A scenario breaks one thing from outside and then only watches: everything that mends it is the
product. It reads rows; it never writes one.
"""

from __future__ import annotations

from controlplane.local.scenarios import hardware, replicas, site, warm, whole
from controlplane.local.scenarios.base import Result, Say, ScenarioError

WHOLE = ("kill-all", "corrupt-checkpoint")
NAMES = (*replicas.FAULTS, warm.NAME, "second-failure", "site-silent", *WHOLE)


def play(name: str, say: Say) -> Result:
    """Break one thing, wait until it is mended, and measure. Raises ScenarioError."""
    if name == "second-failure":
        return hardware.second_failure(say)
    if name == "site-silent":
        return site.silence(say)
    if name == warm.NAME:
        return warm.play(say)
    if name in WHOLE:
        return whole.play(name, say)
    return replicas.play(name, say)


__all__ = ["NAMES", "Result", "Say", "ScenarioError", "play"]
