"""Guards of the house rules: what may import what, what the tree may hold."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("edge", "kernels", "ledger", "origin")
# What imports torch in the origin, by itself or by what it builds on: folders and modules.
WORKER_SIDE = (
    *("origin.demo", "origin.models", "origin.engine.worker"),
    *("origin.engine.drafts", "origin.engine.engine", "origin.engine.generation"),
)
# Folders that git ignores, or that hold no text of ours.
SKIPPED = {"__pycache__", "build", "dist", "node_modules"}
SOURCE = {".bare", ".css", ".html", ".js", ".mjs", ".py", ".sql", ".toml", ".ts"}
MAX_LINES = 600

BLOCKED_IMPORT = """
import importlib, sys
sys.modules["torch"] = sys.modules["triton"] = None
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def files_of_the_tree() -> Iterator[Path]:
    """Every file that could be tracked; needs no git, so that an unpacked archive works too."""
    folders = [ROOT]
    while folders:
        for path in folders.pop().iterdir():
            if path.is_dir() and (not path.name.startswith(".") or path.name == ".ci"):
                if path.name not in SKIPPED:
                    folders.append(path)
            elif path.is_file() and path.parent.name != ".git":
                yield path


def modules_of(package: str) -> list[str]:
    """`ledger` -> ["ledger", "ledger.bare", "ledger.sqlite", …]; at most a folder deep."""
    files = sorted(path for g in ("*.py", "*/*.py") for path in (ROOT / package).glob(g))
    parts = (file.relative_to(ROOT).with_suffix("").parts for file in files)
    names = [".".join(p for p in place if p != "__init__") for place in parts]
    assert names, f"{package} holds no modules"
    return names


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def lint(code: str, filename: str) -> str:
    """What ruff, with this repository's settings, says about `code` in `filename`."""
    return subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--stdin-filename", filename, "-"],
        cwd=ROOT,
        input=code,
        capture_output=True,
        text=True,
        check=False,
    ).stdout


@pytest.mark.parametrize("package", ["edge", "ledger"])
def test_edge_and_ledger_import_with_torch_and_triton_blocked(package: str) -> None:
    result = run_python(BLOCKED_IMPORT, *modules_of(package))
    assert result.returncode == 0, result.stderr


def test_the_supervisor_side_of_the_origin_imports_with_torch_and_triton_blocked() -> None:
    supervisor = [name for name in modules_of("origin") if not name.startswith(WORKER_SIDE)]
    result = run_python(BLOCKED_IMPORT, *supervisor)
    assert result.returncode == 0, result.stderr


def test_blocking_torch_does_stop_an_import_of_it() -> None:
    result = run_python(BLOCKED_IMPORT, "torch")
    assert result.returncode != 0
    assert "ModuleNotFoundError" in result.stderr


def test_the_four_packages_share_one_parent_directory() -> None:
    parents = set()
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None and spec.origin is not None, f"{package} is not a package"
        parents.add(Path(spec.origin).parent.parent)
    assert parents == {ROOT}


@pytest.mark.parametrize("filename", ["edge/x.py", "ledger/x.py", "origin/supervisor.py"])
@pytest.mark.parametrize("module", ["torch", "triton"])
def test_ruff_bans_torch_and_triton_where_they_do_not_belong(filename: str, module: str) -> None:
    assert "TID251" in lint(f"import {module}\n\nprint({module})\n", filename)
    assert "TID251" in lint(f"from {module} import jit\n\nprint(jit)\n", filename)


@pytest.mark.parametrize("filename", ["kernels/x.py", "origin/models/x.py", "origin/demo/x.py"])
def test_ruff_lets_kernels_and_workers_import_torch(filename: str) -> None:
    assert "All checks passed" in lint("import torch\n\nprint(torch)\n", filename)


def test_no_file_that_pins_versions_names_where_they_come_from() -> None:
    """A mirror is the machine's own business, and an address outlives what it serves."""
    address = re.compile(r'--(?:extra-)?index-url|--find-links|"resolved"\s*:\s*"http|@\s*\w+://')
    pins = [
        path
        for path in files_of_the_tree()
        if re.search(r"(?i)lock|constraints|requirements|pyproject|^package\.json$", path.name)
    ]
    assert {ROOT / "constraints.txt", ROOT / "pyproject.toml"} <= set(pins)
    for path in pins:
        text = path.read_text("utf-8")
        assert not address.search(text), f"{path} names an address"
        if not path.name.startswith("package"):
            assert "://" not in text, f"{path} names an address"


def test_no_source_file_is_longer_than_the_limit() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines())
        for path in files_of_the_tree()
        if path.suffix in SOURCE
    }
    assert len(lengths) > len(PACKAGES)
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    home = re.compile(rb"(?<![\w.])/(?:root|work|home/\w+|Users/\w+)/")
    found = [
        path.relative_to(ROOT).as_posix()
        for path in files_of_the_tree()
        if home.search(path.read_bytes())
    ]
    assert found == []


def test_every_package_says_that_it_is_typed() -> None:
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").is_file()] == []


def test_the_licence_is_apache_2_0() -> None:
    words = (ROOT / "LICENSE").read_text("utf-8").split()
    assert " ".join(words[:6]) == "Apache License Version 2.0, January 2004"
    assert " ".join(words[-12:]).endswith(
        "governing permissions and limitations under the License."
    )
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text("utf-8")


def test_help_lists_every_command() -> None:
    result = run_python("from edge.cli import main; main()", "--help")
    assert result.returncode == 0, result.stderr
    commands = re.findall(r"^  ([a-z]+) {2,}\S", result.stdout, re.MULTILINE)
    assert commands == ["up", "edge", "origin", "chat", "config", "ledger", "model"]


def test_help_loads_no_server_and_no_model_library() -> None:
    """What keeps `tailrace --help` quick, said without a clock."""
    result = run_python(
        "import sys, edge.cli\n"
        "heavy = {'torch', 'starlette', 'hypercorn', 'httpx', 'pydantic', 'apsw', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert result.stdout.strip() == "[]", result.stderr
