"""Writes the browser's table of the wire schema, and its types: `python -m tests.web.generate`.

Both say what ledger/wire/tailrace.bare says, in JavaScript's words. tests/test_protocol.py holds
them to it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tailrace.edge.generate.schema import GenerateBody
from tailrace.ledger.wire.schema import (
    CLIENT,
    CLOSING,
    LOGGED,
    MAX_MESSAGES,
    MAX_STAGE_SWITCHES,
    Heartbeat,
    Hello,
    Opened,
    Snapshot,
    Status,
    StreamError,
)
from tests.schema_text import CLIENT_SCHEMA, ROOT, Schema, read_schema, schema_hash

HERE = ROOT / "edge/web/tailrace"
LIMITED = {
    "Open.messages": MAX_MESSAGES,
    "Open.stop": MAX_MESSAGES,
    "Open.stages": MAX_STAGE_SWITCHES,
    "SwitchStages.stages": MAX_STAGE_SWITCHES,
}
"""Lists that the codec bounds and the schema does not."""
HEAD = "// Written by `make schemas`.\n\n"
RECEIVED = {of.tag for of in (Snapshot, StreamError, Heartbeat, Opened, Status, Hello)}
"""Tags of frames that clients receive besides logged ones; a page needs no others at first."""
PRIMITIVES = {
    "str": "string",
    "bool": "boolean",
    "uint": "number",
    "u16": "number",
    "u32": "number",
    "u64": "number | bigint",
    "f32": "number",
    "f64": "number",
    "data": "Uint8Array",
}


def table(schema: Schema, names: list[str]) -> str:
    """Return the source of the table for these types, from which the codec is built when loaded.

    A frame is its tag and its fields, another struct its fields, an enum its words.
    """
    tags = schema.unions["Frame"]
    lines = ["export const TYPES = {"]
    for name in names:
        said = schema.aliases.get(name)
        if name in schema.enums:
            members = schema.enums[name]
            assert [*members.values()] == [*range(len(members))], f"{name}: no word for a number"
            said = " ".join(map(_word, members))
        elif said is None:
            fields = schema.structs[name].items()
            parts = [str(tags[name])] if name in tags else []
            said = " ".join(
                [*parts, *(f"{field}:{_limited(name, field, of)}" for field, of in fields)]
            )
        lines.append(f'  {name}: "{said}",')
    return "\n".join([*lines, "};\n"])


def received(schema: Schema) -> set[str]:
    """Return the types that a client receives, and those that they consist of."""
    tags = schema.unions["Frame"]
    names = {name for name, tag in tags.items() if tag in LOGGED | RECEIVED}
    waiting = [*names]
    while waiting:
        for of in schema.structs.get(waiting.pop(), {}).values():
            found = set(re.findall(r"[A-Z]\w+", of)) - names
            names |= found
            waiting += found
    return names


CHOICES = {
    "overflow": "Overflow",
    "durability": "Durability",
    "priority": "Priority",
    "then": "Unread",
    "unread": "Unread | UnreadBody",
}
"""Fields of a request that the schema of its body calls a string, and whose words are an enum's;
`unread` may be a word alone."""


def request_types() -> list[str]:
    """Return the interfaces of the body of POST /v1/generate, `GenerateInput` and its parts."""
    body = GenerateBody.model_json_schema()
    parts = {**body["$defs"], "GenerateInput": body}
    lines = []
    for name, part in parts.items():
        lines.append(f"export interface {name} {{")
        needed = part.get("required", ())
        for field, of in part["properties"].items():
            if field in CHOICES:
                said = CHOICES[field] + ("" if field in needed else " | null")
            else:
                said = _json_type(of)
            lines.append(f"  {field}{'' if field in needed else '?'}: {said};")
        lines.append("}")
    return lines


def _json_type(of: dict[str, Any]) -> str:
    if "anyOf" in of:
        return " | ".join(map(_json_type, of["anyOf"]))
    if "$ref" in of:
        return str(of["$ref"]).rpartition("/")[2]
    if "enum" in of and of["type"] == "string":
        return " | ".join(map(json.dumps, of["enum"]))
    if of["type"] == "array":
        return f"readonly ({_json_type(of['items'])})[]"
    if isinstance(of.get("additionalProperties"), dict):
        return f"Record<string, {_json_type(of['additionalProperties'])}>"
    kinds = {"integer": "number", "object": "Record<string, unknown>"}
    return kinds.get(of["type"], str(of["type"]))


def types(schema: Schema) -> str:
    """Return schema.d.ts: the same types for TypeScript."""
    lines = [
        "/** Integers above 2^53-1 come as a bigint, whatever is said here; none occurs in",
        " * practice but as a seed, which says so. */",
        "export declare const SCHEMA_ID: string;",
        "export declare const TYPES: Record<string, string>;\n",
    ]
    lines += [f"export type {name} = string;" for name in schema.aliases]
    for name, members in schema.enums.items():
        words = " | ".join(f'"{_word(member)}"' for member in members)
        lines.append(f"export type {name} = {words};")
    frames = schema.unions["Frame"]
    for name, fields in schema.structs.items():
        said = [f'type: "{name}"'] if name in frames else []
        said += [f"{field}: {_type(of)}" for field, of in fields.items()]
        lines.append(f"export interface {name} {{ {'; '.join(said)} }}")
    logged = [name for name, tag in frames.items() if tag in LOGGED]
    lines.append(f"\nexport type Logged = {' | '.join(logged)};")
    lines.append(f"export type Frame = {' | '.join(frames)};")
    lines.append('export type FrameType = Frame["type"];\n')
    lines += request_types()
    return HEAD + "\n".join(lines) + "\n"


def _word(member: str) -> str:
    return member.lower().replace("_", "-")


def _limited(struct: str, field: str, of: str) -> str:
    most = LIMITED.get(f"{struct}.{field}")
    return of if most is None else f"{of}<={most}"


def _type(of: str) -> str:
    if found := re.fullmatch(r"optional<(.*)>", of):
        return f"{_type(found[1])} | null"
    if found := re.fullmatch(r"list<(.*)>", of):
        return f"readonly ({_type(found[1])})[]"
    if of.startswith("data["):
        return PRIMITIVES["data"]
    return PRIMITIVES.get(of, of)


FACTS = {
    "LOGGED": (LOGGED, "Tags of the frames of a stream's log, each of which has an index."),
    "CLOSING": (CLOSING, "Tags of the frames after which nothing more comes on their corr."),
    "CLIENT": (CLIENT, "Tags of the frames that a client may send."),
}


def facts() -> str:
    """Return the sets of tags, and the fields of a request, that relays and sessions need."""
    lines = []
    for name, (tags, meaning) in FACTS.items():
        lines.append(f"/** {meaning} */")
        lines.append(f"export const {name} = new Set({sorted(tags)});")
    lines.append("/** Fields of the body of POST /v1/generate. */")
    fields = " ".join(GenerateBody.model_fields)
    lines.append(f'export const REQUEST_FIELDS = "{fields}".split(" ");')
    return "\n" + "\n".join(lines) + "\n"


def written() -> dict[Path, str]:
    """Return the text of every file that is generated from the schema."""
    schema = read_schema(CLIENT_SCHEMA)
    identity = schema_hash(CLIENT_SCHEMA.read_text("utf-8")).hex()
    names = [*schema.aliases, *schema.enums, *schema.structs]
    needed = received(schema)
    of_clients = table(schema, [name for name in names if name in needed])
    return {
        HERE / "schema.js": f'{HEAD}export const SCHEMA_ID = "{identity}";\n\n{of_clients}',
        HERE / "schema_client.js": HEAD
        + table(schema, [name for name in names if name not in needed])
        + facts(),
        HERE / "schema.d.ts": types(schema),
    }


if __name__ == "__main__":
    for path, text in written().items():
        path.write_text(text, "utf-8")
