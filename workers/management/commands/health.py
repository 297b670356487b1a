"""`manage.py health keeper|worker`: an exit status by which orchestrators judge a process."""

from __future__ import annotations

import http.client
import socket
from typing import Any

import redis
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from kombu.exceptions import OperationalError

from controlplane import redis_keys
from workers.celery import app

ANSWER_S = 3.0


class Command(BaseCommand):
    help = "Succeed if the keeper or the worker of this machine is at work."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("process", choices=["keeper", "worker"])
        parser.add_argument(
            "--name",
            default=f"celery@{socket.gethostname()}",
            help="the worker's name, where it was given one (default: %(default)s)",
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        if options["process"] == "worker":
            self.stdout.write(_worker(options["name"]))
        elif settings.KEEPER_METRICS_ADDRESS:
            self.stdout.write(_keeper_here(settings.KEEPER_METRICS_ADDRESS))
        else:
            self.stdout.write(_any_keeper())


def _worker(name: str) -> str:
    """Its main process answers over the broker, also while every hand is busy."""
    try:
        answers = app.control.ping(destination=[name], timeout=ANSWER_S)
    except (OperationalError, redis.RedisError, OSError) as error:
        raise CommandError(f"the broker does not answer: {error}") from error
    if not answers:
        raise CommandError(f"{name} does not answer; is it started, and under this name?")
    return f"{name} answers"


def _keeper_here(address: str) -> str:
    host, _, port = address.rpartition(":")
    # What listens everywhere is asked on the loopback.
    reachable = "127.0.0.1" if host in ("", "0.0.0.0", "[::]") else host.strip("[]")  # noqa: S104
    connection = http.client.HTTPConnection(reachable, int(port), timeout=ANSWER_S)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        text = response.read().decode().strip()
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"the keeper does not answer at {address}: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise CommandError(f"the keeper is not ready: {text}")
    return f"the keeper {text}"


def _any_keeper() -> str:
    """Without an address of its own there is only the sign of life of whichever leads."""
    try:
        with redis.Redis.from_url(settings.REDIS_URL, socket_timeout=ANSWER_S) as client:
            alive = client.exists(redis_keys.KEEPER_ALIVE)
    except redis.RedisError as error:
        raise CommandError(f"Redis does not answer: {error}") from error
    if not alive:
        raise CommandError("no keeper has given a sign of life within ten seconds")
    return "a keeper leads"
