"""One acceptable order for every verb of the API: where it is sent, and with what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.utils import timezone

from controlplane.api import RESOURCES
from tests import factories as make
from tests.controlplane.rest.world import World

WHY = {"reason": "a test"}


@dataclass(frozen=True)
class Order:
    path: str
    body: dict[str, Any] = field(default_factory=lambda: dict(WHY))
    status: int = 200
    method: str = "post"


def verbs() -> set[str]:
    """Every verb there is, as "<list>/<action>"."""
    return {
        f"{name}/{action}"
        for name, resource in RESOURCES.items()
        for action in dir(resource)
        if hasattr(getattr(resource, action), "verb")
    }


def _on(name: str, action: str, body: dict[str, Any] | None = None, status: int = 200) -> Any:
    """An order to the world's object of this list, with a reason and what else it takes."""
    return lambda world: Order(f"{world.path(name)}/{action}", WHY | (body or {}), status)


def _changed(world: World, name: str, **fields: Any) -> None:
    row = world.objects[name]
    type(row)._default_manager.filter(pk=row.pk).update(**fields)


def _resume(world: World) -> Order:
    _changed(world, "runs", state="paused")
    return Order(f"{world.path('runs')}/resume")


def _return(world: World) -> Order:
    _changed(world, "nodes", state="quarantined")
    return Order(f"{world.path('nodes')}/return", status=202)


def _retire(world: World) -> Order:
    _changed(world, "nodes", state="quarantined")
    return Order(f"{world.path('nodes')}/retire", status=202)


def _release(world: World) -> Order:
    _changed(world, "nodes", hold_reason="hands off")
    return Order(f"{world.path('nodes')}/release")


def _unspare(world: World) -> Order:
    _changed(world, "nodes", spare=True)
    return Order(f"{world.path('nodes')}/unspare")


def _resolve(world: World) -> Order:
    return Order(f"{world.path('incidents')}/resolve")


def _close(world: World) -> Order:
    _changed(world, "incidents", state="resolved")
    return Order(f"{world.path('incidents')}/close")


def _bring_back(world: World) -> Order:
    incident: Any = world.objects["incidents"]
    job: Any = world.objects["jobs"]
    lost = make.PlacementFactory(replica__job=job, replica__index=7, state="ended")
    make.PlaybookRunFactory(
        incident=incident,
        playbook="replica-lost",
        state="cancelled",
        job=lost.replica.job,
        context={"replica": 7, "lost_placement": lost.pk},
    )
    return Order(f"{world.path('incidents')}/bring-back")


def _save(world: World) -> Order:
    incident: Any = world.objects["incidents"]
    body = {"text": "# What happened", "edited": incident.postmortem_digest}
    return Order(f"{world.path('incidents')}/postmortem", body)


def _migrate(world: World) -> Order:
    job: Any = world.objects["jobs"]
    _changed(world, "jobs", coordinator_address="127.0.0.1:4000", gpus_per_replica=1)
    replica = make.ReplicaFactory(job=job, index=job.replicas.count())
    make.PlacementFactory(replica=replica)
    return Order(f"{world.path('jobs')}/migrate", WHY | {"replica": replica.index}, 202)


def _start(world: World) -> Order:
    _changed(world, "jobs", state="pending")
    return Order(f"{world.path('jobs')}/start", status=202)


def _direct(world: World) -> Order:
    make.ProgressSampleFactory(job=world.objects["jobs"])
    return Order(f"{world.path('jobs')}/directives", WHY | {"verb": "checkpoint"}, 201)


def _exclude(world: World) -> Order:
    node = world.objects["nodes"].pk
    return Order(f"{world.path('jobs')}/exclusions", WHY | {"node": node}, 201)


def _include(world: World) -> Order:
    exclusion: Any = world.objects["exclusions"]
    path = f"/api/v1/jobs/{exclusion.job_id}/exclusions/{exclusion.node_id}?reason=a+test"
    return Order(path, {}, method="delete")


def _window(world: World) -> Order:
    ends_at = (timezone.now() + timedelta(hours=1)).isoformat()
    return Order("/api/v1/maintenance", _here(world) | {"ends_at": ends_at}, 201)


def _register(world: World) -> Order:
    body = {"cluster": world.cluster.pk, "name": "new", "program": "train", "world_replicas": 2}
    return Order("/api/v1/jobs", body, 201)


def _mode(world: World) -> Order:
    return Order(f"{world.path('playbooks')}/mode", _here(world) | {"mode": "approve"})


def _reserve(world: World) -> Order:
    return Order("/api/v1/spares/reserve", _here(world) | {"holder": "slurm", "ttl_s": 60}, 201)


def _here(world: World) -> dict[str, Any]:
    return WHY | {"cluster": world.cluster.name}


ORDERS: dict[str, Callable[[World], Order]] = {
    "approvals/approve": _on("approvals", "approve", {"digest": "d1"}),
    "approvals/reject": _on("approvals", "reject"),
    "breakers/close": _on("breakers", "close"),
    "clusters/limits": _on("clusters", "limits", {"scope": "rack", "nodes": 1}),
    "incidents/acknowledge": _on("incidents", "acknowledge"),
    "incidents/bring_back": _bring_back,
    "incidents/close": _close,
    "incidents/note": lambda world: Order(f"{world.path('incidents')}/note", {"text": "words"}),
    "incidents/postmortem": _save,
    "incidents/resolve": _resolve,
    "jobs/create": _register,
    "jobs/directives": _direct,
    "jobs/end": _on("jobs", "end"),
    "jobs/exclusions": _exclude,
    "jobs/include": _include,
    "jobs/migrate": _migrate,
    "jobs/progress": lambda world: Order(f"{world.path('jobs')}/progress", {"step": 7}),
    "jobs/start": _start,
    "jobs/warm_spares": lambda world: Order(
        f"{world.path('jobs')}/warm-spares", WHY | {"count": 2}
    ),
    "maintenance/close": _on("maintenance", "close"),
    "maintenance/create": _window,
    "nodes/diagnose": _on("nodes", "diagnose", status=202),
    "nodes/drain": _on("nodes", "drain", status=202),
    "nodes/hold": _on("nodes", "hold"),
    "nodes/quarantine": _on("nodes", "quarantine", status=202),
    "nodes/reboot": _on("nodes", "reboot", status=202),
    "nodes/release": _release,
    "nodes/reset": _on("nodes", "reset", status=202),
    "nodes/retire": _retire,
    "nodes/return_node": _return,
    "nodes/revoke_key": _on("nodes", "revoke-key"),
    "nodes/spare": _on("nodes", "spare"),
    "nodes/unspare": _unspare,
    "playbooks/mode": _mode,
    "rma-cases/close": _on("rma-cases", "close"),
    "rma-cases/send": _on("rma-cases", "send", {"vendor_reference": "NV-1"}),
    "runs/cancel": _on("runs", "cancel"),
    "runs/pause": _on("runs", "pause"),
    "runs/resume": _resume,
    "spare-reservations/release": _on("spare-reservations", "release"),
    "spares/reserve": _reserve,
}
