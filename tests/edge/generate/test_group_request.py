"""The parameter `group` in bodies and queries: its forms, its defaults, and its refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.datastructures import QueryParams

from tailrace.edge.generate.group_request import WORDS, parse_group
from tailrace.edge.generate.grouping import MAX_GROUP_CHARS, MAX_GROUP_MS, Grouping
from tailrace.edge.generate.schema import parse_branch, parse_generate
from tailrace.ledger.errors import CallerError
from tailrace.ledger.text_units import Unit

FORMS: list[tuple[Any, str, Grouping]] = [
    ("word", "group=word", Grouping(Unit.WORD)),
    ({"by": "paragraph"}, "group=paragraph", Grouping(Unit.PARAGRAPH)),
    ({"ms": 200}, "group_ms=200", Grouping(None, 200)),
    ({"chars": 80}, "group_chars=80", Grouping(None, chars=80)),
    (
        {"by": "sentence", "ms": MAX_GROUP_MS, "chars": MAX_GROUP_CHARS},
        f"group=sentence&group_ms={MAX_GROUP_MS}&group_chars={MAX_GROUP_CHARS}",
        Grouping(Unit.SENTENCE, MAX_GROUP_MS, MAX_GROUP_CHARS),
    ),
]


def in_body(group: object) -> Grouping | None:
    """Return the choice in the body of a POST, which a branch shows in the same way."""
    body = json.dumps({"model": "demo", "prompt": "Hi", "group": group}).encode()
    found = parse_generate(body, idempotency_key="k").grouping
    branch = json.dumps({"index": 1, "group": group}).encode()
    assert parse_branch(branch, bytes(16), None, idempotency_key="k").grouping == found
    return found


def test_the_words_are_those_of_the_units() -> None:
    assert list(WORDS) == [unit.value for unit in Unit]


@pytest.mark.parametrize(("body", "query", "meant"), FORMS)
def test_a_body_and_a_query_say_the_same(body: object, query: str, meant: Grouping) -> None:
    assert in_body(body) == meant
    assert parse_group(QueryParams(query)) == meant


def test_nothing_is_grouped_unless_it_is_requested() -> None:
    assert in_body(None) is None
    assert parse_group(QueryParams("after=3")) is None


UNITS = "one of word, phrase, sentence, paragraph"
MS = f"an integer from 1 to {MAX_GROUP_MS}: text waits at most this long"
CHARS = f"an integer from 1 to {MAX_GROUP_CHARS}: text is sent at this length"
EITHER = (
    '"word", "phrase", "sentence" or "paragraph", or an object such as'
    ' {"by": "sentence", "ms": 200, "chars": 80}'
)


@pytest.mark.parametrize(
    ("group", "field", "hint"),
    [
        ("page", "group", EITHER),
        ("", "group", EITHER),
        (7, "group", EITHER),
        ({}, "group", EITHER),
        ({"by": None}, "group", EITHER),
        ({"by": "page"}, "group.by", UNITS),
        ({"ms": 0}, "group.ms", MS),
        ({"ms": -1}, "group.ms", MS),
        ({"ms": MAX_GROUP_MS + 1}, "group.ms", MS),
        ({"by": "word", "ms": 1.5}, "group.ms", MS),
        ({"ms": "200"}, "group.ms", MS),
        ({"chars": 0}, "group.chars", CHARS),
        ({"chars": MAX_GROUP_CHARS + 1}, "group.chars", CHARS),
        ({"by": "word", "char": 3}, "group.char", 'did you mean "chars"?'),
    ],
)
def test_an_invalid_body_is_refused(group: object, field: str, hint: str) -> None:
    with pytest.raises(CallerError) as caught:
        in_body(group)
    assert (caught.value.field, caught.value.hint) == (field, hint)


@pytest.mark.parametrize(
    ("query", "field", "hint"),
    [
        ("group=page", "group", UNITS),
        ("group=", "group", UNITS),
        ("group=word&group=word", "group", "send one group"),
        ("group=word&group_ms=0", "group_ms", MS),
        ("group_ms=-1", "group_ms", MS),
        (f"group_ms={MAX_GROUP_MS + 1}", "group_ms", MS),
        ("group_ms=1.5", "group_ms", MS),
        ("group_chars=0", "group_chars", CHARS),
        ("group_chars=99999999999999999999", "group_chars", CHARS),
        ("group_chars=3&group_chars=3", "group_chars", "send one group_chars"),
    ],
)
def test_an_invalid_query_is_refused(query: str, field: str, hint: str) -> None:
    with pytest.raises(CallerError) as caught:
        parse_group(QueryParams(query))
    assert (caught.value.field, caught.value.hint) == (field, hint)
