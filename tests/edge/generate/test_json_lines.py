"""JSON lines: the same objects as events, one in each line, whatever a frame holds."""

from __future__ import annotations

import json

from hypothesis import given

from tailrace.edge.generate.json_lines import JsonLinesEncoder, line
from tailrace.edge.sse import EVENTS, events
from tailrace.ledger.frame import (
    FRAMES,
    FinishReason,
    Frame,
    Notice,
    Score,
    ScoredToken,
    Snapshot,
    StreamEnd,
    StreamError,
    Token,
    TokenScores,
    encode,
)
from tests.frame_strategies import any_frame

MEDIA_TYPE = "application/jsonl"


@given(any_frame(FRAMES))
def test_a_line_is_the_data_of_the_event_with_its_name(frame: Frame) -> None:
    raw = encode(frame)
    found = line(raw)
    assert (found == b"") is (frame.tag not in EVENTS)
    if not found:
        return
    assert found.endswith(b"\n")
    assert found.count(b"\n") == 1
    fields = dict(part.split(": ", 1) for part in events([raw]).decode().split("\n") if part)
    data = json.loads(fields["data"])
    assert json.loads(found) == {"type": fields.get("event", "token"), **data}
    assert fields.get("id") == (str(data["index"]) if "index" in data else None)


def test_lines_say_what_they_are() -> None:
    scored = ScoredToken("a", (TokenScores(Score(1, b"a", -0.5)),), 1)
    end = StreamEnd(2, FinishReason.STOP, 4, 3)
    frames = [Token('"\n', 0), scored, Notice("loading", "1 s", 2), Snapshot(0, "x", 3), end]
    body = JsonLinesEncoder(MEDIA_TYPE).frames([encode(frame) for frame in frames])
    told = [json.loads(each) for each in body.splitlines()]
    assert told == [
        {"type": "token", "text": '"\n', "index": 0},
        {
            "type": "token",
            "text": "a",
            "index": 1,
            "logprobs": [{"id": 1, "token": "a", "logprob": -0.5, "top": []}],
        },
        {"type": "notice", "code": "loading", "message": "1 s", "index": 2},
        {"type": "snapshot", "first": 0, "text": "x", "index": 3, "reasoning": False},
        {
            "type": "end",
            "total_tokens": 2,
            "finish_reason": "stop",
            "index": 4,
            "prompt_tokens": 3,
        },
    ]


def test_an_error_is_the_last_line_and_has_no_index() -> None:
    error = StreamError("damaged", "a row is damaged", False, 500)
    assert json.loads(line(encode(error))) == {
        "type": "error",
        "error": {"code": "damaged", "message": "a row is damaged", "retryable": False},
    }


def test_a_body_begins_with_its_first_line_and_a_keepalive_is_one() -> None:
    encoder = JsonLinesEncoder(MEDIA_TYPE)
    assert encoder.media_type == MEDIA_TYPE
    assert encoder.frames([]) == b""
    assert json.loads(encoder.keepalive()) == {"type": "ping"}
