"""Node packages for tests: installed from npm into the folder that pins them."""

from __future__ import annotations

import json
import shutil
import subprocess
from fcntl import LOCK_EX, flock
from pathlib import Path

from tests.needs import needs

INSTALL_TIMEOUT_S = 180.0
MIN_NODE = 20
"""Minimum major version of Node, which vitest 4 requires."""


def installed(folder: Path) -> Path:
    """Return the commands of the packages in the folder's package.json, installed if need be.

    Two processes of tests may ask at the same time: one installs, the other waits for it.
    """
    if shutil.which("npm") is None or shutil.which("node") is None:
        needs("no Node.js here", "on Debian or Ubuntu: apt-get install nodejs npm")
    if _node_major() < MIN_NODE:
        needs(f"Node.js {MIN_NODE} or newer is needed", "https://nodejs.org has it")
    with (folder / "package.json").open() as manifest:
        flock(manifest, LOCK_EX)
        if not _is_current(folder):
            _install(folder)
    return folder / "node_modules" / ".bin"


def _install(folder: Path) -> None:
    done = subprocess.run(
        ["npm", "install", "--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    if done.returncode or not _is_current(folder):
        needs(f"npm install failed: {done.stderr[-500:]}", f"try it in {folder.name}/")


def _node_major() -> int:
    said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True)
    return int(said.stdout.removeprefix("v").split(".")[0])


def _is_current(folder: Path) -> bool:
    """Return True if every package that is pinned is there at its version."""
    manifest = json.loads((folder / "package.json").read_text())
    pinned = manifest.get("dependencies", {}) | manifest.get("devDependencies", {})
    modules = folder / "node_modules"
    # A package under another name is pinned as "npm:ai@6.0.326".
    return all(
        _version(modules / package) == version.rpartition("@")[2]
        for package, version in pinned.items()
    )


def _version(package: Path) -> str | None:
    manifest = package / "package.json"
    return json.loads(manifest.read_text())["version"] if manifest.exists() else None
