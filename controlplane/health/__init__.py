"""Signals, and the failures that triage makes of them."""
