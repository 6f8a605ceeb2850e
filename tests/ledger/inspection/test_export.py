"""Exported frames, one JSON object per line."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given

from tailrace.ledger.frame import FRAMES, LOGGED, Score, ScoredToken, TokenScores, encode
from tailrace.ledger.inspection.commands import frame_document
from tailrace.ledger.interface import Record
from tests.frame_strategies import any_frame


@given(any_frame({tag: FRAMES[tag] for tag in LOGGED}))
def test_every_logged_frame_has_a_line_of_json(frame: Any) -> None:
    said = json.loads(json.dumps(frame_document(Record(encode(frame), (7,)))))
    assert (said["type"], said["ids"]) == (type(frame).__name__, [7])


def test_scores_are_written_with_their_bytes_in_hex() -> None:
    scores = (TokenScores(Score(1, b"a", -0.5), (Score(2, b"b", -1.0),)),)
    document = frame_document(Record(encode(ScoredToken("a", scores, 0)), (1,)))
    assert document["scores"] == [
        {
            "chosen": {"id": 1, "token": "61", "logprob": -0.5},
            "top": [{"id": 2, "token": "62", "logprob": -1.0}],
        }
    ]
