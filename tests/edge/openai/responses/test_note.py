"""The note that a stream keeps about the request for a response."""

from __future__ import annotations

import pytest

from tailrace.edge.openai.responses.request import (
    MAX_ASKED_CHARS,
    MAX_INPUT_CHARS,
    ResponseNote,
    read_note,
)
from tailrace.origin.generations.admission import MAX_NOTE_CHARS

ITEM = {"type": "message", "role": "user", "content": "é"}


def test_a_note_says_what_was_asked_and_given() -> None:
    note = ResponseNote({"temperature": 0.5, "metadata": {"a": "b"}}, [ITEM])
    assert read_note(note.write()) == note


@pytest.mark.parametrize("text", [None, "", "a chat's", "[]", '{"response": 1}', '{"input": []}'])
def test_a_note_of_another_route_says_nothing(text: str | None) -> None:
    assert read_note(text) == ResponseNote({}, None)


def test_what_is_too_long_is_left_out_and_the_rest_is_kept() -> None:
    asked = {"instructions": "x" * MAX_ASKED_CHARS, "tools": [{"name": "f" * 40_000}], "user": "me"}
    long = ResponseNote(asked, [ITEM | {"content": "y" * MAX_INPUT_CHARS}])
    assert read_note(long.write()) == ResponseNote(
        {name: asked[name] for name in ("tools", "user")}, None
    )
    most = {"instructions": "x" * (MAX_ASKED_CHARS - 2)}
    fits = ResponseNote(most, [ITEM | {"content": "y" * (MAX_INPUT_CHARS - 60)}])
    assert read_note(fits.write()) == fits
    assert len(fits.write()) < MAX_NOTE_CHARS
