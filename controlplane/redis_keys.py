"""Names of what the control plane's processes leave in Redis for each other; all may be lost."""

#: Hash of the newest beat of each node, by node id: written by ingest, read by the keeper.
BEATS = "drydock:beats"
#: When an ingest last heard, and since when it does, as JSON: how the keeper tells silent nodes
#: from a deaf control plane. It expires when ingest stops.
INGEST_ALIVE = "drydock:ingest:alive"
#: When the keeper last came round, in ISO 8601. It expires when the keeper falls silent.
KEEPER_ALIVE = "drydock:keeper:alive"
