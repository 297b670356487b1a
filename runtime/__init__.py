"""A library inside training jobs: replicas that drop and rejoin, checkpoints, watchdogs."""
