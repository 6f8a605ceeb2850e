"""`tailrace config schema`: the JSON Schema of tailrace.toml, for editors and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tailrace.ledger.process.settings import Settings, split_at_commas
from tailrace.ledger.process.version import tailrace_version
from tailrace.origin.pipelines.table import PipelineTable
from tailrace.origin.pool.model_table import ModelTable

DIALECT = "https://json-schema.org/draft/2020-12/schema"
OF_A_LIST = {"type", "items", "minItems", "maxItems"}
SCHEMA_FILE = "tailrace.schema.json"
"""Name of the schema's file, to which the first line of a new `tailrace.toml` refers editors."""


def config_schema(parts: Sequence[type[Settings]]) -> dict[str, Any]:
    """Return the schema of `tailrace.toml`: a table for each of `parts`, model and pipeline."""
    definitions: dict[str, Any] = {}
    tables = {part.table: _schema_of(part, definitions) for part in parts}
    models = {
        "type": "object",
        "description": "One table for each of several models, by its name in requests.",
        "additionalProperties": _schema_of(ModelTable, definitions),
    }
    pipelines = {
        "type": "object",
        "description": "One table for each pipeline, by its name in requests: docs/pipelines.md.",
        "additionalProperties": _schema_of(PipelineTable, definitions),
    }
    return {
        "$schema": DIALECT,
        "title": f"Settings of Tailrace {tailrace_version()}",
        "type": "object",
        "additionalProperties": False,
        "properties": tables | {"models": models, "pipelines": pipelines},
        "$defs": definitions,
    }


def _schema_of(part: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    schema = part.model_json_schema()
    definitions |= schema.pop("$defs", {})
    for name, info in part.model_fields.items():
        said = schema["properties"][name]
        if isinstance(info.default, Path) and info.default.is_absolute():
            del said["default"]  # this path depends on where Tailrace is installed
        if any(getattr(one, "func", None) is split_at_commas for one in info.metadata):
            of_a_list = {key: said.pop(key) for key in OF_A_LIST & said.keys()}
            said["anyOf"] = [of_a_list, {"type": "string", "description": "separated by commas"}]
    return schema
