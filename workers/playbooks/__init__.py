"""The playbooks, by name. One file each, readable aloud by an on-call engineer."""

from __future__ import annotations

from workers.playbooks import (
    admit_node,
    move_job,
    move_replica,
    node_orders,
    repair_node,
    replica_lost,
    restore_coordinator,
    site_silent,
    start_job,
    warm_spare,
)
from workers.playbooks.base import Playbook

PLAYBOOKS: dict[str, Playbook] = {
    playbook.name: playbook
    for playbook in (
        admit_node.PLAYBOOK,
        move_job.PLAYBOOK,
        move_replica.PLAYBOOK,
        repair_node.PLAYBOOK,
        replica_lost.PLAYBOOK,
        restore_coordinator.PLAYBOOK,
        site_silent.PLAYBOOK,
        start_job.PLAYBOOK,
        warm_spare.PLAYBOOK,
        *node_orders.PLAYBOOKS,
    )
}
