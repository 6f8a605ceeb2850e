"""Rules on docstrings that ruff does not have, and the files in which both are checked."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.test_house import ROOT, lint

INSTALLED = {"node_modules", "site-packages"}
"""Folders of packages that tests have installed."""


def files_with_checked_docstrings() -> set[Path]:
    """Return the files that pyproject.toml does not excuse from ruff's rules on docstrings."""
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["lint"]
    [excuse] = [key for key, rules in ruff["per-file-ignores"].items() if rules == ["D"]]
    patterns = re.findall(r"((?:[^,{}]|{[^{}]*})+)", excuse.removeprefix("!{").removesuffix("}"))
    found = {path for one in patterns for each in alternatives(one) for path in ROOT.glob(each)}
    return {path for path in found if not INSTALLED & {*path.parts}}


def alternatives(pattern: str) -> list[str]:
    """Return the patterns of `pathlib` for one of ruff's, which may have a group in braces."""
    before, _, rest = pattern.replace("**", "**/*.py").partition("{")
    group, _, after = rest.partition("}")
    return [f"{before}{choice}{after}" for choice in group.split(",")]


def docstrings_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each docstring of a file with its line: modules, classes, functions, attributes."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        for child in ast.iter_child_nodes(node):
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def test_docstrings_begin_as_sentences() -> None:
    """A docstring must stand alone; one that begins with "Of ..." or "Who ..." does not."""
    fragment = re.compile(r"(?:Of|What|Who|Whose|Whom|Whether|As|So (?:many|much|long))\b")
    assert [
        f"{path.relative_to(ROOT).as_posix()}:{line}: {words.splitlines()[0]}"
        for path in files_with_checked_docstrings()
        for line, words in docstrings_of(path)
        if fragment.match(words)
    ] == []


def test_ruff_checks_docstrings() -> None:
    code = '"""Do it."""\n\n\ndef run() -> None:\n    """Runs it"""\n'
    assert {"D401", "D415"} <= set(re.findall(r"D\d+", lint(code, "tests/sample_prose.py")))
