"""The only writers of jobs, replicas, placements, exclusions, reservations and progress."""

from __future__ import annotations

from controlplane.jobs.actions.downsampling import thin_progress
from controlplane.jobs.actions.jobs import (
    begin_start,
    check_active,
    direct,
    end_job,
    end_placement,
    forget_directives,
    keep_as_spare,
    place,
    register,
    request_stop,
    reveal_token,
    set_coordinator,
    vacate,
)
from controlplane.jobs.actions.moves import give_up_move, stand_by, take_place
from controlplane.jobs.actions.reports import record_progress, record_runtime_batch
from controlplane.jobs.actions.spares import (
    exclude_node,
    expire_reservations,
    include_node,
    make_spare,
    release_spare,
    reserve_spare,
    unmake_spare,
)
from controlplane.jobs.actions.warm_spares import end_warm_spare, place_warm_spare, set_warm_spares

__all__ = [
    "begin_start",
    "check_active",
    "direct",
    "end_job",
    "end_placement",
    "end_warm_spare",
    "exclude_node",
    "expire_reservations",
    "forget_directives",
    "give_up_move",
    "include_node",
    "keep_as_spare",
    "make_spare",
    "place",
    "place_warm_spare",
    "record_progress",
    "record_runtime_batch",
    "register",
    "release_spare",
    "request_stop",
    "reserve_spare",
    "reveal_token",
    "set_coordinator",
    "set_warm_spares",
    "stand_by",
    "take_place",
    "thin_progress",
    "unmake_spare",
    "vacate",
]
