"""The contents of a release: one version, workflows that fit their schema, and addresses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github/workflows"
SCRIPT = ".ci/write_addresses.py"
NPM_MANIFEST = "edge/web/tailrace/package.json"
CHANGED = ("pyproject.toml", "README.md", NPM_MANIFEST)
URL, TAG = "https://github.com/someone/tailrace", "v0.1.0"


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def manifest(folder: Path = ROOT) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads((folder / NPM_MANIFEST).read_text())
    return whole


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Return a copy of what metadata is made from, with a repository's address written into it."""
    for name in (*CHANGED, "LICENSE", SCRIPT):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run([sys.executable, SCRIPT, URL, TAG], cwd=tmp_path, check=True)
    return tmp_path


def test_python_and_npm_packages_have_one_version() -> None:
    worker = json.loads((ROOT / "wrangler-compat/package.json").read_text())
    assert project()["version"] == manifest()["version"] == worker["version"]


@pytest.mark.parametrize("name", sorted(file.name for file in WORKFLOWS.iterdir()))
def test_workflows_fit_their_schema(name: str) -> None:
    checker = Path(sys.executable).with_name("check-jsonschema")
    schema = ("--builtin-schema", "vendor.github-workflows")
    subprocess.run([checker, *schema, WORKFLOWS / name], check=True, capture_output=True)


def test_the_tree_names_no_repository_and_the_release_writes_its_own() -> None:
    """No placeholder can be published: the one that runs the workflow is the one that is named."""
    assert "urls" not in project()
    assert not {"repository", "homepage", "bugs"} & manifest().keys()
    steps = yaml.safe_load((WORKFLOWS / "release.yml").read_text())["jobs"]["build"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    [written] = [nth for nth, command in enumerate(commands) if SCRIPT in command]
    assert '"$GITHUB_SERVER_URL/$GITHUB_REPOSITORY" "$GITHUB_REF_NAME"' in commands[written]
    assert commands.index("make dist") > written


def test_metadata_of_a_release_links_to_its_repository(published: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "metadata"],
        cwd=published,
        capture_output=True,
        text=True,
        check=True,
    )
    metadata = json.loads(done.stdout)
    assert metadata["urls"]["Repository"] == URL
    assert metadata["urls"]["Changelog"] == f"{URL}/blob/{TAG}/CHANGELOG.md"
    readme = metadata["readme"]["text"]
    assert "![The path of a token" in readme and f"({URL}/raw/{TAG}/docs/token-path.svg)" in readme
    assert f"[PROTOCOL.md]({URL}/blob/{TAG}/PROTOCOL.md)" in readme
    paths = [part.partition(")")[0] for part in readme.split(f"({URL}/")[1:]]
    assert len(paths) > 20
    assert all((ROOT / path.split("/", 2)[2].partition("#")[0]).exists() for path in paths)
    assert readme.count("](") == readme.count("](https://")
    repository = {"type": "git", "url": f"git+{URL}.git", "directory": "edge/web/tailrace"}
    assert manifest(published) == manifest() | {
        "repository": repository,
        "homepage": f"{URL}#readme",
        "bugs": f"{URL}/issues",
    }


def test_addresses_are_not_written_twice(published: Path) -> None:
    again = subprocess.run(
        [sys.executable, SCRIPT, URL, TAG],
        cwd=published,
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 1 and "[project.urls] already" in again.stderr
