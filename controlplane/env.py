"""Reads settings from the environment: the only place that does.

`NAME_FILE` may name a file that holds the value of `NAME`, for secrets handed over as files.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

#: How long we wait for a server whose host has vanished, or the network to it: without these a
#: query may wait for two hours. Of libpq, which heeds only the first over a socket of this machine.
PATIENCE = {
    "connect_timeout": "5",  # s
    "keepalives_idle": "10",  # s
    "keepalives_interval": "5",  # s
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",  # ms
}
#: The same the other way round: how long the server keeps the locks of a process of ours whose host
#: has vanished, or that stands still in the middle of a transaction.
SERVERS_PATIENCE = {
    "options": "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"
    " -c tcp_user_timeout=25000 -c idle_in_transaction_session_timeout=60000"
}


def env_str(name: str, default: str = "") -> str:
    """The value of NAME, or the content of the file named by NAME_FILE, or `default`.

    Raises ImproperlyConfigured if both are set, or if the file cannot be read or is empty.
    """
    path = os.environ.get(f"{name}_FILE", "")
    if not path:
        return os.environ.get(name, default)
    if os.environ.get(name):
        raise ImproperlyConfigured(
            f"{name} and {name}_FILE are both set: unset one, so that it is clear which counts"
        )
    return _content(f"{name}_FILE", Path(path))


def env_float(name: str, default: float, least: float = -math.inf) -> float:
    """The number that NAME says, or `default`. Raises ImproperlyConfigured for what is no number,
    or less than `least`."""
    text = env_str(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ImproperlyConfigured(f"{name} must be a number, not {text!r}") from None
    if value < least:
        raise ImproperlyConfigured(f"{name} must be at least {least:g}, not {text}")
    return value


def env_int(name: str, default: int) -> int:
    """A whole number from the environment. Raises ImproperlyConfigured if it is none."""
    value = env_float(name, default)
    if value != int(value):
        raise ImproperlyConfigured(f"{name} must be a whole number, not {value}")
    return int(value)


def env_bool(name: str, default: bool) -> bool:
    """Whether the variable says 1, true, yes or on; 0, false, no and off mean the opposite.

    Case does not matter. Raises ImproperlyConfigured for any other text.
    """
    text = env_str(name).lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    if text:
        raise ImproperlyConfigured(f"{name} must be true or false, not {text!r}")
    return default


def env_list(name: str, default: list[str]) -> list[str]:
    """The comma-separated parts of the variable, stripped; `default` if it is unset or empty."""
    text = env_str(name)
    return [part.strip() for part in text.split(",") if part.strip()] if text else default


def database_from_url(url: str, password: str = "") -> dict[str, object]:
    """Django's settings for a `postgresql://user:password@host:port/name?host=/socket` URL.

    What stands after `?` goes before our own PATIENCE. `password` is for a URL without one. Raises
    ImproperlyConfigured for another kind of URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("postgres", "postgresql"):
        raise ImproperlyConfigured("DATABASE_URL must begin with postgresql://")
    if password and parts.password:
        raise ImproperlyConfigured(
            "DATABASE_URL holds a password and DATABASE_PASSWORD is set too: take one away"
        )
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    host = query.pop("host", "") or parts.hostname or ""
    over_tcp = "hostaddr" in query or host[:1] not in ("", "/", "@")
    patience = PATIENCE | (SERVERS_PATIENCE if over_tcp else {})
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(parts.path.lstrip("/")) or "postgres",
        "USER": unquote(parts.username or ""),
        "PASSWORD": password or unquote(parts.password or ""),
        "HOST": host,
        "PORT": str(parts.port or ""),
        "OPTIONS": patience | query,
        "CONN_MAX_AGE": None,
        "CONN_HEALTH_CHECKS": True,
    }


def _content(name: str, path: Path) -> str:
    try:
        content = path.read_text().strip()
    except OSError as error:
        raise ImproperlyConfigured(
            f"{name} names {path}: {error.strerror}. It must be readable by the user that runs "
            f"this process (user id {os.geteuid()})."
        ) from error
    except UnicodeDecodeError as error:
        raise ImproperlyConfigured(f"{name} names {path}: it is not text in UTF-8") from error
    if not content:
        raise ImproperlyConfigured(f"{name} names {path}: the file is empty")
    return content
