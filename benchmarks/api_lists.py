"""How long a list of 100 out of 12,500 nodes takes over HTTP, beside an endpoint that asks nothing.

    python benchmarks/api_lists.py [requests for each row]

A database of its own is made and removed; the server is granian, as in production. The bound is the
same server, middleware and authentication answering after `SELECT 1`. The target is p95 < 150 ms.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from benchmarks.servers.own import own_servers  # noqa: E402 - the path must be set first

NODES = 12_500
CARDS = 8
RACKS = 250
PORT = 18131
TARGET_MS = 150
STATES = ["available", "allocated", "allocated", "allocated", "suspect", "quarantined"]
#: The product's own settings and addresses, and one address more.
BENCH_SETTINGS = """
from controlplane.local.settings import *
ROOT_URLCONF = "bench_urls"
"""
BENCH_URLS = """
from django.db import connection
from django.urls import path
from rest_framework.response import Response
from rest_framework.views import APIView
from controlplane.urls import urlpatterns as ours, handler400, handler500

class Bare(APIView):
    schema = None
    def get(self, request):
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
            return Response({"answer": cursor.fetchone()[0]})

urlpatterns = [path("bare", Bare.as_view()), *ours]
"""
LISTS = {
    "by name": "nodes?limit=100",
    "far down the pages": "@deep",
    "newest change of state first": "nodes?limit=100&sort=-state_since",
    "one state, newest first": "nodes?limit=100&state=suspect&sort=-state_since",
    "one rack": "nodes?limit=100&rack=rack-017",
    "not heard": "nodes?limit=100&reachable=false",
    "part of a name": "nodes?limit=100&q=77",
    "three fields": "nodes?limit=100&fields=id,name,state",
    "cards": "gpus?limit=100&model=NVIDIA%20H200",
}


def main(count: int) -> int:
    with own_servers() as home:
        print(f"making {NODES} nodes with {CARDS} cards each ...", flush=True)
        token, cluster = make_fleet()
        return measure(home, token, cluster, count)


def make_fleet() -> tuple[str, str]:
    """The token of an operator, and the id of the cluster."""
    from django.core.management import call_command
    from django.db import connection
    from django.utils import timezone

    from controlplane.accounts import actions as accounts
    from controlplane.accounts.choices import Role
    from controlplane.accounts.models import SYSTEM
    from controlplane.fleet.actions import create_cluster
    from controlplane.fleet.models import Gpu, Lease, Node, Rack

    call_command("migrate", verbosity=0)
    cluster = create_cluster(SYSTEM, "bench")
    user = accounts.create_user(SYSTEM, "bench", secrets.token_urlsafe())
    accounts.grant_role(SYSTEM, user, Role.OPERATOR, cluster.pk)
    _, token = accounts.create_token(
        SYSTEM, user, name="bench", scope=Role.OPERATOR, cluster_id=None, ttl_s=3600
    )
    racks = Rack.objects.bulk_create(
        [Rack(cluster=cluster, name=f"rack-{number:03d}") for number in range(RACKS)]
    )
    now = timezone.now()
    later = now + timedelta(hours=1)  # heard as long as the benchmark lasts
    nodes = Node.objects.bulk_create(
        [
            Node(
                cluster=cluster,
                rack=racks[number % RACKS],
                name=f"node-{number:05d}",
                address="10.0.0.1",
                state=STATES[number % len(STATES)],
                state_since=now - timedelta(seconds=number * 37 % 86_400),
                public_key=base64.b64encode(number.to_bytes(32, "big")).decode(),
                boot_id=secrets.token_hex(16),
                booted_at=now,
            )
            for number in range(NODES)
        ],
        batch_size=2000,
    )
    Lease.objects.bulk_create(
        [
            Lease(node=node, last_beat_at=later, deadline=later, reachable=number % 50 != 0)
            for number, node in enumerate(nodes)
        ],
        batch_size=5000,
    )
    Gpu.objects.bulk_create(
        [
            Gpu(
                uuid=f"GPU-{number:05d}-{index}",
                serial=f"{number:05d}{index}",
                model="NVIDIA H200",
                memory_bytes=141 * 2**30,
                node=node,
                index=index,
            )
            for number, node in enumerate(nodes)
            for index in range(CARDS)
        ],
        batch_size=5000,
    )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    connection.close()
    return token, cluster.pk


def measure(home: Path, token: str, cluster: str, count: int) -> int:
    (home / "bench_settings.py").write_text(BENCH_SETTINGS)
    (home / "bench_urls.py").write_text(BENCH_URLS)
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "granian", "--interface", "wsgi", "--workers", "1"),
            *("--blocking-threads", "4", "--log-level", "warning", "--port", str(PORT)),
            "controlplane.wsgi:application",
        ],
        env={
            **os.environ,
            "PYTHONPATH": f"{home}:{REPOSITORY}",
            "DJANGO_SETTINGS_MODULE": "bench_settings",
            "LOG_LEVEL": "WARNING",
        },
    )
    try:
        client = Client(token)
        print(f"\n{'':<34}{'p50':>8}{'p95':>8}   ms, {count} requests each, one at a time")
        tell("bound: SELECT 1", client.times("/bare", count))
        worst = 0.0
        for name, path in LISTS.items():
            address = client.deep_page() if path == "@deep" else f"/api/v1/{path}"
            worst = max(worst, tell(name, client.times(address, count)))
        print("beside the target:")
        tell("500 at once", client.times("/api/v1/nodes?limit=500", count // 4))
        whole = f"/api/v1/clusters/{cluster}"
        tell("all usable nodes of the cluster", client.times(f"{whole}/usable-nodes", count // 4))
        tell("what changed since", client.times(f"{whole}/changes?after=0", count))
        print(f"\nslowest list, p95: {worst:.0f} ms (target < {TARGET_MS})")
        return 0 if worst < TARGET_MS else 1
    finally:
        server.terminate()
        server.wait(timeout=20)


class Client:
    """One connection that is kept, as a scheduler's would be."""

    def __init__(self, token: str) -> None:
        self._headers = {"Authorization": f"Bearer {token}"}
        self._until_answering()
        self._connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)

    def get(self, path: str) -> Any:
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {body[:300]!r}")
        return json.loads(body)

    def times(self, path: str, count: int) -> list[float]:
        """Milliseconds of each request; the first few warm up and do not count."""
        taken = []
        for _ in range(count + 5):
            began = time.perf_counter()
            self.get(path)
            taken.append((time.perf_counter() - began) * 1000)
        return taken[5:]

    def deep_page(self) -> str:
        """The address of a page in the middle of the list."""
        page = self.get("/api/v1/nodes?limit=500&fields=id")
        for _ in range(12):
            page = self.get(page["next"])
        return str(page["next"]).replace("limit=500", "limit=100").replace("fields=id&", "")

    def _until_answering(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                probe = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
                probe.request("GET", "/api/v1/openapi.json")
                probe.getresponse().read()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def tell(name: str, taken: list[float]) -> float:
    cuts = statistics.quantiles(taken, n=20)
    print(f"{name:<34}{statistics.median(taken):>8.1f}{cuts[-1]:>8.1f}", flush=True)
    return cuts[-1]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 40))
