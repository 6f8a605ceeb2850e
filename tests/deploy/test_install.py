"""The base install has neither torch nor numpy, is small, and serves an edge."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import venv
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import Edge, Origin, running
from tests.needs import needs

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
MOST_BYTES = 110 * 1000 * 1000
INSTALL_TIMEOUT_S = 600


class Installed(Edge):
    """The edge of another environment, which sees nothing of this one."""

    def __init__(self, python: Path, origin: Origin) -> None:
        super().__init__(origin)
        self.command[:1] = [str(python), "-I"]


def install(folder: Path) -> Path:
    """Install `tailrace` and no extra into a new environment; return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    asked: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    done = subprocess.run(
        [*asked, "-c", ROOT / "constraints.txt", ROOT],
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        check=False,
    )
    if done.returncode:
        needs(f"pip install failed: {done.stderr[-500:]}", "a package index has to be in reach")
    return python


def size_of(packages: Path) -> int:
    """Return the bytes of the packages themselves: no bytecode, and nothing of venv's own."""
    of_venv = {"pip", "setuptools", "pkg_resources", "_distutils_hack"}
    return sum(
        file.lstat().st_size
        for file in packages.rglob("*")
        if file.is_file() and file.suffix != ".pyc"
        if file.relative_to(packages).parts[0] not in of_venv
    )


async def test_an_edge_needs_no_more_than_the_base_install(tmp_path: Path) -> None:
    python = await asyncio.to_thread(install, tmp_path / "venv")
    packages = tmp_path / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    installed = {path.name.partition("-")[0].lower() for path in packages.iterdir()}
    assert "tailrace" in installed and not {"torch", "numpy", "triton"} & installed
    assert size_of(packages) < MOST_BYTES
    origin = Origin(tmp_path / "data")
    edge = Installed(python, origin)
    async with running(origin, edge), httpx.AsyncClient(timeout=60) as client:
        body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "seed": 1}
        made = await client.post(f"{edge.url}/v1/generate", json=body)
        assert made.status_code == 200, made.text
        assert made.json()["total_tokens"] == 8
