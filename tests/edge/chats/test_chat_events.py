"""The positions and the encoders of chats, and which ids chats may have."""

from __future__ import annotations

import json
import re

import pytest

from tailrace.edge.chats.chat_id import MAX_CHAT_CHARS, check_chat
from tailrace.edge.chats.events import (
    LinesChatEncoder,
    Position,
    SseChatEncoder,
    parse_position,
)
from tailrace.edge.sse import events
from tailrace.ledger.errors import CallerError, NotFound
from tailrace.ledger.frame import FinishReason, StreamEnd, Token, encode

TEXTS = (" a", "\nid: 7\n", '{"x"', "\n\nid: 3.1\ndata: x\n\n", " b", *map(str, range(20)))
FRAMES = [encode(Token(text, index)) for index, text in enumerate(TEXTS)]
FRAMES.append(encode(StreamEnd(9, FinishReason.STOP, len(TEXTS), 1)))
TURN = {"turn": 3, "stream": "0" * 32, "started_ms": 1}


def test_the_id_of_an_event_is_its_turn_and_its_index() -> None:
    body = SseChatEncoder().frames_of(3).frames(FRAMES).decode()
    assert re.findall(r"^id: (.*)$", body, re.MULTILINE) == [f"3.{n}" for n in range(len(FRAMES))]
    assert re.sub(r"^id: 3\.", "id: ", body, flags=re.MULTILINE) == events(FRAMES).decode()


def test_each_line_has_its_turn() -> None:
    lines = LinesChatEncoder("application/jsonl").frames_of(3).frames(FRAMES).splitlines()
    read = [json.loads(line) for line in lines]
    assert [(line["turn"], line["index"]) for line in read] == [
        (3, index) for index in range(len(FRAMES))
    ]
    assert [line["text"] for line in read[:-1]] == list(TEXTS)
    assert read[-1]["type"] == "end"


def test_turns_readers_and_errors_are_encoded() -> None:
    sse, lines = SseChatEncoder(), LinesChatEncoder("application/jsonl")
    said = json.dumps(TURN, separators=(",", ":"))
    assert sse.turn(TURN).decode() == f"id: 3\nevent: turn\ndata: {said}\n\n"
    assert json.loads(lines.turn(TURN)) == {"type": "turn", **TURN}
    assert sse.readers(2) == b'event: presence\ndata: {"readers":2}\n\n'
    assert json.loads(lines.readers(2)) == {"type": "presence", "readers": 2}
    error = NotFound("no such stream", code="unknown_stream")
    assert sse.error(3, error).startswith(b'event: error\ndata: {"turn":3,"error":{')
    told = json.loads(lines.error(3, error))
    assert (told["type"], told["turn"]) == ("error", 3)
    assert told["error"]["code"] == "unknown_stream"


@pytest.mark.parametrize(
    ("after", "header", "wanted"),
    [
        ([], None, None),
        ([], "", None),
        (["3"], None, Position(3)),
        ([], "3.41", Position(3, 41)),
        (["0.0", "0.0"], "0.0", Position(0, 0)),
    ],
)
def test_a_position_is_a_turn_or_a_frame_of_it(
    after: list[str], header: str | None, wanted: Position | None
) -> None:
    assert parse_position(after, header) == wanted


@pytest.mark.parametrize(
    ("after", "header"),
    [
        (["x"], None),
        (["-1"], None),
        (["1.2.3"], None),
        (["1."], None),
        (["\u0661"], None),
        ([str(2**64)], None),
        ([], "1 "),
        (["1", "2"], None),
        (["1"], "1.0"),
    ],
)
def test_what_is_no_position_is_refused_by_name(after: list[str], header: str | None) -> None:
    with pytest.raises(CallerError) as caught:
        parse_position(after, header)
    assert caught.value.field in ("after", "Last-Event-ID") and caught.value.hint


@pytest.mark.parametrize("name", ["c", "chat-1", "é" * MAX_CHAT_CHARS, "a b", "..."])
def test_a_chat_may_have_any_printable_id(name: str) -> None:
    assert check_chat(name) == name


@pytest.mark.parametrize(
    "name", ["", "x" * (MAX_CHAT_CHARS + 1), "a/b", "a\\b", "..", "__ds", "\n"]
)
def test_an_id_that_cannot_be_in_a_url_is_refused(name: str) -> None:
    with pytest.raises(CallerError) as caught:
        check_chat(name, "chat")
    assert caught.value.field == "chat" and str(MAX_CHAT_CHARS) in (caught.value.hint or "")
