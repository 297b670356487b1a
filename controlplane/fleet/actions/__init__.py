"""The only writers of clusters, nodes, cards, leases and commands."""

from __future__ import annotations

from controlplane.fleet.actions.commands import (
    RESULT_GRACE_S,
    call_back_commands,
    expire_commands,
    forget_commands,
    queue_command,
    record_command_result,
    take_commands,
)
from controlplane.fleet.actions.enrolment import (
    create_cluster,
    create_join_token,
    enroll,
    revoke_join_token,
    revoke_node_key,
    set_price,
)
from controlplane.fleet.actions.leases import extend_leases, lose_leases, renew_leases
from controlplane.fleet.actions.maintenance import close_maintenance, open_maintenance
from controlplane.fleet.actions.nodes import (
    fail_overdue_nodes,
    record_boot,
    record_power_order,
    record_repair,
    record_report,
    set_bmc,
    set_drained_by,
    set_hold,
    set_reset_pending,
    set_spare,
    transition,
)

__all__ = [
    "RESULT_GRACE_S",
    "call_back_commands",
    "close_maintenance",
    "create_cluster",
    "create_join_token",
    "enroll",
    "expire_commands",
    "extend_leases",
    "fail_overdue_nodes",
    "forget_commands",
    "lose_leases",
    "open_maintenance",
    "queue_command",
    "record_boot",
    "record_command_result",
    "record_power_order",
    "record_repair",
    "record_report",
    "renew_leases",
    "revoke_join_token",
    "revoke_node_key",
    "set_bmc",
    "set_drained_by",
    "set_hold",
    "set_price",
    "set_reset_pending",
    "set_spare",
    "take_commands",
    "transition",
]
