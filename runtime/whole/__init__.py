"""A job of which no replica can be dropped: its ranks train, save, and go on as one."""

from runtime.whole.job import WholeJob

__all__ = ["WholeJob"]
