"""Rules on docstrings that ruff does not have."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.test_house import ROOT, lint

FOLDERS = ("demo", "edge", "kernels", "ledger", "origin", "tailrace", "tests")
INSTALLED = {"node_modules", "site-packages"}
"""Folders of packages that tests have installed."""


def python_files() -> Iterator[Path]:
    """Yield the Python files of the product and of the tests."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            if not INSTALLED & {*path.parts}:
                yield path


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
        for path in python_files()
        for line, words in docstrings_of(path)
        if fragment.match(words)
    ] == []


def test_ruff_checks_docstrings() -> None:
    code = '"""Do it."""\n\n\ndef run() -> None:\n    """Runs it"""\n'
    assert {"D401", "D415"} <= set(re.findall(r"D\d+", lint(code, "tests/sample_prose.py")))
