"""The wrangler file that is shipped: wrangler deploys it in silence, and an edge runs from it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.edge.wrangler.jsonc import parse
from tests.npm import installed
from tests.worker.workerd import FOLDER

HERE = Path(__file__).parent
LEAST_NODE = (22, 12)
"""Minimum version of Node, which wrangler 4 requires."""
DEPLOY_TIMEOUT_S = 120.0
SILENCE = {
    "CI": "true",
    "CLOUDFLARE_CF_FETCH_ENABLED": "false",
    "WRANGLER_HIDE_BANNER": "true",
    "WRANGLER_SEND_ERROR_REPORTS": "false",
    "WRANGLER_SEND_METRICS": "false",
}


def node() -> Path:
    """Return the machine's, if it is new enough, else one from npm."""
    found = shutil.which("node")
    if found is not None:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
        if tuple(map(int, re.findall(r"\d+", said.stdout)[:2])) >= LEAST_NODE:
            return Path(found)
    return installed(HERE) / "node"


def dry_run(file: Path, made: Path) -> subprocess.CompletedProcess[str]:
    """Return what `wrangler deploy` does short of asking Cloudflare."""
    wrangler = installed(FOLDER).parent / "wrangler" / "bin" / "wrangler.js"
    line = [
        str(node()),
        str(wrangler),
        "deploy",
        "--dry-run",
        "--outdir",
        str(made),
        "-c",
        str(file),
    ]
    return subprocess.run(
        line,
        cwd=made.parent,
        env={**os.environ, **SILENCE, "XDG_CONFIG_HOME": str(made.parent)},
        capture_output=True,
        text=True,
        timeout=DEPLOY_TIMEOUT_S,
        check=False,
    )


def config_check(file: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tailrace.cli", "config", "check", "--wrangler", str(file)]
    return subprocess.run([*line, "--json"], capture_output=True, text=True, check=False)


def warnings(done: subprocess.CompletedProcess[str]) -> list[str]:
    said = (done.stdout + done.stderr).splitlines()
    return [line for line in said if "WARNING" in line or "ERROR" in line]


def test_wrangler_deploys_the_file_that_is_shipped_without_a_warning(tmp_path: Path) -> None:
    done = dry_run(FOLDER / "wrangler.jsonc", tmp_path / "made")
    assert (done.returncode, warnings(done), done.stderr) == (0, [], "")
    assert "env.STREAMS (StreamObject)" in done.stdout
    assert (tmp_path / "made" / "worker.js").stat().st_size > 0


def test_an_edge_runs_from_the_file_that_is_shipped() -> None:
    done = config_check(FOLDER / "wrangler.jsonc")
    assert (done.returncode, done.stderr) == (0, "")
    effects = {row["key"]: row["effect"] for row in json.loads(done.stdout)}
    assert effects["vars.TAILRACE_ORIGIN_URL"] == "ignored"
    assert effects["durable_objects"] == effects["migrations"] == "honoured"


@pytest.mark.parametrize(
    ("wrong", "key", "wrangler_says"),
    [
        ({"observabilty": {}}, "observabilty", "warning"),
        ({"triggers": {"crons": ["0 25 * * *"]}}, "triggers.crons.0", "nothing"),
        ({"vars": ["TAILRACE_ORIGIN_URL"]}, "vars", "nothing"),
        ({"route": "a.example/*", "routes": ["b.example/*"]}, "route", "error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_wrangler_lets_pass_is_refused_by_an_edge(
    wrong: dict[str, object], key: str, wrangler_says: str, tmp_path: Path
) -> None:
    shipped = parse((FOLDER / "wrangler.jsonc").read_text())
    assert isinstance(shipped, dict)
    file = tmp_path / "wrangler.json"
    main = {"main": str(FOLDER / "src" / "worker.ts")}
    file.write_text(json.dumps({**shipped, **main, **wrong}))
    done = dry_run(file, tmp_path / "made")
    said = "error" if done.returncode else "warning" if warnings(done) else "nothing"
    assert said == wrangler_says
    ours = config_check(file)
    assert ours.returncode == 2
    [row] = json.loads(ours.stdout)
    assert (row["key"], row["effect"], bool(row["hint"])) == (key, "refused", True)
    assert f"{file.name}: {key}" in ours.stderr
