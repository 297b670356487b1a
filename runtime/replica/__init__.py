"""Replicas that drop out, take over and come back without stopping the others."""
