"""Node packages for tests: installed beside them from npm, at the versions that are pinned."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = HERE / "node_modules"
INSTALL_TIMEOUT_S = 180.0
MIN_NODE = 20
"""What vitest 4 asks for."""


def needs(what: str, hint: str) -> None:
    """Skip the test for want of `what`; on CI, where it has to be there, fail."""
    reason = f"{what}; {hint}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def installed() -> Path:
    """The folder of commands of the packages in package.json, which are installed if need be."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        needs("no Node.js here", "on Debian or Ubuntu: apt-get install nodejs npm")
    if _node_major() < MIN_NODE:
        needs(f"Node.js {MIN_NODE} or newer is needed", "https://nodejs.org has it")
    if not _is_current():
        done = subprocess.run(
            ["npm", "install", "--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund"],
            cwd=HERE,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
        if done.returncode or not _is_current():
            needs(f"npm install failed: {done.stderr[-500:]}", f"try it in {HERE.name}/")
    return MODULES / ".bin"


def _node_major() -> int:
    said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True)
    return int(said.stdout.removeprefix("v").split(".")[0])


def _is_current() -> bool:
    """Whether every package that is pinned is there at its version."""
    pinned = json.loads((HERE / "package.json").read_text())["dependencies"]
    return all(_version(package) == version for package, version in pinned.items())


def _version(package: str) -> str | None:
    manifest = MODULES / package / "package.json"
    return json.loads(manifest.read_text())["version"] if manifest.exists() else None
