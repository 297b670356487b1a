"""What ingest tells Prometheus. Each process of ingest tells its own: they are added up there."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Counter, Gauge, Histogram

MESSAGES = Counter(
    "drydock_ingest_messages",
    "Messages answered, by kind and by what came of them: accepted, or the refusal's code.",
    ["kind", "outcome"],
)
COMMITS = Histogram(
    "drydock_ingest_commit_duration_seconds",
    "Time that one group commit took, of all that was waiting.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
)
COMMITS_FAILED = Counter(
    "drydock_ingest_commits_failed",
    "Group commits that PostgreSQL did not take; the senders keep what was in them.",
)
WRITES_WAITING = Gauge(
    "drydock_ingest_writes_waiting", "Messages taken in whose commit is not yet known."
)
WRITES_WAITING_BYTES = Gauge(
    "drydock_ingest_writes_waiting_bytes", "Size of the bodies of the messages that wait."
)
POLLS_HELD = Gauge("drydock_ingest_polls_held", "Nodes that wait here for orders.")
REQUESTS_IN_FLIGHT = Gauge(
    "drydock_ingest_requests_in_flight", "Requests not yet answered, held polls among them."
)

#: The outcomes that docs/alerts.yml asks for.
WATCHED = (
    "unavailable",
    "internal_error",
    "bad_signature",
    "wrong_job_token",
    "node_revoked",
    "token_unknown",
)


def begin(kinds: Iterable[str]) -> None:
    """Tell of each watched outcome from the start, as 0.

    A series that is born with its first value shows no increase: that message would alert nobody.
    """
    for kind in kinds:
        for outcome in WATCHED:
            MESSAGES.labels(kind, outcome)
