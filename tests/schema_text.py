"""Reads a .bare schema file, so that tests can hold classes and oracles to its text."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLIENT_SCHEMA = ROOT / "ledger/wire/tailrace.bare"
WORKER_SCHEMA = ROOT / "origin/workers/worker.bare"

_DEFINITION = re.compile(r"type (\w+) (struct|enum|union|void|data\[\d+\])(?: \{ (.*?) \})?(?: |$)")
_FIELD = re.compile(r"(\w+): (\S+)")
_NUMBERED = re.compile(r"(\w+) = (\d+)")


@dataclass
class Schema:
    """The definitions of one schema, each kind by name and in the order of the text."""

    structs: dict[str, dict[str, str]] = field(default_factory=dict)
    enums: dict[str, dict[str, int]] = field(default_factory=dict)
    unions: dict[str, dict[str, int]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def canonical(schema: str) -> str:
    """Return a schema's text without comments, each run of white space made one space."""
    lines = (line.partition("#")[0] for line in schema.splitlines())
    return " ".join(" ".join(lines).split())


def schema_hash(schema: str) -> bytes:
    """Return the identity of a schema's text as PROTOCOL.md defines it."""
    said = parse(schema)

    def shape(of: str) -> str:
        """Return a type without names: every name is replaced by what it stands for."""
        if of in said.structs:
            return "{" + ",".join(map(shape, said.structs[of].values())) + "}"
        if of in said.enums:
            return "<" + ",".join(map(str, said.enums[of].values())) + ">"
        outer, bracket, inner = of.partition("<")
        return f"{outer}<{shape(inner[:-1])}>" if bracket else said.aliases.get(of, of)

    tags = sorted((tag, name) for name, tag in said.unions["Frame"].items())
    lines = [f"{tag} {shape(name)}\n" for tag, name in tags]
    return hashlib.sha256("".join(lines).encode()).digest()[:8]


def read_schema(path: Path) -> Schema:
    return parse(path.read_text(encoding="utf-8"))


def parse(schema_text: str) -> Schema:
    """Return the definitions of a schema's text."""
    text = canonical(schema_text)
    schema = Schema()
    end = 0
    for found in _DEFINITION.finditer(text):
        assert found.start() == end, f"not understood: {text[end : found.start()]!r}"
        end = found.end()
        name, kind, body = found[1], found[2], found[3] or ""
        if kind in ("struct", "void"):
            schema.structs[name] = dict(_FIELD.findall(body))
        elif kind in ("enum", "union"):
            numbered = {word: int(number) for word, number in _NUMBERED.findall(body)}
            (schema.enums if kind == "enum" else schema.unions)[name] = numbered
        else:
            schema.aliases[name] = kind
    assert end == len(text), f"not understood: {text[end:]!r}"
    return schema
