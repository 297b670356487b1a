"""The evidence bundle of a card that goes back to its vendor: all that is known, by serial."""

from __future__ import annotations

from typing import Any

from controlplane.fleet.models import Command, Gpu, Node
from controlplane.health.actions import memory_of
from controlplane.health.models import Failure


def bundle(gpu: Gpu, node: Node) -> dict[str, Any]:
    """Everything a vendor asks for, as one JSON value: the card, its failures, its repairs."""
    failures = Failure.objects.filter(gpu=gpu).prefetch_related("signals").order_by("observed_at")
    orders = Command.objects.filter(node=node, verb__in=("diagnose", "field_diagnose"))
    diagnostics = orders.order_by("-created_at")[:5]
    inventory = node.report.get("inventory", {}) if isinstance(node.report, dict) else {}
    return {
        "card": {
            "serial": gpu.serial,
            "uuid": gpu.uuid,
            "model": gpu.model,
            "pci_address": gpu.pci_address,
            "first_seen_at": gpu.first_seen_at.isoformat(),
        },
        "node": {
            "name": node.name,
            "cluster": node.cluster.name,
            "rack": node.rack.name if node.rack else "",
            "slot": gpu.index,
            "cards": sorted({gpu.pk, *node.gpus.values_list("pk", flat=True)}),
            "driver_version": inventory.get("driver_version", ""),
            "kernel": inventory.get("kernel", ""),
            "agent_version": node.agent_version,
        },
        "memory": memory_of(gpu.pk),
        "failures": [
            {
                "code": failure.code,
                "summary": failure.summary,
                "rule": failure.rule,
                "observed_at": failure.observed_at.isoformat(),
                "count": failure.count,
                "lines": [signal.raw for signal in failure.signals.all() if signal.raw],
            }
            for failure in failures
        ],
        "repairs": [
            {"rung": repair.rung, "node": repair.node.name, "at": repair.at.isoformat()}
            for repair in gpu.repairs.select_related("node").order_by("at")
        ],
        "diagnostics": [
            {
                "verb": command.verb,
                "at": command.created_at.isoformat(),
                "state": command.state,
                "error": command.error,
                **command.output,
            }
            for command in diagnostics
        ],
    }
