"""Schemas that would be too costly to follow are refused."""

import json
from typing import Any

import pytest

from tailrace.ledger.frame import FormatKind
from tailrace.origin.engine.grammar import (
    MAX_JOINED_PATTERNS,
    MAX_REGEX_BYTES,
    check_format,
    why_costly,
)


def patterns(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"(a|b)*a(a|b){{{at + 2}}}"} for at in range(count)]


def many_properties() -> dict[str, Any]:
    parts = patterns(MAX_JOINED_PATTERNS * 3)
    return {"type": "object", "properties": {f"p{at}": part for at, part in enumerate(parts)}}


COSTLY = [
    ({"allOf": patterns(MAX_JOINED_PATTERNS + 1)}, "11 different patterns and formats"),
    (
        {
            "$defs": {"a": {"allOf": [{"format": "date"}]}},
            "properties": dict(enumerate(patterns(10))),
        },
        "11 different patterns and formats",
    ),
    (
        {"anyOf": [{"patternProperties": {f"a{at}": {} for at in range(11)}}]},
        "11 different patterns and formats",
    ),
    ({"pattern": "a" * (MAX_REGEX_BYTES + 1)}, "a pattern of 4097 bytes"),
    ({"type": "integer", "multipleOf": 10_001}, "product"),
    ({"allOf": [{"multipleOf": 101}, {"multipleOf": 103}]}, "product"),
    ({"items": {"multipleOf": 0.0001}, "additionalProperties": {"multipleOf": 2}}, "product"),
]
CHEAP = [
    {"allOf": patterns(2)},
    {"allOf": patterns(1) * 50},
    many_properties(),
    {"type": "number", "multipleOf": 0.01},
    {"type": "integer", "multipleOf": 10_000},
    {"properties": {"pattern": {"type": "string"}, "multipleOf": {"type": "number"}}},
    {"enum": ["allOf", 3, None]},
    True,
    7,
]


@pytest.mark.parametrize(("schema", "reason"), COSTLY)
def test_what_would_hold_everything_up_is_refused(schema: Any, reason: str) -> None:
    said = why_costly(json.loads(json.dumps(schema)))
    assert said is not None and reason in said


@pytest.mark.parametrize("schema", CHEAP)
def test_what_does_not_cost_much_is_not(schema: Any) -> None:
    assert why_costly(schema) is None


def test_a_schema_of_many_properties_with_patterns_can_be_followed() -> None:
    check_format(FormatKind.JSON_SCHEMA, json.dumps(many_properties()))
