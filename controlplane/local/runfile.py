"""The run file: where a running `manage.py up` tells its addresses to commands beside it."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from node_agent import procfs

REPOSITORY = Path(__file__).resolve().parent.parent.parent
_found: dict[str, str] = {}


def home() -> Path:
    """Where this machine's product keeps its data: DRYDOCK_HOME, or `.drydock` in the checkout."""
    return Path(os.environ.get("DRYDOCK_HOME") or REPOSITORY / ".drydock").resolve()


def path() -> Path:
    """The file in which a running product says where its parts are."""
    return home() / "run.json"


def load_into(environ: MutableMapping[str, str]) -> None:
    """Set what the run file names and the environment does not, and the home's secret key; where
    there is none, a new one, which `up` writes down, and whoever is given a database: what is
    started by hand on the same one must have the same key."""
    _found.update(environ)
    with ours(home()):
        for name, value in read().items():
            environ.setdefault(name, value)
        if "SECRET_KEY" not in environ and "SECRET_KEY_FILE" not in environ:
            kept = _key_file()
            environ["SECRET_KEY"] = (
                kept.read_text().strip() if kept.exists() else secrets.token_urlsafe(48)
            )
            if "DATABASE_URL" in _found:
                keep_secret_key(environ)


def callers_environment() -> dict[str, str]:
    """The environment as it was before `load_into`: what whoever started us has set."""
    return dict(_found)


def read() -> dict[str, str]:
    """The environment of the running product; empty when none runs here, whatever it left."""
    try:
        content = json.loads(path().read_text())
    except FileNotFoundError:
        return {}
    if not is_alive(content):
        return {}
    return {name: str(value) for name, value in content["environment"].items()}


def write(environment: dict[str, str], pid: int) -> None:
    """Replace the run file whole, readable by its owner only. `pid` is the running `up`."""
    content: dict[str, object] = {**identity(pid), "environment": environment}
    write_private(path(), json.dumps(content, indent=1))


def identity(pid: int) -> dict[str, int | str]:
    """What names this process and never another one: numbers are given again, and a time of day
    moves with the clock. Raises ProcessLookupError if it is gone."""
    process = procfs.read(pid)
    if process is None:
        raise ProcessLookupError(pid)
    return {"pid": pid, "start_ticks": process.start_ticks, "boot_id": _boot_id()}


def is_alive(record: Mapping[str, Any]) -> bool:
    """Whether the very process that has this `identity` lives. Of a record that an earlier version
    wrote nobody can say, and it does not."""
    if record.get("boot_id") != _boot_id():
        return False
    return procfs.is_alive(record["pid"], record["start_ticks"])


def _boot_id() -> str:
    """Of the kernel; empty in a sandbox that does not tell."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def keep_secret_key(environ: MutableMapping[str, str]) -> None:
    """Make the key that `load_into` has set the home's own, unless that has one, which is then set.

    What is started in this environment, and commands beside it, have the same. A key that the
    caller gave is not written down.
    """
    if "SECRET_KEY" in _found or "SECRET_KEY_FILE" in _found:
        return
    if not _key_file().exists():
        write_private(_key_file(), environ["SECRET_KEY"])
    environ["SECRET_KEY"] = _key_file().read_text().strip()


def _key_file() -> Path:
    return home() / "secret-key"


@contextmanager
def ours(home: Path) -> Iterator[None]:
    """End the command, with a sentence, at what another user keeps closed in this home."""
    try:
        yield
    except PermissionError as error:
        sys.exit(
            f"{home} belongs to {owner(Path(error.filename))}: run this as that user, or choose "
            "another place with DRYDOCK_HOME=/path."
        )


def owner(path: Path) -> str:
    """Whose this is; whose the folder is, of what is not there or not to be seen."""
    try:
        user = path.stat().st_uid
    except (FileNotFoundError, PermissionError):
        return owner(path.parent)
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


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
