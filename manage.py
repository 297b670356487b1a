#!/usr/bin/env python
"""Drydock's command line. Uses the project's own environment, whichever Python starts it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

VENV_PYTHON = Path(__file__).resolve().parent / ".venv" / "bin" / "python"


def main() -> None:
    if importlib.util.find_spec("django") is None:
        reexec_in_venv()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.local.settings")
    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


def reexec_in_venv() -> None:
    """Go on under .venv's Python, so that `python manage.py` works without activating it."""
    running_there = Path(sys.prefix).resolve() == VENV_PYTHON.parent.parent.resolve()
    if running_there or not VENV_PYTHON.exists():
        sys.exit("Drydock's packages are not installed here. Run `make install` (or `make up`).")
    os.execv(VENV_PYTHON, [str(VENV_PYTHON), *sys.argv])  # noqa: S606 - our own interpreter


if __name__ == "__main__":
    main()
