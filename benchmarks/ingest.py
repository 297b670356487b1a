"""How many signed beats a second one ingest process takes, beside the bare server's limit.

    python benchmarks/ingest.py [beats]

The limit is the same requests to the same server with an application that answers at once. Ingest
verifies a signature, decodes, and waits for Redis before it answers.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import msgspec  # noqa: E402
from cryptography.hazmat.primitives import serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: E402

from benchmarks.servers.own import own_servers  # noqa: E402
from node_agent import wire  # noqa: E402

NODES = 200
CONNECTIONS = 64
BARE = """
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})
"""


def main(beats: int) -> None:
    with own_servers() as home:
        requests = signed_beats(beats)
        (home / "bare.py").write_text(BARE)
        limit = rate_of(home, "bare:app", 18101, requests)
        ours = rate_of(home, "controlplane.ingest.app:app", 18102, requests)
        print(f"ingest, beats accepted:       {ours:8.0f} /s")
        print(f"limit, a server that answers: {limit:8.0f} /s")
        print(f"ratio:                        {ours / limit:8.2f}")


def signed_beats(count: int) -> list[bytes]:
    """`count` whole HTTP requests, signed by NODES nodes that are enrolled."""
    from django.core.management import call_command
    from django.utils import timezone

    from controlplane.accounts.models import SYSTEM
    from controlplane.fleet.actions import create_cluster
    from controlplane.fleet.models import Node

    call_command("migrate", verbosity=0)
    cluster = create_cluster(SYSTEM, "bench")
    keys = [Ed25519PrivateKey.generate() for _ in range(NODES)]
    now = timezone.now()
    nodes = [
        Node(
            cluster=cluster,
            name=f"n{index}",
            state_since=now,
            booted_at=now,
            boot_id="b",
            public_key=base64.b64encode(
                key.public_key().public_bytes(
                    serialization.Encoding.Raw, serialization.PublicFormat.Raw
                )
            ).decode(),
        )
        for index, key in enumerate(keys)
    ]
    Node.objects.bulk_create(nodes)
    readings = [
        wire.GpuReading(uuid=f"GPU-{i}", temperature_c=60.0, power_w=500.0) for i in range(8)
    ]
    requests = []
    for seq in range(count):
        node, key = nodes[seq % NODES], keys[seq % NODES]
        body = msgspec.json.encode(
            wire.Beat(boot_id="b", seq=seq, at=time.time(), readings=readings)
        )
        at = repr(time.time())
        signature = key.sign(wire.signing_input("/v1/beat", node.pk, at, body))
        head = (
            f"POST /v1/beat HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n"
            f"{wire.HEADER_NODE}: {node.pk}\r\n{wire.HEADER_TIME}: {at}\r\n"
            f"{wire.HEADER_SIGNATURE}: {base64.b64encode(signature).decode()}\r\n\r\n"
        )
        requests.append(head.encode() + body)
    return requests


def rate_of(home: Path, target: str, port: int, requests: list[bytes]) -> float:
    """Answers a second by a server of this application, in `home` or ours; all must be 200."""
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "granian", "--interface", "asgi", "--workers", "1"),
            *("--log-level", "warning", "--port", str(port), target),
        ],
        env={**os.environ, "PYTHONPATH": f"{home}:{REPOSITORY}"},
    )
    try:
        return asyncio.run(_drive(port, requests))
    finally:
        server.terminate()
        server.wait(timeout=20)


async def _drive(port: int, requests: list[bytes]) -> float:
    await _until_answering(port, requests[0])
    shares = [requests[start::CONNECTIONS] for start in range(CONNECTIONS)]
    began = time.perf_counter()
    await asyncio.gather(*(_send_all(port, share) for share in shares))
    return len(requests) / (time.perf_counter() - began)


async def _until_answering(port: int, request: bytes) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            return await _send_all(port, [request])
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


async def _send_all(port: int, requests: list[bytes]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for request in requests:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"refused: {json.loads(body)}")
    writer.close()
    await writer.wait_closed()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
