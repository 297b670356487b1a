"""Where signals come from, and what triage may say of them."""

from __future__ import annotations

from django.db.models import TextChoices


class SignalKind(TextChoices):
    BOOT = "boot", "Boot"
    KERNEL_LINE = "kernel_line", "Kernel line"
    PROCESS_EXITED = "process_exited", "Process exited"
    COORDINATOR_RESTARTED = "coordinator_restarted", "Coordinator restarted"
    GPU_UNREADABLE = "gpu_unreadable", "GPU unreadable"
    READING = "reading", "Reading"  # found by the keeper in what the agents read
    PEER_LOST = "peer_lost", "Peer lost"  # told by a surviving replica
    JOB_TROUBLE = "job_trouble", "Trouble in a job"  # told by a rank
    LEASE_LOST = "lease_lost", "Lease lost"  # found by the keeper


class Action(TextChoices):
    """What a failure calls for, in NVIDIA's words of remedy, gentlest first."""

    IGNORE = "ignore", "Nothing"
    FOLLOW_PRIMARY = "follow_primary", "Nothing: a consequence of another fault"
    RESTART_APP = "restart_app", "Restart the program"
    UPDATE_SOFTWARE = "update_software", "Update the software"
    RESET_GPU = "reset_gpu", "Reset the GPU"
    DRAIN_AND_RESET = "drain_and_reset", "Drain, then reset the GPU"
    REBOOT = "reboot", "Reboot the node"
    POWER_CYCLE = "power_cycle", "Power-cycle the node"
    CHECK_MECHANICALS = "check_mechanicals", "Check seating and cables"
    FIELD_DIAGNOSTIC = "field_diagnostic", "Run the field diagnostic"
    CONTACT_VENDOR = "contact_vendor", "Hand it to the vendor"
    UNDECODABLE = "undecodable", "Look at it: the line lacks what its code needs"


class Urgency(TextChoices):
    """When a failure must be acted upon."""

    NOW = "now", "Now"
    NEXT_CHECKPOINT = "next_checkpoint", "At the next checkpoint"
    IDLE = "idle", "When the node is idle"
    NONE = "none", "Never"

    def before(self, other: str) -> bool:
        """Whether this is sooner than the other."""
        order = list(type(self))
        return order.index(self) < order.index(type(self)(other))


class FaultClass(TextChoices):
    """Whose fault it is."""

    HARDWARE = "hardware", "Hardware"
    DRIVER = "driver", "Driver"
    PROGRAM = "program", "Program"
    FABRIC = "fabric", "Fabric"
    PLATFORM = "platform", "Platform"
    UNKNOWN = "unknown", "Not yet known"
