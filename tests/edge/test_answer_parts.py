"""Which frame begins, continues and ends which part of an answer."""

from __future__ import annotations

import pytest

from tailrace.edge.answer_parts import Change, PartKind, PartTracker
from tailrace.edge.generate.routes import Call, Collected
from tailrace.ledger.frame import (
    Chunk,
    Frame,
    Heartbeat,
    Notice,
    Reasoning,
    Revision,
    ScoredToken,
    Token,
    ToolCall,
)

BEGIN, GROW, END = Change.BEGIN, Change.GROW, Change.END
TEXT, REASONING, CALL = PartKind.TEXT, PartKind.REASONING, PartKind.TOOL_CALL
ANSWER: list[tuple[Frame, list[tuple[Change, PartKind, int]]]] = [
    (Reasoning("hm", 0), [(BEGIN, REASONING, 0), (GROW, REASONING, 0)]),
    (Reasoning("so", 1), [(GROW, REASONING, 0)]),
    (Notice("inexact", "a remark", 2), []),
    (Token("It", 3), [(END, REASONING, 0), (BEGIN, TEXT, 1), (GROW, TEXT, 1)]),
    (Chunk(b"\0", False, 4), []),
    (Heartbeat(1, ready=True), []),
    (ScoredToken(" is", (), 5), [(GROW, TEXT, 1)]),
    (Revision(3, "It was", False, 6), [(GROW, TEXT, 1)]),
    (ToolCall(0, "a", "time", "{", 7), [(END, TEXT, 1), (BEGIN, CALL, 2), (GROW, CALL, 2)]),
    (ToolCall(1, "b", "place", "", 8), [(BEGIN, CALL, 3), (GROW, CALL, 3)]),
    (ToolCall(0, "", "", "}", 9), [(GROW, CALL, 2)]),
    (ToolCall(1, "", "", "{}", 10), [(GROW, CALL, 3)]),
    (Token("!", 11), [(END, CALL, 2), (END, CALL, 3), (BEGIN, TEXT, 4), (GROW, TEXT, 4)]),
    (ToolCall(0, "c", "time", "", 12), [(END, TEXT, 4), (BEGIN, CALL, 5), (GROW, CALL, 5)]),
]


def test_each_frame_changes_the_parts_that_it_should() -> None:
    tracker = PartTracker()
    for frame, changes in ANSWER:
        made = [(change, part.kind, part.at) for change, part in tracker.follow(frame)]
        assert made == changes, frame
    assert [(change, part.at) for change, part in tracker.close()] == [(END, 5)]
    assert not tracker.open
    assert not list(tracker.close())


@pytest.mark.parametrize(
    ("frame", "is_text"), [(Token("a", 0), True), (Reasoning("a", 0), False), (None, False)]
)
def test_an_open_part_of_text_is_named(frame: Frame | None, is_text: bool) -> None:
    tracker = PartTracker()
    if frame is not None:
        assert [change for change, _ in tracker.follow(frame)] == [BEGIN, GROW]
    assert (tracker.text is not None) is is_text


def test_a_document_has_each_calls_arguments_though_their_pieces_alternate() -> None:
    collected = Collected()
    for frame, _ in ANSWER:
        if not isinstance(frame, Heartbeat):
            collected.add(frame)
    assert collected.calls == [
        Call("a", "time", "{}"),
        Call("b", "place", "{}"),
        Call("c", "time", ""),
    ]
    assert collected.reasoning == ["hm", "so"]
    assert collected.text.text == "It was!"
