"""A first draft of an incident's post-mortem, from the facts that stand in its rows."""

from __future__ import annotations

from datetime import datetime

from controlplane.incidents import pricing
from controlplane.incidents.models import Incident


def draft(incident: Incident) -> str:
    """Markdown that an engineer goes on writing: what is known stands, what is not is asked."""
    parts = [
        f"# {incident.title}",
        _summary(incident),
        "## Impact",
        _impact(incident),
        "## What happened",
        _timeline(incident),
        "## What was done",
        _runs(incident),
        "## Cause",
        incident.cause or "Not found. _What do you know that the records do not say?_",
        "## What we change",
        "_Nothing yet. What would have prevented this, or made it shorter?_",
    ]
    return "\n\n".join(parts) + "\n"


def _summary(incident: Incident) -> str:
    lines = [
        f"- Severity: {incident.get_severity_display()}",
        f"- Cluster: {incident.cluster.name}",
        f"- Occurred: {_utc(incident.occurred_at)}",
        f"- Resolved: {_utc(incident.resolved_at)} ({_after(incident, incident.resolved_at)})",
    ]
    return "\n".join(lines)


def _impact(incident: Incident) -> str:
    lines = []
    if incident.job is not None:
        lost = ", ".join(map(str, pricing.replicas_of(incident)))
        lines.append(f"- Job: {incident.job.name}" + (f", replica {lost}" if lost else ""))
    if incident.mitigated_at is not None:
        lines.append(f"- Survivors trained again {_after(incident, incident.mitigated_at)}")
    if incident.restored_at is not None:
        lines.append(f"- All replicas trained again {_after(incident, incident.restored_at)}")
    if incident.gpu_seconds_lost is not None:
        hours = incident.gpu_seconds_lost / 3600
        money = hours * float(incident.cluster.gpu_hour_price)
        lines.append(
            f"- Lost: {incident.gpu_seconds_lost:.0f} GPU-seconds "
            f"({money:.2f} {incident.cluster.currency})"
        )
    return "\n".join(lines) or "No job was hit."


def _timeline(incident: Incident) -> str:
    """A line for each entry, with the date where it is another than that of the line before."""
    lines, date = [], None
    for entry in incident.timeline.all():
        day = "" if entry.at.date() == date else f"{entry.at:%Y-%m-%d} "
        date = entry.at.date()
        moment = f"{day}{entry.at:%H:%M:%S}.{entry.at.microsecond // 1000:03d}"
        lines.append(f"- `{moment}` {entry.text}")
    return "\n".join(lines)


def _runs(incident: Incident) -> str:
    lines = []
    for run in incident.runs.prefetch_related("steps"):
        lines.append(f"### {run.title}: {run.get_state_display().lower()}\n")
        lines += [
            f"{step.position + 1}. {step.title}: {step.outcome or step.get_state_display().lower()}"
            for step in run.steps.all()
        ]
        lines.append("")
    return "\n".join(lines).strip() or "No playbook ran."


def _after(incident: Incident, moment: datetime | None) -> str:
    if moment is None:
        return "not yet"
    return f"{(moment - incident.occurred_at).total_seconds():.1f} s after the fault"


def _utc(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment else "not yet"
