"""Clusters, racks, nodes, cards, their leases, and the commands sent to nodes."""
