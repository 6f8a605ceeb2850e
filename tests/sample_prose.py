"""Print a random sample of the product's prose, to be read by somebody who does not know it.

    python tests/sample_prose.py --seed 1
    python tests/sample_prose.py --seed 1 --area kernels

The sample holds docstrings, comments, messages (errors, hints, log events, help texts, metric
descriptions), settings, and paragraphs of the documentation. Each has what a reader sees beside it:
file and line, and the documented name with its class, the code that a comment belongs to, the field
of an error, the error of a hint, the fields of a log event or the heading of a paragraph. The same
tree and seed give the same sample. The goal: 95 % of the texts are understood at first reading.
"""

from __future__ import annotations

import argparse
import ast
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("edge", "kernels", "ledger", "origin", "tailrace")
SKIPPED_FOLDERS = {"node_modules", "__pycache__", "build", "dist", "site"}
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
METRICS = {"Counter", "Gauge", "Histogram"}
MESSAGE_KEYWORDS = {"hint", "help"}
DIRECTIVE = re.compile(r"#\s*(?:noqa|type: ignore|mypy: |fmt: |pragma|ruff: |!|----)")
MIN_PARAGRAPH_CHARS = 80


@dataclass(frozen=True, slots=True)
class Text:
    """One text of the sample and where it stands."""

    path: Path
    line: int
    subject: str
    """Name of the documented thing, or the code or heading beside the text; may be empty."""
    words: str

    def __str__(self) -> str:
        subject = f" {self.subject.rstrip(':')}:" if self.subject else ""
        return f"{self.path.as_posix()}:{self.line}:{subject} {self.words}"


def docstrings(path: Path, tree: ast.Module) -> Iterator[Text]:
    """Yield the docstrings of a module, its classes, functions and attributes."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    owners: dict[ast.AST, str] = {
        member: f"{each.name}." for each in classes for member in each.body
    }
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, after in zip([None, *body], body, strict=False):
            if not isinstance(after, ast.Expr):
                continue
            words = literal(after.value)
            if words is None:
                continue
            if before is None and isinstance(node, documented):
                name = owners.get(node, "") + getattr(node, "name", "module")
                yield Text(path, after.lineno, name, words)
            elif isinstance(before, ast.Assign | ast.AnnAssign):
                target = before.target if isinstance(before, ast.AnnAssign) else before.targets[0]
                yield Text(path, after.lineno, owners.get(before, "") + ast.unparse(target), words)


def comments(path: Path, source: str) -> Iterator[Text]:
    """Yield the comments of a file with the code they belong to, which is beside or below them.

    Lines that follow one another are one comment.
    """
    code = source.splitlines()
    lines = iter(source.splitlines(keepends=True))
    start, last, beside, parts = 0, -1, "", list[str]()
    for token in tokenize.generate_tokens(lambda: next(lines, "")):
        if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string):
            continue
        row, alone = token.start[0], token.line.lstrip().startswith("#")
        if parts and not (alone and row == last + 1):
            yield Text(path, start, beside or code_below(code, last), " ".join(parts))
            parts = []
        if not parts:
            start, beside = row, "" if alone else token.line[: token.start[1]].strip()
        parts.append(token.string.lstrip("# "))
        last = row if alone else -1
    if parts:
        yield Text(path, start, beside or code_below(code, last), " ".join(parts))


def code_below(code: Sequence[str], row: int) -> str:
    """Return the first line of code below a line, which is counted from 1."""
    below = (line.strip() for line in code[row:])
    return next((line for line in below if line and not line.startswith("#")), "")


def messages(path: Path, tree: ast.Module) -> Iterator[Text]:
    """Yield the texts of errors, log events, command line options and metrics."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args[:1]:
                if words := literal(argument):
                    yield Text(path, argument.lineno, error_name(node.exc), words)
        if not isinstance(node, ast.Call):
            continue
        name = call_name(node)
        described = node.args[:1] if name in LOG_METHODS else []
        if name.lstrip("_").capitalize() in METRICS:
            described = node.args[1:2]
        for argument in described:
            if words := literal(argument):
                fields = ", ".join(each.arg for each in node.keywords if each.arg)
                beside = f"{name} ({fields})" if described == node.args[:1] and fields else name
                yield Text(path, argument.lineno, beside, words)
        error = literal(node.args[0]) if node.args else None
        for keyword in node.keywords:
            if keyword.arg in MESSAGE_KEYWORDS and (words := literal(keyword.value)):
                beside = f"{keyword.arg} of {error!r}" if error else keyword.arg
                yield Text(path, keyword.value.lineno, beside, words)


