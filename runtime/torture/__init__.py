"""Breaks a training job on purpose, again and again, and judges what is left of its claims.

`python -m runtime.torture`. For a person or a test; never part of a running job.
"""
