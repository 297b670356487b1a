"""How often what runs jobs fails: what the best interval between checkpoints depends on."""

from __future__ import annotations

import time
from datetime import timedelta

from django.db.models import F, Sum
from django.db.models.functions import Coalesce, Greatest, Now
from django.utils import timezone

from controlplane.health.choices import Urgency
from controlplane.health.models import Failure
from controlplane.jobs.models import Placement
from runtime.checkpoint.interval import FAILURES_PER_NODE_DAY

#: What was seen in this time counts.
SEEN = timedelta(days=30)
#: The published rate weighs as much as so many days of a node: a young fleet's first failure is not
#: a rate yet.
PUBLISHED_NODE_DAYS = 1000.0


#: Jobs ask each second, and days are counted: it holds for so many seconds.
KNOWN_S = 60.0
_known: dict[str, tuple[float, float]] = {}


def recent_rate(cluster_id: str) -> float:
    """`failures_per_node_day`, as it was a minute ago at most."""
    at, rate = _known.get(cluster_id, (-KNOWN_S, 0.0))
    if time.monotonic() - at >= KNOWN_S:
        rate = failures_per_node_day(cluster_id)
        _known[cluster_id] = (time.monotonic(), rate)
    return rate


def failures_per_node_day(cluster_id: str) -> float:
    """Failures that could not wait, of nodes that ran a job of this cluster, per node and day that
    one ran; drawn towards the published rate while there is little to go by."""
    since = timezone.now() - SEEN
    placements = Placement.objects.filter(replica__job__cluster_id=cluster_id)
    ran = placements.annotate(
        until=Coalesce("ended_at", Now()), since=Greatest("created_at", since)
    ).filter(until__gt=since)
    time = ran.aggregate(time=Sum(F("until") - F("since")))["time"] or timedelta()
    node_days = time / timedelta(days=1)
    failures = Failure.objects.filter(
        node__cluster_id=cluster_id, urgency=Urgency.NOW, observed_at__gt=since
    ).exclude(job_id="")
    expected = FAILURES_PER_NODE_DAY * PUBLISHED_NODE_DAYS
    return (failures.count() + expected) / (node_days + PUBLISHED_NODE_DAYS)
