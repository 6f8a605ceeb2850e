"""Private parts of libraries: all that is used is listed, and a version without it is refused."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tailrace.edge import private_names
from tailrace.edge.private_names import AIOQUIC, H2, PrivateNames, require_private_names
from tailrace.ledger.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = pytest.mark.parametrize("library", [AIOQUIC, H2], ids=lambda each: each.library)
USERS = [
    (AIOQUIC, ("edge/quic/aioquic_connection.py", "edge/quic/aioquic_sending.py")),
    (H2, ("edge/server/hardened_h2.py",)),
]
MODULES = re.compile(r"^(from|import) (aioquic|h2|hpack|hyperframe)\b", re.MULTILINE)


@LIBRARIES
def test_the_installed_version_has_all_that_is_used(library: PrivateNames) -> None:
    require_private_names(library)


@LIBRARIES
def test_the_checked_versions_are_those_that_are_installed_with_us(library: PrivateNames) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert library.requirement in project["dependencies"]
    assert library.requirement.startswith(f"{library.library}>={library.series}.")


@LIBRARIES
def test_another_version_is_refused_with_the_one_that_is_right(
    library: PrivateNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_names, "version", lambda _name: "9.9.9")
    with pytest.raises(ConfigError) as refused:
        require_private_names(library)
    for said in (library.library, "9.9.9", library.series, library.requirement, private_names.PAGE):
        assert said in str(refused.value)


@LIBRARIES
def test_a_name_that_is_missing_is_named_with_the_version(library: PrivateNames) -> None:
    first = next(iter(library.examples()))
    paths = dict(library.paths) | {f"{first}._gone": "", f"{first}._gone.0.more": ""}
    with pytest.raises(ConfigError) as refused:
        require_private_names(replace(library, paths=paths))
    missing = f"{first}._gone, {first}._gone.0.more"
    assert f"{library.library} {version(library.library)} has no {missing}" in str(refused.value)
    assert library.requirement in str(refused.value)


def test_the_command_line_says_which_version_is_missing_a_name() -> None:
    """The name is taken from the class before the edge is imported."""
    program = (
        "import sys, h2.connection as c; del c.H2Connection._receive_frame;"
        "from tailrace.cli import main; sys.argv = ['tailrace', 'edge', '--http', '127.0.0.1:0'];"
        "main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 2 and "Traceback" not in ran.stderr
    said = f"h2 {version('h2')} has no H2Connection._receive_frame, which the edge uses"
    assert ran.stderr.startswith(f"error: h2: {said}")


@pytest.mark.parametrize(("library", "files"), USERS, ids=["aioquic", "h2"])
def test_the_list_is_what_is_used(library: PrivateNames, files: tuple[str, ...]) -> None:
    listed = {part for path in library.paths for part in path.split(".") if part.startswith("_")}
    names = [_private_names((ROOT / file).read_text()) for file in files]
    used = {name for names_used, _ in names for name in names_used}
    own = {name for _, names_defined in names for name in names_defined}
    theirs = {name for each in _objects(library) for name in dir(each)}
    assert used & theirs == listed
    assert used - theirs <= own


def test_no_other_file_of_the_edge_uses_private_parts_of_these_libraries() -> None:
    users = [file for _, files in USERS for file in files]
    for file in (ROOT / "edge").rglob("*.py"):
        text = file.read_text()
        if file.name == "private_names.py" or str(file.relative_to(ROOT)) in users:
            continue
        if MODULES.search(text) is not None:
            used, own = _private_names(text)
            assert used <= own, file
            assert not re.search(r"from \S+\._\w+ import", text), file


def _private_names(text: str) -> tuple[set[str], set[str]]:
    """Return the private names of functions and attributes in a file, and those it defines."""
    used, own = set[str](), set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            used.add(node.name)
            own.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own.add(node.target.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
            if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                own.add(node.attr)
    return {each for each in used if re.match("_(?!_)", each)}, own


def _objects(library: PrivateNames) -> Iterator[object]:
    """Yield every object on the way to a name of the list."""
    examples = library.examples()
    for path in library.paths:
        first, *rest = path.split(".")
        at: Any = examples[first]
        for name in rest:
            yield at
            at = at[int(name)] if name.isdigit() else getattr(at, name)
