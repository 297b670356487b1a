"""Where signals come from, and what triage may say of them."""

from __future__ import annotations

from django.db.models import TextChoices


class SignalKind(TextChoices):
    BOOT = "boot", "Boot"
    KERNEL_LINE = "kernel_line", "Kernel line"
    PROCESS_EXITED = "process_exited", "Process exited"
    COORDINATOR_RESTARTED = "coordinator_restarted", "Coordinator restarted"
    GPU_UNREADABLE = "gpu_unreadable", "GPU unreadable"
    PEER_LOST = "peer_lost", "Peer lost"  # told by a surviving replica
    JOB_TROUBLE = "job_trouble", "Trouble in a job"  # told by a rank
    LEASE_LOST = "lease_lost", "Lease lost"  # found by the keeper


class FaultClass(TextChoices):
    """Whose fault it is."""

    HARDWARE = "hardware", "Hardware"
    DRIVER = "driver", "Driver"
    PROGRAM = "program", "Program"
    FABRIC = "fabric", "Fabric"
    PLATFORM = "platform", "Platform"
    UNKNOWN = "unknown", "Not yet known"
