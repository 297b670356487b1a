"""The rivals' virtual environments: made on first use, outside the repository.

Each holds the rival and what only it needs; torch is the running interpreter's own, so that all
contenders run on the same build and no gigabyte is fetched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path


def python_of(requirement: str) -> str:
    """The interpreter that has this requirement, such as `torchft==0.2.0`.

    Raises RuntimeError if it cannot be installed beside the present torch.
    """
    folder = _cache() / requirement.replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"installing {requirement} in {folder} ...", flush=True)
        _make(folder, python, requirement)
    return str(python)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "drydock" / "rivals" / f"torch-{metadata.version('torch')}"


def _make(folder: Path, python: Path, requirement: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    # Behind the environment's own packages, and seen by pip as installed.
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "torch_of_drydock.pth").write_text(f"{_torch_site()}\n")
    torch = f"torch=={metadata.version('torch').partition('+')[0]}"
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, requirement, torch], text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"{requirement} cannot be installed: {done.stderr.strip()[-500:]}")
    (folder / "complete").touch()


def _torch_site() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed: install the extra `runtime`")
    return Path(spec.origin).parent.parent
