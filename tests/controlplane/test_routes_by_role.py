"""Every route by every kind of caller, for yes and no.

The routes are read from the URLconf and what each needs from beside its view (`Access`), so a new
route cannot be forgotten: one that declares nothing fails here, and so does one whose object or
body is not told in the tables below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape
from typing import Any
from urllib.parse import urljoin

import pytest
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver, reverse
from django.utils import timezone

from controlplane.accounts import actions
from controlplane.accounts.access import Access
from controlplane.accounts.choices import Role
from controlplane.accounts.models import SYSTEM, User
from controlplane.fleet.models import Cluster
from tests import factories as make

pytestmark = pytest.mark.django_db

# --- Callers --------------------------------------------------------------------------------------

#: People by what they hold; the stranger is admin of another cluster. Then tokens of a superuser
#: by their scope, the last one restricted to that other cluster.
PEOPLE = ("stranger", "viewer", "operator", "admin", "superuser")
TOKENS = ("token viewer", "token operator", "token admin", "token elsewhere")
CALLERS = ("nobody", *PEOPLE, *TOKENS)

VIEWERS = frozenset({"viewer", "token viewer"})
OPERATORS = frozenset({"operator", "token operator"})
ADMINS = frozenset({"admin", "superuser", "token admin"})
STRANGERS = frozenset({"stranger", "token elsewhere"})
SEEING = VIEWERS | OPERATORS | ADMINS

#: Who hears yes. Of the others, whoever is not signed in is asked to; to whom the object does not
#: exist, it is not found; the rest is refused.
ALLOWED: dict[Access, frozenset[str]] = {
    Access.PUBLIC: frozenset(CALLERS),
    Access.SIGNED_IN: SEEING | STRANGERS,
    Access.VIEWER: SEEING,
    Access.OPERATOR: OPERATORS | ADMINS,
    Access.ADMIN: ADMINS,
    Access.ADMIN_SOMEWHERE: ADMINS | STRANGERS,
    Access.OWNER: frozenset({"viewer", "superuser", "token viewer", "token admin"}),
    Access.SUPERUSER: frozenset({"superuser", "token admin"}),
}
UNSEEN: dict[Access, frozenset[str]] = {
    Access.VIEWER: STRANGERS,
    Access.OPERATOR: STRANGERS,
    Access.ADMIN: STRANGERS,
    Access.OWNER: frozenset(CALLERS),
}


def expected(access: Access, *, api: bool) -> dict[str, str]:
    """What each caller should hear. Pages know no tokens: a program with one is nobody to them."""

    def answer(caller: str) -> str:
        if caller in ALLOWED[access] and (api or caller not in TOKENS or access is Access.PUBLIC):
            return "yes"
        if caller == "nobody" or (not api and caller in TOKENS):
            return "sign in"
        return "not found" if caller in UNSEEN.get(access, ()) else "refused"

    return {caller: answer(caller) for caller in CALLERS}


# --- Routes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    name: str
    method: str  # of the API; "" for a page, which takes either GET or POST
    arguments: tuple[str, ...]
    access: Access | None

    @property
    def api(self) -> bool:
        return bool(self.method)

    def __str__(self) -> str:
        return f"{self.name} {self.method}".strip()


def _routes(
    patterns: list[URLPattern | URLResolver], outer: tuple[str, ...] = ()
) -> Iterator[Route]:
    for pattern in patterns:
        regex = pattern.pattern.regex.groupindex
        arguments = (*outer, *pattern.pattern.converters, *regex)
        arguments = tuple(dict.fromkeys(arguments))
        if isinstance(pattern, URLResolver):
            yield from _routes(pattern.url_patterns, arguments)
            continue
        view: Any = pattern.callback
        name = pattern.name or str(pattern.pattern)
        for method, action in getattr(view, "actions", {"": ""}).items():
            access = view.cls.access.get(action) if action else getattr(view, "access", None)
            yield Route(name, method, arguments, access)


#: Answers whatever no other route does; there is nothing behind it.
NOTHING_THERE = {""}
ROUTES = list(_routes(get_resolver().url_patterns))
REACHED = [route for route in ROUTES if route.name not in NOTHING_THERE]


# --- One of everything ----------------------------------------------------------------------------


class World:
    """A cluster with one of everything in it, another one, and all the callers."""

    def __init__(self) -> None:
        self.here: Cluster = make.ClusterFactory(name="here")
        self.elsewhere: Cluster = make.ClusterFactory(name="elsewhere")
        self.people = self._people()
        self.clients = self._clients()
        self._fill()
        self._methods: dict[str, str] = {}

    def _people(self) -> dict[str, User]:
        grants = {role.value: make.GrantFactory(role=role, cluster=self.here) for role in Role}
        people = {name: grant.user for name, grant in grants.items()}
        stranger = make.GrantFactory(role=Role.ADMIN, cluster=self.elsewhere).user
        return people | {"stranger": stranger, "superuser": make.UserFactory(is_superuser=True)}

    def _clients(self) -> dict[str, Client]:
        clients = {"nobody": Client()}
        for name, user in self.people.items():
            clients[name] = Client()
            clients[name].force_login(user)
        for role in Role:
            clients[f"token {role}"] = self._bearer(role, None)
        clients["token elsewhere"] = self._bearer(Role.ADMIN, self.elsewhere.pk)
        return clients

    def _bearer(self, scope: Role, cluster_id: str | None) -> Client:
        owner = self.people["superuser"]
        _, text = actions.create_token(
            SYSTEM, owner, name="test", scope=scope, cluster_id=cluster_id, ttl_s=60
        )
        return Client(headers={"Authorization": f"Bearer {text}"})

    def _fill(self) -> None:
        here = self.here
        rack = make.RackFactory(cluster=here)
        node = make.NodeFactory(cluster=here, rack=rack)
        gpu = make.GpuFactory(node=node)
        job = make.JobFactory(cluster=here)
        replica = make.ReplicaFactory(job=job)
        incident = make.IncidentFactory(cluster=here, job=job, node=node)
        run = make.PlaybookRunFactory(incident=incident, state="needs_operator", node=node)
        self.objects: dict[str, Any] = {
            "cluster": here,
            "rack": rack,
            "node": node,
            "gpu": gpu,
            "job": job,
            "replica": replica,
            "placement": make.PlacementFactory(replica=replica),
            "checkpoint": make.CheckpointFactory(job=job),
            "incident": incident,
            "run": run,
            "step": make.PlaybookStepFactory(run=run, state="needs_operator"),
            "decision": make.PlaybookStepFactory(
                run=run, state="done", outcome="did it", finished_at=timezone.now()
            ),
            "approval": make.ApprovalFactory(run=run),
            "failure": make.FailureFactory(node=node),
            "repair": make.RepairRecordFactory(gpu=gpu),
            "case": make.RmaCaseFactory(gpu=gpu),
            "breaker": make.BreakerFactory(cluster=here),
            "spare": make.NodeFactory(cluster=here, spare=True),
            "window": make.MaintenanceWindowFactory(cluster=here),
            "reservation": make.SpareReservationFactory(cluster=here),
            "exclusion": make.NodeExclusionFactory(job=job, node=node),
            "playbook": make.PlaybookFactory(),
            "event": make.AuditEventFactory(cluster=here),
            "join_token": make.JoinTokenFactory(cluster=here),
            "token": make.ApiTokenFactory(user=self.people["viewer"]),
            "user": self.people["viewer"],
        }

    def tries(self, route: Route, caller: str) -> str:
        """What this caller hears on this route; whatever it wrote is undone."""
        client = self.clients[caller]
        address = self.address_of(route)
        body = BODIES.get(route.name, {})
        with transaction.atomic():
            sent = {"reason": "because"} | (body(self) if callable(body) else body)
            answer = self._send(client, route, address, sent)
            transaction.set_rollback(True)
        return heard(answer)

    def address_of(self, route: Route) -> str:
        kwargs = {name: self._key(route, name) for name in route.arguments}
        return reverse(route.name, kwargs=kwargs)

    def _send(self, client: Client, route: Route, address: str, body: dict[str, Any]) -> Any:
        if route.method == "get":
            return client.get(address)
        if route.api:
            told = json.dumps({name: value for name, value in body.items() if value is not None})
            return client.generic(route.method.upper(), address, told, "application/json")
        if self._method_of(route, address) == "post":
            return client.post(address, body)
        return client.get(address)

    def _method_of(self, route: Route, address: str) -> str:
        """Pages take one method: one that acts refuses to be read."""
        if route.name not in self._methods:
            looked = self.clients["superuser"].get(address)
            self._methods[route.name] = "post" if looked.status_code == 405 else "get"
        return self._methods[route.name]

    def _key(self, route: Route, argument: str) -> str:
        kind = KINDS[argument] if argument != "pk" else KIND_OF_RESOURCE[_resource(route)]
        return str(kind(self) if callable(kind) else self.objects[kind].pk)


#: Which of the world's objects an argument of an address names.
KINDS: dict[str, str | Callable[[World], object]] = {
    "cluster_id": "cluster",
    "node_id": "node",
    "name": lambda world: world.objects["node"].name,
    "node": "node",
    "job_id": "job",
    "incident_id": "incident",
    "run_id": "run",
    "approval_id": "approval",
    "case_id": "case",
    "breaker_id": "breaker",
    "window_id": "window",
    "user_id": "user",
    "token_id": "token",
    "join_token_id": "join_token",
}
#: The same for the API, where the argument is always `pk`.
KIND_OF_RESOURCE: dict[str, str] = {
    "approvals": "approval",
    "audit": "event",
    "breakers": "breaker",
    "checkpoints": "checkpoint",
    "clusters": "cluster",
    "decisions": "decision",
    "exclusions": "exclusion",
    "failures": "failure",
    "gpus": "gpu",
    "incidents": "incident",
    "jobs": "job",
    "maintenance": "window",
    "nodes": "node",
    "playbooks": "playbook",
    "racks": "rack",
    "repairs": "repair",
    "replicas": "replica",
    "rma-cases": "case",
    "runs": "run",
    "spare-reservations": "reservation",
    "spares": "spare",
    "steps": "step",
}


def _cluster(world: World) -> dict[str, Any]:
    return {"cluster": world.here.pk}


#: What is posted, beside a reason (none where it is None). An answer of 400 counts as yes, so
#: what decides about who may is told here.
BODIES: dict[str, dict[str, Any] | Callable[[World], dict[str, Any]]] = {
    "incident-note": {"text": "words"},
    "user-create": {"username": "somebody-new"},
    "user-grant": lambda world: {
        "username": world.people["viewer"].username,
        "role": "viewer",
        **_cluster(world),
    },
    "user-revoke": _cluster,
    "join-token-create": _cluster,
    "node-order": {"verb": "drain"},
    "node-maintenance": {"hours": "1"},
    "node-fault": {"kind": "xid79"},
    "job-move": {"replica": "0"},
    "api-jobs-migrate": {"replica": 0},
    "maintenance-open": {"hours": "1"},
    "approval-approve": {"digest": "0" * 64},
    "api-jobs-list": lambda world: {
        **_cluster(world),
        **{"name": "other", "program": "train", "world_replicas": 1, "reason": None},
    },
    "api-maintenance-list": lambda world: {
        **_cluster(world),
        "starts_at": "2036-01-01T00:00:00Z",
        "ends_at": "2036-01-02T00:00:00Z",
    },
    "api-playbooks-mode": lambda world: {**_cluster(world), "mode": "off"},
    "api-spares-reserve": lambda world: {**_cluster(world), "holder": "ci", "ttl_s": 60},
}


def _resource(route: Route) -> str:
    told = [word for word in KIND_OF_RESOURCE if route.name.startswith(f"api-{word}-")]
    assert told, f"tell in KIND_OF_RESOURCE which object {route.name} is about"
    return max(told, key=len)


def heard(answer: Any) -> str:
    """In a word, what an answer says to whoever asked."""
    if answer.status_code == 401 or "/login?next=" in answer.headers.get("Location", ""):
        return "sign in"
    return {403: "refused", 404: "not found"}.get(answer.status_code, "yes")


# --- The tests ------------------------------------------------------------------------------------


def test_there_are_routes_of_pages_and_of_the_api() -> None:
    assert {route.api for route in REACHED} == {True, False}


@pytest.mark.parametrize("route", REACHED, ids=str)
def test_each_route_declares_who_may(route: Route) -> None:
    assert isinstance(route.access, Access)


@pytest.mark.parametrize("route", REACHED, ids=str)
def test_each_caller_hears_what_the_route_declares(route: Route, settings: Any) -> None:
    assert route.access is not None
    settings.SIMULATED_FLEET = True  # so that the buttons that break things are there, too
    world = World()

    heard_by = {caller: world.tries(route, caller) for caller in CALLERS}

    assert heard_by == expected(route.access, api=route.api)


def test_below_an_answer_to_an_order_all_links_lead_on(settings: Any) -> None:
    settings.SIMULATED_FLEET = True
    world = World()
    client = world.clients["superuser"]
    pages = [route for route in REACHED if not route.api and route.access is not Access.PUBLIC]

    # Nothing that an order needs is told with it: most are refused, on the page they belong to.
    sent = [(address, client.post(address)) for address in map(world.address_of, pages)]
    refused = [(address, answer) for address, answer in sent if answer.status_code == 409]

    # The browser now stands at the order's address, which answers nobody who only looks.
    led_to = {urljoin(*link) for link in refused_links(refused)}
    assert len(refused) > 20
    assert {link for link in led_to if client.get(link).status_code == 405} == set()


def refused_links(refused: list[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """What can be followed below each answer, with its address; a form without one of its own."""
    for address, answer in refused:
        body = answer.content.decode()
        forms = re.findall(r'<form [^>]*method="get"[^>]*>', body)
        actions = [re.search(r'action="([^"]*)"', form) for form in forms]
        told = re.findall(r'(?:href|hx-get|data-address)="(?!#)([^"]*)"', body)
        followed = [*told, *(action[1] if action else "" for action in actions)]
        yield from ((address, unescape(link)) for link in followed)
