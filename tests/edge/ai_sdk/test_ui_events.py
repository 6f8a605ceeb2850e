"""Parts of messages for the AI SDK, from the frames of their streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tailrace.edge.ai_sdk import UiEvents
from tailrace.ledger.errors import OriginUnreachable
from tailrace.ledger.frame import (
    FinishReason,
    Frame,
    Notice,
    Opened,
    Reasoning,
    Revision,
    StreamEnd,
    Token,
    ToolCall,
    encode,
    error_frame,
)

STREAM = bytes(range(16))
MESSAGE = f"msg_{STREAM.hex()}"
BEGIN: list[dict[str, Any]] = [{"type": "start", "messageId": MESSAGE}, {"type": "start-step"}]


def ended(index: int, reason: FinishReason = FinishReason.STOP) -> StreamEnd:
    return StreamEnd(5, reason, index, 3, "no worker is left")


def told(*frames: Frame) -> list[dict[str, Any]]:
    """Return the parts of a body, which begins and ends as it should."""
    encoder = UiEvents()
    encoder.opened(Opened(STREAM, 0, "", "demo", 3))
    body = encoder.frames([encode(frame) for frame in frames])
    *parts, done = [block.removeprefix("data: ") for block in body.decode().split("\n\n")[:-1]]
    assert done == "[DONE]"
    events = [json.loads(part) for part in parts]
    assert events[:2] == BEGIN
    return events[2:]


def test_text_and_thoughts_are_parts_that_follow_each_other() -> None:
    frames = (Reasoning("Hm.", 0), Notice("inexact", "", 1), Token('"a\n', 2), Token("é", 3))
    assert told(*frames, Reasoning("So.", 4), ended(5)) == [
        {"type": "reasoning-start", "id": "0"},
        {"type": "reasoning-delta", "id": "0", "delta": "Hm."},
        {"type": "reasoning-end", "id": "0"},
        {"type": "text-start", "id": "1"},
        {"type": "text-delta", "id": "1", "delta": '"a\n'},
        {"type": "text-delta", "id": "1", "delta": "é"},
        {"type": "text-end", "id": "1"},
        {"type": "reasoning-start", "id": "2"},
        {"type": "reasoning-delta", "id": "2", "delta": "So."},
        {"type": "reasoning-end", "id": "2"},
        {"type": "finish-step"},
        {"type": "finish", "finishReason": "stop"},
    ]


def test_calls_of_tools_are_whole_when_the_step_ends_and_one_that_was_cut_off_says_so() -> None:
    calls = (
        *(ToolCall(0, "a", "add", "", 0), ToolCall(0, "", "", '{"x":', 1)),
        *(ToolCall(1, "b", "now", "", 2), ToolCall(0, "", "", "1}", 3)),
    )
    begun = [
        {"type": "tool-input-start", "toolCallId": "a", "toolName": "add"},
        {"type": "tool-input-delta", "toolCallId": "a", "inputTextDelta": '{"x":'},
        {"type": "tool-input-start", "toolCallId": "b", "toolName": "now"},
    ]
    end = {"type": "tool-input-available", "toolCallId": "b", "toolName": "now", "input": {}}
    assert told(*calls, ended(4, FinishReason.TOOL_CALLS)) == [
        *begun,
        {"type": "tool-input-delta", "toolCallId": "a", "inputTextDelta": "1}"},
        {"type": "tool-input-available", "toolCallId": "a", "toolName": "add", "input": {"x": 1}},
        end,
        {"type": "finish-step"},
        {"type": "finish", "finishReason": "tool-calls"},
    ]
    cut = told(*calls[:-1], ended(3, FinishReason.LENGTH))
    assert cut[:3] == begun and cut[4] == end
    assert (cut[3]["type"], cut[3]["input"]) == ("tool-input-error", '{"x":')
    assert cut[-1] == {"type": "finish", "finishReason": "length"}


@pytest.mark.parametrize(
    ("last", "part"),
    [
        (ended(1, FinishReason.CANCELLED), {"type": "abort", "reason": "cancelled"}),
        (ended(1, FinishReason.FAILED), {"type": "error", "errorText": "no worker is left"}),
        (error_frame(OriginUnreachable("gone")), {"type": "error", "errorText": "gone"}),
    ],
)
def test_what_does_not_end_as_it_should_is_told(last: Frame, part: dict[str, str]) -> None:
    assert told(Token("a", 0), last)[-1] == part


def test_a_revision_that_takes_back_what_was_shown_is_a_part_with_the_whole_text() -> None:
    frames = (Token("a", 0), Revision(1, "b", True, 1, 1.0), Revision(0, "c", False, 2, 0.5))
    parts = told(*frames, Token("d", 3), Revision(3, "e", True, 4, 1.0), ended(5))
    deltas = [part["delta"] for part in parts if part["type"] == "text-delta"]
    revised = [part for part in parts if part["type"] == "data-revised"]
    assert deltas == ["a", "b"]
    assert [part["data"]["text"] for part in revised] == ["c", "ce"]
    assert [part["data"]["stability"] for part in revised] == [0.5, 1.0]
    assert {part["id"] for part in revised} == {MESSAGE}


def test_text_behind_a_revision_is_shown_when_its_part_ends() -> None:
    frames = (Token("a", 0), Revision(0, "c", True, 1), Token("d", 2), Reasoning("hm", 3))
    parts = told(*frames, Token("e", 4), ended(5))
    revised = [part["data"] for part in parts if part["type"] == "data-revised"]
    assert [(data["text"], data["final"]) for data in revised] == [
        ("c", True),
        ("cd", True),
        ("cde", True),
    ]
    kinds = [part["type"] for part in parts]
    assert kinds.index("text-end") > kinds.index("data-revised")
