"""How fast the audit trail is chained and verified, and what finding one edit costs.

    python benchmarks/audit_chain.py [rows]

The limit is reading the same rows from the same database and doing nothing with them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.servers.own import own_servers  # noqa: E402 - the path must be set first

T = TypeVar("T")


def main(rows: int) -> None:
    with own_servers():
        measure(rows)


def measure(rows: int) -> None:
    # Django's models can be imported only once its settings are made.
    from django.core.management import call_command

    from controlplane.accounts import chain
    from controlplane.accounts.actions import chain_audit
    from controlplane.accounts.models import AuditEvent

    call_command("migrate", verbosity=0)
    for start in range(0, rows, 10_000):
        AuditEvent.objects.bulk_create(
            AuditEvent(
                actor_kind="system",
                actor_id="drydock",
                verb="node.transition",
                object_type="node",
                object_id=f"nod_{number % 12_500}",
                before={"state": "available"},
                after={"state": "quarantined"},
                reason="XID 79 on GPU 3: the card has fallen off the bus",
            )
            for number in range(start, min(start + 10_000, rows))
        )
    appending, _ = timed(lambda: [chain_audit() for _ in range((rows + 999) // 1000)])
    reading, _ = timed(lambda: sum(1 for _ in chain._chained_rows()))
    verifying, report = timed(chain.verify)
    assert report.ok, report  # noqa: S101 - a broken chain makes the figures worthless
    AuditEvent.objects.filter(position=rows // 2).update(reason="nothing happened")
    finding, report = timed(chain.verify)
    assert [p.position for p in report.problems] == [rows // 2]  # noqa: S101
    print(f"{rows:,} rows")
    print(f"  chained in   {appending:6.2f} s  {rows / appending:10,.0f} rows/s")
    print(f"  verified in  {verifying:6.2f} s  {rows / verifying:10,.0f} rows/s")
    print(f"  edit found   {finding:6.2f} s")
    print(f"  only read in {reading:6.2f} s  ratio {verifying / reading:.2f}")


def timed(operation: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = operation()
    return time.perf_counter() - began, result


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
