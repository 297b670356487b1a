"""What stored readings mean: replayed from what the keeper wrote."""

from __future__ import annotations

from typing import Any

import pytest

from workers import triage

PCI = "00000000:1B:00.0"


@pytest.mark.parametrize(
    ("verdict", "data"),
    [
        ("remap-pending reset_gpu idle", {"reading": "remap_pending", "value": 1}),
        ("remap-failed contact_vendor next_checkpoint", {"reading": "remap_failed", "value": 1}),
        (
            "remap-exhausted contact_vendor next_checkpoint",
            {"reading": "exhausted_banks", "value": 1},
        ),
        (
            "remap-exhausted contact_vendor next_checkpoint",
            {"reading": "remapped_rows", "value": 512},
        ),
        (
            "sram-threshold field_diagnostic next_checkpoint",
            {"reading": "sram_over_threshold", "value": 1},
        ),
        ("recovery-action reboot now", {"reading": "recovery_action", "value": 2}),
        (
            "nvlink-slow drain_and_reset next_checkpoint",
            {"reading": "nvlink_mb_s", "value": 70, "baseline": 100},
        ),
        ("nvlink-errors reset_gpu idle", {"reading": "nvlink_errors", "value": 9}),
        (
            "overheating check_mechanicals idle",
            {"reading": "temperature_c", "value": 85, "limit": 87, "expected": 91},
        ),
        ("throttled check_mechanicals idle", {"reading": "throttle_reasons", "value": 0x40}),
        (
            "pcie-downgrade check_mechanicals idle",
            {"reading": "pcie_lanes", "value": 8, "most": 16},
        ),
        ("pcie-replays check_mechanicals idle", {"reading": "pcie_replays", "value": 9}),
        (
            "fabric-errors check_mechanicals idle",
            {"reading": "symbol_errors", "value": 121, "port": "mlx5_0/1"},
        ),
        (
            "fabric-flaps check_mechanicals next_checkpoint",
            {"reading": "port_flaps", "value": 3, "port": "mlx5_0/1"},
        ),
        (
            "fabric-drop check_mechanicals now",
            {"reading": "port_drop", "value": 240, "port": "mlx5_0/1"},
        ),
    ],
)
def test_each_reading_has_its_meaning(verdict: str, data: dict[str, Any]) -> None:
    found = triage.judge_reading(PCI, data)

    assert found is not None
    assert f"{found.code} {found.action} {found.urgency}" == verdict
    assert triage.to_verify(found.action)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"reading": "remapped_rows", "value": 511},
        {"reading": "remap_failed", "value": 0},
        {"reading": "throttle_reasons", "value": 0x4},
        {"reading": "symbol_errors", "value": 120},
        {"reading": "never-heard-of", "value": 1},
        {"reading": "ecc_corrected", "errors": [1, 1, 1], "window_s": 12},
    ],
)
def test_what_is_well_means_nothing(data: dict[str, Any]) -> None:
    assert triage.judge_reading(PCI, data) is None


@pytest.mark.parametrize(
    ("rule", "action", "confidence"),
    [
        ("driver-recovery-action", "reboot", "high"),
        ("xid-catalogue", "reset_gpu", "high"),
        ("nvidia-memory-guide", "contact_vendor", "high"),
        ("xid-catalogue: repeats", "restart_app", "medium"),
        ("nvlink-below-baseline", "drain_and_reset", "medium"),
        ("xid-catalogue: unused code", "contact_vendor", "low"),
        ("not-in-catalogue", "contact_vendor", "low"),
        ("xid-catalogue", "undecodable", "low"),
    ],
)
def test_a_verdict_says_how_sure_it_is(rule: str, action: str, confidence: str) -> None:
    assert triage.confidence(rule, action) == confidence


@pytest.mark.parametrize("action", triage.ACTIONS)
def test_what_does_something_says_what_is_to_be_seen_after_it(action: str) -> None:
    assert bool(triage.to_verify(action)) == (action not in ("ignore", "follow_primary"))
