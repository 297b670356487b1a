"""A fleet in one thread: simulated time, network and processes around the real membership code.

The real `Coordinator`, `Member` and `Link` run unchanged; sockets, torch, disk and waiting are
simulated. Everything follows from a seed, so a schedule that failed fails again.
"""
