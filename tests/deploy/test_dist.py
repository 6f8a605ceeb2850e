"""`make dist`: what is published is installed into empty environments, and does the main job there.

The wheel is installed with its demo model's packages, and without them in front of a server; beside
Hugging Face's `kernels`, whose import name a folder of ours has. Node runs the npm package, and
workerd's own bundle format is what the Worker is.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.needs import needs
from tests.worker.workerd import Workerd

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
INSTALL_TIMEOUT_S = 600
ANY_PORTS = ("--http-port", "0", "--https-port", "0", "--link-port", "0")
READ_IN_NODE = """
import { stream } from "tailrace";
const reading = stream(`${process.argv[2]}/v1/generate`, {
  input: { model: "demo", prompt: "Once upon a time", max_tokens: 12, seed: 1 },
});
for await (const frame of reading) if (frame.type === "Token") process.stdout.write(frame.text);
"""
BESIDE_HUGGING_FACE = """
import kernels
from kernels.layer import Mode
from tailrace.kernels.shapes import PAGE_TOKENS
from tailrace.kernels import sources
assert kernels.__file__ not in map(str, sources())
print(Mode.INFERENCE, PAGE_TOKENS, kernels.__file__)
"""


def clean_environment() -> dict[str, str]:
    """Return an environment in which no package of this one is found."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(command: list[str | Path], where: Path) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=where,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that `make dist` builds."""
    if shutil.which("npm") is None:
        needs("no Node.js here", "on Debian or Ubuntu: apt-get install nodejs npm")
    folder = tmp_path_factory.mktemp("dist") / "made"
    run(["make", "dist", f"DIST={folder}"], ROOT)
    return folder


@pytest.fixture(scope="module")
def whole(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel with the extra `torch` and Hugging Face's kernels; return the commands."""
    folder = tmp_path_factory.mktemp("whole") / "venv"
    return installed(folder, f"{only(dist, '*.whl')}[torch]", "kernels>=0.11,<1")


def only(folder: Path, pattern: str) -> Path:
    [found] = folder.glob(pattern)
    return found


def installed(folder: Path, *what: str | Path) -> Path:
    """Install into a new environment; return its folder of commands."""
    venv.create(folder, with_pip=True)
    bin_ = folder / "bin"
    pip = (bin_ / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run([*pip, "-c", CONSTRAINTS, *what], folder)
    return bin_


@contextmanager
def serving(
    tailrace: Sequence[str | Path], data: Path, *flags: str
) -> Iterator[tuple[dict[str, Any], str]]:
    """Run `tailrace up`; give its ready line, and what it showed of a sample."""
    process = subprocess.Popen(
        [*tailrace, "up", "--json", "--data", data, *ANY_PORTS, *flags],
        cwd=data.parent,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        ready = json.loads(process.stdout.readline())
        shown = []
        for line in process.stderr:
            shown.append(line)
            if line.rstrip() == "Ctrl-C stops it.":
                break
        yield ready, "".join(shown)
    finally:
        process.terminate()
        process.communicate()


def test_the_wheel_has_one_top_level_name_and_is_what_the_sdist_builds(
    dist: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(only(dist, "*.whl")) as wheel:
        names = set(wheel.namelist())
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"tailrace"}
    for needed in (
        *("tailrace/edge/web/index.html", "tailrace/origin/demo/model/model.safetensors"),
        *("tailrace/ledger/py.typed", "tailrace/kernels/shapes.py", "tailrace/py.typed"),
    ):
        assert needed in names
    run(["tar", "xzf", only(dist, "*.tar.gz")], tmp_path)
    again = tmp_path / "again"
    command: list[str | Path] = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    run([*command, "-d", again], only(tmp_path, "tailrace-*"))
    with zipfile.ZipFile(only(again, "*.whl")) as wheel:
        assert set(wheel.namelist()) == names


def test_the_wheel_serves_the_demo_model_and_a_base_install_is_in_front_of_it(
    dist: Path, whole: Path, tmp_path: Path
) -> None:
    with serving([whole / "tailrace"], tmp_path / "data") as (ready, sample):
        assert "⟨cut after 24 tokens · resumed on" in sample and "the sample failed" not in sample

        base = installed(tmp_path / "base", only(dist, "*.whl"))
        front = ("--upstream", f"{ready['http']}/v1")
        with serving([base / "tailrace"], tmp_path / "front", *front) as (before, seen):
            assert before["models"] == ["demo"]
            assert "⟨cut after 24 tokens · resumed on" in seen

        project = tmp_path / "project"
        project.mkdir()
        (project / "package.json").write_text('{"type": "module"}')
        (project / "read.mjs").write_text(READ_IN_NODE)
        run(["npm", "install", "--silent", "--no-audit", "--no-fund", only(dist, "*.tgz")], project)
        text = run(["node", "read.mjs", ready["http"]], project)
        assert len(text) > 12

        assert asyncio.run(generated_by_worker(dist / "worker", ready["http"], tmp_path)) == 12


async def generated_by_worker(built: Path, edge: str, folder: Path) -> int:
    """Ask the Worker in front of an edge for an answer; return its number of tokens."""
    runtime = Workerd(edge, folder / "worker")
    runtime.built = built
    async with runtime as worker, httpx.AsyncClient(timeout=60) as client:
        body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 12, "seed": 1}
        answer = await client.post(f"{worker.url}/v1/generate", json=body)
        return int(answer.raise_for_status().json()["total_tokens"])


def test_uvx_runs_the_wheel_in_front_of_a_server(dist: Path, whole: Path, tmp_path: Path) -> None:
    uv = Path(sys.executable).with_name("uv")
    command: list[str | Path] = [uv, "tool", "run", "--python", sys.executable]
    command += ["--constraints", CONSTRAINTS]
    command += ["--from", only(dist, "*.whl"), "tailrace"]
    with (
        serving([whole / "tailrace"], tmp_path / "server", "--no-sample") as (server, _),
        serving(command, tmp_path / "front", "--upstream", f"{server['http']}/v1") as (ready, seen),
    ):
        assert ready["models"] == ["demo"]
        assert "⟨cut after 24 tokens · resumed on" in seen


def test_the_wheel_lives_beside_hugging_faces_kernels(whole: Path, tmp_path: Path) -> None:
    said = run([whole / "python", "-c", BESIDE_HUGGING_FACE], tmp_path)
    assert "site-packages/kernels/__init__.py" in said


def test_the_worker_is_one_module_with_a_wrangler_file_that_names_it(dist: Path) -> None:
    worker = dist / "worker"
    assert {path.name for path in worker.iterdir()} == {
        *("LICENSE", "README.md", "worker.js", "wrangler.jsonc")
    }
    assert '"main": "worker.js"' in (worker / "wrangler.jsonc").read_text()
    assert "export {" in (worker / "worker.js").read_text()
