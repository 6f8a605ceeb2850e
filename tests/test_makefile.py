"""The Makefile refuses a Python that is too old before it makes an environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.needs import needs_program
from tests.test_house import ROOT

pytestmark = needs_program("make", "apt-get install make")

# Answers `-V`, runs `-c CODE` as the older Python would, and makes no environment.
PYTHON = """#!/bin/sh
case "$1" in
  -V) echo "Python {version}" ;;
  -c) exec {real} -c 'import sys; sys.version_info = {info}; exec(sys.argv[1])' "$2" ;;
  *) echo "asked for: $*" >&2; exit 1 ;;
esac
"""
# A make above this one, such as `make test PYTHON=...`, passes on its variables.
PASSED_ON = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "VENV")


def python(folder: Path, version: str) -> Path:
    """Write a `python3` of this version, and return its path."""
    folder.mkdir()
    file = folder / "python3"
    info = tuple(map(int, version.split(".")))
    file.write_text(PYTHON.format(version=version, real=sys.executable, info=info))
    file.chmod(0o755)
    return file


def make_up(tmp_path: Path, *words: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run `make up` with an environment that does not exist yet."""
    env = {name: value for name, value in os.environ.items() if name not in PASSED_ON}
    env["PATH"] = os.pathsep.join(filter(None, (path, env["PATH"])))
    command = ["make", "up", f"VENV={tmp_path / 'venv'}", *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version", ["3.9.18", "3.10.14"])
@pytest.mark.parametrize("is_named", [False, True], ids=["first on PATH", "PYTHON=..."])
def test_make_names_an_old_python_and_what_it_needs(
    version: str, is_named: bool, tmp_path: Path
) -> None:
    old = python(tmp_path / "bin", version)
    if is_named:
        done = make_up(tmp_path, f"PYTHON={old}")
    else:
        done = make_up(tmp_path, path=str(old.parent))
    name = old if is_named else "python3"
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == (
        f"error: Tailrace needs Python 3.11 or newer, and '{name}' is Python {version};"
        " name another: make up PYTHON=python3.12"
    )
    assert "making the virtual environment" not in done.stdout
    assert not (tmp_path / "venv").exists()


def test_make_accepts_the_oldest_python_that_it_names(tmp_path: Path) -> None:
    oldest = python(tmp_path / "bin", "3.11.0")
    done = make_up(tmp_path, f"PYTHON={oldest}")
    assert "making the virtual environment" in done.stdout
    assert f"asked for: -m venv {tmp_path / 'venv'}" in done.stderr


def test_make_names_a_python_that_is_not_there(tmp_path: Path) -> None:
    done = make_up(tmp_path, "PYTHON=python3.none")
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == (
        "error: 'python3.none' not found; Tailrace needs Python 3.11 or newer"
        " (make up PYTHON=python3.12)"
    )


def test_the_package_requires_the_python_that_make_requires() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["requires-python"] == ">=3.11"
    for file in ("Makefile", ".ci/run"):
        bounds = re.findall(r"sys\.version_info < (\(.*?\))", (ROOT / file).read_text("utf-8"))
        assert bounds == ["(3, 11)"], file
