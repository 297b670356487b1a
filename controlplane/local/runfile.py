"""The run file: where a running `manage.py up` tells its addresses to commands beside it."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent.parent
_found: dict[str, str] = {}


def home() -> Path:
    """Where this machine's product keeps its data: DRYDOCK_HOME, or `.drydock` in the checkout."""
    return Path(os.environ.get("DRYDOCK_HOME") or REPOSITORY / ".drydock").resolve()


def path() -> Path:
    return home() / "run.json"


def load_into(environ: MutableMapping[str, str]) -> None:
    """Set what the run file names and the environment does not; make the secret key if needed."""
    _found.update(environ)
    for name, value in read().items():
        environ.setdefault(name, value)
    if "SECRET_KEY" not in environ and "SECRET_KEY_FILE" not in environ:
        environ["SECRET_KEY"] = secret_key()


def callers_environment() -> dict[str, str]:
    """The environment as it was before `load_into`: what whoever started us has set."""
    return dict(_found)


def read() -> dict[str, str]:
    """The environment of the running product; empty when none runs here, whatever it left."""
    try:
        content = json.loads(path().read_text())
    except FileNotFoundError:
        return {}
    if not is_alive(content["pid"], content["started_at"]):
        return {}
    return {name: str(value) for name, value in content["environment"].items()}


def write(environment: dict[str, str], pid: int) -> None:
    """Replace the run file whole, readable by its owner only. `pid` is the running `up`."""
    started_at = psutil.Process(pid).create_time()
    content = {"pid": pid, "started_at": started_at, "environment": environment}
    write_private(path(), json.dumps(content, indent=1))


def is_alive(pid: int, started_at: float) -> bool:
    """Whether this very process lives, and not another one that was given its number."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started_at) < 1
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def secret_key() -> str:
    """This home's secret key, made at the first call."""
    key_file = home() / "secret-key"
    if not key_file.exists():
        write_private(key_file, secrets.token_urlsafe(48))
    return key_file.read_text().strip()


def write_private(target: Path, text: str) -> None:
    """Write atomically with mode 0600: the file is whole or absent, whenever we die.

    Raises OSError where it cannot be written; then it is as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).replace(target)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
