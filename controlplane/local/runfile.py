"""The run file: where a running `manage.py up` tells its addresses to commands beside it."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def home() -> Path:
    """Where this machine's product keeps its data: DRYDOCK_HOME, or `.drydock` in the checkout."""
    return Path(os.environ.get("DRYDOCK_HOME") or REPOSITORY / ".drydock").resolve()


def path() -> Path:
    return home() / "run.json"


def load_into(environ: MutableMapping[str, str]) -> None:
    """Set what the run file names and the environment does not; make the secret key if needed."""
    for name, value in read().items():
        environ.setdefault(name, value)
    if "SECRET_KEY" not in environ and "SECRET_KEY_FILE" not in environ:
        environ["SECRET_KEY"] = secret_key()


def read() -> dict[str, str]:
    """The environment of the running product; empty when none has been started here."""
    try:
        content = json.loads(path().read_text())
    except FileNotFoundError:
        return {}
    return {name: str(value) for name, value in content["environment"].items()}


def write(environment: dict[str, str], pid: int) -> None:
    """Replace the run file whole, readable by its owner only."""
    write_private(path(), json.dumps({"pid": pid, "environment": environment}, indent=1))


def secret_key() -> str:
    """This home's secret key, made at the first call."""
    key_file = home() / "secret-key"
    if not key_file.exists():
        write_private(key_file, secrets.token_urlsafe(48))
    return key_file.read_text().strip()


def write_private(target: Path, text: str) -> None:
    """Write atomically with mode 0600: the file is whole or absent, whenever we die."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, target)