def settings(path: Path, tree: ast.Module) -> Iterator[Text]:
    """Yield the descriptions of settings and of the fields of requests."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.AnnAssign):
            continue
        for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
            for keyword in call.keywords:
                if keyword.arg == "description" and (words := literal(keyword.value)):
                    yield Text(path, keyword.value.lineno, ast.unparse(node.target), words)


def paragraphs(path: Path, source: str) -> Iterator[Text]:
    """Yield the paragraphs of a Markdown file, without code blocks, headings and tables."""
    start, heading, parts, fenced = 0, "", list[str](), False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        ends = fence or fenced or not line.strip() or line.startswith(("#", "|", "    "))
        if parts and (ends or line.lstrip().startswith(("- ", "* "))):
            words = " ".join(parts)
            if len(words) >= MIN_PARAGRAPH_CHARS:
                yield Text(path, start, heading, words)
            parts = []
        if line.startswith("#") and not fenced:
            heading = line.lstrip("# ")
        if not ends:
            start = start if parts else number
            parts.append(line.strip())


def literal(node: ast.expr) -> str | None:
    """Return a string literal on one line, with `{…}` for each value; None if it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if isinstance(node, ast.JoinedStr):
        parts = (
            str(part.value)
            if isinstance(part, ast.Constant)
            else f"{{{ast.unparse(part.value if isinstance(part, ast.FormattedValue) else part)}}}"
            for part in node.values
        )
        return " ".join("".join(parts).split())
    return None


def call_name(call: ast.Call) -> str:
    """Return `info` for `log.info(...)`."""
    return ast.unparse(call.func).rpartition(".")[2]


def error_name(call: ast.Call) -> str:
    """Return an error's name and its field, which its message begins with: `CallerError top_k`."""
    fields = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "field"]
    return " ".join([call_name(call), *(field.strip("'") for field in fields)])


def product_files(area: Path) -> Iterator[Path]:
    """Yield the product's Python files below `area`, relative to the repository."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            relative = path.relative_to(ROOT)
            linked = package == "tailrace" and relative.parts[1] in PACKAGES
            if not linked and relative.is_relative_to(area):
                yield relative


def documents(area: Path) -> Iterator[Path]:
    """Yield the Markdown files below `area`, relative to the repository."""
    for path in sorted(ROOT.rglob("*.md")):
        relative = path.relative_to(ROOT)
        folders = set(relative.parts[:-1])
        skipped = folders & SKIPPED_FOLDERS or any(name.startswith(".") for name in folders)
        skipped = skipped or relative.parts[0] in {"CHANGELOG.md", "tests"}
        if not skipped and relative.is_relative_to(area):
            yield relative


def collect(area: Path) -> dict[str, list[Text]]:
    """Return every text below `area`, by kind."""
    found: dict[str, list[Text]] = {kind: [] for kind in SIZES}
    for path in product_files(area):
        source = (ROOT / path).read_text("utf-8")
        tree = ast.parse(source)
        found["docstrings"] += docstrings(path, tree)
        found["comments"] += comments(path, source)
        found["messages"] += messages(path, tree)
        found["settings"] += settings(path, tree)
    for path in documents(area):
        found["paragraphs"] += paragraphs(path, (ROOT / path).read_text("utf-8"))
    return found


SIZES = {"docstrings": 60, "comments": 30, "messages": 30, "settings": 20, "paragraphs": 10}
"""Number of texts to print of each kind."""


def main(show: Callable[[str], None] = print) -> None:
    """Print the sample that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1, help="random seed (default 1)")
    parser.add_argument(
        "--area", type=Path, default=Path(), help="folder or file to draw from (default: all)"
    )
    arguments = parser.parse_args()
    random = Random(arguments.seed)
    for kind, texts in collect(arguments.area).items():
        chosen = random.sample(texts, min(SIZES[kind], len(texts)))
        show(f"\n{kind} ({len(chosen)} of {len(texts)})\n")
        for text in chosen:
            show(f"  {text}")


if __name__ == "__main__":
    main()
