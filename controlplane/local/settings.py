"""Settings of the product on one machine, with the demo's leases, soak and budgets.

Addresses and the secret key are those of the running `manage.py up`, read from its run file, so
that any `manage.py` command started beside it speaks to the same product.
"""

from __future__ import annotations

import os

from controlplane.local.runfile import load_into

# A running product's addresses come first; what the caller set in the environment wins.
load_into(os.environ)

os.environ.setdefault("BEAT_INTERVAL_S", "1")
os.environ.setdefault("LEASE_S", "3")
os.environ.setdefault("STEP_LEASE_S", "15")
os.environ.setdefault("SOAK_S", "2")
os.environ.setdefault("BUDGET_NODES_PER_CLUSTER", "2")
os.environ.setdefault("RMA_COUNTS_S", "10")
os.environ.setdefault("REPAIR_ATTEMPTS_PER_DAY", "2")
os.environ.setdefault("BREAKER_WINDOW_S", "20")
os.environ.setdefault("SILENCE_ASK_S", "300")
os.environ.setdefault("SAMPLE_INTERVAL_S", "5")
os.environ.setdefault("ECC_DRIFT_WINDOW_S", "12")
os.environ.setdefault("READING_HOLD_S", "5")
os.environ.setdefault("SIMULATED_FLEET", "true")
os.environ.setdefault("CAUSE_WAIT_S", "5")
os.environ.setdefault("REPLICA_START_DEADLINE_S", "120")
os.environ.setdefault("BOOT_DEADLINE_S", "60")
os.environ.setdefault("LOG_JSON", "true")

from controlplane.settings import *  # noqa: E402, F403

# One machine serves static files from where they are; nothing collects them.
STATIC_ROOT = None
