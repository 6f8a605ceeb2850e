"""Frames as JSON."""

import math

from tailrace.ledger.frame import (
    Chunk,
    Embedding,
    FinishReason,
    Score,
    ScoredToken,
    StreamEnd,
    Token,
    TokenScores,
)
from tailrace.ledger.frame_json import frame_fields


def test_a_frame_is_its_fields_as_json_has_them() -> None:
    end = StreamEnd(3, FinishReason.TOOL_CALLS, 2, 1)
    assert frame_fields(end) == {
        "total_tokens": 3,
        "finish_reason": "tool-calls",
        "index": 2,
        "prompt_tokens": 1,
        "message": None,
        "retryable": False,
    }
    assert frame_fields(Chunk(b"\1\2", False, 0)) == {"data": "0102", "last": False, "index": 0}
    scored = ScoredToken("a", (TokenScores(Score(1, b"a", -math.inf), ()),), 0)
    assert frame_fields(scored)["scores"] == [
        {"chosen": {"id": 1, "token": "61", "logprob": None}, "top": []}
    ]


def test_a_brief_one_tells_how_long_bytes_and_lists_are() -> None:
    assert frame_fields(Chunk(b"\1\2", False, 0), brief=True)["data"] == 2
    assert frame_fields(Embedding((0.5, 1.0, 2.0), 0), brief=True)["values"] == 3
    assert frame_fields(Token("text", 0), brief=True) == {"text": "text", "index": 0}
