"""Pages of the documentation that are written from the code: settings, command line, HTTP API."""

from __future__ import annotations

import json
from typing import Any

import typer.main
from typer import Context
from typer.core import TyperGroup

from tailrace.cli import app
from tailrace.config_schema import config_schema
from tailrace.edge.config import EdgeConfig
from tailrace.edge.openapi.document import openapi_document
from tailrace.origin.config import LedgerConfig, OriginConfig, StreamsConfig

PARTS = (EdgeConfig, OriginConfig, LedgerConfig, StreamsConfig)
HELP_WIDTH: dict[str, Any] = {"terminal_width": 88, "max_content_width": 88}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
METHODS = ("get", "put", "post", "delete")


def settings_page() -> str:
    """Return the reference of all settings, with defaults, types and ranges."""
    lines = [
        "# Settings",
        "",
        "Generated from the settings models. `tailrace config init` writes these settings as a",
        "commented `tailrace.toml`. `tailrace config check` shows which value holds and where it",
        "comes from. `tailrace config schema` prints the JSON Schema for your editor. A flag wins",
        "over the environment, and the environment over the file.",
    ]
    for table, schema in config_schema(PARTS)["properties"].items():
        several = table in ("models", "pipelines")
        name = f"{table}.NAME" if several else table
        lines += ["", f"## [{name}]"]
        if several:
            lines += ["", schema["description"]]
        properties = schema["additionalProperties"] if several else schema
        for key, about in properties["properties"].items():
            facts = _facts(about)
            if not several:
                facts.append(f"Environment: `TAILRACE_{table.upper()}_{key.upper()}`")
            lines += ["", f"### `{name}.{key}`", ""]
            lines += [_sentence(about.get("description", "")), "", " · ".join(facts)]
    return "\n".join(lines) + "\n"


def _sentence(description: str) -> str:
    text = description[:1].upper() + description[1:]
    return text if text.endswith(".") else f"{text}."


def _facts(about: dict[str, Any]) -> list[str]:
    """Return default, type, choices and range of one setting, each as a short text."""
    default = about.get("default")
    facts = ["Default: none" if default is None else f"Default: `{json.dumps(default)}`"]
    kinds = [kind for kind in about.get("anyOf", [about]) if kind.get("type") != "null"]
    if "type" in kinds[0]:
        facts.append(f"Type: {kinds[0]['type']}")
    for kind in kinds:
        if "enum" in kind:
            facts.append("One of: " + ", ".join(f"`{value}`" for value in kind["enum"]))
        facts += [f"{words} {kind[bound]:,}" for bound, words in BOUNDS.items() if bound in kind]
    return facts


def commands_page() -> str:
    """Return the help of every command, as `tailrace COMMAND --help` prints it."""
    lines = ["# Command line", "", "Generated from the help of each command."]
    root = typer.main.get_command(app)
    _add_help(root, Context(root, info_name="tailrace", **HELP_WIDTH), lines)
    return "\n".join(lines) + "\n"


def _add_help(command: Any, context: Context, lines: list[str]) -> None:
    path = context.command_path
    lines += ["", f"{'#' * min(path.count(' ') + 2, 3)} {path}", "", "```text"]
    lines += [line.rstrip() for line in command.get_help(context).splitlines()] + ["```"]
    children = command.commands if isinstance(command, TyperGroup) else {}
    for name, child in children.items():
        if not child.hidden:
            within = Context(child, info_name=name, parent=context, **HELP_WIDTH)
            _add_help(child, within, lines)


def api_page() -> str:
    """Return the reference of the HTTP API, made of its OpenAPI document."""
    document = openapi_document()
    lines = [
        "# HTTP API",
        "",
        "Generated from the OpenAPI 3.1 document, which every edge serves at `/openapi.json`, and",
        "which has the schemas and all answers: [openapi.json](openapi.json).",
        "[PROTOCOL.md](../../PROTOCOL.md#http) has the rules behind it.",
    ]
    for tag in document["tags"]:
        lines += ["", f"## {tag['name']}", "", tag["description"]]
        for path, operations in document["paths"].items():
            for method in METHODS:
                if tag["name"] in operations.get(method, {}).get("tags", ()):
                    lines += _operation(f"{method.upper()} {path}", operations[method])
    return "\n".join(lines) + "\n"


def _operation(title: str, operation: dict[str, Any]) -> list[str]:
    lines = ["", f"### `{title}`", "", _sentence(operation["summary"])]
    if operation["description"]:
        lines += ["", operation["description"]]
    if parameters := operation.get("parameters"):
        lines += ["", "| Parameter | in | |", "|---|---|---|"]
        for each in parameters:
            text = " ".join(each["description"].split()).replace("|", "\\|")
            lines.append(f"| `{each['name']}` | {each['in']} | {text} |")
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        lines += ["", f"Body: `{media_type}`"]
        for example in content.get("examples", {}).values():
            shown = json.dumps(example["value"], indent=2, ensure_ascii=False)
            lines += ["", "```json", *shown.splitlines(), "```"]
    statuses = ", ".join(operation["responses"])
    return [*lines, "", f"Answers: {statuses}"]
